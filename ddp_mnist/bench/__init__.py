"""Measure speed, as ratios of what ran side by side; may import all but verify, doctor and cli."""
