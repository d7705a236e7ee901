"""The verbs for a run that has ended, a file each; they import run/ and what stands above it."""
