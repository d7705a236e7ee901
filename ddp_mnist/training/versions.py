"""What runs here: the versions of packages, code and commit, and the command."""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ddp_mnist.system.text import quoted

PACKAGES = ("torch", "torchvision", "accelerate", "datasets", "evaluate", "safetensors")


def package_versions(model: str | None = None) -> dict[str, str]:
    """Return Python's and each package's version, from metadata: imports would cost seconds.

    With the net of --model, they are those of its library too.
    """
    names = [*PACKAGES, "timm"] if (model or "").startswith("timm:") else PACKAGES
    return {"python": platform.python_version()} | {name: version_of(name) for name in names}


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def code_digest() -> str:
    """Return the first 16 hex digits of the SHA-256 over this package's modules."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def git_commit() -> str | None:
    """Return the commit of the checkout that this package is part of, + if changed; or None."""
    is_tracked = "ls-files --error-unmatch ."  # .venv may lie in another checkout
    describe = "describe --always --dirty=+ --abbrev=40 --exclude=*"
    for command in (is_tracked, describe):
        git = ["git", "-C", str(Path(__file__).parent), *command.split()]
        try:
            done = subprocess.run(git, capture_output=True, text=True, timeout=5, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
    return done.stdout.strip()


def program() -> str:
    """Return the command that starts this program here: `make` activates no environment."""
    if shutil.which("ddp-mnist"):
        return "ddp-mnist"
    python = min(sys.executable, os.path.relpath(sys.executable), key=len)
    return f"{quoted(python)} -m ddp_mnist"
