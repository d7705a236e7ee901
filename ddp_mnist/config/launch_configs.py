"""accelerate launch's configuration files: a folder of the clone, and part of the package."""

from pathlib import Path

FOLDER = Path("accelerate_configs")
PACKAGE = Path(__file__).parents[1]


def config_file(name: str) -> Path:
    """Return the path of a configuration: in the working directory, or else the package's."""
    file = FOLDER / f"{name}.yaml"
    installed, in_clone = PACKAGE / file, PACKAGE.parent / file
    return next(path for path in (file, installed, in_clone) if path.exists())


def as_flag(name: str) -> str:
    """Return the words in which an error recommends a configuration, e.g. multi_cpu."""
    return f"--config_file {config_file(name)}"
