"""Resuming a run: what it was given before, what may differ now, and what may not.

A flag that is not typed keeps the value that the run began with, so `--resume runs/mnist-001` is
all that is needed. Each flag's policy stands where the flag does; those of Distribution, how many
processes there are and how they talk, are given anew each time.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from ddp_mnist.cluster.launch import CAN_JOIN, nobody_can_join
from ddp_mnist.cluster.store import Store
from ddp_mnist.config.flags import OnResume, flag_fields, flag_name, flag_values, typed_flag
from ddp_mnist.config.image_options import ImageOptions
from ddp_mnist.config.recipe import Recipe
from ddp_mnist.config.run import ResolvedConfig, RunFlags, TrainConfig
from ddp_mnist.data import cache
from ddp_mnist.data.sources import from_anywhere
from ddp_mnist.errors import CheckpointError, UsageError, reason
from ddp_mnist.run import checkpoint
from ddp_mnist.run.folder import (
    CONFIG,
    STATUS,
    SUMMARY,
    RunFolder,
    name_a_run,
    read_json,
    without_link,
)
from ddp_mnist.run.identity import FORMAT, OF_THE_RESULT, Identity

INHERITED: tuple[OnResume, ...] = (*OF_THE_RESULT, "inherited")
MUST_EQUAL = [field.name for g in (RunFlags, Recipe) for field in flag_fields(g, "must equal")]
CANNOT_GROW = f" (no machine can join again; for that, {CAN_JOIN})"


@dataclass(frozen=True)
class EarlierRun:
    """The run to resume, as its config.json describes it."""

    path: str  # on rank 0's machine
    run_id: str
    digest: str  # of its images
    run: dict[str, Any]  # its RunFlags, by field name
    recipe: dict[str, Any]  # its recipe, with what was chosen for it
    finished: str = ""  # if there is nothing left to do: what to say

    @classmethod
    def read(cls, path: Path, resume: str) -> Self:
        """Return what config.json says; `resume` is what was typed.

        Raise CheckpointError for another version's, and KeyError, TypeError, ValueError or OSError
        for a damaged one.
        """
        config = read_json(path / CONFIG)
        if config["format"] != FORMAT:
            raise CheckpointError(
                f"--resume {resume}: {path} is of another version of ddp_mnist (format"
                f" {config['format']}, this is {FORMAT}); resume it with that, or start a new run"
            )
        run, recipe = dict(config["run"]), dict(config["recipe"])
        return cls(str(path), str(config["run_id"]), str(config["digest"]), run, recipe)

    @property
    def flags(self) -> dict[str, Any]:
        return self.run | self.recipe


def find(config: TrainConfig, store: Store) -> EarlierRun | None:
    """Return the run to resume, found by rank 0, which has the folder; None to begin one.

    Raise CheckpointError if --resume names no run, its files cannot be read, or it has finished and
    the flags that were typed are those of another run.
    """
    found = store.broadcast_from_rank0("resume", lambda: (run := _find(config)) and asdict(run))
    return EarlierRun(**found) if found else None


def _find(config: TrainConfig) -> EarlierRun | None:
    resume = config.run.resume
    if resume is None:
        return None
    path = without_link(Path(config.run.run_dir or "" if resume == "auto" else resume))
    try:
        state = read_json(path / STATUS)["state"] if (path / STATUS).exists() else None
        if state != "finished" and resume == "auto" and not checkpoint.newest_first(path):
            return None
        found = EarlierRun.read(path, resume)
        if state != "finished" or _wants_more(config, found.recipe):
            return found
        _refuse_another_run(config, found)
        summary = read_json(path / SUMMARY)
        stopped_by, epochs = summary["stopped_by"], summary["epochs"]
        finished = (
            f"{path}: finished already, after epoch {epochs}"
            f"{f', stopped by {stopped_by}' if stopped_by else ''}, test accuracy"
            f" {summary['test_accuracy']:.4f}; to go on, change {stopped_by or '--epochs'}"
        )
        return dataclasses.replace(found, finished=finished)
    except (OSError, ValueError, KeyError, TypeError) as error:
        name = Path(getattr(error, "filename", None) or path).name
        why = reason(error) if isinstance(error, OSError) else "damaged, or of another program"
        raise CheckpointError(
            f"--resume {resume}: {path} holds no run to resume ({name}: {why}); {name_a_run()}"
        ) from error


def _wants_more(config: TrainConfig, recipe: dict[str, Any]) -> bool:
    """Return whether a finished run is to train for longer, by its epochs or its stop rules."""
    typed = {name: getattr(config.recipe, name) for name in config.explicit & set(recipe)}
    stops = [name for name in ("target_accuracy", "patience") if name in typed]
    more_epochs = typed.get("epochs", 0) > recipe["epochs"]
    return more_epochs or any(typed[name] != recipe[name] for name in stops)


def _refuse_another_run(config: TrainConfig, finished: EarlierRun) -> None:
    """Raise CheckpointError if what was typed describes another run than the finished one."""
    typed = flag_values(config.run) | flag_values(config.recipe)
    asked = {name: typed[name] for name in MUST_EQUAL if name in config.explicit}
    refuse_changes(asked, finished.flags, finished.path)
    now = inherit(config, finished).run
    if from_anywhere(now.dataset) != finished.run["dataset"]:  # the same images may have moved
        images = cache.load(now.dataset, now.cache_dir, ImageOptions.of(finished.run))
        check_images(now.dataset, images.digest, finished, finished.path)


def inherit(config: TrainConfig, found: EarlierRun | None) -> TrainConfig:
    """Return `config` with the run's own values for all that was not typed.

    Raise CheckpointError if config.json holds something else than a run's flags, UsageError if what
    was typed does not go with what the run has.
    """
    if found is not None:
        typed = config.explicit - ({"dataset"} if config.run.dataset == "auto" else set())
        groups: dict[str, Any] = {"run": config.run, "recipe": config.recipe}
        try:
            for group, flags in groups.items():
                names = flag_values(flags, *INHERITED).keys() - typed
                own = {name: found.flags[name] for name in names}
                own = {n: tuple(v) if isinstance(v, list) else v for n, v in own.items()}
                groups[group] = dataclasses.replace(flags, **own)
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"{found.path}: {CONFIG} is damaged ({error}); start a new run in another folder"
            ) from error
        config = dataclasses.replace(config, resumes=True, **groups)
    config.refuse_contradictions()
    return config


def load_latest(
    folder: RunFolder, path: Path, now: Identity, config: ResolvedConfig
) -> tuple[bytes, list[str]]:
    """Lock a run's folder at `path`, and read its newest whole checkpoint; on rank 0.

    `config` and `now` are those of this part of the run. Return the checkpoint's bytes, and lines
    for the person: what is passed over, what changed. Raise CheckpointError if none is whole or the
    newest does not fit the flags, UsageError if another process is writing the folder or fewer
    epochs are asked for than done.
    """
    folder.open(path)
    raw, step, lines = checkpoint.read_newest(path)
    where = f"step {step} of {path}"
    content = checkpoint.from_bytes(raw, where)
    changed = changes(content, now, where)
    if content["state"]["progress"]["step"] != step:
        raise CheckpointError(f"{where}: is that of another step; remove it to use the one before")
    recipe = config.recipe
    if step > recipe.total_steps:
        raise UsageError(
            f"--epochs {recipe.epochs}: the run is already beyond that, at step {step}; ask for at"
            f" least {-(-step // recipe.steps_per_epoch)}"
        )
    folder.cut_metrics(content["metrics_lines"])
    folder.step = step
    summary = f"changed: {', '.join(changed)}" if changed else "nothing changed"
    return raw, [*lines, f"resumed    after step {step:,}; {summary}"]


def changes(content: dict[str, Any], now: Identity, where: str) -> list[str]:
    """Return the differences between a checkpoint's identity and that of this part, in words.

    Raise CheckpointError if something differs that may not, or if it is no checkpoint of this run.
    """
    try:
        if content["format"] != FORMAT:
            raise CheckpointError(f"{where}: has format {content['format']}, this is {FORMAT}")
        content["metrics_lines"], content["state"]["progress"]["step"]  # a KeyError if missing
        before = Identity(**{f.name: content[f.name] for f in dataclasses.fields(Identity)})
        check_images(now.flags["dataset"], now.digest, before, where)
        refuse_changes({name: now.flags[name] for name in MUST_EQUAL}, before.flags, where)
        for name, code in now.own_code.items():
            if before.own_code[name] != code:
                raise CheckpointError(
                    f"{name}: its file was changed since {where} was made; use it as it was, or"
                    " begin another run"
                )
        is_now, was = (of.world["--mixed-precision"] for of in (now, before))
        if "fp64" in (is_now, was):  # the dtype of the weights
            refuse_changes({"mixed_precision": is_now}, {"mixed_precision": was}, where)
        if before.run_id != now.run_id:
            raise CheckpointError(
                f"{where}: belongs to another run than the folder's {CONFIG}; remove it to use the"
                " one before"
            )
        may_change = [name for name in now.flags if name not in (*MUST_EQUAL, "dataset")]
        pairs = {flag_name(name): (before.flags[name], now.flags[name]) for name in may_change}
        pairs |= {name: (before.world.get(name), value) for name, value in now.world.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{where}: is not from ddp_mnist ({type(error).__name__}: {error}); remove it"
        ) from error
    note = {"--epochs": " (another learning-rate schedule from here on)"}
    if nobody_can_join():
        note["world size"] = CANNOT_GROW
    return [f"{name} {a} -> {b}{note.get(name, '')}" for name, (a, b) in pairs.items() if a != b]


def refuse_changes(asked: Mapping[str, Any], before: Mapping[str, Any], where: str) -> None:
    """Raise CheckpointError if a flag, by its field's name, has another value than before."""
    for name, value in asked.items():
        if value != before[name]:
            made = "without it" if before[name] is None else f"with {before[name]}"
            raise CheckpointError(
                f"{typed_flag(name, value)}: {where} was made {made}; leave it as it was, or begin"
                " another run"
            )


def check_images(dataset: str, digest: str, before: EarlierRun | Identity, where: str) -> None:
    """Raise CheckpointError if these are other images than before, wherever they lie now."""
    if before.digest != digest:
        raise CheckpointError(
            f"--dataset {dataset}: its images are not those of {where} ({before.flags['dataset']},"
            f" digest {before.digest[:8]}, now {digest[:8]}); leave it as it was, or begin another"
            " run"
        )
