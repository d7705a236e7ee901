"""Python code of the person's own, named MODULE:NAME on the command line.

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
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ddp_mnist.errors import UsageError, reason

# By module its source as it was imported, with the spec of that import: each makes a new one.
IMPORTED: dict[str, tuple[ModuleSpec | None, str]] = {}
IN_USE: set[str] = set()  # modules that this run has imported, or found to be as their files are
# Where the lines of a traceback are not the person's: in this package, Python's own, and PyTorch.
LIBRARIES = (
    "<frozen",
    *(f"{Path(file).parent}/" for file in (__file__, inspect.__file__, torch.__file__)),
)


def begin() -> None:
    """Have `find` look once more at each file, as a run does at its start."""
    IN_USE.clear()


def find(flag: str, name: str) -> Any:
    """Return what `name`, e.g. my_package.nets:Net, stands for; `flag` is what named it.

    The working directory counts as a place of modules. Raise UsageError, in one line, where there
    is no such thing or its module cannot be imported.
    """
    module, _, attribute = name.partition(":")
    found = getattr(import_module(flag, name), attribute, None)
    if found is None:
        raise UsageError(f"{flag} {name}: {module} has no {attribute}; check its spelling")
    return found


def digest(flag: str, name: str) -> str:
    """Return the SHA-256 of the module's source, as it was imported."""
    import_module(flag, name)
    _, source = IMPORTED[name.partition(":")[0]]
    return hashlib.sha256(source.encode()).hexdigest()


def import_module(flag: str, name: str) -> ModuleType:
    """Return the module before the colon, imported once more if its file was changed.

    After that it stays as it is until the next `begin`.
    """
    module, here = name.partition(":")[0], str(Path.cwd())
    if module in IN_USE and module in sys.modules:
        return sys.modules[module]
    if here not in sys.path:
        sys.path.append(here)  # at the end: a file evaluate.py must not hide the library
    try:
        importlib.invalidate_caches()  # the file may be younger than what Python saw of its folder
        there = sys.modules.get(module)
        found = importlib.import_module(module)
        source = source_of(found)
        file = found.__file__ or ""
        own = file.startswith(f"{here}/") and "-packages" not in file  # the person may have edited
        if found is there and was_edited(found, source, unknown=own):
            with contextlib.suppress(OSError):  # within a second it looks current
                Path(importlib.util.cache_from_source(file)).unlink()
            found = importlib.reload(found)
        IMPORTED[module] = found.__spec__, source
        IN_USE.add(module)
        return found
    except Exception as error:
        IMPORTED.pop(module, None)  # what is left of it counts as unknown
        missing = getattr(error, "name", None) or ""
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{missing}."):
            raise UsageError(
                f"{flag} {name}: there is no module {missing} in {here} or among the installed"
                " packages; name it as in an import, without .py"
            ) from error
        raise UsageError(
            f"{flag} {name}: cannot be imported ({said_by(error)}); correct it, or leave it out"
        ) from error


def hand_in(flag: str, given: Any) -> None:
    """Note a class or a function handed in from Python, which a run finds by its name.

    Raise UsageError if a run would find something else, or record other code.
    """
    module, name = sys.modules.get(given.__module__), f"{given.__module__}:{given.__name__}"
    if module is None or given.__module__ == "__main__" or not (source := source_of(module)):
        return
    found = getattr(module, given.__name__, given)
    if found is not given or was_edited(module, source, unknown=False):
        raise UsageError(
            f"{flag} {name}: is not what its file holds now; restart Python, or give the name"
            f' "{name}", which is imported anew'
        )
    IMPORTED[given.__module__] = module.__spec__, source


def source_of(module: ModuleType) -> str:
    """Return what its file holds now; "" of a module that is not written in Python."""
    file = getattr(module, "__file__", None) or ""
    return inspect.getsource(module) if file.endswith(".py") else ""


def was_edited(module: ModuleType, source: str, unknown: bool) -> bool:
    """Return whether its file holds something else than was imported; `unknown` if others did."""
    spec, imported = IMPORTED.get(module.__name__, (None, ""))
    return imported != source if spec and spec is module.__spec__ else unknown


def said_by(error: Exception, called: object = None) -> str:
    """Return what an error says, and the last line of the person's code on the way to it.

    If that was the call itself, of a function whose arguments are others, it is the function's.
    """
    passed = traceback.extract_tb(error.__traceback__)
    lines = [line for line in passed if not line.filename.startswith(LIBRARIES)]
    own = [line for line in lines if "-packages" not in line.filename] or lines
    places = [(line.filename, line.lineno) for line in own]
    if not places and (code := getattr(called, "__code__", None)):
        places = [(code.co_filename, code.co_firstlineno)]
    return "".join(f"{Path(file).name}:{line}: " for file, line in places[-1:]) + reason(error)
