"""Resuming a run: which settings carry over, which may change, and which may not.

A flag that is not typed keeps the value that the run began with, so `--resume runs/mnist-001` is
enough. Each flag declares its own policy. Those of Distribution, the processes and how they
communicate, have to be given each time.
"""

import dataclasses
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddp_mnist.cluster.store import Store
from ddp_mnist.config import own_code
from ddp_mnist.config.flag_fields import flag_fields, flag_name, flag_values, typed_flag
from ddp_mnist.config.recipe import Recipe
from ddp_mnist.config.train_config import RunFlags, TrainConfig
from ddp_mnist.errors import CheckpointError, UsageError, blame
from ddp_mnist.system.files import read_json
from ddp_mnist.system.text import quoted, reason
from ddp_mnist.training import checkpoint
from ddp_mnist.training.folder import (
    CONFIG,
    MODEL,
    STATUS,
    RunFolder,
    check_one_run,
    name_a_run,
    resolve_link,
)
from ddp_mnist.training.result import finished_line
from ddp_mnist.training.saved_config import RUN_FORMAT, saved_config
from ddp_mnist.training.training_run import TrainingRun

RESUME_KEY = "resume"  # of the store, for the run that rank 0 found
GROUPS = {"run": RunFlags, "recipe": Recipe}  # the flags that a run keeps, by their key in CONFIG


@dataclass(frozen=True)
class EarlierRun:
    """The run to resume."""

    path: str  # on rank 0's machine
    saved: dict[str, Any]  # its config.json
    finished: str | None = None  # the line to print if nothing is left to do

    @property
    def flags(self) -> dict[str, Any]:
        """Return its flags by field name; its recipe is resolved."""
        return self.saved["run"] | self.saved["recipe"]


def find(config: TrainConfig, store: Store) -> EarlierRun | None:
    """Return the run to resume, found by rank 0, which has the folder; None to begin one.

    Raise CheckpointError if --resume names no run, its files cannot be read, or the typed flags are
    another run's.
    """
    if RESUME_KEY not in store.received:
        store.broadcast_from_rank0(RESUME_KEY, lambda: find_on_rank0(config))
    found = store.received[RESUME_KEY]
    return EarlierRun(**found) if found else None


def distribution_before(config: TrainConfig, store: Store) -> dict[str, Any] | None:
    """Return how the run to resume was distributed; None to begin one. Raises as `find` does.

    "threads" is with it if as many processes computed on CPUs: else no bit is kept anyway.
    """
    earlier = find(config, store)
    if not earlier:
        return None
    world = earlier.saved["world"]
    is_alike = (world.get("world size"), world.get("device")) == (store.world_size, "cpu")
    return earlier.saved["distribution"] | {"threads": world.get("threads", 0) if is_alike else 0}


