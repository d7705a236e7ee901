"""The data set: decoded once, cached, and read in global batches. Knows no rank and no run."""
