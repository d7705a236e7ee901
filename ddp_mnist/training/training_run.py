"""What is trained, on which images, by which processes: known before the first step."""

from dataclasses import dataclass

from ddp_mnist.cluster.world import World
from ddp_mnist.config.train_config import TrainConfig
from ddp_mnist.core.recipe import Recipe
from ddp_mnist.core.task import Task
from ddp_mnist.data.image_data import ImageData
from ddp_mnist.data.splits import subset
from ddp_mnist.task import make_task
from ddp_mnist.training.found import Found


@dataclass(frozen=True)
class TrainingRun:
    """A run, as every rank sees it."""

    config: TrainConfig  # with the values that the data and the number of processes decide
    world: World  # all processes
    images: ImageData
    found: Found
    task: Task  # what is learned from the images
    recipe: Recipe  # how the net is trained; --inject may change it

    @property
    def model(self) -> str:
        """The name of the net."""
        return str(self.config.recipe.model)


def make_run(
    config: TrainConfig,
    recipe: Recipe,
    world: World,
    images: ImageData,
    found: Found | None = None,
) -> TrainingRun:
    """Return the run on these images, whose rows are in their splits. Raises as `make_task` does.

    `config` and `recipe` are resolved; `found` is what the flags name, nothing by default.
    """
    found, device = found or Found(), world.accelerator.device
    own = found.task, found.loss, found.scores
    task = make_task(config.recipe, images.classes, subset(images, "train"), device, *own)
    return TrainingRun(config, world, images, found, task, recipe)
