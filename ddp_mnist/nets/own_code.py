"""The user's own Python code, named MODULE:NAME on the command line.

A run imports it once, when it starts, and records what it imported: the file may be edited while
the run trains.
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

from ddp_mnist.errors import CheckpointError, UsageError, reason

SOURCES: dict[str, str] = {}  # each module's source, as this run imported it
# Lines of a traceback in these files are not the user's: Python's own, this package's, PyTorch's.
PLACES = (Path(__file__).parents[1], Path(inspect.__file__).parent, Path(torch.__file__).parent)
LIBRARIES = ("<frozen", *(f"{place}/" for place in PLACES))
FAILURES = (Exception, SystemExit)  # a file that is a program too may call sys.exit()


def begin() -> None:
    """Begin a run: each file is imported again, as it may have been edited since the last run."""
    SOURCES.clear()


def find(flag: str, name: str) -> Any:
    """Return the object `name`, e.g. my_package.nets:Net, that was typed after `flag`.

    Modules are searched for in the working directory too. Raise UsageError if the object does not
    exist, or its module cannot be imported.
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
    """Raise CheckpointError unless the module can be imported and its digest is still `was`."""
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
        importlib.invalidate_caches()  # the file may be newer than Python's listing of its folder
        before = sys.modules.get(module)
        found = importlib.import_module(module)
        file = found.__file__ or ""
        if found is before and file.startswith(f"{here}/") and "-packages" not in file:
            # Bytecode is dated to the second: after a quick edit it would still look current.
            with contextlib.suppress(OSError):
                Path(importlib.util.cache_from_source(file)).unlink()
            found = importlib.reload(found)
        SOURCES[module] = inspect.getsource(found) if file.endswith(".py") else ""
        return found
    except FAILURES as error:
        fix = f"correct the file, or name a module in {here} or an installed one, without .py"
        if isinstance(error, SystemExit):
            fix = 'put what only a program does below `if __name__ == "__main__":`'
        raise UsageError(f"{flag} {name}: cannot be imported ({locate(error)}); {fix}") from error


def locate(error: BaseException, called: object = None) -> str:
    """Return an error's reason after the last line of the user's code, e.g. `my_net.py:3: ...`.

    If no such line ran, because the call itself failed, name the line that defines `called`.
    """
    passed = traceback.extract_tb(error.__traceback__)
    lines = [line for line in passed if not line.filename.startswith(LIBRARIES)]
    own = [line for line in lines if "-packages" not in line.filename] or lines
    places = [(line.filename, line.lineno) for line in own]
    if not places and (code := getattr(called, "__code__", None)):
        places = [(code.co_filename, code.co_firstlineno)]
    why = "ends the program" if isinstance(error, SystemExit) else reason(error)
    return "".join(f"{Path(file).name}:{line}: " for file, line in places[-1:]) + why
