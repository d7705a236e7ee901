"""The data set, decoded once, cached, and read in global batches; knows no rank, config or run."""
