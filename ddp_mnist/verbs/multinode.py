"""One machine's part of a run over several: `make train-multinode`, or `make doctor`.

A bare launcher waits 15 minutes for a missing machine and then does not say which one. So the
machines join a store first, with a deadline; then each starts `accelerate launch`. Without a rank
and an address, the nodes are rehearsed on this machine, over TCP, each with its own launcher.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_mnist.cluster import hardware
from ddp_mnist.cluster.launch import Launch, check_host, config_file
from ddp_mnist.cluster.local_world import free_port
from ddp_mnist.config.flag_fields import Flags, flag
from ddp_mnist.errors import FailedElsewhere, UsageError, one_line
from ddp_mnist.system.console import Console, tell

DEFAULT_PORT = 12345


@dataclass(frozen=True)
class Multinode(Flags):
    """The variables that make was given, and the verb to run.

    for example:
      make train-multinode MACHINE_RANK=0 MAIN_PROCESS_IP=192.168.1.201
    """

    machine_rank: int | None = flag(None, "This machine's number, from 0.", least=0)
    main_process_ip: str | None = flag(None, "Host name or address of machine 0.")
    main_process_port: int | None = flag(None, "Its free port [12345].", least=1, most=65535)
    num_machines: int = flag(2, "Number of machines.", least=1)
    nproc_per_node: int | None = flag(None, "Processes per machine [one per GPU, else 1].", least=1)
    verb: str = flag("train", "Verb to run.", choices=("train", "doctor"))


@dataclass(frozen=True)
class Node:
    """This machine among the machines of a run: the options of `accelerate launch`, by name."""

    config_file: Path
    num_machines: int
    num_processes: int  # of all machines
    machine_rank: int
    main_process_ip: str
    main_process_port: int

    def command(self, verb: str, arguments: Sequence[str]) -> list[str]:
        """Return the command that starts this machine's processes."""
        options = (word for name, value in vars(self).items() for word in (f"--{name}", str(value)))
        launch = [sys.executable, "-m", "accelerate.commands.launch", *options]
        return [*launch, "-m", "ddp_mnist", verb, *arguments]


def run(flags: Multinode, arguments: list[str], timeout_s: float) -> int:
    """Return the exit code of the rehearsal, or of a failed machine; else become the launcher.

    `arguments` are the verb's. Raises as `join_machines` does.
    """
    if flags.machine_rank is None and flags.main_process_ip is None:
        return rehearse(flags, arguments)
    node = make_node(flags)
    place = f"{node.main_process_ip}:{node.main_process_port} (up to {timeout_s:g} s)"
    tell(f"machine {node.machine_rank} of {node.num_machines}: joining the others at {place}")
    try:
        join_machines(node, timeout_s)
    except FailedElsewhere as error:  # printed on that machine only
        tell(one_line(error))
        return error.code
    return os.execv(sys.executable, node.command(flags.verb, arguments))


def make_node(flags: Multinode) -> Node:
    """Return this machine, with one process per GPU, or one."""
    rank, address, size = flags.machine_rank, flags.main_process_ip, flags.num_machines
    if rank is None or address is None:
        typed = f"MAIN_PROCESS_IP={address}" if rank is None else f"MACHINE_RANK={rank}"
        missing = "MACHINE_RANK" if rank is None else "MAIN_PROCESS_IP"
        raise UsageError(f"{typed}: {missing} is missing; give it too, or neither for a rehearsal")
    check_host("MAIN_PROCESS_IP=", address)
    if rank >= size:
        raise UsageError(f"MACHINE_RANK={rank}: must be below NUM_MACHINES={size}; correct one")
    gpus, port = hardware.gpus(), flags.main_process_port or DEFAULT_PORT
    config = config_file("multi_node" if gpus else "multi_node_cpu")
    processes = size * (flags.nproc_per_node or gpus or 1)
    return Node(config, size, processes, rank, main_process_ip=address, main_process_port=port)


def join_machines(node: Node, timeout_s: float) -> None:
    """Return on every machine once all have joined and agree on their numbers.

    Raise UsageError if the numbers differ; otherwise raise as `rendezvous.join_store` does.
    """
    from ddp_mnist.cluster import rendezvous  # imports torch, which a rehearsal can do without

    host, port = node.main_process_ip, node.main_process_port
    launch = Launch("machine", node.machine_rank, node.num_machines, main_host=host, main_port=port)
    store = rendezvous.join_store(launch, timeout_s)
    here = node.num_processes // node.num_machines
    numbers = {"NPROC_PER_NODE": here, "the config": node.config_file.name}
    difference = store.decide_for_all("numbers", numbers, rendezvous.first_difference)
    store.close()  # the launcher of machine 0 opens the port again
    if difference:
        raise UsageError(difference)


def rehearse(flags: Multinode, arguments: list[str]) -> int:
    """Run a launcher for each node; return 1, accelerate's code, if one of them fails."""
    console, nodes = Console(True, must_arrive=False), flags.num_machines
    console.print(f"REHEARSAL: {nodes} nodes on this machine, on its CPU, over TCP")
    port, size = flags.main_process_port or free_port(), nodes * (flags.nproc_per_node or 1)
    launchers: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(nodes):
            node = Node(config_file("multi_node_cpu"), nodes, size, rank, "127.0.0.1", port)
            command = node.command(flags.verb, arguments)
            console.print(f"node {rank}: {' '.join(command[1:])}")
            launchers.append(subprocess.Popen(command))
        # If one ends too early, the processes of the other lose their peers, and end too.
        return next(filter(None, [launcher.wait() for launcher in launchers]), 0)
    finally:
        for launcher in launchers:
            launcher.terminate()
        for launcher in launchers:
            launcher.wait()
