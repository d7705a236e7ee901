"""`make train RESTARTS=3`: run a training command again if it lost a process.

A launcher's exit code is 1 whatever happened, and its own restart would repeat a mistyped flag too;
status.json in the run folder has the cause. Only rank 0's machine has that file, so a run over many
machines is restarted by its scheduler.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddp_mnist.config.run import RunFlags
from ddp_mnist.data.sources import find_source
from ddp_mnist.errors import PeerError
from ddp_mnist.run.console import Console, tell
from ddp_mnist.run.folder import STATUS, read_json, reserve, without_link, writer_of

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
ORPHANS_MAY_TAKE_S = 60  # for processes of a killed launcher to save and end


def restart(restarts: int, command: Sequence[str], run: RunFlags) -> int:
    """Run `python COMMAND`, then again with `--resume auto` as long as it lost a process.

    The command ends with the flags of `train`; `run` holds the parsed RunFlags. Return the exit
    code in status.json, or else the command's. Raise as `find_source` and `reserve` do.
    """
    folder, flags = choose_folder(run)
    again = [] if run.resume else ["--resume", "auto"]
    try:
        for attempt in range(restarts + 1):
            before = written_at(folder)
            resume = again if attempt else []
            code, signalled = run_once([sys.executable, *command, *flags, *resume])
            # A status that this attempt did not write is an earlier attempt's.
            status = read_status(folder) if written_at(folder) != before else {}
            reason = status["error"] if status.get("exit_code") == PeerError.code else None
            if status.get("state") == "running":
                reason = "the process that wrote the run folder was killed"
            if code == 0 or signalled or reason is None or attempt == restarts:
                break
            Console(True, must_arrive=False).print(f"restart {attempt + 1} of {restarts}: {reason}")
        return code and (status.get("exit_code") or code)
    finally:
        if flags and not any(folder.iterdir()):
            folder.rmdir()  # no run began


def choose_folder(run: RunFlags) -> tuple[Path, list[str]]:
    """Return the run's folder, and flags that choose it unless they were typed."""
    folder = run.run_dir if run.resume in (None, "auto") else run.resume
    if folder:
        return without_link(Path(folder)), []
    # Resolving `auto` takes torch, and perhaps a network; here it is just a name.
    made = reserve("auto" if run.dataset == "auto" else find_source(run.dataset).name)
    return made, ["--run-dir", str(made)]


def run_once(command: list[str]) -> tuple[int, bool]:
    """Run the command. Return its exit code, and whether this process was asked to stop meanwhile.

    Signals are forwarded, except SIGINT, which a terminal sends to the command too.
    """
    received: list[int] = []
    # Under nohup SIGHUP is ignored, here and in the command, which inherits that.
    heard = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {n: signal.signal(n, lambda number, _: received.append(number)) for n in heard}
    try:
        process, forwarded = subprocess.Popen(command), 0
        while (code := process.poll()) is None:
            for number in received[forwarded:]:
                forwarded += 1
                if number != signal.SIGINT:
                    process.send_signal(number)
            time.sleep(0.05)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return (code if code >= 0 else 128 - code), bool(received)  # as a shell counts signals


def written_at(folder: Path) -> int | None:
    """Return the time of status.json, in ns; None if the file does not exist."""
    status = folder / STATUS
    return status.stat().st_mtime_ns if status.exists() else None


def read_status(folder: Path) -> dict[str, Any]:
    """Return status.json once no process is writing the folder; {} if one does not end."""
    deadline = time.monotonic() + ORPHANS_MAY_TAKE_S
    while who := writer_of(folder):
        if time.monotonic() > deadline:
            tell(f"restart: {folder} is still being written by {who}; not restarted")
            return {}
        time.sleep(0.1)
    return read_json(folder / STATUS)
