"""The verb `configs`: write accelerate launch's configuration files, for use without a clone."""

import shlex
from pathlib import Path

from ddp_mnist.config.launch_configs import stored
from ddp_mnist.errors import UsageError
from ddp_mnist.run import folder
from ddp_mnist.run.console import Console
from ddp_mnist.verbs.flags import Configs

FOR_EXAMPLE = "multi_cpu.yaml"  # it runs on any machine


def run(flags: Configs) -> None:
    """Write the files; print the purpose of each, and a command with one. Replace no other file."""
    out, console = Path(flags.folder), Console(True)
    contents = {path.name: path.read_bytes() for path in stored()}
    with folder.storage_errors(out, "DIR"):
        for name, content in contents.items():
            if (out / name).exists() and (out / name).read_bytes() != content:
                raise UsageError(
                    f"{out / name}: exists with other content; move it away, or name another DIR"
                )
        out.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            folder.write_atomically(out / name, content)
            purpose = content.decode().splitlines()[0].removeprefix("# ")
            console.print(f"{name:<20} {purpose}")
    example = shlex.quote(str(out / FOR_EXAMPLE))
    console.print(f"written to {out}; to use one:")
    console.print(f"accelerate launch --config_file {example} -m ddp_mnist train")
