"""The data set: reading, decoding once, caching, sampling in global batches, augmentation."""
