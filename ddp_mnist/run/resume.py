"""Taking up a run again: what it was told before, what may differ now, and what may not.

A flag that is not typed keeps the value that the run began with, so `--resume runs/mnist-001` is
all that is needed. How many processes there are and how they talk is asked for anew each time.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import torch

from ddp_mnist.cluster.world import World, broadcast_bytes
from ddp_mnist.config import Recipe, ResolvedConfig, ResolvedRecipe, Run, TrainConfig
from ddp_mnist.data import cache
from ddp_mnist.data.batches import ImageData
from ddp_mnist.data.sources import HUB_IDS
from ddp_mnist.errors import CheckpointError, DivergedError, UsageError
from ddp_mnist.flags import Flags, OnResume, flag_fields, flag_name, flag_values
from ddp_mnist.run import checkpoint
from ddp_mnist.run.console import tell
from ddp_mnist.run.environment import code_digest, package_versions
from ddp_mnist.run.folder import (
    CONFIG,
    STATUS,
    SUMMARY,
    RunFolder,
    read_json,
    without_link,
)
from ddp_mnist.run.state import State

FORMAT = 5

FOLDER_KEY = "run folder"  # under which rank 0 tells the others its path

REMEDY = "leave it as it was, or begin another run"


def go_on(
    state: State, opened: Opened, world: World, recipe: Recipe, steps_per_epoch: int
) -> str | None:
    """Brings every rank to where rank 0's checkpoint left the run. Returns what to say of it."""
    if not opened.goes_on:
        return "\n".join(opened.folder.warnings) or None
    raw = broadcast_bytes(world.accelerator, opened.checkpoint)
    opened.checkpoint = b""  # it may be large
    where = f"the checkpoint of {opened.folder.path}"
    state.restore(checkpoint.from_bytes(raw, where)["state"], recipe, steps_per_epoch)
    changed = f"changed: {', '.join(opened.changed)}" if opened.changed else "nothing changed"
    resumed = f"resumed    after step {state.progress.step:,}; {changed}"
    return "\n".join([*opened.warnings, resumed])


def save(opened: Opened, state: State, keep: int) -> str:
    """Called on every rank at the same step; rank 0 writes. Returns what a stopped run says.

    Raises:
        DivergedError: the weights are not finite numbers, although each loss was.
        StorageError: the checkpoint cannot be written.
    """
    clock, step, folder = time.monotonic(), state.progress.step, opened.folder
    finite = [torch.isfinite(parameter).all() for parameter in state.net.parameters()]
    if not torch.stack(finite).all():
        raise DivergedError(
            f"--lr {opened.about['flags']['--lr']:g}: by step {step} the weights are not finite"
            " numbers any more; use a lower rate, or --max-grad-norm 1"
        )
    folder.reached(step)
    if folder.path:
        about = {**opened.about, "metrics_lines": folder.metrics_lines}
        checkpoint.save(folder.path, step, {**about, "state": state.content()}, keep)
    state.progress.save_seconds += time.monotonic() - clock
    return (
        f"stopped after step {step} and saved; to go on, add --resume {opened.where} to the command"
    )


def give_up(opened: Opened) -> None:
    """What a run that is interrupted twice says, as nothing is saved any more."""
    folder = opened.folder
    if folder.path is None:
        return
    folder.record_outcome("failed", 130, "interrupted twice")
    rest = "nothing is saved"
    if saved := checkpoint.newest_first(folder.path):
        rest = (
            f"nothing after step {checkpoint.step_of(saved[0])} is saved; to go on from there, add"
            f" --resume {opened.where} to the command"
        )
    below_the_bar = "\n" if sys.stderr.isatty() else ""
    tell(f"{below_the_bar}ddp-mnist: interrupted twice: stopped at once, {rest} (code 130)")


