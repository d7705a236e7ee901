"""The flags of `train`: their legal values, and what is chosen for those that are not given."""
