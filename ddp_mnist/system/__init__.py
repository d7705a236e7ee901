"""The machine under this process: its console, files and locks, cores, and deadlines; words."""
