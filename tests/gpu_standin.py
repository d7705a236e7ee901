"""A machine that shows GPUs and has none, and what this project decides there.

    python -m tests.gpu_standin     prints the decisions as JSON, in the environment of `machine`

Where a decision takes processes that meet, they meet, over gloo.
"""

import argparse
import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

HERE = Path(__file__).parent / "machine_with_gpus"
REPOSITORY = Path(__file__).parent.parent
YAMLS = ("single_gpu", "multi_gpu", "multi_node", "cpu", "multi_cpu", "multi_node_cpu")
PAIR = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
TORCHRUN = {**PAIR, "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"}
SRUN = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "localhost"}


def machine(gpus: int, works: bool = True) -> dict[str, str | None]:
    """Return the variables of a command on such a machine.

    Args:
        gpus: that torch counts.
        works: False is a driver that is too old for this torch: it counts them and runs nothing.
    """
    return {
        "CUDA_VISIBLE_DEVICES": None,
        "STANDIN_GPUS": str(gpus),
        "STANDIN_WORKS": "1" if works else "",
        "PATH": os.pathsep.join([str(HERE), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(HERE), str(REPOSITORY)]),
    }


# --- What one process decides for itself


def decision(decide: Callable[[], Any]) -> Any:
    """Return what it decides, or the sentence with which it refuses."""
    from ddp_mnist.errors import DdpMnistError

    try:
        return decide()
    except DdpMnistError as error:
        return str(error)


def way(variables: dict[str, str], *flags: str) -> Any:
    """Return device, backend and precision of `train *flags` under these variables."""
    from ddp_mnist import cli
    from ddp_mnist.cluster.device import choose_backend, choose_device, precision_in_effect
    from ddp_mnist.cluster.launch import find_launch

    def decide() -> list[str]:
        typed = cli.train_config(flags).distribution
        launch = find_launch(typed)
        device = choose_device(typed)
        precision = precision_in_effect(typed, launch, device)
        return [device, choose_backend(typed, launch, device), precision]

    with patch.dict(os.environ, variables):
        return decision(decide)


def workers(config: str) -> list[dict[str, str]]:
    """Return the environment of each process that `accelerate launch` would start here."""
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

    yaml = str(REPOSITORY / "accelerate_configs" / f"{config}.yaml")
    with (
        patch.object(launch.subprocess, "Popen", one),
        patch.object(torch.distributed.run, "run", several),
    ):
        typed = ["--config_file", yaml, "-m", "ddp_mnist", "train"]
        launch.launch_command(launch.launch_command_parser().parse_args(typed))
    return started


def launched(config: str, *flags: str) -> Any:
    """Return how many workers a stored configuration starts, and what they decide."""
    decided = [way(env, *flags) for env in workers(config)]
    assert all(each == decided[0] for each in decided)
    return [len(decided), decided[0]]


