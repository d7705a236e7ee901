"""Resuming a run: what it was given before, what may differ now, and what may not.

A flag that is not typed keeps the value that the run began with, so `--resume runs/mnist-001` is
all that is needed. Each flag's policy stands where the flag does; those of Distribution, how many
processes there are and how they talk, are given anew each time.
"""

import dataclasses
from pathlib import Path
from typing import Any

from ddp_mnist.cluster.launch import CAN_JOIN, nobody_can_join
from ddp_mnist.cluster.world import World
from ddp_mnist.config.flags import OnResume, flag_name, flag_values, typed_flag
from ddp_mnist.config.image_options import ImageOptions
from ddp_mnist.config.run import ResolvedConfig, TrainConfig
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
from ddp_mnist.run.versions import code_digest, own_digests, package_versions

FORMAT = 10  # of config.json and of checkpoints
OF_THE_RESULT: tuple[OnResume, ...] = ("must equal", "may change", "same images")
INHERITED: tuple[OnResume, ...] = (*OF_THE_RESULT, "inherited")
CANNOT_GROW = f" (no machine can join again; for that, {CAN_JOIN})"


def find(config: TrainConfig) -> dict[str, Any] | None:
    """Find the run to resume; on rank 0, which has the folder. Return None to begin one.

    Else return what config.json holds, with `path`, and `finished`: what to say if there is nothing
    to do. Raise CheckpointError if --resume names no run, its files cannot be read, or it has
    finished and the flags that were typed are those of another run.
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
        if found["format"] != FORMAT:
            raise CheckpointError(
                f"--resume {resume}: {path} is of another version of ddp_mnist (format"
                f" {found['format']}, this is {FORMAT}); resume it with that, or start a new run"
            )
        if state == "finished" and not _wants_more(config, found["recipe"]):
            _refuse_another_run(config, found)
            summary = read_json(path / SUMMARY)
            stopped_by, epochs = summary["stopped_by"], summary["epochs"]
            found["finished"] = (
                f"{path}: finished already, after epoch {epochs}"
                f"{f', stopped by {stopped_by}' if stopped_by else ''}, test accuracy"
                f" {summary['test_accuracy']:.4f}; to go on, change {stopped_by or '--epochs'}"
            )
        return {**found, "run_id": str(found["run_id"])}
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


def _refuse_another_run(config: TrainConfig, found: dict[str, Any]) -> None:
    """Raise CheckpointError if what was typed describes another run than the finished one."""
    run, path = config.run, found["path"]
    for group, saved in ((run, found["run"]), (config.recipe, found["recipe"])):
        for name, value in flag_values(group, "must equal").items():
            if name in config.explicit:
                _refuse_change(name, value, saved[name], path)
    another = "dataset" in config.explicit and run.dataset != "auto"
    if another and from_anywhere(run.dataset) != found["run"]["dataset"]:
        cache_dir = run.cache_dir or found["run"]["cache_dir"]
        images = cache.load(run.dataset, cache_dir, ImageOptions.of(found["run"]))
        check_images(run.dataset, images.digest, found)  # a folder may have been moved


def inherit(config: TrainConfig, found: dict[str, Any] | None) -> TrainConfig:
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
                own = {name: found[group][name] for name in names}
                own = {n: tuple(v) if isinstance(v, list) else v for n, v in own.items()}
                groups[group] = dataclasses.replace(flags, **own)
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"{found['path']}: {CONFIG} is damaged ({error}); start a new run in another folder"
            ) from error
        config = dataclasses.replace(config, resumes=True, **groups)
    config.refuse_contradictions()
    return config


def check_images(dataset: str, digest: str, found: dict[str, Any]) -> None:
    """Raise CheckpointError if these are other images than the run's, wherever they lie now."""
    if found["digest"] != digest:
        raise CheckpointError(
            f"--dataset {dataset}: its images are not those of {found['path']}"
            f" ({found['run']['dataset']}, digest {found['digest'][:8]}, now {digest[:8]});"
            " leave it as it was, or begin another run"
        )