def find_on_rank0(config: TrainConfig) -> dict[str, Any] | None:
    """Return the run's fields on rank 0; raises as `find` does."""
    resume = config.run.resume
    if resume is None:
        return None
    path = Path(config.run.run_dir or "" if resume == "auto" else resume)
    try:
        path = resolve_link(path)
        state = read_json(path / STATUS)["state"] if (path / STATUS).exists() else None
        if state != "finished" and resume == "auto" and not checkpoint.newest_first(path):
            return None
        check_one_run(path)
        earlier = EarlierRun(str(path), read_saved(path))
        for group in (config.run, config.recipe):
            for name, value in flag_values(group, "must equal").items():
                if name in config.typed:
                    refuse_another(name, value, earlier.flags[name], path)
        has_model = (path / MODEL).exists()  # else it is written again
        if state != "finished" or not has_model or wants_more(config, earlier.flags):
            return asdict(earlier)
        return asdict(earlier) | {"finished": finished_line(path)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        name = Path(getattr(error, "filename", None) or path).name
        fault, fix = f"{path} holds no run to resume ({name}: {reason(error)})", name_a_run()
        raise CheckpointError(f"--resume {resume}: {fault}; {fix}") from error


def read_saved(path: Path) -> dict[str, Any]:
    """Return a run's config.json; a flag that is newer than the run has its default there.

    So the default of a new flag has to mean that all is as before. Raise CheckpointError if the run
    is of another format, or has a flag that is unknown here, TypeError if a value makes no sense.
    """
    saved = read_json(path / CONFIG)
    other = "" if saved["format"] == RUN_FORMAT else f"format {saved['format']}"
    for key, group in GROUPS.items():
        found = {name: tuple(v) if isinstance(v, list) else v for name, v in saved[key].items()}
        unknown = found.keys() - {field.name for field in flag_fields(group)}
        other = other or ", ".join(map(flag_name, sorted(unknown)))
        saved[key] = found if other else flag_values(group(**found))
    if other:
        what = f"is of another version of ddp_mnist ({other})"
        raise CheckpointError(f"--resume {path}: {what}; resume it with that, or start a new run")
    return saved


def inherit(config: TrainConfig, earlier: EarlierRun) -> TrainConfig:
    """Return `config` with the run's own values for all flags that were not typed."""
    given = config.typed - ({"dataset"} if config.run.dataset == "auto" else set())

    def inherited(group: Any) -> Any:
        kept = flag_values(group, "must equal", "may change").keys() - given
        return dataclasses.replace(group, **{name: earlier.flags[name] for name in kept})

    run, recipe = inherited(config.run), inherited(config.recipe)
    before = frozenset(earlier.saved.get("typed", ()))  # older runs do not tell
    kept = {"run": run, "recipe": recipe, "typed_before": before}
    return dataclasses.replace(config, resumes=True, **kept)


def wants_more(config: TrainConfig, before: dict[str, Any]) -> bool:
    """Return whether a finished run should train longer, by its epochs or its stop rules."""
    names = config.typed & {"epochs", "target_accuracy", "patience"}
    typed = {name: getattr(config.recipe, name) for name in names}
    more_epochs = (typed.pop("epochs", None) or 0) > before["epochs"]
    return more_epochs or any(value != before[name] for name, value in typed.items())


def load_latest(
    run: TrainingRun, folder: RunFolder, earlier: EarlierRun
) -> tuple[bytes, list[str]]:
    """Lock the run's folder, and read its newest whole checkpoint; on rank 0.

    `run` is this part of it. Return the checkpoint's bytes, and lines to print on skipped files and
    changes. Raise CheckpointError if no checkpoint is whole or the newest is another run's,
    UsageError if another process is writing the folder or fewer epochs are requested than are done.
    """
    path, before = Path(earlier.path), earlier.saved
    now = saved_config(run, before["run_id"], earlier.path)
    folder.open(path)
    raw, step, lines = checkpoint.read_newest(path)
    where = str(checkpoint.file_of(path, step))
    content = checkpoint.from_bytes(raw, where)
    with blame(f"{where}: is not from ddp_mnist", CheckpointError, "move it elsewhere"):
        reached = content["state"]["progress"]["step"]
        metrics_lines, metrics_sha256 = content["metrics_lines"], content["metrics_sha256"]
        is_this_runs = (content["run_id"], reached) == (before["run_id"], step)
    if not is_this_runs:
        fault = "belongs to another run, or to another step"
        raise CheckpointError(f"{where}: {fault}; move it elsewhere to use the one before")
    for flag_and_name, was in before["own_code"].items():
        flag, _, name = flag_and_name.partition(" ")
        own_code.check_unchanged(flag, name, was, where)
    precision, was = (each["distribution"]["mixed_precision"] for each in (now, before))
    if "fp64" in (precision, was):  # the dtype of the weights
        refuse_another("mixed_precision", precision, was, path)
    recipe = run.recipe
    if step > recipe.total_steps:
        raise UsageError(
            f"--epochs {recipe.epochs}: the run is already beyond that, at step {step}; ask for at"
            f" least {-(-step // recipe.steps_per_epoch)}"
        )
    lines += folder.cut_metrics(metrics_lines, metrics_sha256)
    folder.step = step
    changed = changes(before, now)
    summary = f"changed: {', '.join(changed)}" if changed else "nothing changed"
    return raw, [*lines, f"resumed    after step {step:,}; {summary}"]


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return, in words, what this part of a run does differently; both are of config.json."""
    pairs = {
        flag_name(field): (before[key][field.name], now[key][field.name])
        for key, group in GROUPS.items()
        for field in flag_fields(group, "may change")
    }
    was = before["world"]  # an older run may lack some
    pairs |= {name: (was[name], value) for name, value in now["world"].items() if name in was}
    notes = {"--epochs": " (another learning-rate schedule from here on)"}
    return [f"{name} {a} -> {b}{notes.get(name, '')}" for name, (a, b) in pairs.items() if a != b]


def refuse_another(name: str, now: Any, before: Any, path: Path) -> None:
    """Raise CheckpointError if a flag, by its field's name, has a different value than before."""
    if now != before:
        fix = "leave it as it was, or begin another run"
        raise CheckpointError(f"{typed_flag(name, now)}: {path} was made with {before}; {fix}")


def check_same_images(dataset: str, digest: str, earlier: EarlierRun) -> None:
    """Raise CheckpointError if these are not the run's images, wherever they lie now."""
    if digest != earlier.saved["digest"]:
        weights = quoted(f"{earlier.path}/{MODEL}")
        fix = f"name those, or begin another run, perhaps on its --weights {weights}"
        raise CheckpointError(f"--dataset {dataset}: not the images of {earlier.path}; {fix}")
