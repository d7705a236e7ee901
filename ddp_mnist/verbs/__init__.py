"""The commands beside `train`: their flags, and a file for each."""
