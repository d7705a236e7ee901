"""Reading with the library `datasets`: a data set on the Hub, or a folder's tables and images.

Heavy libraries are imported where they are used, because a cached run needs none of them.
"""

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddp_mnist.config.image_options import ImageOptions
from ddp_mnist.data import folders
from ddp_mnist.data.hf_dataset import from_table
from ddp_mnist.data.image_files import ImageFiles
from ddp_mnist.errors import DataError, blame, causes, reason
from ddp_mnist.system.deadline import with_deadline

HUB_TIMEOUT_S = 5.0
PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")  # their values hold passwords
OFFLINE_FIX = (
    "set HF_ENDPOINT to a mirror of the Hub that answers, run ddp-mnist prepare where there is a"
    " network and copy the cache folder, give a folder (--dataset PATH), or train on the built-in"
    " digits (--dataset digits)"
)
FOLDER_FIX = (
    "give it images in train/CLASS/ and test/CLASS/, or whole parquet files with equal columns"
)


def read_hub(hub_id: str, where: str, image_options: ImageOptions) -> ImageFiles:
    """Return a data set on the Hub, or in Hugging Face's own cache if the Hub is out of reach.

    One request with a deadline decides which: `load_dataset` itself would retry for 24 s.
    """
    import datasets

    typed, fix = where, ""
    if why := why_out_of_reach(hub_id):
        typed = f"{where}: is not in the cache, and the Hub cannot be reached ({why})"
        fix = OFFLINE_FIX
    with quiet_library(offline=bool(why)), blame(typed, DataError, fix):
        table = datasets.load_dataset(hub_id)
    return from_table(table, where, image_options)


def why_out_of_reach(hub_id: str) -> str:
    """Return why the Hub is out of reach, or "". Raise DataError if it lacks the data set."""
    import huggingface_hub.constants

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    hub = huggingface_hub.HfApi()
    try:
        # A request's time-out does not cover a name server that does not answer.
        with_deadline(lambda: hub.dataset_info(hub_id, timeout=HUB_TIMEOUT_S), HUB_TIMEOUT_S)
    except Exception as error:  # any transport's own: httpx, requests, sockets, proxies
        if getattr(getattr(error, "response", None), "status_code", None) in (401, 403, 404):
            fault = f"--dataset {hub_id}: not on the Hub, or not visible to you"
            fix = "check the id, or log in (hf auth login) if it is private"
            raise DataError(f"{fault}; {fix}") from error
        by = next((f" through {name}" for name in PROXIES if os.environ.get(name)), "")
        return reason([*causes(error)][-1]) + by  # libraries wrap the system's error
    return ""


def read_folder(
    folder: str, paths: list[Path], where: str, image_options: ImageOptions
) -> ImageFiles:
    """Return the images in folders of their classes, or the table that `datasets` reads there."""
    if Path(folder, "dataset_dict.json").exists():
        import datasets

        with quiet_library(offline=True), blame(where, DataError, FOLDER_FIX):
            saved = datasets.load_from_disk(folder)
        return from_table(saved, where, image_options)
    listing = folders.list_images(where, folder, paths, image_options)
    splits = folders.splits_of_images(listing)
    every = [path for of_split in splits.values() for path in of_split]
    images = [path for path in every if not folders.is_metadata(path)]
    notes = folders.check_splits(listing, splits) if splits else []
    if images and images == every:
        files = folders.image_files(listing, splits)
    else:
        fix = "; ".join([*listing.notes, FOLDER_FIX])
        with quiet_library(offline=True), blame(where, DataError, fix):
            table = read_tables(listing, splits)
        files = from_table(table, where, image_options)
        if missing := max(0, len(images) - sum(map(len, table.values()))):
            left_out = f"{missing:,} of {len(images):,} images are in no metadata file"
            notes.append(f"{left_out} and were left out")
    files.notes[:0] = notes
    return files


def read_tables(listing: folders.Listing, splits: dict[str, list[Path]]) -> Any:
    """Return the table that `load_dataset` would return."""
    import pyarrow as pa
    from pyarrow.dataset import ParquetFragmentScanOptions

    # The library's Arrow copy is only needed until the images are decoded. It is mapped, not read:
    # a file that was removed exists as long as it is mapped.
    with tempfile.TemporaryDirectory(prefix="ddp_mnist-", ignore_cleanup_errors=True) as scratch:
        builder = find_builder(listing, scratch, splits)
        if hasattr(builder.config, "fragment_scan_options"):  # of parquet
            # otherwise pyarrow keeps in memory all that it has read of a file
            no_buffer = ParquetFragmentScanOptions(pre_buffer=False)
            builder.config.fragment_scan_options = no_buffer
            builder.config.batch_size = 100
        builder.download_and_prepare()
        pa.default_memory_pool().release_unused()
        return builder.as_dataset()


def find_builder(listing: folders.Listing, scratch: str, splits: dict[str, list[Path]]) -> Any:
    """Return the builder of `datasets` for a folder that the library did not save.

    The library goes by the most common kind of file, so it would miss images that each have a note
    next to them; of those we know the `splits`. It takes the folder's name for a pattern. Raise
    DataError for archives.
    """
    import datasets
    from datasets.data_files import DataFilesDict, DataFilesList
    from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder
    from datasets.packaged_modules.parquet.parquet import Parquet

    folder, tables = listing.folder, listing.tables
    pattern = re.search(r"[][*?]", folder)
    if splits:
        kind = ImageFolder
    elif pattern and tables and not listing.card_names_files:
        kind, splits = Parquet, folders.split_by_names(tables)
    elif archives := [path for path in listing.paths if path.suffix == ".zip" and not tables]:
        fix = "unpack it into train/CLASS/ and test/CLASS/"
        raise DataError(f"{listing.where}: {archives[0]} is an archive, and is not opened; {fix}")
    elif pattern:
        problem = f"has {pattern[0]} in its path, which would be a pattern here; rename it"
        raise DataError(f"{listing.where}: {problem}")
    else:
        return datasets.load_dataset_builder(folder, cache_dir=scratch)
    files = {
        split: DataFilesList([str(Path(folder, file)) for file in of_split], [])
        for split, of_split in splits.items()
    }
    return kind(cache_dir=scratch, data_files=DataFilesDict(files))


@contextlib.contextmanager
def quiet_library(offline: bool) -> Iterator[None]:
    """Keep `datasets` in the block quiet and, if `offline`, off the network."""
    import datasets
    import huggingface_hub

    verbosity, silent = datasets.logging.get_verbosity(), datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    ours, theirs = datasets.config, huggingface_hub.constants
    before = ours.HF_HUB_OFFLINE, theirs.HF_HUB_OFFLINE
    if offline:  # as HF_HUB_OFFLINE=1, which they read only at import
        ours.HF_HUB_OFFLINE = theirs.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        ours.HF_HUB_OFFLINE, theirs.HF_HUB_OFFLINE = before
        datasets.logging.set_verbosity(verbosity)
        if not silent:
            datasets.enable_progress_bars()
