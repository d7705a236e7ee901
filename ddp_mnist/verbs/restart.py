"""Runs a training command again when a process was lost: `make train RESTARTS=3`.

    python -m ddp_mnist.verbs.restart 3 -- -m torch.distributed.run --nproc-per-node 2 \\
        -m ddp_mnist train --dataset digits

What follows `--` is given to python. A launcher's exit code is 1 whatever happened, and its own
restart would repeat a mistyped flag too; status.json in the run folder tells what it was. Only the
machine of rank 0 has that file: a run over many machines is restarted by its scheduler.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from ddp_mnist.cli import make_parser
from ddp_mnist.config import Run
from ddp_mnist.errors import UsageError
from ddp_mnist.run.console import Console, run_program
from ddp_mnist.run.folder import STATUS, in_use, read_json, reserve, without_link

ORPHANS_MAY_TAKE_S = 60  # processes whose launcher was killed save, and end


def main(argv: Sequence[str] | None = None) -> NoReturn:
    run_program(run, argv)


def run(argv: list[str]) -> int:
    """The exit code: that of status.json where there is one, else the command's."""
    if argv and argv[1:2] == ["--"] and not argv[0].isdecimal():
        raise UsageError(f"RESTARTS={argv[0]}: must be a whole number")
    if len(argv) < 3 or not argv[0].isdecimal() or argv[1] != "--" or "train" not in argv:
        raise UsageError("python -m ddp_mnist.verbs.restart: needs N -- COMMAND ... train FLAGS")
    restarts, command = int(argv[0]), [sys.executable, *argv[2:]]
    typed = vars(make_parser().parse_args(argv[argv.index("train") :]))
    folder, first = place(typed)
    again = [] if "resume" in typed else ["--resume", "auto"]
    try:
        for attempt in range(restarts + 1):
            before = age(folder)
            code, stopped = run_once([*command, *first, *(again if attempt else [])])
            # A status that this attempt did not write is that of another run, or of an older part.
            status = status_of(folder) if age(folder) != before else {}
            reason = loss(status)
            if code == 0 or stopped or reason is None or attempt == restarts:
                break
            Console(True, trains=True).print(f"restart {attempt + 1} of {restarts}: {reason}")
        return code and (status.get("exit_code") or code)
    finally:
        if first and not any(folder.iterdir()):
            folder.rmdir()  # it never came to a run


def place(typed: dict[str, Any]) -> tuple[Path, list[str]]:
    """The run's folder, and the flags that put it there if the person left that open."""
    folder = typed.get("resume")
    if folder in (None, "auto"):
        folder = typed.get("run_dir")
    if folder:
        return without_link(Path(folder)), []
    dataset = Path(typed.get("dataset", Run.dataset))
    name = dataset.resolve().name if dataset.is_dir() else str(dataset).replace("/", "--")
    made = reserve(name)
    return made, ["--run-dir", str(made)]


def run_once(command: list[str]) -> tuple[int, bool]:
    """The command's exit code, and whether a signal came that asks for an end.

    SIGTERM and SIGUSR1 are handed on; a terminal's SIGINT reaches the command by itself.
    """
    process: subprocess.Popen[bytes] | None = None
    came: list[int] = []

    def hand_on(number: int, _frame: FrameType | None) -> None:
        came.append(number)
        if process and number != signal.SIGINT:
            process.send_signal(number)

    signals = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = [signal.signal(each, hand_on) for each in signals]
    try:
        process = subprocess.Popen(command)
        for number in came:  # before it stood
            process.send_signal(number)
        # Not wait(): Python sees to a signal between two of its steps, and one that comes just as a
        # wait without an end begins would be handed on only when the command has ended.
        while (code := process.poll()) is None:
            time.sleep(0.05)
        return (code if code >= 0 else 128 - code), bool(came)  # as a shell counts signals
    finally:
        for each, handler in zip(signals, before, strict=True):
            signal.signal(each, handler)


def age(folder: Path) -> int | None:
    """When status.json was written, in ns; None if there is none."""
    status = folder / STATUS
    return status.stat().st_mtime_ns if status.exists() else None


def status_of(folder: Path) -> dict[str, Any]:
    """status.json once nobody writes the folder any more; {} if that does not end."""
    deadline = time.monotonic() + ORPHANS_MAY_TAKE_S
    while in_use(folder):
        if time.monotonic() > deadline:
            return {}
        time.sleep(0.1)
    try:
        return read_json(folder / STATUS)
    except (OSError, ValueError):
        return {}


def loss(status: dict[str, Any]) -> str | None:
    """Why the run should go on by itself; None where a person has to look, or it is done."""
    if status.get("state") == "failed" and status["exit_code"] == 6:
        return status["error"]
    if status.get("state") == "running":
        return "the process that wrote the run folder was killed"
    return None


if __name__ == "__main__":
    main()
