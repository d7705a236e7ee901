"""The net of a run without --model: that of its weights, or for photos a pretrained one."""

import urllib.request
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError

from ddp_mnist.cluster.world import World
from ddp_mnist.config import own_code
from ddp_mnist.config.image_options import ImageOptions
from ddp_mnist.config.recipe import FINE_TUNED_SIDE, PRETRAINED
from ddp_mnist.config.train_config import TrainConfig
from ddp_mnist.data.cache import holds_photos
from ddp_mnist.data.sources import NAMED
from ddp_mnist.errors import UsageError, blame
from ddp_mnist.nets.build import is_known
from ddp_mnist.nets.initial_weights import InitialWeights
from ddp_mnist.nets.published import Published, find_published
from ddp_mnist.system.deadline import with_deadline
from ddp_mnist.system.text import causes, reason
from ddp_mnist.training.named_objects import NamedObjects

ANSWER_S, FETCH_S = 5.0, 300.0  # for the server's first answer, and for all of the 17 MB


def net_of_weights(config: TrainConfig, found: NamedObjects) -> tuple[TrainConfig, NamedObjects]:
    """Return the flags with the net of the run that wrote the file of --weights, if --model names
    none. Raise UsageError if it is the user's own and its file has changed since.
    """
    recipe, about = config.recipe, found.weights.about if found.weights else {}
    if not about:
        return config, found
    typed = f"--weights {recipe.weights}"
    with blame(f"{typed}: is of another version of ddp_mnist, or damaged", UsageError):
        name, code, _ = about["architecture"], about["code"], about["preparation"]["shape"]
    if recipe.model:
        return config, found
    if not is_known(name):
        if own_code.digest("--model", name) != code:
            fix = f"use it as it was, or type --model {name}"
            raise UsageError(f"{typed}: the file of its net {name} was changed since; {fix}")
        found = replace(found, own_code={**found.own_code, f"--model {name}": code})
    return replace(config, recipe=replace(recipe, model=name)), found


def net_for_photos(
    config: TrainConfig, found: NamedObjects, world: World
) -> tuple[TrainConfig, NamedObjects, str | None]:
    """Return flags and named objects with PRETRAINED and its weights, if neither is named, photos
    are to be learned, and the weights can be had. A sentence tells if they cannot.

    Rank 0 looks at the images, and all ranks have to have the weights.
    """
    recipe, flags, store = config.recipe, config.run, world.store
    is_open = not (config.resumes or recipe.model or recipe.weights)
    is_open = is_open and flags.dataset not in ("auto", *NAMED)
    numbers = found.task.columns if found.task else ()
    options = replace(ImageOptions.from_flags(vars(flags)), numbers=numbers)
    # Ranks with other flags take part too: they are told from the others by `first_difference`
    seen = flags.dataset, flags.cache_dir, options, FINE_TUNED_SIDE
    if not store.broadcast_from_rank0("photos", lambda: is_open and holds_photos(*seen)):
        return config, found, None
    made = find_published(PRETRAINED, "DEFAULT")
    looks = store.rank_info.local_rank == 0  # one process of each machine
    mine = why_missing(made) if looks else None
    why = store.decide_for_all("weights", mine, lambda every: next(filter(None, every), None))
    if why or not is_open:
        return config, found, why
    weights = InitialWeights("DEFAULT", made, {})
    recipe = replace(recipe, model=PRETRAINED, weights=weights.typed)
    return replace(config, recipe=recipe), replace(found, weights=weights), None


def why_missing(made: Published) -> str | None:
    """Return why this machine lacks the weights and cannot fetch them, as a sentence; else None."""
    import huggingface_hub.constants

    try:
        if not Path(made.place).exists():
            if huggingface_hub.constants.HF_HUB_OFFLINE:
                raise OSError("HF_HUB_OFFLINE is set")
            asked = urllib.request.Request(made.url, method="HEAD")
            with_deadline(lambda: urllib.request.urlopen(asked, timeout=ANSWER_S), ANSWER_S)
        with_deadline(made.fetch, FETCH_S)
    # of any transport, torch.hub and torch.load
    except (OSError, RuntimeError, ValueError, TimeoutError, UnpicklingError) as error:
        why = reason([*causes(error)][-1])
        fix = f"bring {made.url} to {made.place}, or ask for none: --weights none"
        costs = "which reached 0.64 on 416 pictures where such weights reach 0.86"
        instead = f"so photos are learned from nothing, {costs}"
        return f"{made.title} cannot be had ({why}), {instead}; {fix}"
    return None
