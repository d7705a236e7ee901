"""Commands as a person types them, each in a folder of its own."""

import contextlib
import os
import pty
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import termios
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ddp_mnist.cluster.local_world import run_world

REPOSITORY = Path(__file__).parent.parent
CONFIGS = REPOSITORY / "accelerate_configs"
TRAIN = ["-m", "ddp_mnist", "train"]
TORCHRUN = ["-m", "torch.distributed.run"]
ACCELERATE = ["-m", "accelerate.commands.launch", "--main_process_port", "0", "--config_file"]
MULTI_CPU = [*ACCELERATE, str(CONFIGS / "multi_cpu.yaml")]
MAKE = ["make", "--no-print-directory", f"PYTHON={sys.executable}", "VENV="]
# 45 steps in float64, of the net that needs the least time: starting is what is tested with it.
PROOF = "--dataset digits --model mlp --epochs 3 --batch-size 72 --mixed-precision fp64"
PROOF += " --log-every 1 --run-dir"

# slow.py, a net with which a run can be hit before it ends, and that leaves the cores to others
SLOW = """
import time
from ddp_mnist.core.nets import MLP

class Slow(MLP):
    def forward(self, x):
        time.sleep(0.1)
        return super().forward(x)
"""

# Packages of a person who has them by this variable alone, as on some clusters
GIVEN = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
OTHER_PACKAGES = [folder for folder in GIVEN if Path(folder).resolve() != REPOSITORY]

# What a machine's launcher prints after a complete run if that of machine 0, which serves their
# store, ended a moment before it: https://github.com/pytorch/pytorch/issues/69520
EXIT_RACE = re.compile(
    r"^(E.* \S*elastic/agent/server/api\.py:\d+\]) Error waiting on exit barrier.*\n(?:\1.*\n)*",
    re.MULTILINE,
)

WARNINGS = "PYTHONWARNINGS"  # those that a test expects come on top of those of conftest.py
OPENMP_SEEN = "TEST_OPENMP_SEEN"  # the variable that names the file


def sees_torch(ends_there: bool = False) -> str:
    """Return a sitecustomize.py, which Python imports before all else.

    It notes how OpenMP's threads are to wait as a process that trains loads torch, which a launcher
    does not. If the process `ends_there`, it notes it of any.
    """
    return f"""
import importlib.abc, os, sys

class Torch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch" and ("RANK" in os.environ or {ends_there}):
            found = [os.environ.get(name) for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")]
            with open(os.environ["{OPENMP_SEEN}"], "a") as file:
                print(*found, file=file)
            if {ends_there}:
                os._exit(0)

sys.meta_path.insert(0, Torch())
"""


# A sitecustomize.py without which an editable install finds what is missing in the clone
NOT_EDITABLE = """
import sys

sys.meta_path[:] = [each for each in sys.meta_path if "__editable__" not in str(each)]
"""


def python_path(*folders: Path) -> str:
    """Return PYTHONPATH for a test's processes: these folders, then what the person has in it."""
    return os.pathsep.join([*map(str, folders), *OTHER_PACKAGES])


def proof(run: Path, *more: str) -> list[str]:
    """Return the arguments of the run that every way of starting has to repeat."""
    return [*TRAIN, *PROOF.split(), str(run), *more]


def torchrun(processes: int) -> list[str]:
    """Return the arguments that start so many processes on this machine."""
    return [*TORCHRUN, "--standalone", "--nproc-per-node", str(processes)]


def require_programs(*names: str) -> None:
    """Skip the test where one is missing, with the line that installs those of all tests."""
    if missing := [name for name in names if not shutil.which(name)]:
        packages = (REPOSITORY / ".ci" / "packages").read_text().strip()
        install = f"apt-get install --no-install-recommends {packages}"
        pytest.skip(f"no {', '.join(missing)} on the path; on Debian, as root: {install}")


# --- Commands of this test


@dataclass
class Ended:
    """What a command left behind."""

    code: int
    out: str
    err: str

    def succeeds(self) -> str:
        """Check that it ended with code 0 and nothing on stderr; return what it printed."""
        assert (self.code, self.err) == (0, ""), f"{self.out}\n{self.err}"
        return self.out

    @property
    def error_lines(self) -> list[str]:
        lines = self.err.splitlines()
        return [line for line in lines if line.startswith("ddp-mnist: error:")]


Typed = Callable[..., Ended]  # the fixture that runs a command line in this process


class Started:
    """`python *arguments`, running; or, without a `program`, the arguments as they are.

    Of `variables`, which come on top of ours, those that are None are not set. With a `terminal`,
    of which this is the file number, a Ctrl-C that is typed there reaches the command.
    """

    def __init__(
        self,
        arguments: list[str],
        folder: Path,
        variables: Mapping[str, str | None] | None = None,
        program: str | None = sys.executable,
        terminal: int | None = None,
    ) -> None:
        env = {**os.environ, **(variables or {})}
        if (variables or {}).get(WARNINGS) and WARNINGS in os.environ:
            env[WARNINGS] = f"{os.environ[WARNINGS]},{env[WARNINGS]}"
        command = [program, *arguments] if program else arguments
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *command] if terminal else command,
            cwd=folder,
            stdin=terminal,
            env={name: value for name, value in env.items() if value is not None},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ended(self, timeout_s: float = 120) -> Ended:
        try:
            out, err = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, err = self.process.communicate()
            raise AssertionError(f"still running after {timeout_s} s:\n{out}\n{err}") from None
        return Ended(self.process.returncode, out, EXIT_RACE.sub("", err))


