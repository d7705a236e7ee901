import atexit
import errno
import fcntl
import gc
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

import ddp_mnist  # noqa: F401  # sets what has to stand before a test loads torch
from ddp_mnist import cli
from ddp_mnist.cluster.local_world import preload
from ddp_mnist.system.locks import take
from tests.commands import REPOSITORY, Ended, Typed, proof, python_path, run_command
from tests.hosts import require_flock

Maker = Callable[[Path], object]

unfreeze = gc.unfreeze
gc.disable()  # until all tests are collected: modules are no garbage

preload("ddp_mnist.train", "ddp_mnist.core.metrics", "ddp_mnist.verbs.evaluate")
preload("ddp_mnist.verbs.doctor.verb", "tests.commands", "tests.run_checks")

LAUNCHER_PREFIXES = ("SLURM_", "ACCELERATE_", "TORCHELASTIC_", "OMPI_", "PMI_", "DDP_MNIST_CACHE")
LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# `make test VENV=` would reach the makes that tests start
MAKE_NAMES = ("MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "VENV", "PYTHON")

# Both are read when huggingface_hub is imported.
HUGGINGFACE = tempfile.TemporaryDirectory(prefix="ddp_mnist-")
os.environ.update(HF_HUB_OFFLINE="1", HF_HOME=HUGGINGFACE.name)
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as the command line sets it
# torch asks for the name of each address it connects to: 10 s where no name server answers.
os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
# A flush takes 5 ms, and nobody cuts the power of a test.
os.fsync = os.fstat  # type: ignore[assignment]
if "PYTEST_XDIST_WORKER" in os.environ:
    # workers share the cores, where OpenMP's threads would spin
    os.environ.setdefault("OMP_NUM_THREADS", "1")

SECONDS = "ddp_mnist/seconds"  # of each file's tests the last time, in pytest's cache


def is_requested(marker: str, config: pytest.Config) -> bool:
    expression = config.option.markexpr or ""
    return marker in expression and f"not {marker}" not in expression


def pytest_configure(config: pytest.Config) -> None:
    """Hide all GPUs from the tests, but for those that request one; let them hear all signals.

    nohup ignores SIGHUP, and a shell SIGINT for what it runs in the background; both are inherited.
    """
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not is_requested("gpu", config):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    """Sort the files that took longest first, so that the workers end at about the same time."""
    if cache := getattr(config, "cache", None):  # -p no:cacheprovider leaves none
        seconds = cache.get(SECONDS, {})
        items.sort(key=lambda item: -seconds.get(item.location[0], 0))


def pytest_collection_finish() -> None:
    """Look for garbage from now on, but never in what was imported."""
    gc.freeze()
    gc.enable()
    gc.unfreeze = lambda: None  # with which a run in this process would end


def remember_seconds(terminalreporter: Any, config: pytest.Config) -> None:
    """Note how long each file's tests took, beside what is known of other files."""
    seconds = defaultdict[str, float](float)
    for report in itertools.chain(*terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            seconds[report.location[0]] += report.duration
    if cache := getattr(config, "cache", None):
        cache.set(SECONDS, cache.get(SECONDS, {}) | seconds)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print after the long tests how often each fault was tried, and how often we held."""
    remember_seconds(terminalreporter, config)
    if not is_requested("soak", config):
        return
    terminalreporter.section("tried / held")
    for report in [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]:
        if report.when == "call":
            counts = dict(report.user_properties)
            tried = counts.get("tried", 1)
            held, name = tried if report.passed else "fewer", report.nodeid.rpartition("::")[2]
            row = f"{tried:>5} / {held:<5} {name}  {counts.get('details', '')}"
            terminalreporter.write_line(row)


def pytest_sessionfinish() -> None:
    """End the forkserver of cluster/local_world.py, which by itself would take seconds more.

    It goes once no process holds its pipe. Python has no public way to ask for that.
    """
    atexit.register(unfreeze)  # later: pytest is about to look for garbage five times
    for process in multiprocessing.active_children():  # of a test that failed
        process.kill()
        process.join()
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of all workers."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(autouse=True, scope="session")
def clean_environment(shared: Path) -> None:
    """Remove launchers' variables; give the tests a cache of their own."""
    for name in list(os.environ):
        if name.startswith(LAUNCHER_PREFIXES) or name in LAUNCHER_NAMES + MAKE_NAMES:
            del os.environ[name]
    os.environ["DDP_MNIST_CACHE"] = str(shared / "cache")
    os.environ["PYTHONPATH"] = python_path(REPOSITORY)
    os.environ["PYTHONWARNINGS"] = "ignore:flock not supported on this filesystem"


@pytest.fixture
def flock(tmp_path: Path) -> None:
    """Skip what is otherwise on a disk without flock; tests/system/test_locks.py has that."""
    require_flock(tmp_path)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the test's folder, in which it works."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def torchvisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which torchvision looks for its files; it is empty."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    folder = tmp_path / "torch" / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def no_flock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Refuse flock, as Lustre without -o flock does, or with the error that the test names."""
    number = getattr(request, "param", errno.ENOSYS)

    def flock(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    return number


@pytest.fixture
def typed(capsys: pytest.CaptureFixture[str]) -> Typed:
    """Return a function that runs a command line in this process."""

    def run_here(*argv: object) -> Ended:
        with pytest.raises(SystemExit) as ended:
            cli.main([str(word) for word in argv])
        shown = capsys.readouterr()
        return Ended(int(ended.value.code or 0), shown.out, shown.err)

    return run_here


@pytest.fixture(scope="session")
def mnist() -> Path:
    """Return the folder of the real MNIST; without it, tests that need it are skipped."""
    beside = Path(__file__).parent.parent.parent / "shared" / "mnist"
    folder = Path(os.environ.get("DDP_MNIST_TEST_DATA") or beside)
    if not folder.is_dir():
        pytest.skip(f"no MNIST in {folder}; set DDP_MNIST_TEST_DATA to a folder that holds it")
    return folder


@pytest.fixture(scope="session")
def once(shared: Path) -> Callable[[str, Maker], Path]:
    """Return a function that makes a folder of results, once for all workers."""

    def make_once(name: str, make: Maker) -> Path:
        folder = shared / name
        with take(Path(f"{folder}.lock"), wait=True):
            if not (folder / "made").exists():
                folder.mkdir(exist_ok=True)
                make(folder)
                (folder / "made").touch()
        return folder

    return make_once


@pytest.fixture(scope="session")
def alone(once: Callable[[str, Maker], Path]) -> Path:
    """Return the run of one process that every other way of starting has to equal."""

    made = once("alone", lambda folder: run_command(proof(folder / "run")[2:], folder))
    return made / "run"


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Mount a disk in memory, of the size that the test's parameter says, e.g. 20m."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={request.param}", "tmpfs", str(folder)]
    if sys.platform != "linux" or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs Linux and root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
