"""A run's identity: the values that all ranks share, and those that a checkpoint holds."""

from dataclasses import dataclass
from typing import Any

from ddp_mnist.cluster.world import World
from ddp_mnist.config.flag_fields import OnResume, flag_fields, flag_name, flag_values
from ddp_mnist.config.run import ResolvedConfig
from ddp_mnist.data.image_data import ImageData
from ddp_mnist.run.versions import code_digest, own_digests, package_versions

FORMAT = 11  # of config.json and of checkpoints; a different one cannot be resumed
OF_THE_RESULT: tuple[OnResume, ...] = ("must equal", "may change", "same images")


@dataclass(frozen=True)
class Identity:
    """A checkpoint's metadata: all but the State."""

    format: int
    run_id: str
    flags: dict[str, Any]  # those OF_THE_RESULT, by field name
    digest: str  # of the images
    own_code: dict[str, str]  # SHA-256 of each of the user's own files, by the flag that names it
    world: dict[str, Any]  # may change, and is reported, by the names that users know


def identify(config: ResolvedConfig, world: World, run_id: str, digest: str) -> Identity:
    """Return the identity of a run in this world, on images with this digest."""
    flags = flag_values(config.run, *OF_THE_RESULT) | flag_values(config.recipe, *OF_THE_RESULT)
    may_change = {
        "world size": world.accelerator.num_processes,
        "device": world.accelerator.device.type,
        "--sync-bn": config.distribution.sync_bn,
        "--comm-hook": config.distribution.comm_hook,
        "--compile": bool(world.compile_options) and world.compiled_by,
        "threads": world.threads,
        **in_effect(world),
    }
    return Identity(FORMAT, run_id, flags, digest, own_digests(config.recipe), may_change)


def facts(config: ResolvedConfig, world: World, images: ImageData) -> dict[str, Any]:
    """Return the values that must be equal on every rank, by the names that users know."""
    flags = {
        flag_name(field): getattr(group, field.name)
        for group in (config.run, config.recipe, config.distribution)
        for field in flag_fields(group)
        if not field.metadata["per_rank"]
    }
    own_code = {f"the code of {name}": code for name, code in own_digests(config.recipe).items()}
    others = {"--compile": world.compiled_by, "the data's digest": images.digest}
    others |= {"the images that --weights has seen": str(sum(images.left_out))}
    return flags | others | own_code | in_effect(world)


def in_effect(world: World) -> dict[str, Any]:
    """Return how this process communicates and computes, and with which code."""
    return {
        "--backend": world.backend,
        "--mixed-precision": world.precision,
        **package_versions(),
        "the code's digest": code_digest(),
    }
