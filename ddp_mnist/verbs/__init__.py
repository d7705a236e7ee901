"""The commands besides `train`: their flags, and a file for each."""
