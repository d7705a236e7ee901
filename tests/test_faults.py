"""Whole runs that something happens to. The number in a test's name is the fault's.

Faults that concern one module are tested beside it, under the same kind of name; `pytest -k
fault_05` runs all of one number.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ddp_mnist.cluster.local import LocalWorld, run_world
from ddp_mnist.config import TrainConfig
from ddp_mnist.errors import FailedElsewhere, PeerError, StorageError, UsageError
from ddp_mnist.run import checkpoint
from ddp_mnist.run.folder import MODEL, in_use, read_json
from ddp_mnist.verify.watch import just_train, resumed, train_until
from tests import hosts
from tests.chaos import (
    chaos,
    config_of,
    flags_of,
    is_alive,
    leftovers,
    newest_step,
    seconds_until_gone,
    wait_for_checkpoint,
    wait_until,
    what_stays,
)
from tests.commands import TORCHRUN, TRAIN, Ended, Started

# Long enough to be hit in the middle: 900 steps of the smallest net.
LONG = "--dataset digits --model mlp --epochs 60 --mixed-precision no --checkpoint-every 5"
LONG += " --dist-timeout 8 --quiet --run-dir"
HUSH = {"OMP_NUM_THREADS": "1"}
TWO_PROCESSES = [*TORCHRUN, "--standalone", "--nproc-per-node", "2"]


def long(run_dir: str = "run", epochs: int = 60) -> TrainConfig:
    config = config_of("patient", Path(run_dir))
    return dataclasses.replace(config, recipe=dataclasses.replace(config.recipe, epochs=epochs))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run of two processes that nothing happened to."""
    folder = tmp_path_factory.mktemp("unbroken")
    run_world(2, just_train, config_of("patient", Path("run")), folder=folder)
    return folder / "run"


def status(run: Path) -> tuple[str, int | None]:
    found = read_json(run / "status.json")
    return found["state"], found["exit_code"]


def torchrun(run: Path, *flags: str) -> Started:
    return Started([*TWO_PROCESSES, *TRAIN, *LONG.split(), str(run), *flags], run.parent, HUSH)


def workers_of(started: Started) -> list[psutil.Process]:
    """Return the workers by rank, as their launcher started them."""
    return psutil.Process(started.process.pid).children()


# --- A process is lost


def test_fault_01_fault_02_fault_34_a_worker_is_killed_and_then_the_launcher(
    unbroken: Path, tmp_path: Path
) -> None:
    """`make train RESTARTS=3` begins again by itself, and ends with the unbroken run's weights.

    A worker that took too much memory is killed by the kernel with the same signal.
    """
    run = tmp_path / "run"
    restart = ["-m", "ddp_mnist", "restart", "3", "--", *TWO_PROCESSES, *TRAIN]
    started = Started([*restart, *flags_of("patient", run)], tmp_path, HUSH)
    wait_for_checkpoint(run)
    [launcher] = workers_of(started)
    workers = launcher.children()
    workers[1].kill()
    assert seconds_until_gone(workers) < 5
    assert status(run) == ("failed", 6)
    first = newest_step(run)

    while newest_step(run) <= first:  # it goes on by itself
        assert started.process.poll() is None
        time.sleep(0.01)
    [launcher] = workers_of(started)
    workers = launcher.children()
    launcher.kill()
    assert seconds_until_gone(workers) < 5  # no orphan, and no second writer
    assert not in_use(run)
    ended = started.ended()
    assert status(run) == ("preempted", 143)  # the workers had the time to save
    assert ended.code == 143

    lost, saved = ended.error_lines
    assert lost.startswith("ddp-mnist: error: lost contact with rank 1 of 2 (")
    assert lost.endswith("(code 6)")
    assert "Signal 9 (SIGKILL)" in ended.err  # the launcher's own sentence
    assert saved.startswith("ddp-mnist: error: SIGTERM: stopped after step ")
    [line] = [line for line in ended.out.splitlines() if line.startswith("restart ")]
    assert line.startswith("restart 1 of 3: lost contact with rank 1 of 2 (")

    second = newest_step(run)
    run_world(2, just_train, resumed(config_of("patient", run)), folder=tmp_path)
    assert read_json(run / "summary.json")["resumed_from"] == [first, second]
    assert what_stays(run) == what_stays(unbroken)
    assert leftovers(run) == []


