"""MNIST with a plain PyTorch loop that Accelerate prepares: one process, many, many machines."""

import os

__version__ = "0.1.0"

# OpenMP's threads wait for each other by spinning, for milliseconds unless told otherwise: where
# other programs hold the cores, while the thread that they wait for cannot run. Fewer spins cost
# some speed on a machine that is free; docs/benchmarks.md has the figures. The runtime reads this
# as torch is loaded, so it stands where this package begins. What a person has set stays.
if not os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
    os.environ["GOMP_SPINCOUNT"] = "10000"
