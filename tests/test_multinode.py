"""A machine's part of a run over several: what is refused before anything is started."""

from ddp_mnist.cluster.local_world import free_port
from tests.commands import Typed


def test_incomplete_or_wrong_variables(typed: Typed) -> None:
    here = "--main-process-ip 127.0.0.1"
    for arguments, message in (
        ("--machine-rank 0", "MACHINE_RANK: is one of two, e.g. MACHINE_RANK=0 MAIN_PROCESS_IP="),
        ("--main-process-ip 10.0.0.1", "MAIN_PROCESS_IP: is one of two"),
        (f"--machine-rank 2 {here}", "MACHINE_RANK=2: must be below NUM_MACHINES=2"),
        (f"--machine-rank x {here}", "MACHINE_RANK=x: must be a whole number"),
        (
            f"--machine-rank 0 {here} --main-process-port 0",
            "MAIN_PROCESS_PORT=0: must be at least 1",
        ),
        ("--nproc-per-node -1", "NPROC_PER_NODE=-1: must be at least 1"),
    ):
        ended = typed("multinode", *arguments.split())
        [line] = ended.err.splitlines()
        assert ended.code == 2
        assert line.startswith(f"ddp-mnist: error: {message}")


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
        [line] = ended.err.splitlines()
        assert ended.code == 6
        assert message.format(port=port) in line
