"""Resolve --dataset: a data set on the Hub, in a folder, or built into scikit-learn."""

import functools
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_mnist.config.image_options import ImageOptions
from ddp_mnist.data import tables
from ddp_mnist.data.built_in import BUILT_IN
from ddp_mnist.data.decode import HEIF, reads_heif
from ddp_mnist.data.folders import list_folder, paths_in
from ddp_mnist.data.idx import list_idx
from ddp_mnist.data.listing import Listing
from ddp_mnist.data.metadata import is_metadata
from ddp_mnist.errors import DataError, UsageError, blame
from ddp_mnist.system.files import regular
from ddp_mnist.system.text import did_you_mean, printable

HUB_IDS = {"mnist": "ylecun/mnist", "fashion_mnist": "zalando-datasets/fashion_mnist"}
# Kind and place of the data sets that have a name
NAMED = {name: (name, f"sklearn.datasets.{load.__name__}") for name, load in BUILT_IN.items()}
NAMED |= {name: ("hub", hub_id) for name, hub_id in HUB_IDS.items()}


@dataclass(frozen=True)
class Source:
    """A place to read from: `kind` is hub, folder or a built-in set, `place` an id or a path."""

    name: str
    kind: str
    place: str
    typed: str = field(default="", compare=False)  # as errors begin, e.g. --dataset photos
    warnings: list[str] = field(default_factory=list, compare=False)

    def listing(self, options: ImageOptions) -> Listing:
        """Return the images and labels that lie there.

        Raise DataError if they cannot be read, or StorageError if the disk has no space to unpack
        them.
        """
        if self.kind == "hub":
            return tables.list_hub(self.place, self.typed, options)
        with blame(self.typed, DataError):
            built_in = BUILT_IN[self.kind](self.typed) if self.kind in BUILT_IN else None
            found = built_in or list_idx(self.place, self.typed) or self._folder(options)
        if options.columns and not found.column and options.test_size != 0:
            use, name = options.columns[0]
            fault = f"--columns {use}={name}: {self.typed} has no table that is used"
            raise UsageError("; ".join([fault, *found.notes, "leave it out"]))
        if options.numbers and found.classes:
            raise DataError(f"{self.typed}: has classes, and no {', '.join(options.numbers)}")
        return found

    def _folder(self, options: ImageOptions) -> Listing:
        """Return the tables in a folder, or else its images."""
        for path in self.paths:
            with blame(f"{self.typed}: {path}", DataError, "take it out of the folder"):
                regular(Path(self.place, path))
        found = (Path(self.place, p) for p in self.paths if p.suffix == ".parquet")
        parquet = (path for path in found if path.is_file() and not is_metadata(path))
        image = dict(options.columns).get("image", "image")
        has_tables = any(tables.has_images(file, image) for file in itertools.islice(parquet, 1))
        listing = None
        if not has_tables and not tables.is_saved(self.place):
            listing = list_folder(self.typed, self.place, self.paths, options)
        return listing or tables.list_tables(self.place, self.typed, options)

    @functools.cached_property
    def paths(self) -> list[Path]:
        """The paths in a folder, relative to it; the folder is listed once."""
        with blame(self.typed, DataError):
            return paths_in(Path(self.place))

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of name, size and time of each file of a folder, which change when the data do.

        Tools may keep size and time: of metadata files, which are small, it has the content too.
        A phone's photos change as they become readable.
        Empty for what is no folder, and does not change.
        """
        if self.kind != "folder":
            return ""
        with blame(self.typed, DataError):
            places = [Path(self.place, path) for path in self.paths]
            linked = (link.rglob("*") for link in places if link.is_symlink() and link.is_dir())
            files = sorted({path for path in itertools.chain(places, *linked) if path.is_file()})
            contents = [path.read_bytes() for path in filter(is_metadata, files)]
            facts = [*map(_fact, files), *(hashlib.sha256(each).hexdigest() for each in contents)]
            if any(path.suffix.lower() in HEIF for path in files):
                facts.append(["reads HEIF", reads_heif()])
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def facts_outside(self, files: Iterable[str]) -> list[Any]:
        """Return name, size and time of those of the files that are not among the `paths`."""
        if self.kind != "folder":
            return []
        paths = {Path(os.path.abspath(file)) for file in files if file}  # noqa: PTH100 # as it is named
        return [*map(_fact, sorted(paths - {Path(self.place, path) for path in self.paths}))]


def _fact(path: Path) -> list[Any]:
    """Return a file's name, size and time, or its name alone if it is gone."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return [str(path)]
    return [str(path), found.st_size, found.st_mtime_ns]


def find_source(dataset: str) -> Source:
    """Return the source that `--dataset` names.

    Raise DataError if a path does not lead to a folder, UsageError if it is neither a name nor a
    path.
    """
    typed = f"--dataset {dataset}"
    if dataset in NAMED:
        note = f"{dataset} is the data set of that name; for the folder, give ./{dataset}"
        notes = [note] if Path(dataset).is_dir() else []
        return Source(dataset, *NAMED[dataset], typed, notes)
    path = Path(os.path.realpath(dataset))  # pathlib's raises an error for links in a circle
    with blame(typed, DataError):
        if dataset and path.is_dir():
            return Source(printable(path.name), "folder", str(path), typed)
        if dataset and path.exists():
            raise DataError(f"{typed}: is a file; give the folder it lies in")
    if tables.hub_parts(dataset)[0]:
        return Source(re.sub("[/:@]", "--", dataset), "hub", dataset, typed)
    near = did_you_mean(Path(dataset).name, [*NAMED, *(e.name for e in path.parent.glob("*/"))])
    if dataset.startswith((".", "/", "~")) or dataset.count("/") > 1:
        raise DataError(f"{typed}: no such folder; check the path{near}")
    fix = f"choose from {', '.join([*HUB_IDS, *BUILT_IN])}, a Hub id (owner/name) or a folder"
    raise UsageError(f"{typed}: no such data set or folder; {fix}{near}")


def check_still_there(dataset: str, run: str) -> None:
    """Raise DataError if a run's data set, which nobody typed now, was a folder that is gone."""
    if Path(dataset).is_absolute() and not Path(dataset).is_dir():
        fix = "name their place now: --dataset"
        raise DataError(f"{run}: its images were in {dataset}, where there is no folder; {fix}")


def from_anywhere(dataset: str) -> str:
    """Return a --dataset that names the same data from any working directory."""
    source = find_source(dataset)
    return source.place if source.kind == "folder" else dataset
