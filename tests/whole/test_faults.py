"""Whole runs that something happens to. The number in a test's name is the fault's.

Faults that concern one module are tested beside it, those of launchers and networks in machines/,
under the same kind of name; `pytest -m "not soak and not gpu" -k fault_05` runs all of one number.
"""

import contextlib
import errno
import io
import itertools
import os
import pty
import re
import shutil
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ddp_mnist.cluster.local_world import LocalWorld, run_world
from ddp_mnist.cluster.signals import EXIT_CODES
from ddp_mnist.config.train_config import TrainConfig
from ddp_mnist.errors import FailedElsewhere, PeerError, StorageError
from ddp_mnist.system.files import read_json
from ddp_mnist.training import checkpoint
from ddp_mnist.training.folder import MODEL
from ddp_mnist.verbs.verify import watch
from tests.chaos import (
    SECONDS,
    chaos,
    config_of,
    flags_of,
    leftovers,
    newest_step,
    wait_until,
    workers_of,
)
from tests.run_checks import net_that, status, told_once, with_flags

# Long enough to be hit in the middle: 900 steps of the smallest net.
LONG = ["--epochs", "60"]
RUN = Path("run")
FILE_CALLS = ("open", "write", "flush", "fsync", "replace", "unlink")


def wait_for_step(run: Path, step: int) -> None:
    """Wait for a checkpoint of this step or a later one."""
    wait_until(lambda: newest_step(run) >= step)


# --- A process is lost, or slow


def _hang_disk(held: list[str]) -> None:
    """Let the disk hang at the first checkpoint, the model, and the end's status."""
    flush = os.fsync

    def wait_and_flush(file: int) -> None:
        where = str(Path(f"/proc/self/fd/{file}").readlink())
        says = Path(where).read_text(errors="replace") if "status" in where else ""
        for part in ("step-", "model.safetensors", '"phase": "test"'):
            if (part in where or part in says) and part not in held:
                held.append(part)
                time.sleep(6)
        flush(file)

    patch.object(os, "fsync", wait_and_flush).start()


def _stop_terminal(held: list[str]) -> None:
    """After the first checkpoint do what Ctrl-S does, and later Ctrl-Q."""
    ours, theirs = pty.openpty()
    os.dup2(theirs, 1)
    threading.Thread(target=_read, args=(ours,), daemon=True).start()

    def stop(*_: Any) -> None:
        if newest_step(RUN) and not held:
            held.append("output")
            termios.tcflow(1, termios.TCOOFF)
            threading.Timer(6, termios.tcflow, (1, termios.TCOON)).start()

    watch.before_each_step(stop)


def _read(terminal: int) -> None:
    while os.read(terminal, 4096):
        pass


def _train_held_up(config: TrainConfig, by: Callable[[list[str]], None]) -> tuple[int, str]:
    """Train. Return how often rank 0 was held up, for 6 s each, and what this rank says."""
    held = list[str]()
    if os.environ["RANK"] == "0":
        by(held)
    with contextlib.redirect_stderr(io.StringIO()) as told:
        watch.just_train(config)
    return len(held), told.getvalue()


@pytest.mark.system
def test_fault_59_a_rank_that_is_held_up_for_three_time_outs_is_waited_for(tmp_path: Path) -> None:
    models = set()
    for by, times in ((len, 0), (_hang_disk, 3), (_stop_terminal, 1)):
        (folder := tmp_path / by.__name__).mkdir()
        config = with_flags(config_of("patient", RUN, "--dist-timeout", "2"), quiet=False)
        (held, _), (_, told) = run_world(2, _train_held_up, config, by, folder=folder)
        lines = r"(waiting    for rank 0, which is alive, at \w+\.py:\d+\n)" + f"{{{times}}}"
        assert (held, re.sub(lines, "", told)) == (times, "")
        assert status(folder / RUN) == ("finished", 0)
        models.add((folder / RUN / MODEL).read_bytes())
    assert len(models) == 1


