"""The user's own Python code, named MODULE:NAME on the command line.

A process imports it once, and a run records the SHA-256 of its source. An error in it is one line,
see `blame`; the traceback has the place.
"""

import contextlib
import functools
import hashlib
import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from ddp_mnist.errors import CheckpointError, UsageError, blame


def find(flag: str, name: str) -> Any:
    """Return the object `name`, e.g. my_package.nets:Net, that was typed after `flag`.

    Modules are searched for in the working directory too. Raise UsageError if the object does not
    exist, or its module cannot be imported.
    """
    if ":" not in name:
        raise UsageError(f"{flag} {name}: give MODULE:NAME, e.g. my_file:name for my_file.py")
    module = import_once(flag, name)
    with blame(f"{flag} {name}", UsageError):
        return getattr(module, name.partition(":")[2])


def digest(flag: str, name: str) -> str:
    """Return the SHA-256 of the module's source; of "" for one without."""
    return source_digest(import_once(flag, name))


@functools.cache
def source_digest(module: ModuleType) -> str:
    """Return the digest at the first call, right after the import: the file may be edited later.

    Of a module that was imported elsewhere before, it is that of the file at the first call.
    """
    source = ""
    with contextlib.suppress(OSError, TypeError):
        source = inspect.getsource(module)
    return hashlib.sha256(source.encode()).hexdigest()


def check_unchanged(flag: str, name: str, was: str, run: str) -> None:
    """Raise CheckpointError unless the digest of the module is still `was`."""
    if digest(flag, name) != was:
        raise CheckpointError(
            f"{run}: the file of {flag} {name} was changed since; use it as it was, or train again"
        )


def import_once(flag: str, name: str) -> ModuleType:
    """Return the module before the colon. Python imports it once in a process."""
    here, dotted = str(Path.cwd()), name.partition(":")[0]
    if here not in sys.path:
        sys.path.append(here)  # at the end: a file evaluate.py must not hide the library
    if dotted.partition(".")[0] in sys.stdlib_module_names:  # a stranger's run may name os:abort
        fix = "name a module of yours, and rename it if it has that name"
        raise UsageError(f"{flag} {name}: is Python's own; {fix}")
    with blame(f"{flag} {name}", UsageError, f"correct it, or name another module in {here}"):
        importlib.invalidate_caches()  # the file may be newer than Python's listing of its folder
        module = importlib.import_module(dotted)
    own, found = Path(here, *dotted.split(".")).with_suffix(".py"), module.__file__
    if own.exists() and not (found and own.samefile(found)):
        raise UsageError(f"{flag} {name}: Python takes {found}, not {own}; rename yours")
    source_digest(module)
    return module
