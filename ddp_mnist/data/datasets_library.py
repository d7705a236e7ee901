"""What the library `datasets` reads: a data set on the Hub, and a folder's tables and images.

Heavy libraries are imported where they are used, because a cached run needs none.
"""

import contextlib
import errno
import os
import re
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddp_mnist.config.image_options import ImageOptions
from ddp_mnist.data import folders
from ddp_mnist.data.image_format import Decoded, Reserve
from ddp_mnist.errors import DataError, StorageError, causes, root_reason
from ddp_mnist.system.deadline import with_deadline

HUB_TIMEOUT_S = 5.0
OFFLINE_FIX = (
    "set HF_ENDPOINT to a mirror of the Hub that answers, run ddp-mnist prepare where there is a"
    " network and copy the cache folder, give a folder (--dataset PATH), or train on the built-in"
    " digits (--dataset digits)"
)
FOLDER_FIX = (
    "give it images in train/CLASS/ and test/CLASS/, or whole parquet files with equal columns"
)
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
UNWRITABLE = (*NO_SPACE, errno.EACCES, errno.EROFS, errno.ENOTDIR)


def read_hub(hub_id: str) -> Any:
    """Return the table of a data set on the Hub, or in Hugging Face's own cache if out of reach.

    One request with a deadline decides which: `load_dataset` on its own would retry for 24 s.
    """
    import datasets
    import huggingface_hub

    if why := why_out_of_reach(hub_id):
        why = f"not in the cache, and the Hub cannot be reached: {why}"
    home = (huggingface_hub.constants.HF_HOME, "HF_HOME", UNWRITABLE)
    with quiet_library(f"--dataset {hub_id}", OFFLINE_FIX, why, home):
        return datasets.load_dataset(hub_id)


def why_out_of_reach(hub_id: str) -> str:
    """Return why the Hub is out of reach, or "". Raise DataError if it has no such data set."""
    import huggingface_hub.constants

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    hub = huggingface_hub.HfApi()
    try:
        # No time-out of a request covers a name server that does not answer.
        with_deadline(lambda: hub.dataset_info(hub_id, timeout=HUB_TIMEOUT_S), HUB_TIMEOUT_S)
    except Exception as error:  # any transport's own: httpx, requests, sockets, proxies
        if getattr(getattr(error, "response", None), "status_code", None) in (401, 403, 404):
            raise DataError(
                f"--dataset {hub_id}: the Hub has no such data set for you; check the id, or log in"
                " (hf auth login) if it is private"
            ) from error
        return root_reason(error)
    return ""


def read_folder(
    folder: str, paths: list[Path], where: str, image_options: ImageOptions, reserve: Reserve
) -> tuple[Decoded, list[str]]:
    """Decode images in the folders of their classes, or what `datasets` reads there.

    Return it, and notes on images left out.
    """
    from ddp_mnist.data.hf_dataset import decode_dataset, decode_files

    saved = Path(folder, "dataset_dict.json").exists()
    found = [] if saved else [path.relative_to(folder) for path in paths]
    images, odd = folders.find_images(where, folder, found)
    folders.check_names(where, folder, images)
    splits = folders.splits_of_images(folder, found, images, image_options)
    described = any(file.name in folders.METADATA for files in splits.values() for file in files)
    if splits and not described:
        notes = odd + folders.check_images(where, splits, images, odd, image_options)
        return decode_files(folder, splits, where, image_options, reserve), notes
    # The library's Arrow copy is only needed until the images are decoded.
    scratch_place = (tempfile.gettempdir(), "TMPDIR", NO_SPACE)
    fix = "; ".join([*odd, FOLDER_FIX])
    with quiet_library(where, fix, "it names files outside of it", scratch_place):
        if saved:
            import datasets

            rows, notes = datasets.load_from_disk(folder), []
        else:
            rows, notes = read_tables(folder, found, where, splits, images, odd, image_options)
    return decode_dataset(rows, where, image_options, reserve), notes


