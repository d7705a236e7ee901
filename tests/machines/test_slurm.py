"""The recipe for SLURM under the real daemons, on three hosts. Needs root, slurm-wlm and munge.

A job mostly waits: for its other tasks, for a node, to be requeued. So all jobs run at once.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from ddp_mnist.system.files import read_json
from tests.chaos import newest_step, wait_until
from tests.commands import PROOF, REPOSITORY, SLOW, Ended, Started, require_programs
from tests.hosts import Hosts, require_hosts
from tests.run_checks import check_equal, metrics

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]
PATIENCE_S = 280  # for what takes some 10 s on a machine that does nothing else
RECIPE = str(REPOSITORY / "deploy" / "slurm.sbatch")
LONG = ["--dataset", "digits", "--model", "slow:Slow", "--mixed-precision", "no", "--epochs", "400"]
# What takes minutes by default: until a job starts again (cred_expire), until a node is taken for
# lost (SlurmdTimeout). Nodes have more CPUs than this machine, so that nobody waits for one. The
# node that dies is in a partition of its own: a job that names no nodes could be given it.
CONF = """
ClusterName=test
SlurmctldHost={names[0]}(10.77.0.1)
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=1
SlurmdTimeout=15
MessageTimeout=60
ReturnToService=2
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName={names[0]},{names[1]},{names[2]} NodeAddr=10.77.0.[1-3] CPUs=16
PartitionName=stays Nodes={names[0]},{names[1]} Default=YES
PartitionName=dies Nodes={names[0]},{names[2]}
"""


@dataclass
class Slurm:
    """A cluster with a node on each host; host 0 has the controller, and people log in there."""

    hosts: Hosts
    folder: Path
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.env = {"SLURM_CONF": f"{self.folder}/slurm.conf", "PY": sys.executable}
        self.env |= {"OMP_NUM_THREADS": "1", "SLURM_WAIT": "10"}
        conf = CONF.format(folder=self.folder, names=self.hosts.names)
        (self.folder / "slurm.conf").write_text(conf)
        # else slurmd looks for the machine's cgroups, which it has no use for here
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (self.folder / "key").write_bytes(os.urandom(1024))
        (self.folder / "key").chmod(0o600)
        files = {"socket": "munge", "key-file": "key", "pid-file": "pid", "seed-file": "seed"}
        options = [f"--{name}={self.folder}/{file}" for name, file in files.items()]
        self.start(0, "munged", "--foreground", "--force", *options)
        wait_until((self.folder / "munge").exists)
        self.start(0, "slurmctld", "-D")
        for index in range(3):
            self.start(index, "slurmd", "-D")
        idle = ["sinfo", "--noheader", "--states=idle", "--format=%D"]
        wait_until(lambda: self.typed(self.folder, *idle).out == "3\n", every_s=0.2)

    def start(self, index: int, *daemon: str) -> None:
        with (self.folder / f"{daemon[0]}{index}").open("ab") as log:
            command, env = self.hosts.command(index, *daemon), os.environ | self.env
            self.daemons.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))

    def typed(self, folder: Path, *command: str) -> Ended:
        started = Started(self.hosts.command(0, *command), folder, self.env, program=None)
        return started.ended(PATIENCE_S)

    def submit(self, folder: Path, *arguments: str, on: str = "01", tasks: int = 1) -> "Job":
        """Submit the recipe in `folder`, for `tasks` processes on each of these hosts."""
        (folder / "slow.py").write_text(SLOW)
        nodes = ",".join(self.hosts.names[int(index)] for index in on)
        options = [f"--nodelist={nodes}", f"--ntasks-per-node={tasks}", "--cpus-per-task=1"]
        command = ["sbatch", "--parsable", "--gpus-per-node=0", *options, *arguments]
        ended = self.typed(folder, *command)
        assert ended.code == 0, ended.err
        return Job(self, folder, ended.out.strip())


@dataclass
class Job:
    """A job, or an element of a job array."""

    slurm: Slurm
    folder: Path  # in which it was submitted
    name: str

    def ask(self, *command: str) -> str:
        """Return what a command says of the job; a busy controller has to be asked again."""
        ended = list[Ended]()

        def is_answered() -> bool:
            ended.append(self.slurm.typed(self.folder, *command, self.name))
            return ended[-1].code == 0

        wait_until(is_answered, every_s=1)
        return ended[-1].out

    def shown(self) -> dict[str, str]:
        return dict(re.findall(r"(\w+)=(\S*)", self.ask("scontrol", "show", "job")))

    def becomes(self, **expected: str) -> None:
        """Wait until SLURM says this of it, for as long as a busy machine may need."""
        wait_until(lambda: expected.items() <= self.shown().items(), PATIENCE_S, every_s=1)

    def cancel(self) -> None:
        self.ask("scancel")
        self.becomes(JobState="CANCELLED")

    @property
    def run(self) -> Path:
        return self.folder / "runs" / f"slurm-{self.shown()['JobId']}"

    def reached(self) -> int:
        status = self.run / "status.json"
        return (read_json(status)["step"] or -1) if status.exists() else -1

    def trains(self, after: int = 0) -> None:
        wait_until(lambda: self.reached() > after, PATIENCE_S, every_s=1)

    def printed(self) -> str:
        return (self.folder / f"slurm-{self.name}.out").read_text()

    def task(self, rank: int) -> psutil.Process:
        here = {"cwd": str(self.folder), "exe": str(Path(sys.executable).resolve())}
        mine = {"SLURM_JOB_ID": self.shown()["JobId"], "SLURM_PROCID": str(rank)}.items()
        [task] = [
            each
            for each in psutil.process_iter([*here, "environ"])
            if here.items() <= each.info.items() and mine <= each.info["environ"].items()
        ]
        return task


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    require_hosts()
    require_programs("munged", "slurmctld", "slurmd", "sbatch")
    # under /tmp, as a socket's path has to be short, and slurm.conf takes none with spaces
    with tempfile.TemporaryDirectory(prefix="ddp_mnist-", dir="/tmp") as folder:
        with Hosts(3) as hosts:
            slurm = Slurm(hosts, Path(folder))
            yield slurm
        for daemon in slurm.daemons:  # they ended with their hosts
            daemon.wait()


# --- What is done to jobs


def two_tasks_on_each_node(slurm: Slurm, folder: Path) -> Path:
    flags = [word for word in PROOF.split() if word != "--run-dir"]
    job = slurm.submit(folder, RECIPE, *flags, tasks=2)
    job.becomes(JobState="COMPLETED", Restarts="0")
    return job.run


def one_of_an_array_is_requeued_then_hangs_and_the_other_is_cancelled(
    slurm: Slurm, folder: Path
) -> None:
    """The last element is the one that has the array's own id."""
    array = slurm.submit(folder, "--array=0-1", RECIPE, *LONG, "--dist-timeout", "20")
    first, last = (Job(slurm, folder, f"{array.name}_{index}") for index in range(2))
    first.trains()
    last.trains()
    tasks = [last.task(rank) for rank in range(2)]
    last.ask("scancel", "--batch", "--signal=USR1")  # the signal of --signal=B:USR1@120
    # The signal comes to each task at its own moment, be it after the task has stopped with others.
    while running := psutil.wait_procs(tasks, timeout=0.05)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            running[-1].send_signal(signal.SIGUSR1)
    last.becomes(Restarts="1")
    stopped = newest_step(last.run)
    assert stopped == last.reached() > 0  # saved
    assert first.shown().items() >= {"JobState": "RUNNING", "Restarts": "0"}.items()

    first.cancel()
    last.trains(after=stopped)
    assert f"resumed    after step {stopped}; nothing changed\n" in last.printed()
    last.task(1).send_signal(signal.SIGSTOP)
    last.becomes(JobState="FAILED", Restarts="1")
    assert "ddp-mnist: error: lost contact with rank 1 of 2 (" in last.printed()

    assert first.shown().items() >= {"JobState": "CANCELLED", "Restarts": "0"}.items()
    assert newest_step(first.run) == first.reached()
    for job in (first, last):
        steps = [line["step"] for line in metrics(job.run)]
        assert steps == sorted(set(steps))  # each once


