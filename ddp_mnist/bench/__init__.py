"""Measure speed, always as a ratio of two programs that ran side by side."""
