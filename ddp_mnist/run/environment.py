"""The versions of what runs here: packages, code, commit."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("torch", "torchvision", "accelerate", "datasets", "evaluate", "safetensors")


def package_versions() -> dict[str, str]:
    """Return Python's and each package's version, from metadata: imports would cost seconds."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"
    return found


def code_digest() -> str:
    """Return the first 16 hex digits of the SHA-256 over this package's modules."""
    sha = hashlib.sha256()
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        sha.update(file.read_bytes())
    return sha.hexdigest()[:16]


def git_commit() -> str | None:
    """Return the commit of the checkout that this package is part of, + if changed; or None."""
    here = Path(__file__)
    tracked = ["ls-files", "--error-unmatch", here.name]  # .venv may lie in another checkout
    describe = ["describe", "--always", "--dirty=+", "--abbrev=40", "--exclude=*"]
    try:
        for command in (tracked, describe):
            git = ["git", "-C", str(here.parent), *command]
            done = subprocess.run(git, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