def read_tables(
    folder: str,
    found: list[Path],
    where: str,
    splits: dict[str, list[Path]],
    images: list[Path],
    odd: list[str],
    image_options: ImageOptions,
) -> tuple[Any, list[str]]:
    """Read what `load_dataset` can. Return it, and notes on images left out."""
    import pyarrow as pa
    from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder
    from pyarrow.dataset import ParquetFragmentScanOptions

    with tempfile.TemporaryDirectory(prefix="ddp_mnist-", ignore_cleanup_errors=True) as scratch:
        builder, notes = find_builder(folder, found, where, scratch, splits), list[str]()
        if isinstance(builder, ImageFolder):
            splits = {
                str(split): [Path(os.path.relpath(file, folder)) for file in files]
                for split, files in builder.config.data_files.items()
            }
            if image_options.for_evaluation:
                builder.config.drop_labels = False  # of one class too
            notes = odd + folders.check_images(where, splits, images, odd, image_options)
        if hasattr(builder.config, "fragment_scan_options"):  # of parquet
            # otherwise pyarrow keeps all that it has read of a file until its end
            no_buffer = ParquetFragmentScanOptions(pre_buffer=False)
            builder.config.fragment_scan_options = no_buffer
            builder.config.batch_size = 100
        builder.download_and_prepare()
        pa.default_memory_pool().release_unused()
        # Mapped, not read: a file that was removed stays as long as it is mapped.
        rows = builder.as_dataset()
        notes += folders.not_described(splits, {split: len(rows[split]) for split in rows})
        return rows, notes


def find_builder(
    folder: str, found: list[Path], where: str, scratch: str, splits: dict[str, list[Path]]
) -> Any:
    """Return the builder of `datasets` for a folder that the library did not save.

    The library goes by the most common kind of file, so it would miss images with a note beside
    each, of which we know the `splits`, and it takes the folder's name for a pattern. Raise
    DataError for archives.
    """
    import datasets
    from datasets.data_files import DataFilesDict, DataFilesList
    from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder
    from datasets.packaged_modules.parquet.parquet import Parquet

    tables, by_card = folders.tables_of(folder, found)
    if splits:
        kind = ImageFolder
    elif (pattern := re.search(r"[][*?]", folder)) and tables and not by_card:
        kind, splits = Parquet, folders.split_by_names(tables)
    elif archives := [path for path in found if path.suffix == ".zip" and not tables]:
        fix = "unpack it into train/CLASS/ and test/CLASS/"
        raise DataError(f"{where}: {archives[0]} is an archive, and is not opened; {fix}")
    elif pattern:
        problem = f"has {pattern[0]} in its path, which would be a pattern here; rename it"
        raise DataError(f"{where}: {problem}")
    else:
        return datasets.load_dataset_builder(folder, cache_dir=scratch)
    files = {
        split: DataFilesList([str(Path(folder, file)) for file in of_split], [])
        for split, of_split in splits.items()
    }
    return kind(cache_dir=scratch, data_files=DataFilesDict(files))


@contextlib.contextmanager
def quiet_library(
    where: str, fix: str, why_offline: str, written: tuple[str, str, tuple[int, ...]]
) -> Iterator[None]:
    """Keep `datasets` in the block quiet and, if there is a reason `why_offline`, off the network.

    Raise DataError, which ends with `fix`, if the data set cannot be read, and StorageError if the
    library cannot write: `written` is the folder that it writes to, the variable that moves it, and
    the errno codes that mean so.
    """
    import datasets
    import huggingface_hub

    verbosity, silent = datasets.logging.get_verbosity(), datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    ours, theirs = datasets.config, huggingface_hub.constants
    before = ours.HF_HUB_OFFLINE, theirs.HF_HUB_OFFLINE
    if why_offline:  # as HF_HUB_OFFLINE=1, which they read only at import
        ours.HF_HUB_OFFLINE = theirs.HF_HUB_OFFLINE = True
    try:
        with warnings.catch_warnings():
            # Its lock on the files it writes is then a file, too.
            warnings.filterwarnings("ignore", "flock not supported")
            yield
    except DataError:
        raise
    except Exception as error:  # its own and those of pyarrow, fsspec and the transport
        folder, name, codes = written
        for cause in causes(error):
            if isinstance(cause, OSError) and cause.errno in codes:
                raise StorageError(
                    f"{folder}: cannot be written ({cause.strerror}); set {name} to another folder"
                ) from error
        offline = why_offline and isinstance(error, ConnectionError)
        why = why_offline if offline else root_reason(error)
        raise DataError(f"{where}: cannot be read ({why}); {fix}") from error
    finally:
        ours.HF_HUB_OFFLINE, theirs.HF_HUB_OFFLINE = before
        datasets.logging.set_verbosity(verbosity)
        if not silent:
            datasets.enable_progress_bars()
