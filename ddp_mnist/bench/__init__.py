"""The verb `bench` measures speed as ratios of what ran side by side; it may import all but cli."""
