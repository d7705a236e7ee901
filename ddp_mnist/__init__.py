"""MNIST with a plain PyTorch loop that Accelerate prepares: one process, many, many machines."""

import os
import sys

__version__ = "0.2.0"

# `python -m`, so torchrun too, puts the working folder first, where the user's evaluate.py or
# random.py would stand in for the library. Last, it still has the modules of --model and its like.
if sys.argv[:1] == ["-m"] and not sys.flags.safe_path:
    sys.path.append(sys.path.pop(0))

# OpenMP's threads wait for each other by spinning, for milliseconds unless told otherwise. If other
# programs hold the cores, the thread they wait for cannot run meanwhile. Fewer spins cost some
# speed on an idle machine; docs/benchmarks.md has the figures. The runtime reads this when torch is
# loaded, so it is set here, at the package's first import. A value that the user has set is kept.
if not os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
    os.environ["GOMP_SPINCOUNT"] = "10000"

# With one of these, as many clusters set them, OpenMP binds the main thread to its first core while
# torch is loaded: every process of a machine to the same one. So they are kept from it.
BINDING_NAMES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
BINDING = {name: os.environ.pop(name) for name in BINDING_NAMES if name in os.environ}
