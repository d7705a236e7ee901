"""Print a digest of the weights and the log of twelve kinds of runs: has a change altered a result?

    PYTHONPATH=$PWD python tools/digests.py > after.txt    # about four minutes on two cores
    diff before.txt after.txt

Each kind runs on 1, 2 and 3 processes, once to its end and once stopped by SIGTERM and resumed. A
line has the first 16 hex digits of two SHA-256: of all tensors of model.safetensors, and of
metrics.jsonl without speeds. Digests depend on the processor, so compare commits on one machine:

    git worktree add /tmp/before COMMIT
    PYTHONPATH=/tmp/before python tools/digests.py > before.txt
"""

import hashlib
import itertools
import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BASE = ["--dataset", "digits", "--batch-size", "72", "--log-every", "1", "--quiet", "--cpu"]
STOPS_AT = 20  # the optimizer step in which the last rank gets SIGTERM, counted from 0
# Keys of metrics.jsonl that differ from run to run, and one that older commits do not write
SPEEDS = ("images_per_second", "waiting_for_data", "peak_memory_mb", "gradient_norm")
FORKSERVER = multiprocessing.get_context("forkserver")

OWN_CODE = """
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self, classes, shape):
        super().__init__()
        self.conv = nn.Conv2d(shape[0], 16, 5, stride=2)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.LazyLinear(classes)

    def forward(self, x):
        return self.head(self.dropout(F.relu(self.conv(x)).flatten(1)))


def squared(logits, labels):
    return (logits.softmax(1) - F.one_hot(labels, logits.shape[1])).square().sum(1)
"""


def flags(text: str, precision: str) -> list[str]:
    """Return BASE with these flags."""
    return [*BASE, "--mixed-precision", precision, *text.split()]


KINDS = {  # the flags that differ from BASE
    "mlp": flags("--model mlp --epochs 3", "fp64"),
    "cnn": flags("--model cnn --epochs 3", "no"),
    "cnn_deep, accurate": flags("--preset accurate --epochs 2", "no"),
    "cnn_bn": flags("--model cnn_bn --epochs 3", "no"),
    "accumulation, clipping": flags(
        "--model mlp --epochs 3 --grad-accum 2 --max-grad-norm 0.5", "fp64"
    ),
    "augmentation": flags("--model cnn --epochs 3 --augment", "fp64"),
    "patience": flags("--model mlp --epochs 8 --patience 1 --lr 0.05", "no"),
    "balanced": flags("--model mlp --epochs 3 --class-weights balanced", "fp64"),
    "own net": flags("--model own_code:Net --epochs 3", "no"),
    "own loss": flags("--model mlp --epochs 3 --loss own_code:squared", "fp64"),
    "colour patches": flags("--dataset patches --epochs 1", "no"),
    "schedule changed": flags("--model mlp --epochs 3", "fp64"),
}
ON_RESUME = {"schedule changed": ["--epochs", "5"]}


def main() -> None:
    """Make all runs in a temporary folder, and print a line for each."""
    FORKSERVER.set_forkserver_preload(["torch._dynamo", "ddp_mnist.train", "ddp_mnist.cli"])
    with tempfile.TemporaryDirectory(prefix="ddp_mnist-") as scratch:
        os.chdir(scratch)
        Path("own_code.py").write_text(OWN_CODE)
        for (kind, typed), size in itertools.product(KINDS.items(), (1, 2, 3)):
            later = ON_RESUME.get(kind, [])
            run = f"{kind}-{size}".replace(" ", "-")
            train(size, [*typed, "--run-dir", run])
            if later:
                train(size, ["--quiet", "--cpu", *precision_of(typed), "--resume", run, *later])
            report(kind, size, "fresh", Path(run))
            run += "-again"
            train(size, [*typed, "--run-dir", run], stops_at=STOPS_AT)
            train(size, ["--quiet", "--cpu", *precision_of(typed), "--resume", run, *later])
            report(kind, size, "interrupted", Path(run))


def precision_of(typed: list[str]) -> list[str]:
    """Return the flag that a resumed run does not take over, with its value."""
    place = typed.index("--mixed-precision")
    return typed[place : place + 2]


def report(kind: str, size: int, how: str, run: Path) -> None:
    """Print the line of a run."""
    print(f"{kind:<24} {size} {how:<12} {weights_digest(run)} {log_digest(run)}", flush=True)


def weights_digest(run: Path) -> str:
    """Return a digest of the names, types, shapes and bytes of all tensors."""
    content = (run / "model.safetensors").read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    header.pop("__metadata__", None)
    found = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    found.update(content[begin:])
    return found.hexdigest()[:16]


def log_digest(run: Path) -> str:
    """Return a digest of the lines of metrics.jsonl, without speeds."""
    found = hashlib.sha256()
    for line in (run / "metrics.jsonl").read_text().splitlines():
        kept = {key: value for key, value in json.loads(line).items() if key not in SPEEDS}
        found.update(json.dumps(kept, sort_keys=True).encode())
    return found.hexdigest()[:16]


# --- Processes


def train(size: int, arguments: list[str], stops_at: int | None = None) -> None:
    """Run `ddp-mnist train` in `size` processes; exit if one ends otherwise than it should."""
    port = free_port()
    processes: list[Any] = [
        FORKSERVER.Process(target=member, args=(rank, size, port, arguments, stops_at))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    codes = [process.exitcode for process in processes]
    if codes != [0 if stops_at is None else 143] * size:
        sys.exit(f"train {' '.join(arguments)}: exit codes {codes}")


def member(rank: int, size: int, port: int, arguments: list[str], stops_at: int | None) -> None:
    """Train as one rank; the last one gets SIGTERM in step `stops_at`."""
    from ddp_mnist import cli

    os.environ |= {"OMP_NUM_THREADS": "1"}
    if size > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if stops_at is not None and rank == size - 1:
        stop_in_step(stops_at)
    cli.main(["train", *arguments])


def stop_in_step(step: int) -> None:
    """Send this process SIGTERM in an optimizer step."""
    from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

    calls = itertools.count()

    def strike(optimizer: Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        # Muon's step ends with AdamW's, in which the hook may run again, without some gradients.
        if all(p.grad is not None for p in parameters) and next(calls) == step:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)  # until it is noted

    register_optimizer_step_pre_hook(strike)


def free_port() -> int:
    """Return a port that the system has free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


if __name__ == "__main__":
    main()
