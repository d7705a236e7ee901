"""Processes of this machine that form a group, without a launcher.

They come from a forkserver that has torch loaded, so one stands in 0.1 s instead of 5: proofs,
benchmarks and tests that need many worlds go through it.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import random
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddp_mnist.cluster.hardware import gpus
from ddp_mnist.errors import FailedElsewhere, UsageError

PORTS = range(15000, 30000)

FORKSERVER = mp.get_context("forkserver")

FORKSERVER.set_forkserver_preload(
    [
        "torch._dynamo",
        "ddp_mnist.train",
        "ddp_mnist.run.metrics",
        "ddp_mnist.verbs.evaluate",
        __name__,
    ]
)


def free_port() -> int:
    """A port at which nobody listens, to be opened a little later.

    The system picks ports from 32768 on for connections that go out, and one of those could be
    taken in between.

    Raises:
        UsageError: none was found.
    """
    for port in random.SystemRandom().sample(PORTS, 100):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    raise UsageError(f"ports {PORTS[0]} to {PORTS[-1]}: no free one was found; end what uses them")


def backend_among(processes: int) -> str:
    """Returns auto, or gloo where the processes share a GPU, as NCCL needs one each."""
    return "gloo" if 0 < gpus() < processes else "auto"


def launcher_variables(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun tells a worker, but for the store of its agent."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _member(
    results: Any, function: Callable[..., Any], variables: dict[str, str], folder: str, args: tuple
) -> None:
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC_")]:
        del os.environ[name]  # of a launcher that started this program, and not these processes
    os.environ.update(variables)
    os.chdir(folder)
    try:
        results.send((True, function(*args)))
    except BaseException as error:
        results.send((False, (error, traceback.format_exc())))
    results.close()


class LocalWorld:
    """`size` processes that each run one function.

    Args:
        size: how many.
        function: importable; gets `args` in each process.
        folder: the processes' working directory.
        variables: more environment variables, the same for all.
    """

    def __init__(
        self,
        size: int,
        function: Callable[..., Any],
        *args: Any,
        folder: Path,
        variables: dict[str, str] | None = None,
    ) -> None:
        port = free_port()
        self.pipes, self.processes = [], []
        for rank in range(size):
            mine = launcher_variables(rank, size, port) if size > 1 else {}
            mine |= {"OMP_NUM_THREADS": "1", **(variables or {})}
            ours, theirs = FORKSERVER.Pipe(duplex=False)
            process = FORKSERVER.Process(
                target=_member, args=(theirs, function, mine, str(folder), args), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def outcomes(self, timeout_s: float = 120) -> list[Any]:
        """Per rank what the function returned, or the exception that ended it."""
        results = []
        try:
            for rank, pipe in enumerate(self.pipes):
                if not pipe.poll(timeout_s):
                    raise TimeoutError(f"rank {rank} has not finished after {timeout_s} s")
                try:
                    worked, result = pipe.recv()
                except EOFError:
                    worked, result = False, (ConnectionError("was killed"), "")
                results.append(result if worked else result[0])
                if not worked:
                    results[-1].__notes__ = [f"on rank {rank}:\n{result[1]}"]
        finally:
            for process in self.processes:
                process.join(0 if sys.exc_info()[0] else 10)
                if process.is_alive():
                    process.kill()
                    process.join()
        return results

    def results(self, timeout_s: float = 120) -> list[Any]:
        """Like `outcomes`, but an exception on any rank is raised here, before what it caused."""
        outcomes = self.outcomes(timeout_s)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        for error in sorted(errors, key=lambda error: isinstance(error, FailedElsewhere)):
            raise error
        return outcomes


def run_world(
    size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120, **options: Any
) -> list[Any]:
    """What `function` returned on each of `size` processes."""
    return LocalWorld(size, function, *args, **options).results(timeout_s)