def test_fault_20_a_frozen_peer_that_is_woken_in_time_and_one_that_is_not(tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = config_of("patient", RUN, *LONG, "--dist-timeout", "3")
    world = LocalWorld(2, watch.just_train, config, folder=tmp_path)
    wait_for_step(run, 1)
    _, frozen = workers_of(world)
    frozen.suspend()
    time.sleep(1.2)
    assert status(run)[0] == "running"
    before = newest_step(run)
    frozen.resume()
    wait_for_step(run, before + 8)
    frozen.suspend()
    try:
        wait_until(lambda: status(run)[0] != "running", 3 + 10)
    finally:
        frozen.resume()
    assert status(run) == ("failed", 6)
    rank_0, _ = world.outcomes()
    assert isinstance(rank_0, PeerError)
    assert str(rank_0).startswith("lost contact with rank 1 of 2 (")


def test_fault_46_a_pause_of_all_longer_than_the_time_out_loses_nobody(tmp_path: Path) -> None:
    config = config_of("patient", RUN, "--epochs", "10", "--dist-timeout", "2")
    world = LocalWorld(2, watch.just_train, config, folder=tmp_path)
    wait_for_step(tmp_path / "run", 1)
    for process in workers_of(world):
        process.suspend()
    time.sleep(4)
    for process in workers_of(world):
        process.resume()
    world.outcomes()
    assert status(tmp_path / "run") == ("finished", 0)


@pytest.mark.parametrize(
    ("size", "who", "how"),
    [(3, 2, "raises"), (3, 2, "exits"), (3, 1, "is killed"), (2, 0, "is killed")],
)
def test_fault_01_fault_21_one_rank_fails_alone(
    size: int, who: int, how: str, tmp_path: Path
) -> None:
    outcomes = LocalWorld(size, _fail_alone, who, how, folder=tmp_path).outcomes()
    failed = outcomes.pop(who)
    errors = [error for error, _ in outcomes]
    assert max(seconds for _, seconds in outcomes) < SECONDS
    found = read_json(tmp_path / "run" / "status.json")
    if how == "raises":
        assert isinstance(failed[0], ZeroDivisionError)
        assert [type(error) for error in errors] == [FailedElsewhere] * 2
        assert (found["state"], found["exit_code"], found["error"]) == ("failed", 1, "the first")
        return
    told = told_once(errors, 6)
    assert isinstance(told, PeerError)
    assert {str(error) for error in errors} == {str(told)}
    assert str(told).startswith(f"lost contact with rank {who} of {size} (")
    assert str(told).endswith("; see what that process says, then resume the run or start it again")
    # with rank 0 nobody is left who writes it
    expected = ("failed", 6, str(told)) if who else ("running", None, None)
    assert (found["state"], found["exit_code"], found["error"]) == expected


def _fail_alone(who: int, how: str) -> tuple[Exception, float]:
    """Let rank `who` fail at step 5. Return what ends this rank, and how many seconds later."""
    steps, reached = iter(range(watch.STEPS)), [0.0]

    def fail(*_: Any) -> None:
        if next(steps) != 5:
            return
        reached[0] = time.monotonic()
        if os.environ["RANK"] == str(who):
            if how == "raises":
                raise ZeroDivisionError("the first")
            if how == "exits":
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)

    with watch.before_each_step(fail), pytest.raises(Exception) as ended:
        watch.just_train(watch.proof_config(model="mlp"))
    return ended.value, time.monotonic() - reached[0]


# --- The disk


# 900 KB have room for two checkpoints of the cnn, not for a third beside them.
@pytest.mark.parametrize("small_disk", ["900k"], indirect=True)
def test_fault_05_a_full_disk(small_disk: Path, tmp_path: Path) -> None:
    config = config_of("plain", small_disk / "run")
    outcomes = LocalWorld(2, watch.just_train, config, folder=tmp_path).outcomes()
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


def _save_hit_at(call: int, number: int | None) -> None:
    """Save the checkpoint of step 4, and be killed at that call, or let it fail with an errno."""
    calls = iter(range(1000))

    def hit(frame: Any, event: str, function: Any) -> None:
        where = str(frame.f_globals["__name__"])
        if event != "c_call" or not where.startswith(("ddp_mnist.system.files", "pathlib")):
            return
        if function.__name__ in FILE_CALLS and next(calls) == call:
            if number is None:
                os.kill(os.getpid(), signal.SIGKILL)
            else:
                raise OSError(number, os.strerror(number))

    sys.setprofile(hit)
    checkpoint.save(Path(), 4, {"weights": torch.full((40_000,), 4.0)}, keep=2)


