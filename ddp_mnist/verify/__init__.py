"""Prove on this machine what `train` promises, by small runs in float64."""
