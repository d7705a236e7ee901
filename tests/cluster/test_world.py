import contextlib
import io
import os
import re
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from ddp_mnist.cluster import connections, world
from ddp_mnist.cluster.launch import find_launch
from ddp_mnist.cluster.local_world import LocalWorld, run_world
from ddp_mnist.config.distribution import Distribution
from ddp_mnist.errors import UsageError
from ddp_mnist.verbs.verify.watch import just_train, proof_config
from tests.run_checks import told_once, with_flags

# --- Loners: faults row 23


def train_where_accelerate_sees_one_process() -> Any:
    """Train as under a launcher that Accelerate does not understand."""
    world.make_accelerator = lambda **_: SimpleNamespace(num_processes=1)
    return just_train(proof_config())


def test_fault_23_processes_that_would_each_train_alone(tmp_path: Path) -> None:
    outcomes = LocalWorld(2, train_where_accelerate_sees_one_process, folder=tmp_path).outcomes()
    reported = told_once(outcomes, 2)
    assert isinstance(reported, UsageError)
    message = "WORLD_SIZE=2: but Accelerate formed a group of 1, so each process would train alone"
    assert str(reported).startswith(message)
    assert list(tmp_path.iterdir()) == []


# --- Ranks that are not alike: faults row 22


OTHER = {"--seed": "5", "torch": "2.0.0", "the code's digest": "0123"}


def train_otherwise(what: str) -> Any:
    """Train with something else on rank 1; for other data see test_cache.py."""
    from ddp_mnist.training import saved_config

    config = proof_config()
    if os.environ["RANK"] == "1":
        versions = saved_config.package_versions()
        if what == "--seed":
            config = with_flags(config, seed=5)
        elif what == "torch":
            saved_config.package_versions = lambda model=None: versions | {"torch": "2.0.0"}  # noqa: ARG005
        else:
            saved_config.code_digest = lambda: "0123"
    return just_train(config)


@pytest.mark.parametrize("what", OTHER)
def test_fault_22_ranks_with_other_flags_packages_or_code_are_refused(
    what: str, tmp_path: Path
) -> None:
    outcomes = LocalWorld(2, train_otherwise, what, folder=tmp_path).outcomes()
    reported = told_once(outcomes, 2)
    line = rf"{what}: rank 0 has \S+, rank 1 has {OTHER[what]}; start every "
    assert re.match(line, str(reported))
    assert not (tmp_path / "run").exists()


# --- Connections


def lose_the_store() -> tuple[set[int], str]:
    """Cut rank 1's connections to the store. Return how all are probed, and what this rank says."""
    told, flags = io.StringIO(), Distribution(cpu=True, dist_timeout=10)
    with contextlib.redirect_stderr(told), world.join_world(flags, find_launch(flags)) as here:
        found = [
            each.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            and each.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
            for _, each in connections._connected()
        ]
        here.store.barrier()  # rank 0 would see what rank 1 makes anew, too
        if here.store.rank == 1:
            connections.shut_down(connections.keep_alive() - here.store.connections)
        here.store.barrier()
        here.accelerator.wait_for_everyone()
    return {*found}, told.getvalue()


def test_fault_58_connections_are_probed_and_the_stores_is_made_anew(tmp_path: Path) -> None:
    assert run_world(2, lose_the_store, folder=tmp_path) == [({10}, "")] * 2


# --- The end


def leave_without_a_word() -> str:
    """Do all the work; then rank 1 is gone."""
    flags = Distribution(cpu=True, dist_timeout=1.5)
    told = io.StringIO()
    with contextlib.redirect_stderr(told), world.join_world(flags, find_launch(flags)) as here:
        here.accelerator.wait_for_everyone()
        if here.store.rank == 1:
            os._exit(0)
    return told.getvalue()


def test_fault_61_a_rank_that_is_gone_when_all_is_done_spoils_nothing(tmp_path: Path) -> None:
    line, gone = LocalWorld(2, leave_without_a_word, folder=tmp_path).outcomes()
    assert isinstance(gone, ConnectionError)
    assert re.fullmatch(
        r"ddp-mnist: warning: all is done, but the ranks could not say goodbye \(lost contact with"
        r" rank 1 of 2 \(no sign of life for 1.5 s\); see what .*\n",
        line,
    )


def join_twice_beside_another_accelerator() -> list[str]:
    """Return the precision of a notebook's own Accelerator, of two worlds, and of its own again."""
    own = Accelerator(cpu=True, mixed_precision="bf16")
    found = [own.mixed_precision]
    for precision in ("no", "bf16"):
        flags = Distribution(cpu=True, mixed_precision=precision)
        with world.join_world(flags, find_launch(flags)) as here:
            found.append(here.accelerator.mixed_precision)
    with pytest.raises(UsageError, match=r"^no$"), world.join_world(flags, find_launch(flags)):
        raise UsageError("no")
    return [*found, own.mixed_precision, AcceleratorState().mixed_precision]


def test_a_world_leaves_the_accelerate_of_its_process_as_it_was(tmp_path: Path) -> None:
    """Else the next command of a notebook would be refused, or compute in this one's precision."""
    [found] = run_world(1, join_twice_beside_another_accelerator, folder=tmp_path)
    assert found == ["bf16", "no", "bf16", "bf16", "bf16"]
