"""The machine that this process runs on: cores, memory, other programs, file locks, deadlines."""
