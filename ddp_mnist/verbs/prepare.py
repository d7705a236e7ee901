"""The verb `prepare`: fetches and decodes a data set once, into the cache."""

from ddp_mnist.data import cache
from ddp_mnist.data.reading import Reading
from ddp_mnist.run.console import Console
from ddp_mnist.verbs.flags import Prepare


def run(flags: Prepare) -> None:
    """Fill the cache; print what is in it."""
    console = Console(True)
    reading = Reading.of(vars(flags))
    name, notes = cache.choose(flags.dataset, flags.cache_dir, reading, console.print)
    images = cache.load(name, flags.cache_dir, reading, refresh=flags.refresh, log=console.print)
    for note in [*notes, *images.warnings, *images.preparation.notes]:
        console.print(note)
    console.print(
        f"{images.name}: {len(images.train_labels):,} train and {len(images.test_labels):,} test"
        f" images of {len(images.classes)} classes in {cache.cache_folder(flags.cache_dir)}"
    )
    console.print(f"digest {images.digest}")