def test_fault_20_a_frozen_peer_that_is_woken_in_time(tmp_path: Path) -> None:
    world, frozen = freeze_rank_1(long(epochs=10), tmp_path)
    time.sleep(3)
    assert status(tmp_path / "run")[0] == "running"
    frozen.resume()
    assert [summary["steps"] for summary in world.results()] == [150, 150]


def test_fault_20_a_peer_that_stays_frozen(tmp_path: Path) -> None:
    config = long()
    patient = dataclasses.replace(config.distribution, dist_timeout=4.0)
    world, frozen = freeze_rank_1(dataclasses.replace(config, distribution=patient), tmp_path)
    try:
        wait_until(lambda: status(tmp_path / "run")[0] != "running", 4 + 10)
    finally:
        frozen.resume()
    assert status(tmp_path / "run") == ("failed", 6)
    rank_0, _ = world.outcomes()
    assert isinstance(rank_0, PeerError)
    assert str(rank_0).startswith("lost contact with rank 1 of 2 (")


def freeze_rank_1(config: TrainConfig, folder: Path) -> tuple[LocalWorld, psutil.Process]:
    world = LocalWorld(2, just_train, config, folder=folder)
    wait_for_checkpoint(folder / "run")
    frozen = psutil.Process(world.processes[1].pid)
    frozen.suspend()
    return world, frozen


@pytest.mark.parametrize("how", ["raises", "exits"])
def test_fault_21_one_rank_fails_alone(how: str, tmp_path: Path) -> None:
    world = LocalWorld(3, _fail_on_rank_2, long(), how, folder=tmp_path)
    wait_for_checkpoint(tmp_path / "run")
    began = time.monotonic()
    outcomes = world.outcomes()
    assert time.monotonic() - began < 10  # from the first checkpoint; the fault comes later
    codes = [getattr(outcome, "code", None) for outcome in outcomes]
    state, code = status(tmp_path / "run")
    if how == "raises":
        assert isinstance(outcomes[2], ZeroDivisionError)
        assert [type(outcome) for outcome in outcomes[:2]] == [FailedElsewhere] * 2
        assert (state, code) == ("failed", 1)
        error = read_json(tmp_path / "run" / "status.json")["error"]
        assert error == "the first one"
    else:
        assert codes[:2] == [6, 6]
        assert (state, code) == ("failed", 6)
        reported = [outcome for outcome in outcomes[:2] if outcome.agreed]
        assert [str(error)[:31] for error in reported] == ["lost contact with rank 2 of 3 ("]


def _fail_on_rank_2(config: TrainConfig, how: str) -> Any:
    from unittest.mock import patch

    from ddp_mnist import train

    rate_of = train.learning_rate

    def rate(step: int, *args: Any) -> float:
        if step == 40 and os.environ["RANK"] == "2":
            if how == "exits":
                os._exit(0)
            raise ZeroDivisionError("the first one")
        return rate_of(step, *args)

    with patch.object(train, "learning_rate", rate):
        return just_train(config)


