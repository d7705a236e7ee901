"""The machine under this process: its console, files and locks, its cores, and deadlines."""