@pytest.mark.parametrize("number", [None, errno.EIO])
def test_fault_03_fault_05_killed_or_refused_at_every_call_of_a_save(
    number: int | None, tmp_path: Path, record_property: Any
) -> None:
    """The calls are those by which Python changes files; test_checkpoint.py has their order."""
    run, before = tmp_path / "run", tmp_path / "before"
    before.mkdir()
    for step in (1, 2, 3):
        checkpoint.save(before, step, {"weights": torch.full((40_000,), float(step))}, keep=2)
    found = set()
    for call in itertools.count():
        shutil.copytree(before, run)
        [outcome] = LocalWorld(1, _save_hit_at, call, number, folder=run).outcomes()
        raw, step, warnings = checkpoint.read_newest(run)
        weights = checkpoint.from_bytes(raw, run)["weights"]
        assert (weights == step).all()
        assert warnings == []
        found.add(step)
        if outcome is None:  # it makes no more calls
            break
        if number is None:
            assert isinstance(outcome, ConnectionError)
        else:
            assert (type(outcome), outcome.code, leftovers(run)) == (StorageError, 5, [])
            assert ": cannot be written (Input/output error); free space" in str(outcome)
            assert str(outcome).endswith(" another --run-dir")
            checkpoint.save(run, 5, {}, keep=2)  # once the disk is mended
            assert checkpoint.step_of(checkpoint.newest_first(run)[0]) == 5
        shutil.rmtree(run)
    record_property("tried", call)
    assert call >= 8
    assert found == {3, 4}


# --- Signals


def _command(arguments: list[str]) -> None:
    """Run a command of this package in this process; it prints to out.txt and err.txt."""
    from ddp_mnist import cli

    for number, name in ((1, "out.txt"), (2, "err.txt")):
        os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
    cli.main(arguments)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGUSR1, 143)])
