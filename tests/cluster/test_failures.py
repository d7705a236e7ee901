import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from ddp_mnist.cluster.failures import A_GPU_EACH, as_expected, first_cause, propagate_first_error
from ddp_mnist.cluster.store import Store
from ddp_mnist.errors import DataError, FailedElsewhere, PeerError, UsageError
from tests.ranks import at_once, stores

SHARED_GPU = "NCCL communicator: invalid usage (run with NCCL_DEBUG=WARN for details)"


UNHANDLED = (
    "NCCL AllReduce failed: unhandled system error (run with NCCL_DEBUG=INFO for details) \n"
    "NCCL Last Error: socketPollConnect poll() timed out"
)


@pytest.mark.parametrize(
    ("text", "lost", "kind", "message"),
    [
        (SHARED_GPU, [], UsageError, f"--backend nccl: {SHARED_GPU}; {A_GPU_EACH}; "),
        (UNHANDLED, [1], PeerError, "lost contact with rank 1 of 2 (socketPoll"),
        # all ranks are there
        (UNHANDLED, [], PeerError, "lost contact with another rank of 2 (socketPoll"),
    ],
)
def test_nccls_own_reason_is_given(
    text: str, lost: list[int], kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(dist.HashStore(), 0, 2)
    monkeypatch.setattr(store, "find_dead_ranks", lambda: lost)
    error = as_expected(store, dist.DistBackendError(text))
    assert type(error) is kind
    assert str(error).startswith(message)
    assert "NCCL_DEBUG=WARN" in str(error)


@pytest.mark.parametrize("error", [RuntimeError, ConnectionError, TimeoutError])
def test_fault_64_an_error_of_ones_own_code_is_no_broken_connection_whatever_it_says(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddp_mnist.cluster.store.LEAVING_S", 0)  # no rank 1 is there to leave

    def own_code() -> None:
        raise error("gloo socket: connection timed out, broken pipe, NCCL")

    zero, _ = stores(2)
    with pytest.raises(error) as raised, propagate_first_error(zero):
        own_code()
    assert type(raised.value) is error
    assert zero.failure()["code"] == 1  # type: ignore[index]


def test_a_store_that_does_not_answer_is_a_lost_rank() -> None:
    class Frozen(dist.HashStore):
        def get(self, key: str) -> bytes:
            time.sleep(1)
            return key.encode()

    store = Store(Frozen(), 1, 2, patience_s=0.1)
    line = r"lost contact with rank 0 of 2 \(no sign of life for 0.1 s\)"
    with pytest.raises(PeerError, match=line), propagate_first_error(store):
        store.call("get", "key")


@pytest.mark.parametrize(
    "written",
    [
        b"",
        b"[]",
        b'"x"',
        b"{}",
        b'{"rank": 0, "message": "bye", "code": 256, "lost": []}',
        b'{"rank": 0, "message": "bye", "code": 0, "lost": []}',
        b'{"rank": 0, "message": "bye", "code": "6", "lost": []}',
        b'{"rank": 2, "message": "bye", "code": 6, "lost": []}',
        b'{"rank": 0, "message": "bye", "code": 6, "lost": ["x"]}',
        b'{"rank": true, "message": "bye", "code": 6, "lost": []}',
        b'{"rank": 0, "message": {}, "code": 6, "lost": 7}',
    ],
)
def test_a_failure_that_no_rank_wrote_ends_the_run_as_a_lost_peer(written: bytes) -> None:
    zero, one = stores(2)
    zero.c10d.set("failure", written.decode())
    for store in (zero, one):
        with pytest.raises(PeerError, match="holds a failure that none of them reported") as raised:
            store.raise_if_failed()
        assert raised.value.code == 6


@pytest.mark.parametrize(
    "wait",
    [
        lambda store: store.broadcast_from_rank0("never", int),
        lambda store: store.decide_for_all("never", 1, list),
        lambda store: store.barrier(),
        lambda store: store.close(),
    ],
)
def test_waiting_ends_when_another_rank_fails(wait: Callable[[Store], Any]) -> None:
    zero, one = stores(2)

    def fail() -> None:
        time.sleep(0.2)
        zero.report_failure("no data", 3)

    _, error = at_once(fail, partial(wait, one))
    assert (type(error), str(error), error.code) == (FailedElsewhere, "no data", 3)


@pytest.mark.parametrize(
    ("error", "message", "code"),
    [
        (DataError("no data"), "no data", 3),
        (KeyboardInterrupt(), "KeyboardInterrupt", 130),
        (ZeroDivisionError("by 0"), "by 0", 1),
    ],
)
def test_the_first_failure_counts_and_its_rank_tells(
    error: BaseException, message: str, code: int
) -> None:
    zero, one, two = stores(3)
    zero.raise_if_failed()
    assert first_cause(one, error) is error
    assert error.agreed  # type: ignore[attr-defined]
    assert zero.failure() == {"rank": 1, "message": message, "code": code, "lost": []}
    with pytest.raises(PeerError, match=message):
        one.raise_if_failed()  # its own, as its heartbeat reports it
    late = first_cause(zero, ValueError("what followed"))
    assert isinstance(late, FailedElsewhere)
    assert late.where == ""
    for zero.hosts, where in ((["a", "a", "b"], ""), (["a", "b", "b"], "rank 1 (b)")):
        with pytest.raises(FailedElsewhere) as raised:
            zero.raise_if_failed()
        assert raised.value.where == where
    assert (str(late), late.code, late.agreed) == (message, code, False)
    assert first_cause(two, late) is late
    assert isinstance(first_cause(zero, KeyboardInterrupt()), FailedElsewhere)
