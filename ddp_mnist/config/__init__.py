"""The flags of `train`: their legal values, and the values chosen for those not given."""
