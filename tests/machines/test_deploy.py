"""The recipes for clusters, as far as they can be run without one; test_slurm.py has its own."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddp_mnist.cluster.local_world import free_port
from ddp_mnist.system.files import read_json
from tests.commands import REPOSITORY, Started, all_succeed
from tests.hosts import require_root

pytestmark = pytest.mark.system
DEPLOY = REPOSITORY / "deploy"
OUR_PYTHON = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
# Flags beside those of a recipe: data that need no network, the smallest net
SMALL = ["--dataset", "digits", "--model", "mlp", "--mixed-precision", "no", "--epochs", "2"]


def test_the_scripts_are_clean() -> None:
    shellcheck = Path(sysconfig.get_path("scripts")) / "shellcheck"
    command = [shellcheck, DEPLOY / "slurm.sbatch", DEPLOY / "ssh.sh"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# --- Kubernetes


def manifests(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def test_the_job_is_what_kubernetes_expects() -> None:
    import kubernetes_validate  # slow, and the only one that needs it

    service, job = manifests("kubernetes-job.yaml")
    for each in (service, job):
        kubernetes_validate.validate(each, "1.30", strict=True)
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    variables = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
    assert int(variables["WORLD_SIZE"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert int(variables["MASTER_PORT"]) == service["spec"]["ports"][0]["port"]
    mounted = {each["name"]: each["mountPath"] for each in pod["containers"][0]["volumeMounts"]}
    assert {each["name"] for each in pod["volumes"]} == set(mounted)
    assert mounted["runs"] == "/app/runs"  # where the image's working directory has them


def test_the_trainjob_is_what_kubeflow_expects() -> None:
    from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

    [trainjob] = manifests("kubernetes-trainjob.yaml")
    read = TrainerV1alpha1TrainJob.from_dict(trainjob)
    assert read.to_dict() == trainjob  # a field that it does not know would be lost


def test_the_job_trains_on_two_pods(tmp_path: Path) -> None:
    """Where the name that the Service gives to rank 0's pod is known."""
    require_root("a name for one command")
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost ddp-mnist-0.ddp-mnist\n")
    mount = f'mount --bind {hosts} /etc/hosts && exec "$@"'
    _, job = manifests("kubernetes-job.yaml")
    [container] = job["spec"]["template"]["spec"]["containers"]
    command = ["unshare", "--mount", "sh", "-c", mount, "sh"]
    command += [*container["command"], *container["args"], *SMALL]
    pods = [tmp_path / f"pod-{index}" for index in range(job["spec"]["completions"])]
    started = []
    for index, pod in enumerate(pods):
        pod.mkdir()
        given = {each["name"]: each.get("value", str(index)) for each in container["env"]}
        started.append(Started(command, pod, given | OUR_PYTHON, program=None))
    all_succeed(started)
    assert read_json(pods[0] / "runs" / "job" / "summary.json")["world_size"] == 2
    assert not (pods[1] / "runs").exists()  # only rank 0 needs the disk


def test_the_trainjob_trains_on_two_nodes(tmp_path: Path) -> None:
    """With the variables that Kubeflow's runtime for torch gives each node."""
    [trainjob] = manifests("kubernetes-trainjob.yaml")
    trainer = trainjob["spec"]["trainer"]
    variables = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    started = []
    for rank in range(trainer["numNodes"]):
        own = variables | OUR_PYTHON | {"PET_NODE_RANK": str(rank)}
        words = [*trainer["command"], *trainer["args"], *SMALL]
        started.append(Started(words, tmp_path, own, program=None))
    all_succeed(started)
    summary = read_json(tmp_path / "runs" / "trainjob" / "summary.json")
    assert (summary["world_size"], summary["num_machines"]) == (2, 2)


# --- The rest


def test_the_image_has_what_an_install_needs() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    copied = [name for line in lines if line.startswith("COPY") for name in line.split()[1:-1]]
    assert all((REPOSITORY / name).exists() for name in copied)
    needed = {"pyproject.toml", "README.md", "LICENSE", "ddp_mnist", "accelerate_configs"}
    assert needed | {"constraints.txt"} <= {*copied}
    [work] = [line.split()[1] for line in lines if line.startswith("WORKDIR")]
    assert work == "/app"
    command = json.loads(next(line for line in lines if line.startswith("CMD"))[3:])
    assert command == ["python", "-m", "ddp_mnist", "doctor"]
