"""One machine's part of a run over several: `make train-multinode`, or `make doctor`.

A bare launcher waits 15 minutes for a missing machine and then does not say which. Here the
machines meet first, with a deadline, and only then does each start `accelerate launch`. Without
rank and address, two nodes are rehearsed on this machine, over TCP, each with its own launcher.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

from ddp_mnist.cluster import hardware
from ddp_mnist.cluster.local import free_port
from ddp_mnist.cluster.nodes import DEFAULT_PORT, Node
from ddp_mnist.errors import FailedElsewhere, UsageError, one_line
from ddp_mnist.run.console import Console, tell
from ddp_mnist.verbs.flags import Multinode


def run(
    flags: Multinode, arguments: list[str], timeout_s: float, meet: Callable[[Node, float], None]
) -> int:
    """Return the exit code of the rehearsal; a real node becomes its launcher instead.

    Args:
        flags: which machine of how many this is.
        arguments: of the verb.
        timeout_s: how long to wait for the other machines.
        meet: is called with this machine and `timeout_s`; raises if the others do not come.

    Raises:
        UsageError: the flags contradict each other.
    """
    if (flags.machine_rank is None) != (flags.main_process_ip is None):
        given, missing = "MACHINE_RANK", "MAIN_PROCESS_IP"
        if flags.machine_rank is None:
            given, missing = missing, given
        raise UsageError(
            f"{given}: needs {missing} beside it, e.g. make train-multinode MACHINE_RANK=0"
            " MAIN_PROCESS_IP=192.168.1.201; give both, or none to rehearse on this machine"
        )
    if flags.machine_rank is None:
        return rehearse(flags, arguments)
    node = make_node(flags)
    if node.verb == "train":
        Console(True, must_arrive=False).print(
            f"machine {node.machine_rank} of {node.num_machines}: meeting the others at"
            f" {node.main_process_ip}:{node.main_process_port} (up to {timeout_s:g} s)"
        )
    try:
        meet(node, timeout_s)
    except FailedElsewhere as error:  # it was said on that machine's screen only
        tell(one_line(error))
        return error.code
    return os.execv(sys.executable, node.command(arguments))


def make_node(flags: Multinode) -> Node:
    """Return this machine, with as many processes as it has GPUs, or one."""
    assert flags.machine_rank is not None and flags.main_process_ip
    if flags.machine_rank >= flags.num_machines:
        raise UsageError(
            f"MACHINE_RANK={flags.machine_rank}: of {flags.num_machines} machines, the ranks are 0"
            f" to {flags.num_machines - 1}; set NUM_MACHINES too if there are more"
        )
    gpus = hardware.gpus()
    return Node(
        flags.machine_rank,
        flags.main_process_ip,
        flags.main_process_port or DEFAULT_PORT,
        flags.num_machines,
        flags.nproc_per_node or gpus or 1,
        config="multi_node" if gpus else "multi_node_cpu",
        verb=flags.verb,
    )


def rehearse(flags: Multinode, arguments: list[str]) -> int:
    """Run two launchers on this machine; return 1, accelerate's code, if one of them fails."""
    console = Console(True, must_arrive=False)
    console.print("REHEARSAL: two nodes on this machine, on its CPU, over TCP")
    if flags.num_machines != 2:
        raise UsageError(
            f"NUM_MACHINES={flags.num_machines}: the rehearsal has two nodes; for more, give"
            " MACHINE_RANK and MAIN_PROCESS_IP"
        )
    port, per_node = flags.main_process_port or free_port(), flags.nproc_per_node or 1
    nodes = [Node(rank, "127.0.0.1", port, 2, per_node, "multi_node_cpu") for rank in (0, 1)]
    launchers = []
    for node in nodes:
        console.print(f"node {node.machine_rank}: {' '.join(node.command(arguments)[1:])}")
        launchers.append(subprocess.Popen(node.command(arguments)))
    try:
        while True:
            codes = [launcher.poll() for launcher in launchers]
            if any(codes) or None not in codes:
                return next((code for code in codes if code), 0)
            time.sleep(0.1)
    finally:
        for launcher in launchers:
            if launcher.poll() is None:
                launcher.terminate()
        for launcher in launchers:
            launcher.wait()