# --- The disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount 900 KB: room for two checkpoints of the cnn, not for a third beside them."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=900k", "tmpfs", str(folder)]
    if (
        not sys.platform.startswith("linux")
        or subprocess.run(mount, capture_output=True).returncode
    ):
        pytest.skip("mounting a small disk needs Linux and root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_fault_05_a_full_disk(small_disk: Path, tmp_path: Path) -> None:
    config = config_of("plain", small_disk / "run")
    outcomes = LocalWorld(2, just_train, config, folder=tmp_path).outcomes()
    assert [error.code for error in outcomes] == [5, 5]
    assert isinstance(outcomes[0], StorageError)
    run = small_disk / "run"
    assert str(outcomes[0]).startswith(f"{run}/checkpoints/")
    assert "cannot be written (No space left on device); free space" in str(outcomes[0])
    assert status(run) == ("failed", 5)
    assert leftovers(run) == []
    raw, step, warnings = checkpoint.read_newest(run)
    assert (step, warnings) == (8, [])
    checkpoint.from_bytes(raw, run)


def test_fault_06_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    began = time.monotonic()
    config = long(str(tmp_path / "file" / "run"))
    outcomes = LocalWorld(2, just_train, config, folder=tmp_path).outcomes()
    assert time.monotonic() - began < 10
    assert [error.code for error in outcomes] == [5, 5]


def write_calls(trace: str, folder: Path) -> list[tuple[str, str]]:
    """Return (call, file name) of each successful call that changes files in `folder`."""
    calls = []
    for line in trace.splitlines():
        if str(folder) in line and (match := re.search(r"\b([a-z0-9_]+)\((.*)\) = (\d+)", line)):
            name, arguments = match[1], match[2]
            if name.startswith("open") and "O_CREAT" not in arguments:
                continue
            calls.append((name, Path(re.findall(r"[<\"](/[^>\"]*)[>\"]", arguments)[-1]).name))
    return calls


SAVE = """
import sys
from pathlib import Path
import torch
from ddp_mnist.run import checkpoint
run = Path(sys.argv[1])
content = {"weights": torch.arange(40_000, dtype=torch.float64)}
checkpoint.save(run, 4, content, keep=2)
"""
TRACED = "openat,open,write,fsync,fdatasync,rename,renameat,renameat2,unlink,unlinkat,mkdir"


def strace(folder: Path, *options: str, save: str = SAVE) -> tuple[Ended, str]:
    """Run a process that saves one checkpoint, under strace."""
    if not shutil.which("strace"):
        pytest.skip("needs strace")
    trace = folder / "trace"
    command = ["strace", "-f", "-y", "-o", str(trace), "-e", f"trace={TRACED}", *options]
    done = subprocess.run(
        [*command, sys.executable, "-c", save, str(folder / "run")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    return Ended(done.returncode, done.stdout, done.stderr), trace.read_text()


def calls_by_number(trace: str, folder: Path) -> dict[str, list[int]]:
    """Return by name which of their thread's calls `write_calls` are: so strace counts."""
    found: dict[str, list[int]] = {}
    counted: Counter[tuple[str, str]] = Counter()
    for line in trace.splitlines():
        if match := re.match(r"(\d+) +([a-z0-9_]+)\(", line):
            thread, name = match.groups()
            counted[thread, name] += 1
            if write_calls(line, folder):
                found.setdefault(name, []).append(counted[thread, name])
    return found


def saved_before(run: Path) -> None:
    import torch

    for step in (1, 2, 3):
        content = {"weights": torch.full((40_000,), step, dtype=torch.float64)}
        checkpoint.save(run, step, content, keep=2)


def test_fault_04_the_order_on_disk(tmp_path: Path) -> None:
    """File written, on the disk, renamed; the folder on the disk; then an old one removed."""
    run = tmp_path / "run"
    run.mkdir()
    saved_before(run)
    ended, trace = strace(tmp_path)
    assert ended.code == 0, ended.err
    calls = write_calls(trace, run / "checkpoints")
    names = [name for name, _ in calls]
    first = next(number for number, name in enumerate(names) if name == "write")
    order = [name for name in names[first:] if name != "write"]
    assert order == ["fsync", "rename", "fsync", "unlink"]
    files = [file for name, file in calls[first:] if name in ("fsync", "rename", "unlink")]
    assert files[0].endswith(".tmp")
    assert files[1:] == ["step-00000004.pt", "checkpoints", "step-00000002.pt"]


@pytest.mark.soak
def test_fault_03_killed_or_refused_at_every_call_of_a_save(
    tmp_path: Path, record_property: Any
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    saved_before(run)
    before = {path.name: path.read_bytes() for path in (run / "checkpoints").iterdir()}
    _, trace = strace(tmp_path)
    tried = held = 0
    for name, numbers in calls_by_number(trace, run / "checkpoints").items():
        for number in numbers:
            for fault in ("signal=SIGKILL", "error=ENOSPC", "error=EIO"):
                shutil.rmtree(run)
                (run / "checkpoints").mkdir(parents=True)
                for old, content in before.items():
                    (run / "checkpoints" / old).write_bytes(content)
                ended, _ = strace(tmp_path, "-e", f"inject={name}:{fault}:when={number}")
                tried += 1
                raw, step, warnings = checkpoint.read_newest(run)
                checkpoint.from_bytes(raw, run)
                assert warnings == []
                assert step in (3, 4), (name, number, fault)
                if "SIGKILL" in fault:
                    assert ended.code == -signal.SIGKILL
                else:
                    last = ended.err.strip().splitlines()[-1]
                    assert last.startswith("ddp_mnist.errors.StorageError: "), (name, ended.err)
                    assert str(run) in last
                    assert leftovers(run) == [], (name, number, fault)
                held += 1
    record_property("tried", tried)
    record_property("held", held)
    assert tried >= 15


# --- Signals


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 143)]
)
def test_fault_12_fault_13_a_signal_to_one_of_three_stops_all_at_one_step(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    world = LocalWorld(3, train_until, long(), 40, number, 1, folder=tmp_path)
    outcomes = world.outcomes()
    assert [error.code for error in outcomes] == [code] * 3
    [reported] = [str(error) for error in outcomes if error.agreed]
    run = tmp_path / "run"
    assert reported.startswith(f"{number.name}: stopped after step {newest_step(run)} and saved; ")
    assert reported.endswith("add --resume run to the command")
    assert status(run) == ("preempted", code)
    assert not (run / "model.safetensors").exists()
    assert leftovers(run) == []


def test_fault_11_sigterm_to_the_launcher(tmp_path: Path) -> None:
    run = tmp_path / "run"
    started = torchrun(run)
    wait_for_checkpoint(run)
    workers = workers_of(started)
    started.process.terminate()
    assert seconds_until_gone(workers) < 10
    ended = started.ended()
    [line] = ended.error_lines
    assert line.startswith("ddp-mnist: error: SIGTERM: stopped after step ")
    assert line.endswith(f"and saved; to go on, add --resume {run} to the command (code 143)")
    assert status(run) == ("preempted", 143)


@pytest.mark.parametrize("phase", ["validation", "test", "save"])
def test_fault_11_in_evaluation_and_during_a_save(
    phase: str, unbroken: Path, tmp_path: Path
) -> None:
    config = config_of("patient", Path("run"))
    outcomes = LocalWorld(2, _stopped_in, config, phase, folder=tmp_path).outcomes()
    assert [error.code for error in outcomes] == [143, 143]
    run = tmp_path / "run"
    assert status(run) == ("preempted", 143)
    step = {"validation": 15, "test": 90}.get(phase, newest_step(run))
    assert newest_step(run) == step
    [summary, _] = run_world(2, just_train, resumed(config), folder=tmp_path)
    assert summary["resumed_from"] == [step]
    assert (run / MODEL).read_bytes() == (unbroken / MODEL).read_bytes()


def _stopped_in(config: TrainConfig, phase: str) -> Any:
    """SIGTERM comes to rank 1 as rank 0 enters the phase, or to rank 0 as it writes."""
    from unittest.mock import patch

    from ddp_mnist import train

    evaluate, save = train.evaluate_split, checkpoint.save

    def evaluate_and_stop(accelerator: Any, model: Any, loader: Any, *args: Any) -> Any:
        which = "test" if len(loader.dataset) == 360 else "validation"
        if which == phase and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)
        return evaluate(accelerator, model, loader, *args)

    def save_and_stop(*args: Any, **options: Any) -> None:
        if phase == "save":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)
        save(*args, **options)

    with (
        patch.object(train, "evaluate_split", evaluate_and_stop),
        patch.object(checkpoint, "save", save_and_stop),
    ):
        return just_train(config)


