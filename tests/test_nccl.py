"""NCCL's waits and end without a GPU: CUDA's event, the collectives and the group are stand-ins."""

import inspect
import os
import signal
import threading
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator

from ddp_mnist.cluster import failures, nccl, world
from ddp_mnist.cluster.failures import end_group
from ddp_mnist.cluster.local_world import LocalWorld
from ddp_mnist.cluster.nccl import NcclAccelerator
from ddp_mnist.cluster.store import Store
from ddp_mnist.cluster.world import form_group, make_accelerator
from ddp_mnist.config.distribution import Distribution
from ddp_mnist.errors import FailedElsewhere
from ddp_mnist.verify.watch import just_train, proof_config
from tests.chaos import SECONDS, check_lost

Patch = pytest.MonkeyPatch


class Clock:
    """Time that passes in sleep alone, and there by 1 us at the least."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.sleeps = 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 1e-6)
        self.sleeps += 1


@pytest.fixture
def clock(monkeypatch: Patch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("ddp_mnist.cluster.nccl.time", clock)
    monkeypatch.setattr("ddp_mnist.cluster.nccl.error_of_the_group", lambda: "SUCCESS")
    return clock


def waiting(clock: Clock, gpu_s: float = 1e6, timeout_s: float = 300.0) -> NcclAccelerator:
    """Return rank 0's Accelerator of two, whose GPU is done after so many seconds."""
    accelerator = object.__new__(NcclAccelerator)
    accelerator.store, accelerator.timeout_s = Store(dist.HashStore(), 0, 2), timeout_s
    done_at = clock.now + gpu_s
    event = SimpleNamespace(record=Mock(), query=lambda: clock.now >= done_at)
    accelerator.new_event = Mock(return_value=event)
    return accelerator


def seconds_until(
    accelerator: NcclAccelerator, clock: Clock, message: str, error: type = dist.DistBackendError
) -> float:
    """Return how long a wait takes that ends with this error."""
    began = clock.now
    with pytest.raises(error, match=message):
        accelerator.wait_for_gpu()
    return clock.now - began


# --- One wait


@pytest.mark.parametrize(
    ("gpu_s", "late_s", "queries"),
    [(0.0, 0.0, 0), (0.001, 2e-6, 1_100), (0.05, 60e-6, 3_100), (2.0, 1.1e-3, 6_000)],
)
def test_a_wait_ends_soon_after_the_gpu_is_done(
    gpu_s: float, late_s: float, queries: int, clock: Clock
) -> None:
    accelerator = waiting(clock, gpu_s)
    began = clock.now
    accelerator.wait_for_gpu()
    assert gpu_s <= clock.now - began + 1e-9 <= gpu_s + late_s + 1e-8
    assert clock.sleeps <= queries


def test_the_store_is_read_twice_a_second_and_not_in_a_short_wait(clock: Clock) -> None:
    for gpu_s, looks in ((0.4, 0), (0.6, 1), (10.3, 20)):
        accelerator = waiting(clock, gpu_s)
        with patch.object(accelerator.store, "failure", return_value=None) as reads:
            accelerator.wait_for_gpu()
        assert reads.call_count == looks


def test_a_wait_ends_at_the_timeout(clock: Clock) -> None:
    accelerator = waiting(clock, timeout_s=20)
    assert 20 <= seconds_until(accelerator, clock, "^timed out: .* within 20 s$") <= 20.6
    assert (
        accelerator.store.call("get", "alive") == b"0 "
    )  # it may be busy with its end when others look
    waiting(clock, 19.0, timeout_s=20).wait_for_gpu()


def a_rank_fails(accelerator: NcclAccelerator) -> None:
    Store(accelerator.store.c10d, 1, 2).report_failure("a bug", 1)


def the_store_is_gone(accelerator: NcclAccelerator) -> None:
    accelerator.store.c10d = Mock(check=Mock(side_effect=RuntimeError("reset by peer")))


def the_watchdog_saw(error: str, _: NcclAccelerator) -> None:
    nccl.error_of_the_group = lambda: error


@pytest.mark.parametrize(
    ("happens", "message", "error"),
    [
        (a_rank_fails, "^a bug$", FailedElsewhere),
        (the_store_is_gone, "^the connection to the main address is gone$", RuntimeError),
        (partial(the_watchdog_saw, "COMM_ERROR"), "is broken: COMM_ERROR$", RuntimeError),
        (partial(the_watchdog_saw, "TIMEOUT"), "is broken: TIMEOUT$", RuntimeError),
    ],
)
def test_a_wait_ends_when(happens: Any, message: str, error: type[Exception], clock: Clock) -> None:
    accelerator = waiting(clock)
    happens(accelerator)
    assert seconds_until(accelerator, clock, message, error) <= 0.6


def test_a_wait_that_an_abort_ended_is_no_result(clock: Clock) -> None:
    """The watchdog may abort the communicator: its kernel ends with half a sum."""
    accelerator = waiting(clock, gpu_s=0.0)
    the_watchdog_saw("COMM_ERROR", accelerator)
    assert seconds_until(accelerator, clock, "is broken: COMM_ERROR$") < 0.1
    assert accelerator.store.call("get", "alive") == b"0 "


