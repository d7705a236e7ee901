"""MNIST with a plain PyTorch loop that Accelerate prepares: one process, many, many machines."""

__version__ = "0.1.0"
