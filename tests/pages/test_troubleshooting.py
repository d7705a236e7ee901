"""Each error that docs/troubleshooting.md quotes is provoked: what torch says, and what we say."""

import argparse
import contextlib
import io
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from ddp_mnist.cluster.local_world import LocalWorld, free_port, run_world
from ddp_mnist.core.nets import MODELS
from ddp_mnist.system.text import causes
from tests.commands import REPOSITORY, run_here

pytestmark = pytest.mark.system
PAGE = (REPOSITORY / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
RUN = ["train", "--dataset", "digits", "--epochs", "1"]
Said = dict[str, str]  # by the name of an error what torch said; by "our NAME" what we did

NETS = """
from torch import nn

class Unused(nn.Module):
    def __init__(self, classes, shape):
        super().__init__()
        self.used, self.unused = nn.Linear(784, classes), nn.Linear(784, classes)

    def forward(self, images):
        return self.used(images.flatten(1))

class InPlace(nn.Module):
    def __init__(self, classes, shape):
        super().__init__()
        self.layer = nn.Linear(784, classes)

    def forward(self, images):
        logits = self.layer(images.flatten(1)).sigmoid()
        logits += 1
        return logits
"""


def message(provoke: Callable[..., object], *args: Any, **options: Any) -> str:
    """Return the kind of what torch raises, and the text of it and of what it came from."""
    with pytest.raises(Exception) as caught:
        provoke(*args, **options)
    error, kind = caught.value, caught.type
    return "\n".join([f"{kind.__module__}.{kind.__qualname__}", *map(str, causes(error))])


def our_line(*argv: str) -> str:
    """Return what a command prints, and its exit code."""
    code, printed = run_here([*argv], file=False)
    return f"{printed}exit code {code}"


# --- One process


def alone() -> Said:
    """Provoke what a process meets by itself, first in torch, then in ddp_mnist."""
    said = {}
    said["rank"] = message(dist.init_process_group, "gloo")
    said["group"] = message(DistributedDataParallel, nn.Linear(1, 1))
    state = {f"module.{key}": value for key, value in nn.Linear(1, 1).state_dict().items()}
    said["keys"] = message(nn.Linear(1, 1).load_state_dict, state)
    with contextlib.redirect_stderr(io.StringIO()) as printed, pytest.raises(SystemExit):
        argparse.ArgumentParser().parse_args(["--local-rank=0"])
    said["local rank"] = printed.getvalue()
    logits = torch.ones(1, requires_grad=True).sigmoid()
    logits += 1
    said["in place"] = message(logits.backward)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth9"
    said["interface"] = message(start, free_port(), 0, 1)
    del os.environ["GLOO_SOCKET_IFNAME"]
    agent = LaunchConfig(1, 1, 1, rdzv_backend="c10d", rdzv_endpoint="localhost:0", run_id="x")
    agent.max_restarts, agent.monitor_interval = 0, 0.05
    failing = elastic_launch(agent, sys.executable)
    said["child"] = message(failing, "-c", "raise SystemExit(1)")

    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        said["port"] = message(start, port, 0, 2).replace(str(port), "29500")
        said["our port"] = our_line(*RUN, *tcp(port, 0)).replace(str(port), "29500")
    with socket.socket() as silent:  # holds a port at which nobody answers, so that nobody takes it
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        said["store"] = message(start, port, 1, 2).replace(str(port), "29500")
        said["our store"] = our_line(*RUN, *tcp(port, 1)).replace(str(port), "29500")

    for name, net in (("unused", "Unused"), ("in place", "InPlace")):
        said[f"our {name}"] = our_line(*RUN, "--model", f"nets:{net}")
    state = MODELS["mlp"](10, (1, 28, 28)).state_dict()
    torch.save({f"module.{key}": value for key, value in state.items()}, "module.pt")
    said["our keys"] = our_line(*RUN, "--model", "mlp", "--weights", "module.pt")
    said["our local rank"] = our_line("--local-rank=0", *RUN, "--local_rank", "0", "--dry-run")
    os.environ["WORLD_SIZE"] = "2"
    said["our rank"] = our_line(*RUN)
    return said


def start(port: int, rank: int, world_size: int, timeout_s: float = 1) -> None:
    place: Any = {"rank": rank, "world_size": world_size, "timeout": timedelta(seconds=timeout_s)}
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", **place)


def tcp(port: int, rank: int) -> list[str]:
    place = ["--init-method", f"tcp://127.0.0.1:{port}", "--rank", str(rank), "--world-size", "2"]
    return [*place, "--dist-timeout", "1"]


# --- Two processes


class FirstAlone(nn.Sequential):
    def forward(self, numbers: Tensor) -> Tensor:
        return self[0](numbers)


def unused_parameters(_: int) -> None:
    model = DistributedDataParallel(FirstAlone(nn.Linear(1, 1), nn.Linear(1, 1)))
    for _ in range(2):
        model(torch.ones(1, 1)).sum().backward()


def other_number_of_layers(rank: int) -> None:
    DistributedDataParallel(nn.Sequential(*(nn.Linear(1, 1) for _ in range(1 + rank))))


def other_shape(rank: int) -> None:
    DistributedDataParallel(nn.Linear(1, 1 + rank))


def one_leaves(rank: int, seconds: float = 0.3) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(1))
    time.sleep(seconds * rank)


