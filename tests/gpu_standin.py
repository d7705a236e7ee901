"""A machine that shows GPUs and has none, and what this project decides there.

    python -m tests.gpu_standin FOLDER     prints the decisions by KIND as JSON

It begins on the machine with one GPU, and becomes the others. Where a decision takes processes
that meet, they meet, over gloo.
"""

import contextlib
import functools
import io
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

from tests.commands import REPOSITORY, python_path

HERE = Path(__file__).parent / "machine_with_gpus"
YAMLS = ("single_gpu", "multi_gpu", "multi_node", "cpu", "multi_cpu", "multi_node_cpu")
PAIR = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
TORCHRUN = {**PAIR, "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"}
SRUN = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "localhost"}


# By kind of machine. A driver that is too old for this torch counts its GPUs and runs nothing.
KINDS = {
    "one": {"STANDIN_GPUS": "1", "STANDIN_WORKS": "1"},
    "two": {"STANDIN_GPUS": "2", "STANDIN_WORKS": "1"},
    "old driver": {"STANDIN_GPUS": "1", "STANDIN_WORKS": ""},
}


def machine(kind: str) -> dict[str, str | None]:
    """Return the variables of a command on such a machine."""
    return {
        **KINDS[kind],
        "CUDA_VISIBLE_DEVICES": None,
        "PATH": os.pathsep.join([str(HERE), os.environ["PATH"]]),
        "PYTHONPATH": python_path(HERE, REPOSITORY),
    }


# --- What one process decides for itself


def way(variables: dict[str, str], **flags: Any) -> Any:
    """Return what `train` does with these variables: its device, backend and precision.

    Or the sentence with which it refuses.
    """
    from ddp_mnist.cluster import hardware
    from ddp_mnist.cluster.device import choose_backend, choose_device, precision_in_effect
    from ddp_mnist.cluster.launch import find_launch
    from ddp_mnist.config.distribution import Distribution
    from ddp_mnist.errors import DdpMnistError

    typed = Distribution(**flags)
    hardware.hidden_once.clear()  # each of them is a process of its own
    with patch.dict(os.environ, variables):
        try:
            launch, device = find_launch(typed), choose_device(typed)
            precision = precision_in_effect(typed, launch, device)
            return [device, choose_backend(typed, launch, device), precision]
        except DdpMnistError as error:
            return str(error)


def workers(*flags: str) -> list[dict[str, str]]:
    """Return the environment of each process that `accelerate launch *flags` would start here."""
    import torch.distributed.run
    from accelerate.commands import launch

    started: list[dict[str, str]] = []

    def one(command: Any, env: dict[str, str]) -> Any:  # noqa: ARG001
        started.append(env)
        return SimpleNamespace(wait=lambda: None, returncode=0)

    def several(arguments: Any) -> None:
        local_size = int(arguments.nproc_per_node)
        nodes = int(arguments.nnodes.partition(":")[0])
        for rank in range(local_size):
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": nodes * local_size}
            numbers |= {"LOCAL_WORLD_SIZE": local_size, "GROUP_WORLD_SIZE": nodes}
            own = {name: str(number) for name, number in numbers.items()}
            started.append({**os.environ, **TORCHRUN, **own})

    with (
        patch.object(launch.subprocess, "Popen", one),
        patch.object(torch.distributed.run, "run", several),
    ):
        typed = [*flags, "-m", "ddp_mnist", "train"]
        launch.launch_command(launch.launch_command_parser().parse_args(typed))
    return started


def launched(config: str, **flags: Any) -> Any:
    """Return how many workers a stored configuration starts, and what they decide."""
    yaml = str(REPOSITORY / "accelerate_configs" / f"{config}.yaml")
    decided = [way(env, **flags) for env in workers("--config_file", yaml)]
    assert all(each == decided[0] for each in decided)
    return [len(decided), decided[0]]


def on_this_machine() -> dict[str, Any]:
    import torch

    from ddp_mnist.cluster import hardware
    from ddp_mnist.cluster.local_world import backend_among
    from ddp_mnist.doctor.machine_checks import processors
    from ddp_mnist.verbs import multinode
    from ddp_mnist.verbs.flags import Doctor

    torch.cpu.get_capabilities = dict  # type: ignore[assignment]
    made = multinode.make_node(multinode.Multinode(machine_rank=0, main_process_ip="192.0.2.1"))
    for_doctor = hardware.default_processes(2)
    return {
        "gpus": hardware.gpus(),
        "node": [made.config, made.nproc_per_node],
        "doctor": [for_doctor, backend_among(for_doctor)],
        "doctor finds": [f"{each.status} {each.name}" for each in processors(Doctor())],
        "doctor finds of its own": on_the_last_gpu(),
        "doctor opened one": getattr(torch.cuda, "opened", False),
        "bench": [hardware.default_processes(least) for least in (1, 2)],
        "yaml": {config: launched(config) for config in YAMLS},
        "yaml --cpu": launched("single_gpu", cpu=True),
        "yaml --cpu fp16": launched("single_gpu", cpu=True, mixed_precision="fp16"),
        "accelerate --cpu": [way(env) for env in workers("--cpu", "--num_processes", "2")],
    }


def on_the_last_gpu() -> list[str]:
    """Return what the doctor finds if it may use the last GPU alone."""
    from ddp_mnist.cluster.local_world import run_world
    from ddp_mnist.doctor import machine_checks as machine
    from ddp_mnist.verbs.flags import Doctor

    own = {"CUDA_VISIBLE_DEVICES": str(int(os.environ["STANDIN_GPUS"]) - 1)}
    there = functools.partial(run_world, variables={**os.environ, **own})
    with patch.dict(os.environ, own), patch.object(machine, "run_world", there):
        return [f"{each.status} {each.name}" for each in machine.processors(Doctor())]