def test_a_wait_ends_when_another_rank_looks_for_the_dead(clock: Clock) -> None:
    accelerator = waiting(clock)
    other = Store(accelerator.store.c10d, 1, 2)
    found: list[list[int]] = []
    looks = threading.Thread(target=lambda: found.append(other.find_dead_ranks(0.3)))
    looks.start()
    while not other.exists("alive"):
        time.sleep(0.001)
    seconds_until(accelerator, clock, "^another rank lost a connection$")
    looks.join()
    assert found == [[]]  # this one has answered


@pytest.mark.parametrize("before_s", [100.0, 0.0, -2.0])
def test_a_wait_ends_some_seconds_after_a_stop_signal(before_s: float, clock: Clock) -> None:
    """It came before the wait began, or in it; if all ranks are there, the wait is over by then."""
    accelerator = waiting(clock)
    accelerator.store.signalled = clock.now - before_s
    expected = max(0.0, -before_s) + nccl.AFTER_SIGNAL_S
    message = "^timed out: 10 s after a stop signal$"
    assert expected <= seconds_until(accelerator, clock, message) <= expected + 0.6
    accelerator = waiting(clock, nccl.AFTER_SIGNAL_S - 0.1)
    accelerator.store.signalled = clock.now - before_s
    accelerator.wait_for_gpu()


def test_the_host_waits_wherever_it_is_about_to_read(monkeypatch: Patch) -> None:
    happened: list[str] = []

    def note(name: str) -> Any:
        happened.append(name)
        return name

    for name in ("reduce", "gather", "backward"):
        monkeypatch.setattr(Accelerator, name, lambda *_, name=name: note(name))
    monkeypatch.setattr(Accelerator, "sync_gradients", True, raising=False)
    accelerator = object.__new__(NcclAccelerator)
    accelerator.wait_for_gpu = lambda: note("wait")  # type: ignore[method-assign]
    accelerator.scaler = None
    assert accelerator.reduce(torch.ones(1)) == "reduce"
    assert accelerator.gather((torch.ones(1),)) == "gather"
    accelerator.backward(torch.ones(1))  # nobody reads anything: the GPU may lag behind
    accelerator.scaler = torch.amp.GradScaler("cpu")
    accelerator.backward(torch.ones(1))
    monkeypatch.setattr(Accelerator, "sync_gradients", False)
    accelerator.backward(torch.ones(1))  # a part of a step
    waits = "reduce wait gather wait backward backward wait backward"
    assert happened == waits.split()


# --- A run that loses a rank


def train_beside(who: int, how: str, timeout_s: float) -> tuple[Exception, float]:
    """Kill rank `who` at its fifth all-reduce, in which the others' GPUs wait."""
    make_accelerator, reduce = world.make_accelerator, Accelerator.reduce
    rank, reduces, stuck = int(os.environ["RANK"]), [0], [0.0]

    class Event:
        def record(self) -> None: ...

        def query(self) -> bool:
            return not stuck[0]

    class StandIn(NcclAccelerator):
        new_event = Event

    def accelerator(flags: Distribution, *args: Any) -> Accelerator:
        def stand_in(**options: Any) -> Accelerator:
            return StandIn(args[-1], flags.dist_timeout, **options)

        with patch.object(world, "Accelerator", stand_in):
            return make_accelerator(flags, *args)

    def enqueue(self: Accelerator, tensor: torch.Tensor, *args: Any) -> Any:
        reduces[0] += 1
        if reduces[0] < 5:
            return reduce(self, tensor, *args)
        if rank == who:
            os.kill(os.getpid(), signal.SIGKILL)
        stuck[0] = time.monotonic()
        if how == "one gets SIGTERM" and rank == 2:
            os.kill(os.getpid(), signal.SIGTERM)  # from the launcher of its node
        return tensor

    def error_of_the_group() -> str:
        return "COMM_ERROR" if how == "NCCL sees it" and stuck[0] else "SUCCESS"

    config = proof_config(model="mlp")
    config = replace(config, distribution=replace(config.distribution, dist_timeout=timeout_s))
    with (
        patch.object(world, "make_accelerator", accelerator),
        patch.object(Accelerator, "reduce", enqueue),
        patch.object(nccl, "error_of_the_group", error_of_the_group),
        patch.object(nccl, "AFTER_SIGNAL_S", 1.0),
        pytest.raises(Exception) as ended,
    ):
        just_train(config)
    return ended.value.with_traceback(None), time.monotonic() - stuck[0]


@pytest.mark.parametrize(
    ("size", "who", "how", "timeout_s"),
    [
        (3, 1, "one gets SIGTERM", 60.0),
        (2, 1, "NCCL sees it", 60.0),
        (2, 0, "with the store", 60.0),
        (3, 1, "nobody knows", 3.0),
    ],
)
def test_fault_01_a_rank_that_is_lost_is_named_in_one_line(
    size: int, who: int, how: str, timeout_s: float, tmp_path: Path
) -> None:
    outcomes = LocalWorld(size, train_beside, who, how, timeout_s, folder=tmp_path).outcomes()
    del outcomes[who]
    errors = [error for error, _ in outcomes]
    waited_for = timeout_s if timeout_s == 3 else 0
    assert max(seconds for _, seconds in outcomes) < waited_for + SECONDS
    check_lost(errors, who, size, tmp_path / "run")