def python(
    *arguments: str, folder: Path, variables: dict[str, str] | None = None, timeout_s: float = 120
) -> Ended:
    return Started(list(arguments), folder, variables).ended(timeout_s)


def written_to(terminal: int) -> str:
    """Return what is written to a terminal until its other end is closed; close it too."""
    written = b""
    with contextlib.suppress(OSError):  # Linux's way to say that the other end is closed
        while part := os.read(terminal, 4096):
            written += part
    os.close(terminal)
    return written.decode().replace("\r\n", "\n")


def left_on_screen(written: str) -> list[str]:
    """Return the lines that a terminal shows: of each, the last text that began at its left."""
    return [line.rpartition("\r")[2].replace("\x1b[K", "") for line in written.split("\n")]


def all_succeed(started: list[Started]) -> list[str]:
    """Wait for all before one may fail; return what each printed."""
    ended = [each.ended() for each in started]
    return [each.succeeds() for each in ended]


# --- Commands of the documents

FOLDERS = [REPOSITORY / name for name in ("", "docs", "docs/course", "deploy")]
PAGES = sorted(page.relative_to(REPOSITORY) for each in FOLDERS for page in each.glob("*.md"))
ENGLISH = [page for page in PAGES if not page.name.endswith(".zh-CN.md")]  # of equal commands


@dataclass(frozen=True)
class Fence:
    """A block of code in a page; `mark` is the word behind its language."""

    page: Path
    line: int
    language: str
    mark: str
    body: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def fences_of(page: Path) -> list[Fence]:
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    found = re.finditer(r"^```(\S*) *(.*?)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [Fence(page, text.count("\n", 0, m.start()) + 1, m[1], m[2], m[3]) for m in found]


def shell(script: str, folder: Path) -> Started:
    """Start a script in `folder`, as a person would in a clone with its environment activated.

    Nor does make know that make is running the tests: it would print the folder that it enters.
    What sees_torch() notes is in the file `openmp`.
    """
    for name in ("ddp_mnist", "accelerate_configs", "Makefile", "pyproject.toml", "deploy"):
        (folder / name).symlink_to(REPOSITORY / name)
    (folder / "sitecustomize.py").write_text(sees_torch())
    variables = {
        **dict.fromkeys(("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")),  # which the tests' process has
        OPENMP_SEEN: str(folder / "openmp"),
        "PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]]),
        "MAKEFLAGS": f"PYTHON={sys.executable} VENV=",
        "MAKELEVEL": None,
        "PYTHONPATH": python_path(folder),
        "OMP_NUM_THREADS": "1",  # else torchrun remarks that it sets it
    }
    return Started(["bash", "-e", "-o", "pipefail", "-c", script], folder, variables, program=None)


def run_here(argv: list[str], file: bool) -> tuple[int, str]:
    """Return the exit code of a file, or else a verb, and what it prints, in this process.

    It stands here, as a process of a world imports the module of what it runs, which costs it a
    second with all that a test imports.
    """
    from ddp_mnist import cli

    with tempfile.TemporaryFile("w+") as printed:
        code = 0
        with redirect_stdout(printed), redirect_stderr(printed):
            try:
                if file:
                    sys.argv = argv
                    sys.path.insert(0, str(Path.cwd()))  # as `python FILE` does
                    runpy.run_path(argv[0], run_name="__main__")
                else:
                    cli.main(argv)
            except SystemExit as ended:
                code = int(ended.code or 0)
        printed.seek(0)
        return code, printed.read()


def run_command(
    argv: list[str], folder: Path, size: int = 1, file: bool = False, **options: Any
) -> str:
    """Run it in so many processes, which have torch loaded; return what they print, rank 0 first.

    Check that all end with code 0.
    """
    outcomes = run_world(size, run_here, argv, file, folder=folder, **options)
    assert {code for code, _ in outcomes} == {0}, outcomes
    return "".join(printed for _, printed in outcomes)


def on_forked_terminal(code: str, columns: int = 80, term: str = "xterm") -> tuple[int, str]:
    """Return the exit code of Python code on a terminal of that width, and what it writes there.

    It runs in a copy of this process: one of a world, which has loaded what takes seconds.
    """
    pid, ours = pty.fork()
    if pid == 0:
        termios.tcsetwinsize(0, (24, columns))
        os.environ["TERM"] = term
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        status = 99
        try:
            exec(code, {})
            status = 0
        except SystemExit as ended:
            status = int(ended.code or 0)
        finally:
            sys.stdout.flush()
            os._exit(status)
    written = written_to(ours)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), written


def write_given(fence: Fence, folder: Path) -> None:
    """Write the file that a page gives, which begins with its name."""
    (folder / fence.body.splitlines()[0].removeprefix("# ")).write_text(fence.body)
