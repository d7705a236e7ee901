"""Resuming a run: which settings carry over, which may change, and which may not.

A flag that is not typed keeps the value that the run began with, so `--resume runs/mnist-001` is
enough. Each flag declares its own policy. Those of Distribution, the processes and how they
communicate, have to be given each time.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddp_mnist.cluster.store import Store
from ddp_mnist.config.flag_fields import OnResume, flag_fields, flag_name, flag_values, typed_flag
from ddp_mnist.config.recipe import Recipe
from ddp_mnist.config.run import ResolvedConfig, RunFlags, TrainConfig
from ddp_mnist.data import cache
from ddp_mnist.data.sources import from_anywhere
from ddp_mnist.errors import CheckpointError, UsageError, reason
from ddp_mnist.run import checkpoint
from ddp_mnist.run.evaluation import number_text
from ddp_mnist.run.folder import (
    CONFIG,
    MODEL,
    STATUS,
    SUMMARY,
    RunFolder,
    name_a_run,
    read_json,
    without_link,
)
from ddp_mnist.run.identity import FORMAT, OF_THE_RESULT, Identity
from ddp_mnist.task import options_of

INHERITED: tuple[OnResume, ...] = (*OF_THE_RESULT, "inherited")
MUST_EQUAL = [field.name for g in (RunFlags, Recipe) for field in flag_fields(g, "must equal")]


@dataclass(frozen=True)
class EarlierRun:
    """The run to resume, as its config.json describes it."""

    path: str  # on rank 0's machine
    run_id: str
    digest: str  # of its images
    flags: dict[str, Any]  # its RunFlags and its resolved recipe, by field name
    left_out: Sequence[int] = ()  # keys of images that its --weights had seen
    finished: str = ""  # the line to print if nothing is left to do


def find(config: TrainConfig, store: Store) -> EarlierRun | None:
    """Return the run to resume, found by rank 0, which has the folder; None to begin one.

    Raise CheckpointError if --resume names no run, its files cannot be read, or the typed flags are
    another run's.
    """
    found = store.broadcast_from_rank0("resume", lambda: _find(config))
    return EarlierRun(**found) if found else None


def _find(config: TrainConfig) -> dict[str, Any] | None:
    """Return the run's fields on rank 0; raises as `find` does."""
    resume = config.run.resume
    if resume is None:
        return None
    path = without_link(Path(config.run.run_dir or "" if resume == "auto" else resume))
    try:
        state = read_json(path / STATUS)["state"] if (path / STATUS).exists() else None
        if state != "finished" and resume == "auto" and not checkpoint.newest_first(path):
            return None
        written = read_json(path / CONFIG)
        if written["format"] != FORMAT:
            raise CheckpointError(
                f"--resume {resume}: {path} is of another version of ddp_mnist (format"
                f" {written['format']}, this is {FORMAT}); resume it with that, or start a new run"
            )
        flags = written["run"] | written["recipe"]
        left_out = written["left_out"]
        found = EarlierRun(str(path), written["run_id"], written["digest"], flags, left_out)
        now = inherit(config, found)
        typed = flag_values(now.run) | flag_values(now.recipe)
        for name in MUST_EQUAL:
            refuse_another(name, typed[name], flags[name], path)
        if state != "finished" or wants_more(now.recipe, flags):
            return asdict(found)
        if from_anywhere(now.run.dataset) != flags["dataset"]:  # the same images may have moved
            images = cache.load(now.run.dataset, now.run.cache_dir, options_of(typed))
            check_same_images(now.run.dataset, images.digest, found)
        return asdict(found) | {"finished": has_finished(path)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        name = Path(getattr(error, "filename", None) or path).name
        why = reason(error) if isinstance(error, OSError) else "damaged, or from another program"
        raise CheckpointError(
            f"--resume {resume}: {path} holds no run to resume ({name}: {why}); {name_a_run()}"
        ) from error


def inherit(config: TrainConfig, found: EarlierRun) -> TrainConfig:
    """Return `config` with the run's own values for all flags that were not typed."""
    typed = config.explicit - ({"dataset"} if config.run.dataset == "auto" else set())

    def inherited(group: Any) -> Any:
        own = {name: found.flags[name] for name in flag_values(group, *INHERITED).keys() - typed}
        from_json = {n: tuple(v) if isinstance(v, list) else v for n, v in own.items()}
        return dataclasses.replace(group, **from_json)

    run, recipe = inherited(config.run), inherited(config.recipe)
    return dataclasses.replace(config, resumes=True, run=run, recipe=recipe)


def wants_more(now: Recipe, before: dict[str, Any]) -> bool:
    """Return whether a finished run should train longer, by its epochs or its stop rules."""
    stops = ("target_accuracy", "patience")
    return (now.epochs or 0) > before["epochs"] or any(getattr(now, n) != before[n] for n in stops)


def has_finished(path: Path) -> str:
    """Return the line on a finished run that should not train longer."""
    summary = read_json(path / SUMMARY)
    stopped_by = summary["stopped_by"]
    early = f", stopped by {stopped_by}" if stopped_by else ""
    name = summary["score_name"]
    score = number_text(summary[f"test_{name}"])
    return (
        f"{path}: finished already, after epoch {summary['epochs']}{early}, test {name} {score};"
        f" to train longer, change {stopped_by or '--epochs'}"
    )


def load_latest(
    folder: RunFolder, found: EarlierRun, now: Identity, config: ResolvedConfig
) -> tuple[bytes, list[str]]:
    """Lock the run's folder, and read its newest whole checkpoint; on rank 0.

    `config` and `now` are those of this part of the run. Return the checkpoint's bytes, and lines
    to print on skipped files and changes. Raise CheckpointError if no checkpoint is whole or the
    newest is another run's, UsageError if another process is writing the folder or fewer epochs are
    requested than are done.
    """
    path = Path(found.path)
    folder.open(path)
    raw, step, lines = checkpoint.read_newest(path)
    where = f"step {step} of {path}"
    content = checkpoint.from_bytes(raw, where)
    try:
        before = Identity(**{f.name: content[f.name] for f in dataclasses.fields(Identity)})
        reached, metrics_lines = content["state"]["progress"]["step"], content["metrics_lines"]
        changed = changes(before, now)
        other_code = [name for name in now.own_code if before.own_code[name] != now.own_code[name]]
        precision, was = (of.world["--mixed-precision"] for of in (now, before))
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{where}: is not from ddp_mnist ({type(error).__name__}: {error}); remove it"
        ) from error
    if before.run_id != now.run_id or reached != step:
        raise CheckpointError(
            f"{where}: belongs to another run, or to another step; remove it to use the one before"
        )
    if other_code:
        raise CheckpointError(
            f"{other_code[0]}: its file was changed since {where} was made; use it as it was, or"
            " begin another run"
        )
    if "fp64" in (precision, was):  # the dtype of the weights
        refuse_another("mixed_precision", precision, was, path)
    recipe = config.recipe
    if step > recipe.total_steps:
        raise UsageError(
            f"--epochs {recipe.epochs}: the run is already beyond that, at step {step}; ask for at"
            f" least {-(-step // recipe.steps_per_epoch)}"
        )
    folder.cut_metrics(metrics_lines)
    folder.step = step
    summary = f"changed: {', '.join(changed)}" if changed else "nothing changed"
    return raw, [*lines, f"resumed    after step {step:,}; {summary}"]


