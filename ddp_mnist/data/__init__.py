"""The data set: read, decoded once, cached, sampled in global batches, augmented."""
