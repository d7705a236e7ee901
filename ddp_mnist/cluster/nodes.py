"""One machine of a run over several: its settings, and how the machines find each other beforehand.

A bare launcher waits 15 minutes for a missing machine and then does not say which one. So the
machines join a store first, with a deadline; then each starts `accelerate launch`.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from ddp_mnist.cluster.launch import Launch
from ddp_mnist.config.launch_configs import config_file
from ddp_mnist.errors import UsageError

DEFAULT_PORT = 12345


@dataclass(frozen=True)
class Node:
    """This machine among the machines of a run; `config` names a file of accelerate_configs."""

    machine_rank: int
    main_process_ip: str
    main_process_port: int
    num_machines: int
    nproc_per_node: int
    config: str
    verb: str = "train"

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Return the command that starts this machine's processes."""
        return [
            *(sys.executable, "-m", "accelerate.commands.launch"),
            *("--config_file", str(config_file(self.config))),
            *("--num_machines", str(self.num_machines)),
            *("--num_processes", str(self.num_machines * self.nproc_per_node)),
            *("--machine_rank", str(self.machine_rank)),
            *("--main_process_ip", self.main_process_ip),
            *("--main_process_port", str(self.main_process_port)),
            *("-m", "ddp_mnist", self.verb, *arguments),
        ]


def join_machines(node: Node, timeout_s: float) -> None:
    """Return on every machine once all have joined and agree on their numbers.

    Raise UsageError if the numbers differ; otherwise raise as `rendezvous.join_store` does.
    """
    from ddp_mnist.cluster import rendezvous  # imports torch, which a rehearsal can do without

    host, port = node.main_process_ip, node.main_process_port
    launch = Launch("machine", node.machine_rank, node.num_machines, main_host=host, main_port=port)
    store = rendezvous.join_store(launch, timeout_s)
    numbers = {"NPROC_PER_NODE": node.nproc_per_node, "the config": f"{node.config}.yaml"}
    try:
        rendezvous.check_same(store, numbers)
    except UsageError:  # every machine finds the difference
        store.close()
        raise
    store.close()  # the launcher of machine 0 opens the port again
