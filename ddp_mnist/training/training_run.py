"""What is trained, on which images, by which processes: known before the first step."""

from collections.abc import Callable
from dataclasses import dataclass

from ddp_mnist.cluster.world import World
from ddp_mnist.config.train_config import ResolvedConfig
from ddp_mnist.core.recipe import Recipe
from ddp_mnist.core.task import Task
from ddp_mnist.core.wrappers import Normalised
from ddp_mnist.data.image_data import ImageData
from ddp_mnist.nets.initial_weights import InitialWeights


@dataclass(frozen=True)
class TrainingRun:
    """A run, as every rank sees it."""

    config: ResolvedConfig  # with the values that the data and the number of processes decide
    world: World  # all processes
    images: ImageData
    task: Task  # what is learned from them
    make_net: Callable[[], Normalised]
    recipe: Recipe  # how the net is trained; --inject may change it
    weights: InitialWeights | None = None  # with which the run began
