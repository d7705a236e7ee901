"""Prove the promises of `train` on this machine, by small runs in float64."""
