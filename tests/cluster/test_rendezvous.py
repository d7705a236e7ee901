import errno
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import psutil
import pytest
import torch.distributed as dist

from ddp_mnist.cluster import main_port, rendezvous
from ddp_mnist.cluster.connections import keep_alive, shut_down
from ddp_mnist.cluster.launch import Launch
from ddp_mnist.cluster.local_world import LocalWorld, free_port, run_world
from ddp_mnist.cluster.rendezvous import JoinRequest, join_store
from ddp_mnist.cluster.store import RankInfo, host_id, name_of
from ddp_mnist.errors import PeerError, UsageError
from tests.commands import Typed
from tests.run_checks import told_once

TIMEOUT_S = 0.8  # of every rendezvous that fails here
NOBODY = "rank 1 of 2 reached nobody there within 0.8 s ("


def place(rank: int, world_size: int, port: int, host: str = "127.0.0.1") -> Launch:
    return Launch("tcp", rank, world_size, main_host=host, main_port=port)


def meet_as(ranks: list[int], world_sizes: list[int], host: str = "127.0.0.1") -> Any:
    """One process's rendezvous: its hosts, or its error and the seconds that it took."""
    number = int(os.environ.get("RANK", 0))
    port = int(os.environ["MASTER_PORT"])
    Path(f"started-{number}").touch()
    while len(list(Path().glob("started-*"))) < len(ranks):
        time.sleep(0.01)  # starting a process takes long where others use the machine too
    os.getpid = lambda: 7  # as it may be in each of several containers
    started = time.monotonic()
    try:
        store = join_store(place(ranks[number], world_sizes[number], port, host), TIMEOUT_S)
    except Exception as error:
        return error, time.monotonic() - started
    store.close()
    return store.rank_info


def rendezvous_of(ranks: list[int], world_sizes: list[int], folder: Path) -> list[Any]:
    """`meet_as` in as many processes as there are ranks."""
    variables = {"MASTER_PORT": str(free_port())}
    return run_world(len(ranks), meet_as, ranks, world_sizes, folder=folder, variables=variables)


@pytest.mark.parametrize("host", ["localhost", "::1"])
def test_processes_meet_and_know_where_each_runs(host: str, tmp_path: Path) -> None:
    if host == "::1" and not any(each.address == host for each in psutil.net_if_addrs()["lo"]):
        pytest.skip("no IPv6 here")
    here, own = name_of(host_id()), "::1" if host == "::1" else "127.0.0.1"
    places = run_world(2, meet_as, [0, 1], [2, 2], host, folder=tmp_path)
    assert places == [RankInfo(rank, 2, 1, here, own) for rank in range(2)]


def test_each_rank_gets_a_place_on_its_machine_and_the_address_of_another() -> None:
    where = [("a", "10.0.0.1"), ("b", None), ("a", None), ("c", "10.0.0.3"), ("b", "10.0.0.2")]
    places = rendezvous._rank_infos([JoinRequest("token", *each) for each in where])
    assert [each.local_rank for each in places] == [0, 0, 1, 0, 1]
    assert [each.local_world_size for each in places] == [2, 2, 2, 1, 2]
    assert [each.address for each in places] == [address for _, address in where]
    assert {(each.num_machines, each.main_host) for each in places} == {(3, "a")}
    for (host, _), place in zip(where, places, strict=True):
        assert (place.other_address == "10.0.0.1") == (host != "a")
        assert place.other_address in {address for other, address in where if other != host}


def test_a_missing_process_is_named_by_the_first_to_notice(tmp_path: Path) -> None:
    outcomes = rendezvous_of([0, 2], [4, 4], tmp_path)
    reported = told_once([error for error, _ in outcomes], 6)
    assert max(seconds for _, seconds in outcomes) < TIMEOUT_S + 2
    assert "2 of 4 processes came within 0.8 s; missing: rank 1, 3; start them" in str(reported)
    assert {str(error) for error, _ in outcomes} == {str(reported)}


@pytest.mark.parametrize(
    ("rank", "host", "message", "reason"),
    [
        (0, "127.0.0.1", "1 of 2 processes came within 0.8 s", "; missing: rank 1; start"),
        (1, "127.0.0.1", NOBODY, "Connection refused"),
        (1, "no.such.host.invalid", NOBODY, "Name"),
    ],
)
def test_fault_16_fault_23_nobody_else_comes_or_is_at_the_address(
    rank: int, host: str, message: str, reason: str
) -> None:
    port, started = free_port(), time.monotonic()
    with pytest.raises(PeerError) as raised:
        join_store(place(rank, 2, port, host), TIMEOUT_S)
    assert 0.5 < time.monotonic() - started < TIMEOUT_S + 2
    assert str(raised.value).startswith(f"{host}:{port}: {message}")
    assert reason in str(raised.value)
    assert raised.value.agreed is (rank == 0)  # who found no store can tell nobody