def find(config: TrainConfig) -> dict[str, Any] | None:
    """The run to go on with, or None to begin one. Called on rank 0 only, which has the folder.

    Returns:
        What config.json holds, and `path`; `finished`: what to say if there is nothing to do.

    Raises:
        CheckpointError: --resume names no run, its files cannot be read, or it has finished and
            the flags that were typed are those of another run.
        DataError: the folder that is typed as a finished run's --dataset cannot be read.
    """
    resume = config.run.resume
    if resume is None:
        return None
    path = without_link(Path(config.run.run_dir or "" if resume == "auto" else resume))
    try:
        state = read_json(path / STATUS)["state"] if (path / STATUS).exists() else None
        if state != "finished" and resume == "auto" and not checkpoint.newest_first(path):
            return None
        found = {**read_json(path / CONFIG), "path": str(path), "finished": None}
        assert found["run_id"]
        if found["format"] != FORMAT:
            raise CheckpointError(
                f"--resume {resume}: {path} is of another version of ddp_mnist (format"
                f" {found['format']}, this is {FORMAT}); go on with that one, or begin anew"
            )
        if state == "finished" and not _wants_more(config, found["recipe"]):
            _refuse_another_run(config, found)
            found["finished"] = _finished(path, read_json(path / SUMMARY))
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        name = Path(getattr(error, "filename", None) or path).name
        reason = error.strerror if isinstance(error, OSError) else "damaged, or of another program"
        raise CheckpointError(
            f"--resume {resume}: {path} holds no run to go on with ({name}: {reason});"
            " name one, e.g. runs/latest"
        ) from error
    return found


def _wants_more(config: TrainConfig, recipe: dict[str, Any]) -> bool:
    """Whether a finished run is asked for more epochs, or not to stop where it did."""
    more_epochs = "epochs" in config.typed and (config.recipe.epochs or 0) > recipe["epochs"]
    stops = config.typed & {"target_accuracy", "patience"}
    return more_epochs or any(getattr(config.recipe, name) != recipe[name] for name in stops)


def _refuse_another_run(config: TrainConfig, found: dict[str, Any]) -> None:
    """Nothing is left to do for a finished run, but what was typed may ask for another one."""
    run, path, typed = config.run, found["path"], config.typed
    same = run.dataset == "auto" or _same_place(run.dataset, found["run"]["dataset"])
    if "dataset" in typed and not same:
        if not Path(run.dataset).is_dir():
            _refuse_value("--dataset", run.dataset, found["run"]["dataset"], path)
        images = cache.load(run.dataset, run.cache_dir or found["run"]["cache_dir"])
        refuse_other_images(run.dataset, images.digest, found)  # a folder may have been moved
    for group, saved in ((run, found["run"]), (config.recipe, found["recipe"])):
        for name, value in flag_values(group, "must equal").items():
            if name in typed:
                _refuse_value(flag_name(name), value, saved[name], path)


def _same_place(typed: str, stored: str) -> bool:
    """Whether two names are of one data set; a folder may be gone since."""
    place = os.path.realpath(os.path.expanduser(typed))  # noqa: PTH111
    return stored in (typed, place) or HUB_IDS.get(typed, typed) == HUB_IDS.get(stored, stored)


def _finished(path: Path, summary: dict[str, Any]) -> str:
    stopped = f", stopped by {summary['stopped_by']}" if summary["stopped_by"] else ""
    return (
        f"{path}: finished already, after epoch {summary['epochs']}{stopped}, test accuracy"
        f" {summary['test_accuracy']:.4f}; to go on, change {summary['stopped_by'] or '--epochs'}"
    )


def inherit(config: TrainConfig, found: dict[str, Any] | None) -> TrainConfig:
    """`config` with the run's own values for all that was not typed.

    Raises:
        CheckpointError: config.json holds something else than a run's flags.
    """
    if found is None:
        config.refuse_contradictions()
        return config
    try:
        groups = {}
        for name in ("run", "recipe"):
            group, saved = getattr(config, name), found[name]
            inherited = flag_values(group, "must equal", "may change", "same images", "inherited")
            mine = {f for f in config.typed if getattr(group, f, None) != "auto"}
            values = {flag: saved[flag] for flag in inherited if flag not in mine}
            groups[name] = dataclasses.replace(group, **values)
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"{found['path']}: {CONFIG} is damaged ({error}); begin the run anew elsewhere"
        ) from error
    config = dataclasses.replace(config, **groups)
    config.refuse_contradictions()
    return config


