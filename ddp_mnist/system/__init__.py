"""The machine under this process: cores, memory, other programs, file locks, deadlines."""