@pytest.fixture
def stranger() -> Iterator[int]:
    """A port where something listens that is no store, and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_something_else_at_the_address(stranger: int, tmp_path: Path) -> None:
    variables = {"MASTER_PORT": str(stranger)}
    [[error, seconds]] = run_world(1, meet_as, [1], [2], folder=tmp_path, variables=variables)
    assert isinstance(error, PeerError)
    assert "rank 1 of 2 found something there that is not rank 0 (no answer within" in str(error)
    assert seconds < TIMEOUT_S + 2


def test_fault_15_a_port_that_is_taken_is_named_at_once(stranger: int) -> None:
    started = time.monotonic()
    with pytest.raises(UsageError, match=f"^port {stranger}: cannot be opened here \\(Address al"):
        join_store(place(0, 2, stranger), 60)
    assert time.monotonic() - started < 1


@pytest.mark.parametrize(
    ("host", "listens"),
    [
        *((own, own) for own in ("127.0.0.1", "::1", "127.0.1.1", "0.0.0.0")),
        *(("localhost", "127.0.0.1"), ("10.0.0.1", "0.0.0.0"), ("debian", "::")),
    ],
)
def test_loopback_is_kept_to_this_machine(
    host: str, listens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own name, which stands for 127.0.1.1 on Debian, has another address elsewhere."""
    known = socket.getaddrinfo
    resolve = lambda name, *a, **k: known("127.0.1.1" if name == "debian" else name, *a, **k)  # noqa: E731
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    main_port.serve_store(host, port := free_port(), 5)
    found = [each.laddr for each in psutil.Process().net_connections() if each.status == "LISTEN"]
    assert [laddr.ip for laddr in found if laddr.port == port] == [listens]


@pytest.mark.parametrize("error", [TimeoutError("timed out"), ConnectionRefusedError("refused")])
def test_a_firewall_in_front_of_this_machine_itself_is_named(
    error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "create_connection", Mock(side_effect=error))
    line = r"^127.0.0.1:\d+: opened, but not reached from here \(.*\); let the firewall accept"
    with pytest.raises(UsageError, match=line):
        main_port.serve_store("127.0.0.1", free_port(), 5)


def test_a_loopback_that_is_down_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    down = OSError(errno.ENETUNREACH, "Network is unreachable")
    monkeypatch.setattr(socket, "create_connection", Mock(side_effect=down))
    lo = (
        r"Network is unreachable\); this machine cannot reach itself, is the interface lo up \(ip l"
    )
    for rank, kind in ((0, UsageError), (1, PeerError)):
        launch = Launch("tcp", rank, 2, main_host="127.0.0.1", main_port=free_port())
        with pytest.raises(kind, match=lo):
            main_port.open_store(launch, f"rank {rank}", 0.1)


def test_two_processes_with_one_rank(tmp_path: Path) -> None:
    outcomes = rendezvous_of([0, 1, 1], [3, 3, 3], tmp_path)
    [first] = [error for error, _ in outcomes if isinstance(error, UsageError)]
    assert "another process joined as rank 1 after this one" in str(first)
    assert "its own rank, 0 to 2" in str(first)
    assert first.agreed  # so it is printed
    # the second may replace the first, so the others go on waiting for the rank that is missing
    others = [error for error, _ in outcomes if error is not first]
    assert [error.code for error in others] == [6, 6]
    assert all("2 of 3 processes came" in str(error) for error in others)


def test_processes_that_were_given_different_world_sizes(tmp_path: Path) -> None:
    for sizes in ([2, 3], [3, 2]):
        outcomes = rendezvous_of([0, 1], sizes, tmp_path)
        assert max(seconds for _, seconds in outcomes) < TIMEOUT_S
        first = told_once([error for error, _ in outcomes], 2)
        told = f"rank 1 was given {sizes[1]} as the number of all, rank 0 {sizes[0]};"
        assert told in str(first)
        assert {str(error) for error, _ in outcomes} == {str(first)}


