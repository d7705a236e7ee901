"""Where a thread is, or an error started: in a call to other ranks, or in code that works."""

import sys
import traceback
from collections.abc import Container
from pathlib import Path
from types import FrameType

# Modules that call other ranks; a backward pass of DDP ends with its all-reduces.
CALLS = ("torch.distributed", "torch.nn.parallel", "torch.autograd", "ddp_mnist.cluster.store")
NOT_OWN = (sys.stdlib_module_names - {"__main__"}) | {"ddp_mnist"}
PASSED_OVER = (NOT_OWN - {"ddp_mnist"}) | {"ddp_mnist.system.deadline"}
OURS, LOW = ("ddp_mnist",), ("ddp_mnist.cluster", "ddp_mnist.system", "ddp_mnist.core.accelerator")


def frames_of(thread: int) -> list[FrameType]:
    """Return the frames of a thread, the innermost first."""
    return [frame for frame, _ in traceback.walk_stack(sys._current_frames().get(thread))]


def frames_in(error: BaseException) -> list[FrameType]:
    """Return the frames that an error went through, the innermost first."""
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)][::-1]


def calls_others(frames: list[FrameType]) -> bool:
    """Return whether the innermost frame, but for the standard library's, calls other ranks."""
    modules = (str(frame.f_globals.get("__name__")) for frame in frames)
    inner = next((name for name in modules if not _within(name, PASSED_OVER)), "")
    return _within(inner, CALLS)


def place(frames: list[FrameType]) -> str:
    """Return file and line of the innermost frame in which a run shows, e.g. `fit.py:94`.

    That is this package's, above its lowest floors, or the user's own.
    """
    for frame in frames:
        name, file = str(frame.f_globals.get("__name__")), Path(frame.f_code.co_filename)
        is_ours = _within(name, OURS) and not _within(name, LOW)
        is_own = not ({"site-packages", "dist-packages"} & {*file.parts} or _within(name, NOT_OWN))
        if is_ours or is_own:
            return f"{file.name}:{frame.f_lineno}"
    return ""


def _within(module: str, names: Container[str]) -> bool:
    """Return whether a module is one of these, or in a package of these."""
    parts = module.split(".")
    return any(".".join(parts[:length]) in names for length in range(1, len(parts) + 1))
