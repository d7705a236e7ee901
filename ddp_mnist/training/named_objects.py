"""What the flags of a run name, found once, before its data is read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from accelerate.tracking import get_available_trackers

from ddp_mnist.cluster.store import Store
from ddp_mnist.config import own_code
from ddp_mnist.config.train_config import TrainConfig
from ddp_mnist.core.task import Score, Task
from ddp_mnist.errors import UsageError, blame
from ddp_mnist.nets.build import factory_of, is_known
from ddp_mnist.nets.initial_weights import InitialWeights, find_weights
from ddp_mnist.task import find_loss, find_score, find_task
from ddp_mnist.training.folder import trained_on


@dataclass(frozen=True)
class NamedObjects:
    """What the flags name; nothing by default."""

    task: type[Task] | None = None  # of --task
    scores: Mapping[str, Score] = field(default_factory=dict)  # of --metrics; on rank 0 alone
    trackers: Sequence[str] = ()  # of --trackers
    # The SHA-256 of the user's own files, by the flag with its name: --model, --loss, --task
    own_code: Mapping[str, str] = field(default_factory=dict)
    weights: InitialWeights | None = None  # of --weights
    # The keys of the images that the weights were trained on, where they are known
    seen: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64))


def find_named(config: TrainConfig, store: Store) -> NamedObjects:
    """Find what the flags name. Raise UsageError for an unknown name."""
    recipe = config.recipe
    if recipe.model:
        factory_of(recipe.model)
    task = find_task(recipe.task) if recipe.task else None
    find_loss(recipe.loss)
    users_net = recipe.model if recipe.model and not is_known(recipe.model) else None
    users = {"--model": users_net, "--loss": recipe.loss, "--task": recipe.task}
    digests = {f"{f} {name}": own_code.digest(f, name) for f, name in users.items() if name}
    weights = find_weights(recipe.model or "the default net", recipe.weights)
    # Rank 0 alone logs and counts; importing scikit-learn takes it a second.
    trackers = store.broadcast_from_rank0("trackers", lambda: known_trackers(config.run.trackers))
    scores = {n: find_score(n) for n in recipe.metrics} if store.rank == 0 else {}
    with blame(f"--weights {recipe.weights}", UsageError):
        file = Path(recipe.weights).resolve() if recipe.weights else None
        seen = trained_on(file.parent) if file and file.is_file() else np.zeros(0, np.uint64)
    return NamedObjects(task, scores, trackers, digests, weights, seen)


def known_trackers(trackers: str | None) -> list[str]:
    """Return the comma-separated names; to be called on rank 0, where the trackers run.

    Raise UsageError for one that is not installed: Accelerate would leave it out in silence.
    """
    names = [name.strip() for name in (trackers or "").split(",") if name.strip()]
    installed = [str(name) for name in get_available_trackers()] if names else []
    for name in names:
        if name not in installed:
            legal = ", ".join(installed)
            raise UsageError(f"--trackers {name}: is not installed; choose from {legal}")
    return names