def on_this_machine() -> dict[str, Any]:
    import torch

    from ddp_mnist.bench import benches, commands
    from ddp_mnist.cluster import device, hardware
    from ddp_mnist.cluster.local import backend_among
    from ddp_mnist.doctor import checks
    from ddp_mnist.doctor.flags import Doctor
    from ddp_mnist.doctor.machine import processors
    from ddp_mnist.verbs import multinode

    device.has_native_bf16 = lambda: False
    made = multinode.make_node(multinode.Multinode(machine_rank=0, main_process_ip="192.0.2.1"))
    for_doctor = checks.default_processes()

    def config_for(processes: int) -> str:
        command = commands.launcher(processes)
        return Path(command[command.index("--config_file") + 1]).stem

    ranks = {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    return {
        "gpus": hardware.gpus(),
        "node": [made.config, made.nproc_per_node],
        "doctor": [for_doctor, backend_among(for_doctor)],
        "doctor finds": [f"{each.status} {each.name}" for each in processors(Doctor())],
        "doctor opened one": getattr(torch.cuda, "opened", False),
        "bench": {what: benches.default_processes(what) for what in benches.BENCHES},
        "bench says": benches.sharing_notes(benches.default_processes("loop")),
        "bench launches": [decision(functools.partial(config_for, size)) for size in (1, 2)],
        "yaml": {config: launched(config) for config in YAMLS},
        "yaml --cpu": launched("single_gpu", "--cpu"),
        "yaml --cpu fp16": launched("single_gpu", "--cpu", "--mixed-precision", "fp16"),
        "plain": way({}),
        "plain --cpu": way({}, "--cpu"),
        "torchrun": way({**TORCHRUN, **ranks}),
        "torchrun gloo": way({**TORCHRUN, **ranks}, "--backend", "gloo"),
        "srun": way({**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}),
        "tcp": way({}, "--init-method", "tcp://127.0.0.1:1", "--rank", "0", "--world-size", "2"),
    }


# --- What processes decide that have met


def meet(flags: dict[str, Any], each: list[dict[str, str | None]]) -> list[str]:
    """Join as one rank; `each` has variables of each rank, or None for those that are not set.

    Returns:
        The rank's device, its backend, LOCAL_RANK, and the class around its net.
    """
    import torch

    from ddp_mnist.cluster.launch import find_launch
    from ddp_mnist.cluster.world import join_world
    from ddp_mnist.config import Distribution

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


def meetings(gpus: int, folder: Path) -> dict[str, Any]:
    """Return by name what both ranks came to, or the sentence that one of them reports."""
    from ddp_mnist import errors
    from ddp_mnist.cluster.local import LocalWorld, free_port, run_world
    from ddp_mnist.verify import watch

    def world(each: list[Any] | None = None, **flags: Any) -> Any:
        outcomes = LocalWorld(2, meet, flags, each or [{}, {}], folder=folder).outcomes()
        refused = [error for error in outcomes if isinstance(error, errors.DdpMnistError)]
        if refused:
            said = {str(error) for error in refused}
            return [*said, sorted({error.code for error in refused})]
        return outcomes

    if gpus == 1:
        return {
            "nccl": world(),
            "gloo": world(backend="gloo"),
            "srun torchrun": world([{"SLURM_STEP_ID": "0"}] * 2),
            "cpu": world(cpu=True),
            "verify": run_world(1, a_proof, watch.proof_config(epochs=1), folder=folder),
        }
    own = [{"CUDA_VISIBLE_DEVICES": str(gpu)} for gpu in range(2)]
    tcp = dict.fromkeys(("LOCAL_WORLD_SIZE", "LOCAL_RANK"))
    slurm = {**tcp, "RANK": None, "WORLD_SIZE": None, **SRUN, "MASTER_PORT": str(free_port())}
    tasks = [{"SLURM_PROCID": f"{rank}", "SLURM_LOCALID": f"{rank}"} for rank in range(2)]
    return {
        "nccl": world(),
        "a GPU each": world([tcp | each for each in own]),
        "the same GPU": world([tcp | own[0]] * 2),
        "srun": world([slurm | task | each for task, each in zip(tasks, own, strict=True)]),
        "plain_ddp.py": run_world(2, plainly, folder=folder),
    }


def a_proof(config: Any) -> bool:
    """Return whether a run of `verify` opened a GPU."""
    import torch

    from ddp_mnist.verify.watch import just_train

    just_train(config)
    return torch.cuda.opened  # type: ignore[attr-defined]


def plainly() -> int:
    """Return the GPU that plain_ddp.py works on."""
    import torch

    from ddp_mnist import plain_ddp

    with patch.object(sys, "argv", ["plain_ddp", "--dataset", "digits", "--epochs", "1"]):
        plain_ddp.main()
    return torch.cuda.current_device()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--meet", type=int, default=0, metavar="GPUS")
    arguments = parser.parse_args()
    with contextlib.redirect_stdout(sys.stderr):
        found = on_this_machine()
        if arguments.meet:
            found["met"] = meetings(arguments.meet, arguments.folder)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