def test_fault_13_control_c_once_and_twice(tmp_path: Path) -> None:
    runs = [tmp_path / "run1", tmp_path / "run2"]
    once, twice = (Started([*TRAIN, *LONG.split(), str(run)], tmp_path, HUSH) for run in runs)
    for started, run in ((once, runs[0]), (twice, runs[1])):
        wait_for_checkpoint(run)
        started.process.send_signal(signal.SIGINT)
    wait_until(lambda: not is_pending(signal.SIGINT, twice))  # else the second would be lost
    twice.process.send_signal(signal.SIGINT)
    began = time.monotonic()
    first, second = once.ended(), twice.ended()
    assert time.monotonic() - began < 5
    assert (first.code, second.code) == (130, 130)
    [line] = first.err.splitlines()
    assert line.startswith("ddp-mnist: error: SIGINT: stopped after step ")
    assert status(runs[0]) == ("preempted", 130)
    [line] = second.err.splitlines()
    assert re.fullmatch(
        rf"ddp-mnist: interrupted twice: stopped at once, nothing after step \d+ is saved;"
        rf" .* --resume {runs[1]} to the command \(code 130\)",
        line,
    )


def is_pending(number: signal.Signals, started: Started) -> bool:
    """Return whether a signal has not been delivered yet; two of one number would become one."""
    file = Path(f"/proc/{started.process.pid}/status")
    if not file.exists():  # not Linux
        time.sleep(0.01)
        return False
    [mask] = re.findall(r"^ShdPnd:\s*(\w+)$", file.read_text(), re.MULTILINE)
    return bool(int(mask, 16) & 1 << (number - 1))