def a_node_dies_and_comes_back(slurm: Slurm, folder: Path) -> None:
    every = ["--checkpoint-every", "5"]
    job = slurm.submit(folder, "--partition=dies", RECIPE, *LONG, *every, on="02")
    wait_until(lambda: newest_step(job.run), PATIENCE_S, every_s=1)
    slurm.hosts.cut(2)
    slurm.hosts.kill(2)
    job.becomes(JobState="PENDING", Restarts="1")
    saved, reached = newest_step(job.run), job.reached()
    slurm.hosts.mend(2)
    slurm.start(2, "slurmd", "-D")
    job.trains(after=max(saved, reached))
    assert f"resumed    after step {saved}; nothing changed\n" in job.printed()
    job.cancel()
    assert job.shown().items() >= {"Restarts": "1"}.items()
    assert newest_step(job.run) == job.reached()


def the_doctor_examines_the_nodes(slurm: Slurm, folder: Path) -> None:
    doctor = [sys.executable, "-m", "ddp_mnist", "doctor", "--dataset", "digits"]
    ended = slurm.typed(folder, "srun", "--nodes=2", "--ntasks=2", *doctor)
    assert "2 processes on 2 machines connected" in ended.out
    assert ended.code == 0, ended.out


DONE = (
    one_of_an_array_is_requeued_then_hangs_and_the_other_is_cancelled,
    a_node_dies_and_comes_back,
    the_doctor_examines_the_nodes,
)
Doing = dict[Callable[..., object], Future[object]]


@pytest.fixture(scope="module")
def doing(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doing]:
    folder, all_done = tmp_path_factory.mktemp, (two_tasks_on_each_node, *DONE)
    pool = ThreadPoolExecutor()
    yield {each: pool.submit(each, slurm, folder(each.__name__)) for each in all_done}
    pool.shutdown(wait=False)  # after a Ctrl-C, what still runs ends with its hosts


@pytest.mark.parametrize("what", DONE, ids=lambda what: what.__name__)
def test_fault_41_slurm(what: Callable[..., object], doing: Doing) -> None:
    doing[what].result()


def test_a_job_is_the_same_training(doing: Doing, alone: Path) -> None:
    run = doing[two_tasks_on_each_node].result()
    assert isinstance(run, Path)
    check_equal(run, alone, 4, num_machines=2)
