"""Where a thread is, or an error came from: in a call to other ranks, or in code that works."""

import sys
import traceback
from collections.abc import Container
from types import FrameType

# Modules that call other ranks; a backward pass of DDP ends with its all-reduces.
CALLS = ("torch.distributed", "torch.nn.parallel", "torch.autograd", "ddp_mnist.cluster.store")
PASSED_OVER = (sys.stdlib_module_names - {"__main__"}) | {"ddp_mnist.system.deadline"}
LIBRARIES = ("torch", "accelerate", "ddp_mnist.cluster", "ddp_mnist.core.accelerator")


def frames_of(thread: int) -> list[FrameType]:
    """Return the frames of a thread, the innermost first."""
    return [frame for frame, _ in traceback.walk_stack(sys._current_frames().get(thread))]


def frames_in(error: BaseException) -> list[FrameType]:
    """Return the frames that an error came through, the innermost first."""
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)][::-1]


def calls_others(frames: list[FrameType]) -> bool:
    """Return whether the innermost frame, but for the standard library's, calls other ranks."""
    modules = (str(frame.f_globals.get("__name__")) for frame in frames)
    inner = next((name for name in modules if not _within(name, PASSED_OVER)), "")
    return _within(inner, CALLS)


def place(frames: list[FrameType]) -> str:
    """Return file and line of the innermost frame that is no library's, e.g. `fit.py:94`."""
    for frame in frames:
        name = str(frame.f_globals.get("__name__"))
        if not (_within(name, LIBRARIES) or _within(name, PASSED_OVER)):
            return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
    return ""


def _within(module: str, names: Container[str]) -> bool:
    """Return whether a module is one of these, or in a package of these."""
    parts = module.split(".")
    return any(".".join(parts[:length]) in names for length in range(1, len(parts) + 1))
