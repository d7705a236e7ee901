#!/bin/sh
# Makes $VENV with the pinned versions, for the Makefile. A set-up that failed half-way has no
# $VENV/.ready, says at which step it failed, and is taken up again by the next `make`.
set -u

fail() {
    echo "make venv: $1" >&2
    exit 1
}

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    fail "$PYTHON is missing or older than Python 3.11; name one: make PYTHON=python3.12"

if ! "$VENV/bin/python" -c '' 2>/dev/null; then
    echo "making $VENV with $("$PYTHON" --version)"
    "$PYTHON" -m venv --clear "$VENV" ||
        fail "$PYTHON -m venv $VENV failed; on Debian and Ubuntu: apt install python3-venv"
fi

echo "installing the versions of constraints.txt (about 5 GB on Linux, a few minutes)"
"$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
    --editable '.[dev]' ||
    fail "pip could not install (see above); check network and disk space, then run make again"

# A torch of another release than torchvision's installs without complaint and fails at import.
"$VENV/bin/python" -W error -c 'import torch, torchvision' 2>"$VENV/import.log" || {
    tail -n 1 "$VENV/import.log" >&2
    fail "torch and torchvision do not fit together; make clean, then make again"
}

touch "$VENV/.ready"
echo "$VENV is ready"
