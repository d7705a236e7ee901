"""accelerate launch's configuration files: a folder of the clone, and part of the package."""

from pathlib import Path

FOLDER = "accelerate_configs"


def stored() -> list[Path]:
    """Return the files: inside an installed package, or next to the package in a clone."""
    package = Path(__file__).parents[1]
    inside = sorted((package / FOLDER).glob("*.yaml"))
    return inside or sorted((package.parent / FOLDER).glob("*.yaml"))


def config_file(name: str) -> Path:
    """Return the path of a configuration: in the working directory, or else the package's."""
    here = Path(FOLDER) / f"{name}.yaml"
    return here if here.exists() else next(path for path in stored() if path.name == here.name)


def as_flag(name: str) -> str:
    """Return the words in which an error recommends a configuration, e.g. multi_cpu."""
    return f"--config_file {FOLDER}/{name}.yaml, which ddp-mnist configs writes"
