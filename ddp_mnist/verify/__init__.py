"""Prove what train promises, by training; may import everything but doctor, bench and cli."""
