"""The net of a run without --model: that of its weights, or for photos a pretrained one."""

import urllib.request
from dataclasses import replace
from pathlib import Path

from ddp_mnist.cluster.world import World
from ddp_mnist.config.image_options import ImageOptions
from ddp_mnist.config.recipe import FINE_TUNED_SIDE, PRETRAINED
from ddp_mnist.config.train_config import TrainConfig
from ddp_mnist.data.photos import are_photos
from ddp_mnist.data.sources import NAMED
from ddp_mnist.nets.initial_weights import InitialWeights
from ddp_mnist.nets.published import Published, find_published
from ddp_mnist.system.deadline import with_deadline
from ddp_mnist.system.text import causes, reason
from ddp_mnist.training.named_objects import NamedObjects

ANSWER_S, FETCH_S = 5.0, 300.0  # for the server's first answer, and for all of the 17 MB


def choose_net(
    config: TrainConfig, found: NamedObjects, world: World
) -> tuple[TrainConfig, NamedObjects, str | None]:
    """Return flags and named objects with a net if --model names none and it is known already.

    It is that of the run which wrote the file of --weights; or else, without
    weights, PRETRAINED if photos are to be learned and ImageNet's weights can be had. A sentence
    tells if they cannot. Rank 0 looks at the images, and all ranks have to have the weights.
    """
    recipe, flags, store = config.recipe, config.run, world.store
    if not recipe.model and found.weights and (about := found.weights.about):
        return replace(config, recipe=replace(recipe, model=about["architecture"])), found, None
    is_open = not (config.resumes or recipe.model or recipe.weights)
    if not is_open or flags.dataset in ("auto", *NAMED):
        return config, found, None
    columns = found.task.columns if found.task else ()
    options = replace(ImageOptions.from_flags(vars(flags)), columns=columns)
    seen = flags.dataset, flags.cache_dir, options, FINE_TUNED_SIDE
    if not store.broadcast_from_rank0("photos", lambda: are_photos(*seen)):
        return config, found, None
    made = find_published(PRETRAINED, "DEFAULT")
    looks = store.rank_info.local_rank == 0  # one process of each machine
    mine = why_missing(made) if looks else None
    why = store.decide_for_all("weights", mine, lambda every: next(filter(None, every), None))
    if why:
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
    except Exception as error:  # of any transport, torch.hub and torch.load
        why = reason([*causes(error)][-1])
        fix = f"bring {made.url} to {made.place}, or ask for none: --weights none"
        costs = "which reached 0.64 on 416 pictures where such weights reach 0.86"
        instead = f"so photos are learned from nothing, {costs}"
        return f"{made.title} cannot be had ({why}), {instead}; {fix}"
    return None
