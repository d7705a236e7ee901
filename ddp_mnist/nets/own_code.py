"""The user's own Python code, named MODULE:NAME on the command line.

A run imports it once, at its start, and what it records of the code is what was imported then: the
file may be edited while the run goes on.
"""

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import ddp_mnist
from ddp_mnist.errors import CheckpointError, UsageError, reason

SOURCES: dict[str, str] = {}  # by module what its file held when this run imported it
# Where the lines of a traceback are not the person's: in this package, Python's own, and PyTorch.
LIBRARIES = (
    "<frozen",
    *(f"{Path(file).parent}/" for file in (ddp_mnist.__file__, inspect.__file__, torch.__file__)),
)


def begin() -> None:
    """Have each file imported once more: it may have been edited since the last run."""
    SOURCES.clear()


def find(flag: str, name: str) -> Any:
    """Return what `name`, e.g. my_package.nets:Net, stands for; `flag` is what named it.

    The working directory counts as a place of modules. Raise UsageError, in one line, where there
    is no such thing or its module cannot be imported.
    """
    module, _, attribute = name.partition(":")
    found = getattr(import_once(flag, name), attribute, None)
    if found is None:
        raise UsageError(f"{flag} {name}: {module} has no {attribute}; check its spelling")
    return found


def digest(flag: str, name: str) -> str:
    """Return the SHA-256 of the module's source, as it was imported."""
    import_once(flag, name)
    return hashlib.sha256(SOURCES[name.partition(":")[0]].encode()).hexdigest()


def check_unchanged(flag: str, name: str, was: str, run: str) -> None:
    """Raise CheckpointError unless the module is here, and its digest is what it `was` in `run`."""
    try:
        now = digest(flag, name)
    except UsageError as error:
        why = str(error).partition(";")[0]
        raise CheckpointError(f"{run}: its {why}; call this where the run was started") from error
    if now != was:
        raise CheckpointError(
            f"{run}: the file of {flag} {name} was changed since; use it as it was, or train again"
        )


def import_once(flag: str, name: str) -> ModuleType:
    """Return the module before the colon, as its file was at the first call since `begin`."""
    module, here = name.partition(":")[0], str(Path.cwd())
    if module in SOURCES and module in sys.modules:
        return sys.modules[module]
    if here not in sys.path:
        sys.path.append(here)  # at the end: a file evaluate.py must not hide the library
    try:
        importlib.invalidate_caches()  # the file may be younger than what Python saw of its folder
        before = sys.modules.get(module)
        found = importlib.import_module(module)
        file = found.__file__ or ""
        if found is before and file.startswith(f"{here}/") and "-packages" not in file:
            with contextlib.suppress(OSError):  # edited within a second it would look current
                Path(importlib.util.cache_from_source(file)).unlink()
            found = importlib.reload(found)
        SOURCES[module] = inspect.getsource(found) if file.endswith(".py") else ""
        return found
    except Exception as error:
        missing = getattr(error, "name", None) or ""
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{missing}."):
            raise UsageError(
                f"{flag} {name}: there is no module {missing} in {here} or among the installed"
                " packages; name it as in an import, without .py"
            ) from error
        raise UsageError(
            f"{flag} {name}: cannot be imported ({said_by(error)}); correct it, or leave it out"
        ) from error


def said_by(error: Exception, called: object = None) -> str:
    """Return what an error says, and the last line of the person's code on the way to it.

    If no line of theirs ran, because the call itself failed, name the line that defines `called`.
    """
    passed = traceback.extract_tb(error.__traceback__)
    lines = [line for line in passed if not line.filename.startswith(LIBRARIES)]
    own = [line for line in lines if "-packages" not in line.filename] or lines
    places = [(line.filename, line.lineno) for line in own]
    if not places and (code := getattr(called, "__code__", None)):
        places = [(code.co_filename, code.co_firstlineno)]
    return "".join(f"{Path(file).name}:{line}: " for file, line in places[-1:]) + reason(error)
