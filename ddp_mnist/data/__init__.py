"""The data set: decoded once, cached, read in global batches. Imports errors and seeding alone."""
