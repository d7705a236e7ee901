"""The machine under this process: its cores and memory, locks on files, limits of time."""
