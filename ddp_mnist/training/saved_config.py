"""config.json: what a run is. It is written as the run begins, and read to resume it."""

from typing import Any

import torch

from ddp_mnist.cluster.world import World
from ddp_mnist.config.flag_fields import flag_fields, flag_name, flag_values
from ddp_mnist.data.image_data import ImageData
from ddp_mnist.training.training_run import TrainingRun
from ddp_mnist.training.versions import code_digest, package_versions

# Of config.json and of checkpoints. Raise it if a checkpoint's tensors or counts would be read
# wrongly: one of another format is refused. A new flag needs no new format, see resume.py.
RUN_FORMAT = 13
# Flags that may differ between ranks. A machine may have its folders elsewhere: what is in them is
# compared.
OF_A_RANK = {"dataset", "run_dir", "resume", "cache_dir", "quiet"}
OF_A_RANK |= {"init_method", "rank", "world_size", "local_rank"}
ALIKE = "OMP_NUM_THREADS, ATEN_CPU_CAPABILITY and MKL_ENABLE_INSTRUCTIONS"
LAST_BITS = f"the last bits of a step (set {ALIKE} alike, or --optimizer adamw)"


def saved_config(
    run: TrainingRun, run_id: str, run_dir: str, trained_on: str = ""
) -> dict[str, Any]:
    """Return the content of config.json.

    `run_dir` is the folder on rank 0's machine, `trained_on` the SHA-256 of that file.
    """
    config, world, images = run.config, run.world, run.images
    resolved = {
        "backend": world.backend,
        "mixed_precision": world.precision,
        "compile": bool(world.compile_options),
        "has_bf16": world.has_bf16,
        "launcher_precision": world.launcher_precision,
    }
    return {
        "format": RUN_FORMAT,
        "run_id": run_id,
        "digest": images.digest,
        "test_share": images.test_share,
        "left_out": images.left_out,
        "normalised": [images.image_format.mean, images.image_format.std],
        "fine_tunes": run.recipe.head_rate != 1,
        "trained_on": trained_on,
        "own_code": run.found.own_code,
        "typed": sorted(config.typed | config.typed_before),
        "run": flag_values(config.run) | {"run_dir": run_dir, "resume": None},
        "recipe": flag_values(config.recipe),
        "distribution": flag_values(config.distribution) | resolved,
        "world": {
            "world size": world.store.world_size,
            "device": world.accelerator.device.type,
            "--sync-bn": config.distribution.sync_bn,
            "--comm-hook": config.distribution.comm_hook,
            "threads": torch.get_num_threads(),
            "CPU instructions": torch.backends.cpu.get_cpu_capability(),
            **runtime_facts(world, config.recipe.model),
        },
    }


def why_others(
    images: ImageData, saved: dict[str, Any], dataset: str, put_back: str
) -> tuple[str, str] | None:
    """Return why images are not those of a run, and what to do; None if they are.

    `saved` is its config.json, `put_back` what to do if they have changed.
    """
    if images.digest == saved["digest"]:
        return None
    if (made := saved.get("format")) != RUN_FORMAT:
        other = f"it was trained by another version of ddp_mnist (format {made})"
        return f"{other}, which compares images in another way", "use that"
    return f"the images of {dataset} have changed since the run", put_back


def must_be_equal(run: TrainingRun) -> dict[str, Any]:
    """Return the values that must be equal on every rank, by the names that users know.

    Images stand first: flags that were not typed are chosen for them.
    """
    config, images = run.config, run.images
    flags = {
        flag_name(field): getattr(group, field.name)
        for group in (config.run, config.recipe, config.distribution)
        for field in flag_fields(group)
        if field.name not in OF_A_RANK
    }
    own_code = {f"the code of {name}": code for name, code in run.found.own_code.items()}
    of_images = {
        "the data's digest": images.digest,
        "the images that --weights has seen": str(sum(images.left_out)),
    }
    last_bits = {LAST_BITS: run.step_digest}  # last, as most of what differs above changes it
    return of_images | flags | own_code | runtime_facts(run.world, config.recipe.model) | last_bits


def runtime_facts(world: World, model: str | None) -> dict[str, Any]:
    """Return how this process communicates and computes, and with which code."""
    return {
        "--backend": world.backend,
        "--mixed-precision": world.precision,
        "--compile": world.compiled_by,
        **package_versions(model),
        "the code's digest": code_digest(),
    }