def changes(before: Identity, now: Identity) -> list[str]:
    """Return, in words, what this part of a run does differently from the part before."""
    flags = {flag_name(n): (before.flags[n], v) for n, v in now.flags.items() if n != "dataset"}
    world = {name: (before.world.get(name), value) for name, value in now.world.items()}
    notes = {"--epochs": " (another learning-rate schedule from here on)"}
    pairs = (flags | world).items()
    return [f"{name} {a} -> {b}{notes.get(name, '')}" for name, (a, b) in pairs if a != b]


def refuse_another(name: str, now: Any, before: Any, path: Path) -> None:
    """Raise CheckpointError if a flag, by its field's name, has a different value than before."""
    if now != before:
        made = "without it" if before is None else f"with {before}"
        raise CheckpointError(
            f"{typed_flag(name, now)}: {path} was made {made}; leave it as it was, or begin another"
            " run"
        )


def check_same_images(dataset: str, digest: str, found: EarlierRun) -> None:
    """Raise CheckpointError if these are not the run's images, wherever they lie now."""
    if digest != found.digest:
        raise CheckpointError(
            f"--dataset {dataset}: its images are not those of {found.path}"
            f" ({found.flags['dataset']}, digest {found.digest[:8]}, now {digest[:8]}); leave it as"
            f" it was, or begin another run, perhaps on its --weights {found.path}/{MODEL}"
        )
