"""Files that a person names for results: checked before the work, written whole after it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from ddp_mnist.errors import StorageError, UsageError, reason
from ddp_mnist.run.folder import to_json, write_atomically


def check_place(file: str | None, flag: str, ending: str = "") -> Path | None:
    """Return where a result is to be written, before minutes are spent on it.

    Raises:
        UsageError: it is no place for a file; a device is none either, it would be replaced.
        StorageError: nothing can be written there.
    """
    if file is None:
        return None
    path = Path(file)
    try:
        exists = path.absolute().parent.is_dir() and (path.is_file() or not path.exists())
        if not exists or not path.name.endswith(ending):
            kind = ending or "file"
            raise UsageError(f"{flag} {path}: must be a {kind} in a folder that is there")
        # Tried, as os.access knows nothing of a full disk, and lets root write anywhere.
        with tempfile.TemporaryFile(dir=path.absolute().parent, buffering=0) as probe:
            probe.write(bytes(4096))
    except OSError as error:
        raise _cannot_be_written(path, flag, error) from error
    return path


def save_json(path: Path, content: dict[str, Any], flag: str = "--save") -> None:
    """Raise StorageError if it cannot be written."""
    try:
        write_atomically(path, to_json(content).encode())
    except OSError as error:
        raise _cannot_be_written(path, flag, error) from error


def _cannot_be_written(path: Path, flag: str, error: OSError) -> StorageError:
    return StorageError(f"{flag} {path}: cannot be written ({reason(error)}); name another file")
