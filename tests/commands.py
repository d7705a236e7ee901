"""Commands as a person types them, in a folder of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
CONFIGS = REPOSITORY / "accelerate_configs"
TRAIN = ["-m", "ddp_mnist", "train"]
TORCHRUN = ["-m", "torch.distributed.run"]
ACCELERATE = ["-m", "accelerate.commands.launch", "--main_process_port", "0", "--config_file"]


@dataclass
class Ended:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def error_lines(self) -> list[str]:
        lines = self.err.splitlines()
        return [line for line in lines if line.startswith("ddp-mnist: error:")]


class Started:
    """`python *arguments`, running; or, without a `program`, the arguments as they are."""

    def __init__(
        self,
        arguments: list[str],
        folder: Path,
        variables: dict[str, str] | None = None,
        program: str | None = sys.executable,
    ) -> None:
        self.process = subprocess.Popen(
            [program, *arguments] if program else arguments,
            cwd=folder,
            env={**os.environ, **(variables or {})},
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
        return Ended(self.process.returncode, out, err)


def python(
    *arguments: str, folder: Path, variables: dict[str, str] | None = None, timeout_s: float = 120
) -> Ended:
    return Started(list(arguments), folder, variables).ended(timeout_s)
