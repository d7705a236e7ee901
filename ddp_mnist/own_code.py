"""Python code of the person's own, named MODULE:NAME on the command line."""

import importlib
import inspect
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from ddp_mnist.errors import UsageError, reason

IMPORTED: dict[str, str] = {}  # by module its source, as it was imported
# Where the lines of a traceback are not the person's: in this package, Python's own, and PyTorch.
LIBRARIES = (
    "<frozen",
    *(f"{Path(file).parent}/" for file in (__file__, inspect.__file__, torch.__file__)),
)


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


def import_module(flag: str, name: str) -> Any:
    """Import the module before the colon; once more if its file was written anew since."""
    module, here = name.partition(":")[0], str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        importlib.invalidate_caches()  # the file may be younger than what Python saw of its folder
        found = importlib.import_module(module)
        source = inspect.getsource(found) if getattr(found, "__file__", None) else ""
        if IMPORTED.get(module, source) != source:
            found = importlib.reload(found)
        IMPORTED[module] = source
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

    If that was the call itself, of a function whose arguments are others, it is the function's.
    """
    passed = traceback.extract_tb(error.__traceback__)
    lines = [line for line in passed if not line.filename.startswith(LIBRARIES)]
    own = [line for line in lines if "-packages" not in line.filename] or lines
    places = [(line.filename, line.lineno) for line in own]
    if not places and (code := getattr(called, "__code__", None)):
        places = [(code.co_filename, code.co_firstlineno)]
    return "".join(f"{Path(file).name}:{line}: " for file, line in places[-1:]) + reason(error)