def identity(config: ResolvedConfig, world: World, run_id: str, digest: str) -> dict[str, Any]:
    """Return a checkpoint's entries on its run, beside the State; those in `world` may change."""
    flags = flag_values(config.run, *OF_THE_RESULT) | flag_values(config.recipe, *OF_THE_RESULT)
    return {
        "format": FORMAT,
        "run_id": run_id,
        "flags": flags,
        "digest": digest,
        "own_code": own_digests(config.recipe),
        "world": {
            "world size": world.accelerator.num_processes,
            "device": world.accelerator.device.type,
            "--backend": world.backend,
            "--mixed-precision": world.precision,
            "--sync-bn": config.distribution.sync_bn,
            "--comm-hook": config.distribution.comm_hook,
            "--compile": bool(world.compiler) and world.compiled_by,
            "threads": world.threads,
            **package_versions(),
            "the code's digest": code_digest(),
        },
    }


def load_latest(
    folder: RunFolder, path: Path, now: dict[str, Any], config: ResolvedConfig
) -> tuple[bytes, list[str]]:
    """Lock a run's folder at `path`, and read its newest whole checkpoint; on rank 0.

    `config` and `now`, the `identity`, are those of this part of the run. Return the checkpoint's
    bytes, and lines for the person: what is passed over, what changed. Raise CheckpointError if
    none is whole or the newest does not fit the flags, UsageError if another process is writing the
    folder or fewer epochs are asked for than done.
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


def changes(content: dict[str, Any], now: dict[str, Any], where: str) -> list[str]:
    """Return the differences between a checkpoint's content and the `identity` now, in words.

    Raise CheckpointError if something differs that may not, or if it is no checkpoint of this run.
    """
    config, flags = TrainConfig(), now["flags"]
    fixed = flag_values(config.run, "must equal") | flag_values(config.recipe, "must equal")
    try:
        if content["format"] != FORMAT:
            raise CheckpointError(f"{where}: has format {content['format']}, this is {FORMAT}")
        content["metrics_lines"], content["state"]["progress"]["step"]  # a KeyError if missing
        before, was = content["flags"], content["world"]["--mixed-precision"]
        found = {"path": where, "run": before, "digest": content["digest"]}
        check_images(flags["dataset"], now["digest"], found)
        for name in fixed:
            _refuse_change(name, flags[name], before[name], where)
        for name, code in now["own_code"].items():
            if content["own_code"][name] != code:
                raise CheckpointError(
                    f"{name}: its file was changed since {where} was made; use it as it was, or"
                    " begin another run"
                )
        if "fp64" in (is_now := now["world"]["--mixed-precision"], was):  # another dtype
            _refuse_change("mixed_precision", is_now, was, where)
        if content["run_id"] != now["run_id"]:
            raise CheckpointError(
                f"{where}: belongs to another run than the folder's {CONFIG}; remove it to use the"
                " one before"
            )
        may_change = [name for name in flags if name not in (*fixed, "dataset")]
        pairs = {flag_name(name): (before[name], flags[name]) for name in may_change}
        pairs |= {name: (content["world"].get(name), v) for name, v in now["world"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{where}: is not from ddp_mnist ({type(error).__name__}: {error}); remove it"
        ) from error
    note = {"--epochs": " (another learning-rate schedule from here on)"}
    if nobody_can_join():
        note["world size"] = CANNOT_GROW
    return [f"{name} {a} -> {b}{note.get(name, '')}" for name, (a, b) in pairs.items() if a != b]


def _refuse_change(name: str, value: Any, saved: Any, where: str) -> None:
    """Raise CheckpointError if the flag, given by its field's name, has another value now."""
    if value != saved:
        made = "without it" if saved is None else f"with {saved}"
        raise CheckpointError(
            f"{typed_flag(name, value)}: {where} was made {made}; leave it as it was, or begin"
            " another run"
        )