def one_is_late(rank: int) -> None:
    one_leaves(rank, 1.2)


ABOUT_NETS = (unused_parameters, other_number_of_layers, other_shape)
MISTAKES: tuple[Callable[[int], None], ...] = (*ABOUT_NETS, one_leaves, one_is_late)


def together(ports: list[int]) -> None:
    """Provoke what takes two; rank 1 ends in the middle, so what is said goes to files."""
    rank, said = int(os.environ["RANK"]), {}
    for fault, port in zip(MISTAKES, ports, strict=True):
        start(port, rank, 2, timeout_s=1 if fault == one_is_late else 60)
        try:
            fault(rank)
        except RuntimeError as error:
            said[fault.__name__] = str(error)
        dist.destroy_process_group()
    said["our model"] = our_line(*RUN, "--model", ("cnn", "mlp")[rank])
    os.environ["GLOO_SOCKET_IFNAME"] = "eth9"
    said["our interface"] = our_line(*RUN)
    os.environ.pop("GLOO_SOCKET_IFNAME")
    Path(f"rank-{rank}.json").write_text(json.dumps(said))
    if rank == 1:
        DistributedDataParallel.forward = lambda *_: os._exit(1)  # type: ignore[method-assign]
    said["our peer"] = our_line(*RUN)
    Path(f"rank-{rank}.json").write_text(json.dumps(said))


# --- A DataLoader's worker


def broken_worker() -> None:
    """Let a worker meet what it does if its /dev/shm is full."""

    def collate(_: list[int]) -> None:
        os.kill(os.getpid(), signal.SIGBUS)

    # of this process alone, as with the default of Linux, torch sees which signal ended it
    worker = {"num_workers": 1, "multiprocessing_context": "fork"}
    next(iter(DataLoader([0], collate_fn=collate, **worker)))  # type: ignore[arg-type]


# --- The page


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    """Provoke everything once, in three processes and a worker."""
    folder = tmp_path_factory.mktemp("said")
    (folder / "nets.py").write_text(NETS)
    ports = [free_port() for _ in MISTAKES]
    pair = LocalWorld(2, together, ports, folder=folder)
    [found] = run_world(1, alone, folder=folder)
    found["worker"] = message(broken_worker)
    assert isinstance(pair.outcomes()[1], ConnectionError)  # rank 1 ended itself
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]
    for name in {**ranks[0], **ranks[1]}:
        found[name] = "\n".join(rank.get(name, "") for rank in ranks)
    return found


# By heading of the page what stands in its fences, one after the other.
QUOTES = {
    "Troubleshooting": ["child"],
    "Address already in use": ["port", "our port"],
    "The client socket has timed out, connection refused": ["store", "our store"],
    "environment variable RANK expected, but not set": ["rank", "our rank"],
    "Default process group has not been initialized": ["group"],
    "unrecognized arguments: --local-rank": ["local rank"],
    "Expected to have finished reduction in the prior iteration": [
        "unused_parameters",
        "our unused",
    ],
    "DDP expects same model across all ranks": [
        "other_number_of_layers",
        "other_shape",
        "our model",
    ],
    "modified by an inplace operation": ["in place", "our in place"],
    "Missing key(s) in state_dict: names with module.": ["keys"],
    "Connection closed by peer, Timed out waiting": ["one_leaves", "one_is_late", "our peer"],
    "Unable to find address for, connectFullMesh failed": ["interface", "our interface"],
    "DataLoader worker is killed by signal: Bus error": ["worker"],
}


def sections() -> dict[str, list[str]]:
    """Return the fences of each section."""
    parts = re.split(r"^#+ (.*)\n", PAGE, flags=re.MULTILINE)[1:]
    fence = re.compile(r"^```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    return {head: fence.findall(text) for head, text in zip(parts[::2], parts[1::2], strict=True)}


def test_the_page_quotes_these_errors_and_no_other() -> None:
    quoted = {heading: len(fences) for heading, fences in sections().items() if fences}
    assert quoted == {heading: len(names) for heading, names in QUOTES.items()}


@pytest.mark.parametrize("heading", QUOTES)
def test_what_the_page_quotes_is_what_is_said(heading: str, said: Said) -> None:
    for fence, name in zip(sections()[heading], QUOTES[heading], strict=True):
        heard = " ".join(said[name].split())
        if name == "one_leaves":  # a moment decides which of the two it is; the port is any
            reset = r"Read error (\S+): .* reset by peer"
            heard = re.sub(reset, r"Connection closed by peer \1", heard)
            heard = re.sub(r"(\[127\.0\.0\.1\]):\d+", r"\1:29500", heard)
        for part in re.split(r"^\.\.\.$", fence, flags=re.MULTILINE):
            assert " ".join(part.split()) in heard, name


def test_what_torch_refuses_is_taken_here(said: Said) -> None:
    for name in ("our keys", "our local rank"):
        assert said[name].endswith("\nexit code 0")