@dataclasses.dataclass
class Opened:
    """A run folder that stands, and what the run in it goes on from.

    Attributes:
        folder: where the run writes.
        resolved: what config.json is to hold.
        about: what each checkpoint says of the run, beside the State.
        goes_on: whether there is a checkpoint to go on from; known on every rank.
        checkpoint: its bytes, on rank 0.
        changed: what is not as it was when the checkpoint was made.
        warnings: checkpoints that were passed over.
        where: the folder's path on rank 0's machine; known on every rank.
    """

    folder: RunFolder
    resolved: dict[str, Any]
    about: dict[str, Any]
    goes_on: bool
    checkpoint: bytes = b""
    changed: list[str] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)
    where: str = ""


def open_run(
    config: ResolvedConfig, world: World, images: ImageData, found: Any, folder: RunFolder
) -> Opened:
    """Create the run folder on rank 0's machine, or open it; other ranks go on once it stands.

    Args:
        config: resolved.
        world: the processes.
        images: the data.
        found: what `find` told, on every rank.
        folder: without a place; rank 0 gives it one.

    Raises:
        UsageError: the folder holds a run, another process is writing it, or fewer epochs are
            asked for than are done.
        CheckpointError: no checkpoint is whole, or the newest does not fit the flags.
        StorageError: the folder cannot be written.
    """
    run_id = found["run_id"] if found else uuid.uuid4().hex
    run = dataclasses.asdict(config.run)
    resolved = {
        "run_id": run_id,
        "format": FORMAT,
        "digest": images.digest,
        "run": run,
        "recipe": flag_values(config.recipe),
        "distribution": dataclasses.asdict(config.distribution)
        | {"backend": world.backend, "mixed_precision": world.precision},
    }
    opened = Opened(folder, resolved, about(config, world, run_id, images.digest), bool(found))

    def open_it() -> str:
        if found:
            load_latest(opened, Path(found["path"]), config.recipe)
        else:
            begin_again = config.run.resume == "auto"
            folder.create(config.run.run_dir, images.name, begin_again=begin_again)
        return str(folder.path)

    opened.where = world.store.broadcast_from_rank0(FOLDER_KEY, open_it)
    run |= {"run_dir": opened.where, "resume": None}
    return opened


def load_latest(opened: Opened, path: Path, recipe: ResolvedRecipe) -> None:
    """Locks the folder of a run that stands, and reads its newest whole checkpoint."""
    opened.folder.open(path)
    opened.checkpoint, step, opened.warnings = checkpoint.read_newest(path)
    where = f"step {step} of {path}"
    content = checkpoint.from_bytes(opened.checkpoint, where)
    opened.changed = changes(content, opened.about, where)
    if content["state"]["progress"]["step"] != step:
        raise CheckpointError(f"{where}: is that of another step; remove it to use the one before")
    if step > recipe.total_steps:
        raise UsageError(
            f"--epochs {recipe.epochs}: the run is beyond them, at step {step}; ask for at"
            f" least {-(-step // recipe.steps_per_epoch)}"
        )
    opened.folder.cut_metrics(content["metrics_lines"])
    opened.folder.reached(step)
    opened.folder.begin()


def refuse_other_images(dataset: str, digest: str, found: Any) -> None:
    """A resumed run keeps its images, wherever they lie now."""
    if found and found["digest"] != digest:
        raise _other_images(
            dataset, digest, found["path"], found["run"]["dataset"], found["digest"]
        )


def _other_images(dataset: str, digest: str, where: str, was: str, before: str) -> CheckpointError:
    return CheckpointError(
        f"--dataset {dataset}: its images are not those of {where} ({was}, digest {before[:8]}, now"
        f" {digest[:8]}); {REMEDY}"
    )


