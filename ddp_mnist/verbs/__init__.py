"""The other commands: their flags, a file for each, and what `make` calls; they may import run/."""
