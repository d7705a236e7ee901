"""The machines of a run, which meet and agree before each of them starts its processes."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from ddp_mnist.cluster.launch import CONFIGS, Launch
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
            *("--config_file", f"{CONFIGS}/{self.config}.yaml"),
            *("--num_machines", str(self.num_machines)),
            *("--num_processes", str(self.num_machines * self.nproc_per_node)),
            *("--machine_rank", str(self.machine_rank)),
            *("--main_process_ip", self.main_process_ip),
            *("--main_process_port", str(self.main_process_port)),
            *("-m", "ddp_mnist", self.verb, *arguments),
        ]


def meet(node: Node, timeout_s: float) -> None:
    """Return on every machine once all have come and agree on their numbers.

    Raise UsageError if these differ, and else as `rendezvous.meet` does.
    """
    from ddp_mnist.cluster import rendezvous  # torch: a rehearsal does without

    host, port = node.main_process_ip, node.main_process_port
    launch = Launch("machine", node.machine_rank, node.num_machines, main_host=host, main_port=port)
    store = rendezvous.meet(launch, timeout_s)
    numbers = {"NPROC_PER_NODE": node.nproc_per_node, "the config": f"{node.config}.yaml"}
    try:
        rendezvous.check_same(store, numbers)
    except UsageError:  # every machine finds that
        store.close()
        raise
    store.close()  # the launcher of machine 0 opens the port again
