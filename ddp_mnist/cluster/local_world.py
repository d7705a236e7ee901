"""Run one function in several processes of this machine, which can form a group.

A server that has torch loaded forks them, so that each starts in 0.1 s instead of 5: proofs,
benchmarks and tests need many such worlds.
"""

import gc
import multiprocessing as mp
import os
import random
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from ddp_mnist.cluster.hardware import gpus
from ddp_mnist.cluster.interfaces import why_port_is_taken
from ddp_mnist.cluster.launch import LAUNCHER_VARIABLES
from ddp_mnist.errors import FailedElsewhere, UsageError

PORTS = range(15000, 30000)  # below those that the system picks for outgoing connections
FORKSERVER = mp.get_context("forkserver")
LONGEST_TMPDIR = 60  # bytes; Python adds 32, and a path of a socket has 103 at most on macOS
SAFE_PATH = "PYTHONSAFEPATH"  # Python then leaves out the working folder
SHORT = ("/tmp", "/var/tmp", "/dev/shm")
_preloaded: list[str] = []


def preload(*modules: str) -> None:
    """Name modules that the forkserver loads when it starts, before the first process."""
    _preloaded.extend(modules)
    FORKSERVER.set_forkserver_preload(_preloaded)


preload("ddp_mnist.cluster.preloaded", __name__)


def start_server() -> None:
    """Start the forkserver, unless it runs, with a socket whose path is short enough.

    Python puts the socket into TMPDIR, whose path schedulers make long. It starts the server with
    the working folder first on its path, where a random.py of the user would stand in for its own;
    only in a clone that is not installed does the server need it, to find this package.
    """
    before, safe = tempfile.gettempdir(), os.environ.get(SAFE_PATH)
    if len(os.fsencode(before)) > LONGEST_TMPDIR:
        tempfile.tempdir = next(filter(os.path.isdir, SHORT), before)
    if not safe and Path.cwd() != Path(__file__).parents[2]:
        os.environ[SAFE_PATH] = "1"
    try:
        forkserver.ensure_running()
    finally:
        tempfile.tempdir = before
        if not safe:
            os.environ.pop(SAFE_PATH, None)


def free_port() -> int:
    """Return a free port. Raise UsageError if none is found.

    It is not reserved: open it soon. Two simultaneous callers get the same one once in 15,000.
    """
    for port in random.SystemRandom().sample(PORTS, 100):
        if not why_port_is_taken(port):
            return port
    raise UsageError(f"ports {PORTS[0]} to {PORTS[-1]}: no free one was found; stop what uses them")


def backend_among(processes: int) -> str:
    """Return auto, or gloo if processes share a GPU: NCCL needs one for each."""
    return "gloo" if 0 < gpus() < processes else "auto"


class LocalWorld:
    """`size` processes in `folder` that each run one importable function with `args`."""

    def __init__(
        self,
        size: int,
        function: Callable[..., Any],
        *args: Any,
        folder: Path,
        variables: dict[str, str] | None = None,
    ) -> None:
        shared = {"OMP_NUM_THREADS": "1"}
        if size > 1:  # as torchrun sets them, except for its agent's store
            shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            shared |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(size))
        start_server()
        self.pipes, self.processes = [], []
        for rank in range(size):
            ranks = dict.fromkeys(("RANK", "LOCAL_RANK") if size > 1 else (), str(rank))
            mine = shared | ranks | (variables or {})
            ours, theirs = FORKSERVER.Pipe(duplex=False)
            process = FORKSERVER.Process(
                target=_member, args=(theirs, function, mine, str(folder), args), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def outcomes(self, timeout_s: float = 120) -> list[Any]:
        """Return each rank's result, or the exception that ended it."""
        results = []
        try:
            for rank, pipe in enumerate(self.pipes):
                if not pipe.poll(timeout_s):
                    raise TimeoutError(f"rank {rank} has not finished after {timeout_s} s")
                try:
                    results.append(pipe.recv())
                except EOFError:
                    results.append(ConnectionError("was killed"))
        finally:
            for process in self.processes:
                process.join(0 if sys.exc_info()[0] else 10)
                process.kill()
                process.join()
        return results


def run_world(
    size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120, **options: Any
) -> list[Any]:
    """Return the results of `function` on `size` processes, by rank; see LocalWorld.

    If ranks raised exceptions, raise the first cause.
    """
    outcomes = LocalWorld(size, function, *args, **options).outcomes(timeout_s)
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, FailedElsewhere))
    return outcomes


def _member(
    results: Any, function: Callable[..., Any], variables: dict[str, str], folder: str, args: tuple
) -> None:
    gc.freeze()
    gc.enable()  # which preloaded.py disabled
    for name in filter(LAUNCHER_VARIABLES.fullmatch, [*os.environ]):
        del os.environ[name]  # it is no member of the batch job or the launcher of this program
    os.environ.update(variables)
    os.chdir(folder)
    try:
        results.send(function(*args))
    except BaseException as error:
        error.add_note(f"in a separate process:\n{traceback.format_exc()}")
        results.send(error)
    results.close()
