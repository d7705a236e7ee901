import ast
import os
import socket
import tempfile
from pathlib import Path

import pytest

from ddp_mnist.cluster import interfaces, local_world
from ddp_mnist.errors import UsageError
from tests.commands import REPOSITORY, python

NAMES = """
    SLURM_NTASKS SLURM_JOB_ID PMI_SIZE OMPI_COMM_WORLD_SIZE RANK WORLD_SIZE LOCAL_RANK
    GROUP_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID ACCELERATE_USE_FSDP
    ACCELERATE_DYNAMO_BACKEND
"""
OF_A_JOB = dict.fromkeys(NAMES.split(), "4")
STAYS = {"ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "no", "RANKING": "1"}

WORLDS = """
import sys
sys.path.sort(key="".__eq__)  # as ddp_mnist has it
from pathlib import Path
from ddp_mnist.cluster.local_world import FORKSERVER, run_world
from tests.cluster.test_local_world import seen

FORKSERVER.set_forkserver_preload([])  # which takes seconds

print(run_world(1, seen, folder=Path.cwd()) + run_world(2, seen, folder=Path.cwd()))
"""


def seen() -> tuple[dict[str, str], str]:
    names = [*OF_A_JOB, *STAYS]
    return {n: os.environ[n] for n in names if n in os.environ}, tempfile.gettempdir()


def test_fault_39_fault_40_worlds_in_a_job_with_a_long_tmpdir(tmp_path: Path) -> None:
    """Python puts a socket into TMPDIR, whose path may have 107 characters."""
    place = tmp_path / ("späces and " * 8)
    place.mkdir()
    (tmp_path / "multiprocessing.py").write_text("raise SystemExit('a file of the user was run')")
    variables = OF_A_JOB | STAYS | {"TMPDIR": str(place), "PYTHONPATH": str(REPOSITORY)}
    ended = python("-c", WORLDS, folder=tmp_path, variables=variables)
    assert ended.code == 0, ended.err
    [alone, *both] = ast.literal_eval(ended.out)
    assert alone == (STAYS, str(place))
    for rank, (variables, place_there) in enumerate(both):
        assert variables.pop("MASTER_PORT") != "4"
        of_two = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2"}
        mine = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        assert (variables, place_there) == (STAYS | of_two | mine, str(place))


def test_a_free_port_is_free_and_not_one_of_those_for_outgoing_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = local_world.free_port()
    assert 15000 <= port < 30000
    with socket.create_server(("", port)):
        assert interfaces.why_port_is_taken(port) == "Address already in use"
        monkeypatch.setattr(local_world, "PORTS", [port] * 100)
        with pytest.raises(UsageError, match=rf"^ports {port} to {port}: no free one was found;"):
            local_world.free_port()