# --- Two runs in one folder


def test_fault_14_a_second_run_at_the_same_time_and_after(tmp_path: Path) -> None:
    config, run = long(epochs=20), tmp_path / "run"

    def refused(second: TrainConfig) -> str:
        [error] = LocalWorld(1, just_train, second, folder=tmp_path).outcomes()
        assert isinstance(error, UsageError)
        return str(error)

    world = LocalWorld(1, just_train, config, folder=tmp_path)
    wait_for_checkpoint(run)
    assert refused(resumed(config)).startswith("run: another run is writing there; ")
    refused(config)
    [summary] = world.results()
    assert (summary["steps"], summary["resumed_from"]) == (300, [])
    before = (run / "status.json").read_bytes()
    assert refused(config).startswith("--run-dir run: holds a run already (to go on: --resume ")
    assert (run / "status.json").read_bytes() == before


# --- Payloads


def test_fault_09_no_code_of_a_checkpoint_is_run(tmp_path: Path) -> None:
    import hashlib
    import pickle

    config = config_of("patient", Path("run"))
    LocalWorld(1, train_until, config, 20, folder=tmp_path).outcomes()
    newest = checkpoint.newest_first(tmp_path / "run")[0]
    proof = tmp_path / "the payload was run"

    class Payload:
        def __reduce__(self) -> Any:
            return (os.system, (f"touch '{proof}'",))

    content = pickle.dumps({"format": 1, "state": Payload()})
    newest.write_bytes(content + hashlib.sha256(content).digest())
    [error] = LocalWorld(1, just_train, resumed(config), folder=tmp_path).outcomes()
    assert error.code == 4
    assert "nothing of it was run" in str(error)
    assert not proof.exists()


# --- Overflow


def test_fault_24_a_streak_of_overflows_ends_the_run(tmp_path: Path) -> None:
    """A loss scaler that never finds a scale: its steps are left out, and that has an end."""
    [error] = LocalWorld(1, _always_overflows, long(), folder=tmp_path).outcomes()
    assert error.code == 7
    assert str(error).startswith("--lr 0.01: by step ")
    run = tmp_path / "run"
    assert status(run) == ("failed", 7)
    assert newest_step(run) == 20  # the last good one stays