def refuse_uneven(recipe: Recipe, world_size: int, found: Any) -> None:
    """A resumed run keeps its batch: it is the number of processes that has to fit."""
    parts = world_size * recipe.grad_accum
    if found and recipe.batch_size and recipe.batch_size % parts:
        most = recipe.batch_size // recipe.grad_accum
        legal = [n for n in range(1, most + 1) if recipe.batch_size % (n * recipe.grad_accum) == 0]
        raise UsageError(
            f"--resume {found['path']}: its batch of {recipe.batch_size} does not divide by"
            f" {parts}, for {world_size} processes x --grad-accum {recipe.grad_accum}; use"
            f" {', '.join(map(str, legal[:12]))} processes"
        )


def about(config: TrainConfig, world: World, run_id: str, digest: str) -> dict[str, Any]:
    """What a checkpoint says of its run beside the State; `world` holds what may change."""
    of_the_result: tuple[OnResume, ...] = ("must equal", "may change", "same images")
    flags = flag_values(config.run, *of_the_result) | flag_values(config.recipe, *of_the_result)
    return {
        "format": FORMAT,
        "run_id": run_id,
        "flags": {flag_name(name): value for name, value in flags.items()},
        "digest": digest,
        "world": {
            "world size": world.accelerator.num_processes,
            "device": world.accelerator.device.type,
            "--backend": world.backend,
            "--mixed-precision": world.precision,
            "--sync-bn": config.distribution.sync_bn,
            "--comm-hook": config.distribution.comm_hook,
            "--compile": config.distribution.compile,
            "threads": world.threads,
            **package_versions(),
            "the code's digest": code_digest(),
        },
    }


def changes(content: dict[str, Any], now: dict[str, Any], where: str) -> list[str]:
    """What differs between a checkpoint and the run as it is told now, for people.

    Args:
        content: of the checkpoint.
        now: `about` this part of the run.
        where: the checkpoint, for people.

    Raises:
        CheckpointError: something differs that may not, or it is no checkpoint of this run.
    """
    try:
        if content["format"] != FORMAT:
            raise CheckpointError(f"{where}: has format {content['format']}, this is {FORMAT}")
        for name in ("progress", "model", "optimizer", "scaler", "best_weights"):
            content["state"][name]
        content["metrics_lines"], content["state"]["progress"]["step"]
        _refuse(content, now, where)
        may_change = names(Run, "may change") + names(Recipe, "may change")
        pairs = [(name, content["flags"].get(name), now["flags"][name]) for name in may_change]
        world = now["world"]
        pairs += [(name, content["world"].get(name), world[name]) for name in world]
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{where}: is not from ddp_mnist ({type(error).__name__}: {error}); remove it"
        ) from error
    note = {"--epochs": " (another schedule of the rate from here on)"}
    return [f"{name} {a} -> {b}{note.get(name, '')}" for name, a, b in pairs if a != b]


def names(group: type[Flags], on_resume: OnResume) -> list[str]:
    """Return the flags with this policy, as typed."""
    return [flag_name(field) for field in flag_fields(group, on_resume)]


def _refuse_value(name: str, value: Any, saved: Any, where: str) -> None:
    if value != saved:
        raise CheckpointError(f"{name} {value}: {where} was made with {saved}; {REMEDY}")


def _refuse(content: dict[str, Any], now: dict[str, Any], where: str) -> None:
    if content["digest"] != now["digest"]:
        dataset, was = now["flags"]["--dataset"], content["flags"]["--dataset"]
        raise _other_images(dataset, now["digest"], where, was, content["digest"])
    for name in names(Run, "must equal") + names(Recipe, "must equal"):
        _refuse_value(name, now["flags"][name], content["flags"][name], where)
    was, is_now = content["world"]["--mixed-precision"], now["world"]["--mixed-precision"]
    if was != is_now and "fp64" in (was, is_now):
        raise CheckpointError(
            f"--mixed-precision {is_now}: {where} was made with {was}, whose weights have another"
            f" dtype; {REMEDY}"
        )
    if content["run_id"] != now["run_id"]:
        raise CheckpointError(
            f"{where}: belongs to another run than the folder's {CONFIG}; remove it to use the one"
            " before"
        )
