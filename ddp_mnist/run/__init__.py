"""One training run: its agreement, state, checkpoints, metrics, files and printed lines."""