def _always_overflows(config: TrainConfig) -> Any:
    from unittest.mock import patch

    import torch

    from ddp_mnist.run import meter

    sums = meter.sum_up
    steps = 0

    def overflow(losses: list[torch.Tensor], *others: Any) -> torch.Tensor:
        nonlocal steps
        first, steps = steps, steps + len(losses)
        spoilt = [loss * float("inf" if n >= 20 else 1) for n, loss in enumerate(losses, first)]
        return sums(spoilt, *others)

    with patch.object(meter, "sum_up", overflow):
        return just_train(config)


# --- The network


def on_a_host(
    network: hosts.Hosts, index: int, folder: Path, address: str, rank: int, *flags: str
) -> Started:
    """Start one process of two, over TCP, on a host with a disk of its own."""
    here = folder / f"host{index}"
    here.mkdir()
    command = [sys.executable, *TRAIN, *LONG.split(), "run", "--init-method", address]
    command += ["--rank", str(rank), "--world-size", "2", *flags]
    return Started(network.command(index, *command), here, HUSH, program=None)


def two_hosts(network: hosts.Hosts, folder: Path, *flags: str, late_s: float = 0) -> list[Started]:
    """Start one process on each of two hosts; the first serves the main port, perhaps late."""
    address = f"tcp://{network.address(0)}:29444"
    second = on_a_host(network, 1, folder, address, 1, *flags)
    time.sleep(late_s)
    return [on_a_host(network, 0, folder, address, 0, *flags), second]


def first_error(started: Started) -> str:
    """Return stderr of one that failed, which is one line."""
    ended = started.ended()
    [line] = ended.err.splitlines()
    return line


@pytest.mark.soak
def test_fault_18_a_link_that_is_cut_for_3_s(tmp_path: Path) -> None:
    hosts.require_hosts()
    with hosts.Hosts(2) as network:
        started = two_hosts(network, tmp_path, "--epochs", "20")
        wait_for_checkpoint(tmp_path / "host0" / "run")
        network.cut(1)
        time.sleep(3)
        network.mend(1)
        assert [each.ended().code for each in started] == [0, 0]


@pytest.mark.soak
def test_fault_18_a_link_that_is_cut_for_good(tmp_path: Path) -> None:
    hosts.require_hosts()
    with hosts.Hosts(2) as network:
        started = two_hosts(network, tmp_path)
        run = tmp_path / "host0" / "run"
        wait_for_checkpoint(run)
        network.cut(1)
        began, kept = time.monotonic(), newest_step(run)
        lines = [first_error(each) for each in started]
        assert time.monotonic() - began < 8 + 10
        assert [each.process.returncode for each in started] == [6, 6]
    for rank, line in enumerate(lines):
        assert line.startswith(f"ddp-mnist: error: lost contact with rank {1 - rank} of 2 (")
    assert status(run) == ("failed", 6)
    assert newest_step(run) >= kept


@pytest.mark.soak
def test_fault_19_a_slow_or_lossy_link_changes_no_weight(tmp_path: Path) -> None:
    hosts.require_hosts()
    written = []
    for delay_ms, loss_percent in ((0, 0), (10, 0), (1, 1)):
        folder = tmp_path / str(delay_ms)
        folder.mkdir()
        with hosts.Hosts(2, delay_ms, loss_percent) as network:
            started = two_hosts(network, folder, "--epochs", "2", "--dist-timeout", "60")
            assert [each.ended().code for each in started] == [0, 0]
        written.append((folder / "host0" / "run" / "model.safetensors").read_bytes())
    assert written == [written[0]] * 3


@pytest.mark.soak
def test_fault_15_a_main_port_that_is_taken_on_a_host(tmp_path: Path) -> None:
    hosts.require_hosts()
    listen = "import socket, time; s = socket.create_server(('', 29444)); time.sleep(60)"
    with hosts.Hosts(1) as network:
        other = Started(network.command(0, sys.executable, "-c", listen), tmp_path, program=None)
        time.sleep(1)
        began = time.monotonic()
        code, line = alone_on_a_host(network, tmp_path, f"tcp://{network.address(0)}:29444", rank=0)
        took = time.monotonic() - began
        for process in psutil.Process(other.process.pid).children(recursive=True):
            process.kill()
        other.process.kill()
        other.ended()
    assert (code, line[:31]) == (2, "ddp-mnist: error: port 29444: c")
    assert took < 5


