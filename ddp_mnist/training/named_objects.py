"""What the flags of a run name, found once, before its data is read."""

import hashlib
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
from ddp_mnist.nets.initial_weights import (
    InitialWeights,
    about_file,
    find_weights,
    read_weights,
)
from ddp_mnist.system.files import read_if_whole
from ddp_mnist.task import find_loss, find_score, find_task
from ddp_mnist.training.folder import SUMMARY, UNKNOWN, trained_on


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
    seen = np.zeros(0, np.uint64)
    if weights and not weights.published:
        with blame(f"--weights {recipe.weights}", UsageError):
            seen = seen_by(Path(weights.typed).resolve())
    return NamedObjects(task, scores, trackers, digests, weights, seen)


def seen_by(file: Path) -> np.ndarray:
    """Return the keys of the images that the weights in a file were trained on.

    It is UNKNOWN if a run wrote them, and they are not those of the run beside them; none for
    another program's, and if the file is gone.
    """
    if not file.is_file():
        return np.zeros(0, np.uint64)
    digest = read_if_whole(file.parent / SUMMARY).get("model_sha256")
    is_its_own = digest == hashlib.sha256(file.read_bytes()).hexdigest()
    if is_its_own and (known := trained_on(file.parent)).size:
        return known
    read_weights(str(file))  # one that is damaged is refused before images are decoded
    return np.array([UNKNOWN] if about_file(str(file)) else [], np.uint64)


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