def test_fault_12_fault_13_a_signal_to_one_of_three_stops_all_at_one_step(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    """SIGTERM does in test_resume.py, SIGHUP below."""
    config = config_of("patient", RUN, *LONG)
    outcomes = LocalWorld(3, watch.train_until, config, 40, number, 1, folder=tmp_path).outcomes()
    reported = str(told_once(outcomes, code))
    run = tmp_path / "run"
    assert reported.startswith(f"{number.name}: stopped after step {newest_step(run)} and saved; ")
    assert reported.endswith("add --resume run to the command")
    assert status(run) == ("preempted", code)
    assert not (run / MODEL).exists()
    assert leftovers(run) == []


def test_fault_37_a_closed_terminal_saves_and_nohup_trains_on(tmp_path: Path) -> None:
    """The terminal is a real one, so what the run says at its end can be written nowhere."""
    flags = ["train", *flags_of("patient", RUN, "--cpu", "--epochs")]
    closed, ignored = tmp_path / "closed", tmp_path / "nohup"
    closed.mkdir()
    ignored.mkdir()
    assert run_world(1, _until_terminal_closes, [*flags, "600"], folder=closed) == [129]
    assert status(closed / "run") == ("preempted", 129)
    assert newest_step(closed / "run") == read_json(closed / "run" / "status.json")["step"]
    nohup = LocalWorld(1, _ignores_hangup, [*flags, "12"], folder=ignored)
    wait_for_step(ignored / "run", 1)
    [process] = workers_of(nohup)
    process.send_signal(signal.SIGHUP)
    assert status(ignored / "run") == ("running", None)
    [ended] = nohup.outcomes()
    assert (ended.code, status(ignored / "run")) == (0, ("finished", 0))


def _ignores_hangup(arguments: list[str]) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    _command(arguments)


def _until_terminal_closes(arguments: list[str]) -> int:
    """Return the exit code of a command whose terminal is closed after its first checkpoint."""
    from ddp_mnist import cli

    pid, terminal = pty.fork()
    if pid == 0:
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        for number in EXIT_CODES:
            signal.signal(number, signal.SIG_DFL)
        try:
            cli.main(arguments)
        except SystemExit as ended:
            os._exit(int(ended.code or 0))
    wait_for_step(RUN, 1)
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_fault_13_control_c_twice(tmp_path: Path) -> None:
    """Test the second; what the first one does, the signals to one of three show."""
    flags = flags_of("patient", RUN, *LONG, "--cpu", "--log-every", "900")
    world = LocalWorld(1, _typed, ["train", *flags], folder=tmp_path)
    wait_for_step(tmp_path / "run", 1)
    [process] = world.processes
    assert process.pid
    began = time.monotonic()
    while process.is_alive():  # two that come at once would be one
        with contextlib.suppress(ProcessLookupError):  # it may end between the look and the signal
            os.kill(process.pid, signal.SIGINT)
        process.join(0.02)
    assert time.monotonic() - began < 5
    assert process.exitcode == 130
    [line] = (tmp_path / "err.txt").read_text().splitlines()
    assert re.fullmatch(
        r"ddp-mnist: interrupted twice: stopped at once, nothing after step \d+ is saved;"
        r" to go on, add --resume run \(code 130\)",
        line,
    )


def _typed(arguments: list[str]) -> None:
    """Run a command whose every step takes a while."""
    from ddp_mnist.core.meter import Meter

    update = Meter.update

    def slowly(*arguments: Any) -> None:
        time.sleep(0.4)
        update(*arguments)

    # both signals come before the next sync point, four steps later, on a busy machine too
    with patch.object(Meter, "update", slowly):
        _command(arguments)


def test_fault_11_a_signal_in_the_test_ends_the_run_before_its_result(tmp_path: Path) -> None:
    """At every other place, and two of them, and bit for bit: machines/test_dying.py."""
    in_the_test = """if os.path.exists(status := "run/status.json"):
            with open(status) as file:
                os.kill(os.getpid(), 15 if '"phase": "test"' in file.read() else 0)"""
    (tmp_path / "struck.py").write_text(net_that(in_the_test))
    config = watch.proof_config(model="struck:Net", epochs=1)
    told_once(LocalWorld(1, watch.just_train, config, folder=tmp_path).outcomes(), 143)
    run = tmp_path / "run"
    assert (status(run), newest_step(run)) == (("preempted", 143), 15)
    assert not (run / MODEL).exists()


# --- Divergence


def test_fault_24_divergence_ends_all_ranks_and_the_last_good_checkpoint_stays(
    tmp_path: Path,
) -> None:
    # each step multiplies the weights by 1 - 99 x 10: two layers' product overflows after 6 or 7
    typed = ("--lr", "99", "--weight-decay", "10", "--warmup", "0")
    config = config_of("patient", RUN, *typed)
    outcomes = LocalWorld(2, watch.just_train, config, folder=tmp_path).outcomes()
    assert str(told_once(outcomes, 7)).startswith("--lr 99: ")
    assert status(tmp_path / "run") == ("failed", 7)
    assert not (tmp_path / "run" / MODEL).exists()
    raw, step, _ = checkpoint.read_newest(tmp_path / "run")
    assert step == 4
    weights = checkpoint.from_bytes(raw, step)["state"]["model"]
    assert all(weight.isfinite().all() for weight in weights.values())


# --- Chaos


KILLS = ["SIGKILL worker", "SIGKILL worker", "SIGKILL all"]
STOPS = ["SIGTERM worker", "SIGTERM worker", "SIGTERM all", "SIGINT worker", "SIGUSR1 worker"]


@pytest.mark.soak
@pytest.mark.parametrize("faults", [*[KILLS] * 4, *[STOPS] * 2])
def test_fault_01_fault_12_chaos(
    faults: list[str], tmp_path: Path, request: pytest.FixtureRequest, record_property: Any
) -> None:
    """CHAOS=200 hits at random moments; each run is taken up again, and ends as if unharmed."""
    count = max(1, int(os.environ.get("CHAOS") or "20") // 4)
    seed = f"{os.environ.get('CHAOS_SEED', '0')} {request.node.name}"
    hits = chaos(tmp_path, count, seed, faults)
    record_property("tried", count)
    record_property("details", hits)
