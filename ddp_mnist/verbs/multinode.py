"""One machine's part of a run over several: `make train-multinode`, or `make doctor`.

    python -m ddp_mnist.verbs.multinode --machine-rank 0 --main-process-ip HOST -- --epochs 2

A bare launcher waits 15 minutes for a missing machine and then does not say which. Here the
machines meet first, with a deadline, and only then does each start `accelerate launch`. Without
rank and address, two nodes are rehearsed on this machine, over TCP, each with its own launcher.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from ddp_mnist.cluster import hardware
from ddp_mnist.cluster.local import free_port
from ddp_mnist.cluster.nodes import DEFAULT_PORT, Node, meet
from ddp_mnist.config import Distribution
from ddp_mnist.errors import CheckFailed, UsageError
from ddp_mnist.run.console import Console, run_program, tell


def main(argv: Sequence[str] | None = None) -> NoReturn:
    run_program(run, argv)


def run(argv: list[str]) -> int:
    """The exit code of the rehearsal; a real node becomes its launcher and does not return."""
    flags, arguments = parse(argv)
    if bool(flags.machine_rank) != bool(flags.main_process_ip):
        given, missing = "MACHINE_RANK", "MAIN_PROCESS_IP"
        if flags.main_process_ip:
            given, missing = missing, given
        raise UsageError(
            f"{given}: needs {missing} beside it, e.g. make train-multinode MACHINE_RANK=0"
            " MAIN_PROCESS_IP=192.168.1.201; give both, or none to rehearse on this machine"
        )
    if not flags.machine_rank:
        return rehearse(flags, arguments)
    node = make_node(flags)
    if node.verb == "doctor":
        examine_way(node, arguments)
    else:
        timeout_s = timeout_of(node.verb, arguments)
        Console(True, must_arrive=False).print(
            f"machine {node.machine_rank} of {node.num_machines}: meeting the others at"
            f" {node.main_process_ip}:{node.main_process_port} (up to {timeout_s:g} s)"
        )
        meet(node, timeout_s)
    return os.execv(sys.executable, node.command(arguments))


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our flags, and after `--` the verb's. An empty value, as make passes it, is none."""
    end = argv.index("--") if "--" in argv else len(argv)
    ours, arguments = argv[:end], argv[end + 1 :]
    parser = argparse.ArgumentParser(
        prog="python -m ddp_mnist.verbs.multinode", description=__doc__
    )
    for name in ("machine-rank", "main-process-ip", "main-process-port"):
        parser.add_argument(f"--{name}", default="")
    for name in ("num-machines", "nproc-per-node"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--verb", default="train", choices=("train", "doctor"))
    return parser.parse_args(ours), arguments


def make_node(flags: argparse.Namespace) -> Node:
    gpus = hardware.gpus()
    num_machines = whole_number("NUM_MACHINES", flags.num_machines or "2", least=1)
    rank = whole_number("MACHINE_RANK", flags.machine_rank, least=0)
    if rank >= num_machines:
        raise UsageError(
            f"MACHINE_RANK={rank}: of {num_machines} machines, the ranks are 0 to"
            f" {num_machines - 1}; set NUM_MACHINES too if there are more"
        )
    return Node(
        machine_rank=rank,
        main_process_ip=flags.main_process_ip,
        main_process_port=whole_number(
            "MAIN_PROCESS_PORT", flags.main_process_port or str(DEFAULT_PORT), least=1, most=65535
        ),
        num_machines=num_machines,
        nproc_per_node=whole_number(
            "NPROC_PER_NODE", flags.nproc_per_node or str(gpus or 1), least=1
        ),
        config="multi_node" if gpus else "multi_node_cpu",
        verb=flags.verb,
    )


def whole_number(name: str, text: str, *, least: int, most: int = 10**6) -> int:
    if not text.isdecimal() or not least <= int(text) <= most:
        raise UsageError(f"{name}={text}: must be a whole number from {least} to {most}")
    return int(text)


def timeout_of(verb: str, arguments: list[str]) -> float:
    """The --dist-timeout among the verb's flags, or its default; the verb checks the rest."""
    from ddp_mnist.cli import DOCTOR_TIMEOUT_S, make_parser

    typed = vars(make_parser().parse_args([verb, *arguments]))
    default = DOCTOR_TIMEOUT_S if verb == "doctor" else Distribution.dist_timeout
    return typed.get("dist_timeout", default)


def examine_way(node: Node, arguments: list[str]) -> None:
    """`meet` for the doctor, who says how far it goes. Raises CheckFailed where it does not.

    The findings go on to the processes that are started next, for the verdict of all.
    """
    from ddp_mnist import cli
    from ddp_mnist.doctor import examination, network
    from ddp_mnist.verify.results import failure_summary

    typed = cli.make_parser().parse_args(["doctor", *arguments])
    say, findings = tell if typed.json else Console(True).print, []
    for finding in network.examine_way(node, timeout_of("doctor", arguments)):
        say(f"machine {node.machine_rank}: {finding}")
        findings.append(finding)
    if wrong := failure_summary("doctor", findings):
        verdict = examination.describe(findings, processes=0)
        if typed.save:
            cli.write_json(Path(typed.save), verdict)
        Console(typed.json).print(json.dumps(verdict))
        raise CheckFailed(f"machine {node.machine_rank}: {wrong}")
    network.pass_on(findings)


def rehearse(flags: argparse.Namespace, arguments: list[str]) -> int:
    """Two launchers on this machine, one machine rank each; 1, accelerate's code, if one fails."""
    console = Console(True, must_arrive=False)
    console.print("REHEARSAL: two nodes on this machine, on its CPU, over TCP")
    if flags.num_machines not in ("", "2"):
        raise UsageError(
            f"NUM_MACHINES={flags.num_machines}: the rehearsal has two nodes; for more, give"
            " MACHINE_RANK and MAIN_PROCESS_IP"
        )
    port = whole_number(
        "MAIN_PROCESS_PORT", flags.main_process_port or str(free_port()), least=1, most=65535
    )
    per_node = whole_number("NPROC_PER_NODE", flags.nproc_per_node or "1", least=1)
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


if __name__ == "__main__":
    main()
