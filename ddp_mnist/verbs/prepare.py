"""The verb `prepare`: fetch and decode a data set once, into the cache."""

from ddp_mnist.config.image_options import ImageOptions
from ddp_mnist.data import cache
from ddp_mnist.data.listing import STORED_SPLITS
from ddp_mnist.system.console import Console
from ddp_mnist.system.text import escaped
from ddp_mnist.verbs.flags import Prepare


def run(flags: Prepare) -> None:
    """Fill the cache; print its data set."""
    console, options = Console(True), ImageOptions.from_flags(vars(flags))
    if flags.task:
        from ddp_mnist.task import options_of  # imports torch, which takes a second

        options = options_of(vars(flags))
    name, notes = cache.choose(flags.dataset, flags.cache_dir, options, console.print)
    images = cache.load(name, flags.cache_dir, options, refresh=flags.refresh, log=console.print)
    for note in [*notes, *images.notes]:
        console.print(note)
    every = {split: f"{len(rows):,} {split}" for split, rows in images.rows.items()}
    *first, last = (every[split] for split in STORED_SPLITS if split in every)
    targets = f"{len(images.classes)} classes" if images.classes else ", ".join(options.numbers)
    counts, folder = f"{', '.join(first)} and {last}", cache.cache_folder(flags.cache_dir)
    console.print(f"{images.name}: {counts} images of {targets} in {escaped(folder)}")
    console.print(f"digest {images.digest}")