def meet_and_lose_rank_0() -> Any:
    """Wait for a third process, which does not come."""
    rank = int(os.environ["RANK"])
    if rank == 0:
        threading.Timer(1, os._exit, [1]).start()
    with pytest.raises(PeerError) as raised:
        join_store(place(rank, 3, int(os.environ["MASTER_PORT"])), 15)
    return raised.value


def test_rank_0_goes_away_while_others_wait(tmp_path: Path) -> None:
    _, error = LocalWorld(2, meet_and_lose_rank_0, folder=tmp_path).outcomes()
    assert "rank 0 or its launcher, which serves this port, ended before all had" in str(error)


def meet_and_be_cut_off() -> str:
    """Have each connection to the store cut, as a firewall may do it, and agree all the same."""
    rank = int(os.environ["RANK"])
    store = join_store(place(rank, 2, int(os.environ["MASTER_PORT"])), 15)
    if rank == 1:
        shut_down(keep_alive())
    said: str = store.broadcast_from_rank0("word", lambda: "yes")
    store.close()
    return said


def test_a_rank_whose_connections_are_cut_goes_on(tmp_path: Path) -> None:
    assert run_world(2, meet_and_be_cut_off, folder=tmp_path) == ["yes", "yes"]


# --- The store, which threads share


def test_fault_17_a_machine_that_never_comes(typed: Typed) -> None:
    """Machine 0 says how many came; machine 1, with nobody at the address, says which address."""
    for machine, message in (
        ("0", "1 of 2 machines came within 1 s; missing: machine 1"),
        ("1", "127.0.0.1:{port}: machine 1 of 2 reached nobody there within 1 s"),
    ):
        port = free_port()
        here = f"--main-process-ip 127.0.0.1 --main-process-port {port}"
        line = f"--machine-rank {machine} {here} -- --dist-timeout 1"
        ended = typed("multinode", *line.split())
        _, line = ended.err.splitlines()
        assert ended.code == 6
        assert message.format(port=port) in line


# --- A store that outlives a rendezvous


class Comes(NamedTuple):
    """One process, and how it comes to meet."""

    rank: int
    after_s: float = 0
    dies_after_s: float = 0  # it is killed then


def come(size: int, *places: Comes) -> Any:
    """Return the tokens of all ranks, or the error."""
    this = places[int(os.environ["RANK"])]
    time.sleep(this.after_s)
    if this.dies_after_s:
        threading.Timer(this.dies_after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    launch = replace(place(this.rank, size, int(os.environ["MASTER_PORT"])), agent_store=True)
    try:
        store = join_store(launch, 15)
        tokens = store.decide_for_all("tokens", os.urandom(8).hex(), list)
        if this.dies_after_s:
            time.sleep(60)
        store.close()
    except (UsageError, PeerError) as error:
        return error
    return tokens


@pytest.fixture
def come_together(tmp_path: Path) -> Callable[..., list[Any]]:
    """Return a function that lets processes meet in the store of one agent, as often as called."""
    agent = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def together(size: int, *places: Comes) -> list[Any]:
        variables = {"MASTER_PORT": str(agent.port)}
        world = LocalWorld(len(places), come, size, *places, folder=tmp_path, variables=variables)
        found = world.outcomes()
        met = [tokens for tokens in found if isinstance(tokens, list)]
        assert all(tokens == met[0] for tokens in met)
        return found

    return together


def test_fault_44_processes_that_are_restarted_in_any_order_meet(
    come_together: Callable[..., list[Any]],
) -> None:
    """Each launcher restarts its own, and a machine that joins later has not restarted any."""
    killed = come_together(2, Comes(0, dies_after_s=0.6), Comes(1, dies_after_s=0.6))
    assert [type(each) for each in killed] == [ConnectionError] * 2
    for places in ([Comes(0, after_s=0.3), Comes(1)], [Comes(0), Comes(1, after_s=0.3)]):
        first, second = come_together(2, *places)
        assert len(set(first)) == 2
        assert first == second


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_takes_the_place_of_a_dead_one_while_others_wait(
    rank: int, come_together: Callable[..., list[Any]]
) -> None:
    dies, waits = Comes(rank, dies_after_s=0.5), Comes(1 - rank)
    died, *met = come_together(3, dies, waits, Comes(rank, 0.8), Comes(2, 1.2))
    assert isinstance(died, ConnectionError)
    assert len(met) == 3
    assert len(set(met[0])) == 3
