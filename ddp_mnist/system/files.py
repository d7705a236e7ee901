"""Files that are replaced whole, and whose errors name the flag for their place."""

import contextlib
import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddp_mnist import errors
from ddp_mnist.errors import StorageError, UsageError, blame
from ddp_mnist.system.console import warn_once
from ddp_mnist.system.text import as_json, finite, reason

CHANGED = "was changed or damaged since it was written: its SHA-256 does not match"
SEAL = "sha256"  # the key of an object's own digest
LEFTOVER = ".*.[0-9]*-[0-9]*.tmp"  # left by a process that was killed while writing


def to_json(content: dict[str, Any]) -> str:
    """Return the object as indented JSON; bytes of a path that are not UTF-8 are escaped."""
    return as_json(content, indent=2) + "\n"


def sealed(content: dict[str, Any]) -> dict[str, Any]:
    """Return the object as it reads back from JSON, with the SHA-256 of all else in it."""
    plain = json.loads(as_json(content))
    return plain | {SEAL: digest_of(plain)}


def digest_of(plain: dict[str, Any]) -> str:
    """Return the SHA-256 of an object that was read from JSON."""
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def regular(path: Path) -> Path:
    """Return the path of a file to open. Raise OSError for a pipe or a device: it may never end."""
    if not path.is_file() and path.exists() and not path.is_dir():
        raise OSError(None, "not a regular file", str(path))
    return path


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in the file, without its seal.

    Raise OSError, for damage too: with EBADMSG, as disks that check their content raise it.
    """
    raw, content, why = regular(path).read_bytes(), None, "is damaged, or not a JSON object"
    with contextlib.suppress(ValueError, RecursionError):
        content = json.loads(raw)
    if isinstance(content, dict) and finite(content) == content:
        why = CHANGED
        if content.pop(SEAL, None) in (None, digest_of(content)):  # older files have none
            return content
    raise OSError(errno.EBADMSG, f"{why}; put it back", str(path))


def read_if_whole(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file; {} if it is missing or damaged."""
    with contextlib.suppress(OSError):
        return read_json(path)
    return {}


def no_link(path: str, flags: int) -> int:
    """Open a file for `open`, but not through a link, which another user may have put there."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that readers see the old content or the new one, also after a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-0.tmp")  # as LEFTOVER finds it
    try:
        temporary.unlink(missing_ok=True)
        with open(temporary, "xb") as file:  # never through a link, as `no_link`
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_DIRECTORY)
    try:
        os.fsync(folder)  # the new name is on the disk too
    except OSError as error:
        if error.errno not in errors.LACKING:
            raise
        warn_once(
            f"this disk cannot flush folders ({reason(error)}): a power cut may lose the last file"
        )
    finally:
        os.close(folder)


@contextlib.contextmanager
def storage_errors(path: Path, flag: str = "--run-dir") -> Iterator[None]:
    """Turn an OSError of the block into a StorageError; `flag` names the option for the place.

    Too many open files are a UsageError.
    """
    try:
        yield
    except OSError as error:
        fault = f"{error.filename2 or error.filename or path}: cannot be written ({reason(error)})"
        if error.errno in errors.TOO_MANY:
            raise UsageError(f"{fault}; {errors.MORE_FILES}") from error
        fix = f"free space or fix permissions, or use another {flag}"
        raise StorageError(f"{fault}; {fix}") from error


def try_to_write(folder: Path) -> None:
    """Write a temporary file to the folder. Raise OSError.

    os.access knows nothing of a full disk, and lets root write anywhere.
    """
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        file.write(bytes(4096))


def check_place(file: str | None, flag: str, ending: str = "") -> None:
    """Check the place of a result before minutes are spent on computing it.

    Raise UsageError unless it is a regular file or a new one in an existing folder, StorageError if
    nothing can be written there.
    """
    if file is None:
        return
    path = Path(file)
    folder = path.absolute().parent
    with blame(f"{flag} {path}", StorageError):
        fits = folder.is_dir() and (path.is_file() or not path.exists())
        if not fits or not path.name.endswith(ending):
            raise UsageError(f"{flag} {path}: must be a {ending or 'file'} in an existing folder")
        try_to_write(folder)