# --- What processes decide that have met


def meet(flags: dict[str, Any], each: list[dict[str, str | None]]) -> list[str]:
    """Join as one rank. Return its device, backend, LOCAL_RANK, and the class around its net.

    `each` has variables of each rank, or None for those that are not set.
    """
    import torch

    from ddp_mnist.cluster.launch import find_launch
    from ddp_mnist.cluster.world import join_world
    from ddp_mnist.config.distribution import Distribution

    for name, value in each[int(os.environ["RANK"])].items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    typed = Distribution(dist_timeout=20, **flags)
    with join_world(typed, find_launch(typed)) as world:
        model = world.accelerator.prepare_model(torch.nn.Linear(2, 2))
        world.accelerator.wait_for_everyone()
        device, backend = str(world.accelerator.device), world.backend
        return [device, backend, os.environ["LOCAL_RANK"], type(model).__name__]


def meeting(kind: str, folder: Path, each: list[Any] | None = None, **flags: Any) -> Any:
    """Return what both ranks came to, or the sentence that one of them reports, and its code."""
    from ddp_mnist import errors
    from ddp_mnist.cluster.local_world import LocalWorld

    outcomes = LocalWorld(
        2, meet, flags, each or [{}, {}], folder=folder, variables=KINDS[kind]
    ).outcomes()
    refused = [error for error in outcomes if isinstance(error, errors.DdpMnistError)]
    if refused:
        return [*{str(error) for error in refused}, sorted({error.code for error in refused})]
    return outcomes


def on_one_gpu(folder: Path) -> dict[str, Any]:
    from ddp_mnist.cluster.local_world import run_world
    from ddp_mnist.verify import watch

    met = functools.partial(meeting, "one", folder)
    return {
        "nccl": met(),
        "gloo": met(backend="gloo"),
        "cpu": met(cpu=True),
        "plain_ddp.py": run_world(2, plainly, folder=folder, variables=KINDS["one"]),
        "verify": run_world(1, a_proof, watch.proof_config(epochs=1), folder=folder),
    }


def on_two_gpus(folder: Path) -> dict[str, Any]:
    from ddp_mnist.cluster.local_world import free_port, run_world

    met = functools.partial(meeting, "two", folder)
    own = [{"CUDA_VISIBLE_DEVICES": str(gpu)} for gpu in range(2)]
    tcp = dict.fromkeys(("LOCAL_WORLD_SIZE", "LOCAL_RANK"))
    slurm = {**tcp, "RANK": None, "WORLD_SIZE": None, **SRUN, "MASTER_PORT": str(free_port())}
    tasks = [{"SLURM_PROCID": f"{rank}", "SLURM_LOCALID": f"{rank}"} for rank in range(2)]
    return {
        "nccl": met(),
        "a GPU each": met([tcp | each for each in own]),
        "the same GPU": met([tcp | own[0]] * 2),
        "srun": met([slurm | task | each for task, each in zip(tasks, own, strict=True)]),
        "plain_ddp.py": run_world(2, plainly, folder=folder, variables=KINDS["two"]),
    }


def a_proof(config: Any) -> bool:
    """Return whether a run of `verify` opened a GPU."""
    import torch

    from ddp_mnist.verify.watch import just_train

    just_train(config)
    return torch.cuda.opened  # type: ignore[attr-defined]


def plainly() -> tuple[int, str]:
    """Return the GPU that plain_ddp.py works on, and the backend that it asks for."""
    import torch
    import torch.distributed as dist

    from ddp_mnist import plain_ddp

    init = Mock(wraps=dist.init_process_group)
    with (
        patch.object(sys, "argv", ["plain_ddp", "--dataset", "digits", "--epochs", "1"]),
        patch.object(dist, "init_process_group", init),
    ):
        plain_ddp.main()
    return torch.cuda.current_device(), init.call_args.args[0]


def printed_by(*argv: str) -> str:
    """Return what a verb of the command line prints. Raise AssertionError if it fails."""
    from ddp_mnist import cli

    with contextlib.redirect_stdout(io.StringIO()) as console:
        try:
            cli.main(argv)
        except SystemExit as ended:
            assert not ended.code, console.getvalue()
    return console.getvalue()


def main() -> None:
    from ddp_mnist.cluster.local_world import preload, run_world

    preload("ddp_mnist.train", "ddp_mnist.verify.watch")
    folder, found = Path(sys.argv[1]), {}
    with contextlib.redirect_stdout(sys.stderr):
        for kind, variables in KINDS.items():
            # the forkserver of all has the variables of the first
            there = functools.partial(run_world, variables=variables)
            with (
                patch.dict(os.environ, variables),
                patch("ddp_mnist.doctor.machine_checks.run_world", there),
            ):
                found[kind] = on_this_machine()
                if kind == "one":
                    found[kind]["met"] = on_one_gpu(folder)
                    found[kind]["doctor prints"] = json.loads(
                        printed_by("doctor", "--dataset", "digits", "--json")
                    )
                    verify = ["verify", "--gpu", "--processes", "2", "--model", "mlp"]
                    found[kind]["verify prints"] = printed_by(
                        *verify, "--save", str(folder / "verify.json")
                    )
                    bench = ["bench", "loop", "--dataset", "digits", "--repeats", "5"]
                    found[kind]["bench prints"] = printed_by(*bench)
                elif kind == "two":
                    found[kind]["met"] = on_two_gpus(folder)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
