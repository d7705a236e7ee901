"""How fast it is on this machine, as ratios of what ran side by side; imports all but the cli."""
