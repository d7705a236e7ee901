"""What is trained, on which images, by which processes: known before the first step."""

from dataclasses import dataclass

from ddp_mnist.cluster.world import World
from ddp_mnist.config.train_config import ResolvedConfig
from ddp_mnist.core.recipe import Recipe
from ddp_mnist.core.task import Task
from ddp_mnist.data.image_data import ImageData
from ddp_mnist.data.splits import subset
from ddp_mnist.task import make_task
from ddp_mnist.training.found import Found


@dataclass(frozen=True)
class TrainingRun:
    """A run, as every rank sees it."""

    config: ResolvedConfig  # with the values that the data and the number of processes decide
    world: World  # all processes
    images: ImageData
    found: Found
    task: Task  # what is learned from the images
    recipe: Recipe  # how the net is trained; --inject may change it


def make_run(
    config: ResolvedConfig, world: World, images: ImageData, found: Found | None = None
) -> TrainingRun:
    """Return the run on these images, whose rows are in their splits. Raises as `make_task` does.

    `found` is what the flags of `config` name; nothing by default.
    """
    found, device = found or Found(), world.accelerator.device
    own = found.task, found.loss, found.scores
    task = make_task(config.recipe, images.classes, subset(images, "train"), device, *own)
    recipe = config.recipe.for_fit(images.image_format.kind)
    return TrainingRun(config, world, images, found, task, recipe)
