"""The data set: finding and reading it, decoding once, caching, and the rows of each split."""
