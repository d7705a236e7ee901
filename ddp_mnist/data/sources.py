"""A data set is read from the Hub, from a folder, or out of scikit-learn.

Heavy libraries are imported where they are used, because a cached run needs none.
"""

import contextlib
import dataclasses
import errno
import functools
import hashlib
import json
import os
import re
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ddp_mnist import errors
from ddp_mnist.config.image_options import AS_THEY_ARE, ImageOptions
from ddp_mnist.data import folders
from ddp_mnist.data.built_in import BUILT_IN
from ddp_mnist.data.held_out import as_in_files, keys_of
from ddp_mnist.data.idx import find_idx_files, read_idx
from ddp_mnist.data.image_format import Decoded, Reserve, Shape
from ddp_mnist.system.deadline import with_deadline

HUB_IDS = {"mnist": "ylecun/mnist", "fashion_mnist": "zalando-datasets/fashion_mnist"}
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


@dataclass(frozen=True)
class Source:
    """A place to read from: `kind` is hub, folder or a built-in set, `place` an id or a path."""

    name: str
    kind: str
    place: str
    image_options: ImageOptions = AS_THEY_ARE
    typed: str = field(default="", compare=False)  # its name in errors
    warnings: list[str] = field(default_factory=list, compare=False)

    def read(self, reserve: Reserve) -> Decoded:
        """Decode all of it, into the room that `reserve` makes for the images.

        Raise UsageError if --test-size does not fit, DataError, or StorageError if there is no
        space to unpack it.
        """
        where, notes = f"--dataset {self.typed}", list[str]()
        with readable(self.typed):
            if self.kind in BUILT_IN:
                decoded = as_asked(BUILT_IN[self.kind](), self.name, self.image_options, reserve)
            elif self.kind == "hub":
                from ddp_mnist.data.hf_dataset import decode_dataset

                decoded = decode_dataset(read_hub(self.place), where, self.image_options, reserve)
            elif files := find_idx_files(Path(self.place), self.typed):
                decoded = as_asked(read_idx(files), self.name, self.image_options, reserve)
            else:
                decoded, notes = read_folder(
                    self.place, self.paths, where, self.image_options, reserve
                )
                decoded.notes[:0] = notes
        if self.image_options.for_evaluation:
            return decoded
        test = decoded.labels["test"]
        if (unseen := np.flatnonzero(~np.isin(test, decoded.labels["train"]))).size:
            row, label = unseen[0], decoded.classes[test[unseen[0]]]
            fault = f"{where}: class {label} has images in test (row {row}) and none in train"
            fix = "add some to train, or correct the labels"
            raise errors.DataError("; ".join([fault, *notes, fix]))
        return decoded

    @functools.cached_property
    def paths(self) -> list[Path]:
        """The paths in a folder, which is listed once."""
        with readable(self.typed):
            return folders.paths_in(Path(self.place))

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of name, size and time of each file of a folder: they change when the data do."""
        if self.kind != "folder":
            return ""
        folder, found = Path(self.place), self.paths
        with readable(self.typed):
            linked = (path.rglob("*") for path in found if path.is_symlink() and path.is_dir())
            files = sorted(path for paths in (found, *linked) for path in paths if path.is_file())
            stats = [(str(path.relative_to(folder)), path.stat()) for path in files]
        facts: list[Any] = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
        if any(name.lower().endswith(folders.HEIF) for name, _ in stats):
            from ddp_mnist.data.decode import reads_heif

            facts += ["and HEIF is read"] * reads_heif()
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def outside(self, files: Iterable[str]) -> dict[str, list[int]]:
        """Return size and time of those of the files, which a table names, outside the folder."""
        if self.kind != "folder":
            return {}
        paths = (Path(os.path.abspath(file)) for file in files)  # noqa: PTH100 # as it is named
        return {
            str(path): [path.stat().st_size, path.stat().st_mtime_ns] if path.exists() else []
            for path in paths
            if not path.is_relative_to(self.place)
        }


@contextlib.contextmanager
def readable(place: str) -> Iterator[None]:
    """Turn what the file system and pyarrow raise (OSError, ValueError) into a DataError."""
    try:
        yield
    except (OSError, ValueError) as error:
        why = errors.root_reason(error)
        problem = f"--dataset {place}: cannot be read ({why}); check its files"
        raise errors.DataError(problem) from error


def find_source(dataset: str, image_options: ImageOptions = AS_THEY_ARE) -> Source:
    """Return the source that `--dataset` names. Raise DataError if a path leads to no folder.

    Raise UsageError if it is neither a name nor a path.
    """
    beside = dataset in (*BUILT_IN, *HUB_IDS) and Path(dataset).is_dir()
    notes = [f"{dataset} is the data set of that name; for the folder, give ./{dataset}"] * beside
    if dataset in BUILT_IN:
        place = f"sklearn.datasets.{BUILT_IN[dataset].__name__}"
        return Source(dataset, dataset, place, image_options, warnings=notes)
    if dataset in HUB_IDS:
        return Source(dataset, "hub", HUB_IDS[dataset], image_options, dataset, notes)
    # Unlike pathlib's, these two raise nothing for ~nobody or links in a circle.
    path = Path(os.path.realpath(os.path.expanduser(dataset)))  # noqa: PTH111
    with readable(dataset):
        if dataset and path.is_dir():
            return Source(errors.printable(path.name), "folder", str(path), image_options, dataset)
        if dataset and path.exists():
            raise errors.DataError(f"--dataset {dataset}: is a file; give the folder it lies in")
    names = [*HUB_IDS, *BUILT_IN, *(each.name for each in path.parent.glob("*/"))]
    near = errors.did_you_mean(Path(dataset).name, names)
    if dataset.startswith((".", "/", "~")) or dataset.count("/") > 1:
        raise errors.DataError(f"--dataset {dataset}: no such folder; check the path{near}")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", dataset, re.ASCII):
        return Source(dataset.replace("/", "--"), "hub", dataset, image_options, dataset)
    raise errors.UsageError(
        f"--dataset {dataset}: no such data set or folder; choose from mnist, fashion_mnist,"
        f" digits, patches, a Hub id (owner/name) or a folder{near}"
    )


def from_anywhere(dataset: str) -> str:
    """Return a --dataset that names the same data from any working directory."""
    source = find_source(dataset)
    return source.place if source.kind == "folder" else dataset


# --- Through the library `datasets`


def read_hub(hub_id: str) -> Any:
    """Read from the Hub, or from Hugging Face's own cache if the Hub is out of reach.

    One request with a deadline decides which: `load_dataset` on its own would retry for 24 s.
    """
    import datasets
    import huggingface_hub

    if why := why_out_of_reach(hub_id):
        why = f"not in the cache, and the Hub cannot be reached: {why}"
    home = (huggingface_hub.constants.HF_HOME, "HF_HOME", UNWRITABLE)
    with library(f"--dataset {hub_id}", OFFLINE_FIX, why, home):
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
            raise errors.DataError(
                f"--dataset {hub_id}: the Hub has no such data set for you; check the id, or log in"
                " (hf auth login) if it is private"
            ) from error
        return errors.root_reason(error)
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
    with library(where, fix, "it names files outside of it", scratch_place):
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
            # pyarrow would else hold all that it has read of a file until its end
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
        raise errors.DataError(f"{where}: {archives[0]} is an archive, and is not opened; {fix}")
    elif pattern:
        problem = f"has {pattern[0]} in its path, which would be a pattern here; rename it"
        raise errors.DataError(f"{where}: {problem}")
    else:
        return datasets.load_dataset_builder(folder, cache_dir=scratch)
    files = {
        split: DataFilesList([str(Path(folder, file)) for file in of_split], [])
        for split, of_split in splits.items()
    }
    return kind(cache_dir=scratch, data_files=DataFilesDict(files))


@contextlib.contextmanager
def library(
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
    except errors.DataError:
        raise
    except Exception as error:  # its own and those of pyarrow, fsspec and the transport
        folder, name, codes = written
        for cause in errors.causes(error):
            if isinstance(cause, OSError) and cause.errno in codes:
                raise errors.StorageError(
                    f"{folder}: cannot be written ({cause.strerror}); set {name} to another folder"
                ) from error
        offline = why_offline and isinstance(error, ConnectionError)
        why = why_offline if offline else errors.root_reason(error)
        raise errors.DataError(f"{where}: cannot be read ({why}); {fix}") from error
    finally:
        ours.HF_HUB_OFFLINE, theirs.HF_HUB_OFFLINE = before
        datasets.logging.set_verbosity(verbosity)
        if not silent:
            datasets.enable_progress_bars()


# --- Arrays in memory


def as_asked(decoded: Decoded, name: str, image_options: ImageOptions, reserve: Reserve) -> Decoded:
    """Return a data set that was read into memory, its images in the size and colours asked for."""
    if image_options.test_size is not None and not image_options.for_evaluation:
        problem = f"{name} has a test split of its own; remove --test-size"
        raise errors.UsageError(f"--test-size {image_options.test_size}: {problem}")
    channels, height, width = decoded.images["train"].shape[1:]
    wanted = 1 if image_options.grey else 3 if image_options.for_evaluation else channels
    shape = (wanted, *(image_options.size or (height, width)))
    images = reserve(shape, {split: len(labels) for split, labels in decoded.labels.items()})
    unchanged = shape == (channels, height, width)
    for split, given in decoded.images.items():
        images[split][:] = given if unchanged else resized(given, shape)
    notes = decoded.notes
    if not unchanged:
        kind = "in colour" if shape[0] == 3 else "grey"
        notes = [*notes, f"images of {height}x{width} became {shape[1]}x{shape[2]} {kind}"]
    keys = {split: keys_of(given) for split, given in decoded.images.items()}
    as_stored = decoded.as_stored and unchanged
    return dataclasses.replace(decoded, images=images, notes=notes, as_stored=as_stored, keys=keys)


def resized(images: np.ndarray, shape: Shape) -> np.ndarray:
    """Return uint8 [N, C, H, W] in another size, or grey."""
    import PIL.Image

    from ddp_mnist.data.decode import decode_image

    files = map(PIL.Image.fromarray, as_in_files(images))
    return np.stack([decode_image(file, shape) for file in files])
