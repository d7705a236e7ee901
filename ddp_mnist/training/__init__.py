"""One training run: what its ranks agree on, its state, checkpoints, metrics, files and output."""