@pytest.mark.soak
@pytest.mark.parametrize(
    ("address", "rank", "line"),
    [
        ("10.77.0.99:29444", 1, "10.77.0.99:29444: rank 1 of 2 reached nobody there"),
        ("no-such-host:29444", 1, "no-such-host:29444: rank 1 of 2 reached nobody there"),
        ("10.77.0.1:29444", 0, "1 of 2 processes came within 4 s; missing: rank 1"),
    ],
)
def test_fault_16_fault_17_nobody_at_the_main_address_and_nobody_else(
    address: str, rank: int, line: str, tmp_path: Path
) -> None:
    hosts.require_hosts()
    began = time.monotonic()
    with hosts.Hosts(1) as network:
        code, found = alone_on_a_host(network, tmp_path, f"tcp://{address}", rank)
    assert time.monotonic() - began < 4 + 10
    assert code == 6
    assert line in found


def alone_on_a_host(network: hosts.Hosts, folder: Path, address: str, rank: int) -> tuple[int, str]:
    """Return the code of one process of two that cannot meet the other, and its one line."""
    started = on_a_host(network, 0, folder, address, rank, "--dist-timeout", "4")
    line = first_error(started)
    assert not (folder / "host0" / "run").exists()
    return started.process.returncode, line


@pytest.mark.soak
def test_fault_17_a_node_that_comes_late(tmp_path: Path) -> None:
    hosts.require_hosts()
    with hosts.Hosts(2) as network:
        started = two_hosts(network, tmp_path, "--epochs", "1", late_s=5)
        assert [each.ended().code for each in started] == [0, 0]


# --- Chaos


KILLS = ["SIGKILL worker", "SIGKILL worker", "SIGKILL all"]
STOPS = ["SIGTERM worker", "SIGTERM worker", "SIGTERM all", "SIGINT worker", "SIGUSR1 worker"]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("launcher", "faults", "share"),
    [
        *[("none", KILLS, 0.225)] * 4,
        ("torchrun", ["SIGKILL worker", "SIGKILL launcher", "SIGKILL both"], 0.05),
        ("accelerate", ["SIGKILL worker", "SIGKILL launcher", "SIGKILL both"], 0.05),
        *[("none", STOPS, 0.225)] * 2,
        ("torchrun", ["SIGTERM worker", "SIGTERM launcher"], 0.05),
    ],
)
def test_fault_01_fault_02_fault_11_fault_12_chaos(
    launcher: str,
    faults: list[str],
    share: float,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    record_property: Any,
) -> None:
    """CHAOS=200 hits at random moments; each run is taken up again, and ends as if unharmed."""
    count = max(1, round(int(os.environ.get("CHAOS") or "20") * share))
    seed = f"{os.environ.get('CHAOS_SEED', '0')} {request.node.name}"
    tally = chaos(tmp_path, count, seed, launcher, faults)
    record_property("tried", tally.tried.total())
    record_property("held", tally.held.total())
    record_property("details", f"{launcher}: {tally}")
    assert tally.held.total() == count


@pytest.fixture(autouse=True)
def no_orphans() -> Iterator[None]:
    """Check that no process of a test outlives it, however hard it was hit."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    deadline = time.monotonic() + 10
    while left := [child for child in psutil.Process().children(recursive=True) if is_ours(child)]:
        left = [child for child in left if child.pid not in before]
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    assert not left, [name_of(child) for child in left]


def is_ours(process: psutil.Process) -> bool:
    """Leave out multiprocessing's own, which stay for the next test."""
    keepers = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")
    return is_alive(process) and not any(keeper in name_of(process) for keeper in keepers)


def name_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
