"""What is done with a run that has ended, a verb a file. Imports run/ and what stands above it."""