# --- The group's begin and end


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")
def test_torch_has_what_only_a_gpu_would_call(monkeypatch: Patch) -> None:
    assert callable(dist.ProcessGroup.abort)
    assert callable(dist.ProcessGroup._get_backend)
    assert callable(dist.ProcessGroupNCCL2.get_error)
    from torch._C._distributed_c10d import ErrorType

    assert ErrorType.SUCCESS.name == "SUCCESS"
    assert issubclass(dist.DistBackendError, RuntimeError)
    # nccl.py is written for this class, whose watchdog and errors another one may not have
    monkeypatch.delenv("TORCH_DIST_USE_NCCL2", raising=False)
    monkeypatch.setattr(dist.Backend, "_plugins", {})
    dist.Backend._ensure_backend_registered("nccl")
    made_by = dist.Backend._plugins["NCCL"].creator_fn
    assert made_by.__name__ == "_create_nccl2_process_group"
    assert "backend = ProcessGroupNCCL2(" in inspect.getsource(made_by)


@pytest.mark.parametrize(
    ("backend", "own", "ends_ms", "seconds"),
    [("gloo", None, None, 20.0), ("nccl", None, "60000", 50.0), ("nccl", "5000", "5000", 50.0)],
)
def test_the_watchdog_is_later_than_our_waits_and_leaves_time_to_name_the_lost_rank(
    backend: str, own: str | None, ends_ms: str | None, seconds: float, monkeypatch: Patch
) -> None:
    def init(*_: Any, timeout: timedelta, **__: Any) -> None:
        found.append((os.environ.get(nccl.WATCHDOG_ENDS), timeout.total_seconds()))

    found = list[Any]()
    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setattr("ddp_mnist.cluster.device.gpus", lambda: 1)
    with patch.dict(os.environ):
        os.environ.pop(nccl.WATCHDOG_ENDS, None)
        os.environ.update({nccl.WATCHDOG_ENDS: own} if own else {})
        form_group(Store(dist.HashStore(), 0, 1), backend, 0, 20.0)
    assert found == [(ends_ms, seconds)]


def test_only_nccl_has_an_accelerator_of_its_own(monkeypatch: Patch) -> None:
    of_nccl, usual = Mock(), Mock()
    monkeypatch.setattr("ddp_mnist.cluster.nccl.NcclAccelerator", of_nccl)
    monkeypatch.setattr("ddp_mnist.cluster.world.Accelerator", usual)
    store = Store(dist.HashStore(), 0, 1)
    for backend, device in (("none", "cpu"), ("gloo", "cpu"), ("none", "cuda"), ("gloo", "cuda")):
        make_accelerator(Distribution(), device, backend, "no", store)
    assert (usual.call_count, of_nccl.call_count) == (4, 0)
    make_accelerator(Distribution(dist_timeout=7), "cuda", "nccl", "fp16", store)
    assert of_nccl.call_args.args == (store, 7)
    assert of_nccl.call_args.kwargs["mixed_precision"] == "fp16"


class Group:
    """A group whose collectives wait for a lost peer; `calls` lists how it was ended."""

    def __init__(self, monkeypatch: Patch, backend: str) -> None:
        self.calls: list[str] = []
        self.ends = threading.Event()
        found = SimpleNamespace(
            is_initialized=lambda: True,
            get_backend=lambda: backend,
            destroy_process_group=lambda: self.calls.append("destroy"),
            group=SimpleNamespace(WORLD=self),
        )
        monkeypatch.setattr("ddp_mnist.cluster.failures.dist", found)
        monkeypatch.setattr("ddp_mnist.cluster.failures.aborted", [])
        monkeypatch.setattr("ddp_mnist.cluster.failures.gc", Mock())  # all tests' objects are many

    def abort(self) -> None:
        self.calls.append("abort")
        self.ends.wait(60)
        self.calls.append("abort has ended")


def test_after_an_error_nccl_is_aborted_once_and_not_waited_for(monkeypatch: Patch) -> None:
    group = Group(monkeypatch, "nccl")
    monkeypatch.setattr("ddp_mnist.cluster.failures.ABORT_S", 0.05)
    for in_order in (False, False, True):  # each place that ends it after an error
        end_group(in_order=in_order)
    assert group.calls == ["abort"]  # which goes on: nobody waited for it
    assert failures.aborted == [group]
    group.ends.set()


@pytest.mark.parametrize(("backend", "in_order"), [("nccl", True), ("gloo", True), ("gloo", False)])
def test_any_other_end_is_a_destroy(backend: str, in_order: bool, monkeypatch: Patch) -> None:
    group = Group(monkeypatch, backend)
    end_group(in_order=in_order)
    assert group.calls == ["destroy"]
