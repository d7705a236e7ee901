"""What --dataset names: a data set on the Hub, in a folder, or inside scikit-learn."""

import contextlib
import functools
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ddp_mnist import errors
from ddp_mnist.config.image_options import AS_THEY_ARE, ImageOptions
from ddp_mnist.data import datasets_library, folders
from ddp_mnist.data.built_in import BUILT_IN
from ddp_mnist.data.idx import find_idx_files, read_idx
from ddp_mnist.data.image_format import Decoded, Reserve
from ddp_mnist.data.in_memory import as_asked

HUB_IDS = {"mnist": "ylecun/mnist", "fashion_mnist": "zalando-datasets/fashion_mnist"}


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

                table = datasets_library.read_hub(self.place)
                decoded = decode_dataset(table, where, self.image_options, reserve)
            elif files := find_idx_files(Path(self.place), self.typed):
                decoded = as_asked(read_idx(files), self.name, self.image_options, reserve)
            else:
                decoded, notes = datasets_library.read_folder(
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
