"""Tables of images and labels, read by the library `datasets`: of the Hub, or in a folder.

Heavy libraries are imported where they are used, because a cached run needs none of them.
"""

import contextlib
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ddp_mnist.config.image_options import ImageOptions
from ddp_mnist.data.decode import LFS
from ddp_mnist.data.groups import COLUMN, name_in
from ddp_mnist.data.listing import (
    LABELS,
    Cell,
    Listing,
    choose_splits,
    number_columns,
    number_labels,
)
from ddp_mnist.errors import DataError, UsageError, blame
from ddp_mnist.system.deadline import with_deadline
from ddp_mnist.system.files import read_if_whole, regular
from ddp_mnist.system.text import causes, joined, reason

HUB_TIMEOUT_S = 5.0
OFFLINE_FIX = (
    "set HF_ENDPOINT to a mirror of the Hub that answers, run ddp-mnist prepare where there is a"
    " network and copy the cache folder, give a folder (--dataset PATH), or train on the built-in"
    " digits (--dataset digits)"
)
FOLDER_FIX = "give images in train/CLASS/ and test/CLASS/, or whole parquet files of one kind"
FILES = ("binary", "large_binary", "string", "large_string")  # types of their content or path
NAMES = {"image": ("image", "images", "img", "pixels", "pixel_values"), "label": LABELS}


def hub_parts(place: str) -> tuple[str, str | None, str | None]:
    """Return the parts of owner/name:config@revision, where all but the first may be missing.

    The first is empty if it is not written so. A revision is a commit, a tag or a branch.
    """
    parts = r"(\w[\w.-]*/\w[\w.-]*)(?::([^:@/]+))?(?:@([^:@]+))?"
    found = re.fullmatch(parts, place, re.ASCII)
    return (found[1], found[2], found[3]) if found else ("", None, None)


def list_hub(place: str, typed: str, options: ImageOptions) -> Listing:
    """Return a data set on the Hub, or in Hugging Face's own cache if the Hub is out of reach.

    One request with a deadline decides which: `load_dataset` itself would retry for 24 s. Without
    the Hub it takes the latest configuration and revision in its cache, whatever was asked for, so
    those that are named have a separate cache.
    """
    import datasets

    why = why_out_of_reach(place)
    fault = f"{typed}: is not in the cache, and the Hub cannot be reached ({why})" if why else typed
    hub_id, config, revision = hub_parts(place)
    named = place.removeprefix(hub_id)
    cache = Path(datasets.config.HF_DATASETS_CACHE, quote(named, "")) if named else None
    with quiet_library(offline=bool(why)), blame(fault, DataError, OFFLINE_FIX if why else ""):
        try:
            table = datasets.load_dataset(hub_id, config, revision=revision, cache_dir=cache)
        except ValueError:
            names = [] if why else datasets.get_dataset_config_names(hub_id, revision=revision)
            if config or len(names) < 2:
                raise
            fix = f"name one of them, as --dataset {hub_id}:{names[0]}{named}"
            several = f"has several configurations: {joined(names, 80)}"
            raise DataError(f"{typed}: {several}; {fix}") from None
    return list_table(table, typed, options)


def why_out_of_reach(place: str) -> str | None:
    """Return why the Hub is out of reach, or None. Raise DataError if it lacks the data set."""
    import huggingface_hub.constants

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    hub = huggingface_hub.HfApi()
    hub_id, _, revision = hub_parts(place)
    ask = partial(hub.dataset_info, hub_id, revision=revision, timeout=HUB_TIMEOUT_S)
    try:
        with_deadline(ask, HUB_TIMEOUT_S)  # a request's does not cover a name server that is silent
    except Exception as error:  # any transport's own: httpx, requests, sockets, proxies
        if getattr(getattr(error, "response", None), "status_code", None) in (401, 403, 404):
            fault = f"--dataset {place}: not on the Hub, or not visible to you"
            what = "id and revision" if revision else "the id"
            fix = f"check {what}, or log in (hf auth login) if it is private"
            raise DataError(f"{fault}; {fix}") from error
        return reason([*causes(error)][-1])  # libraries wrap the system's error
    return None


def list_tables(folder: str, typed: str, options: ImageOptions) -> Listing:
    """Return a data set that the library saved in a folder, or finds there as tables."""
    import datasets

    with quiet_library(offline=True), blame(typed, DataError, FOLDER_FIX):
        if is_saved(folder):
            return list_table(datasets.load_from_disk(folder), typed, options, folder)
        if pattern := re.search(r"[][*?]|::", folder):
            raise DataError(f"{typed}: has {pattern[0]} in its path, a pattern here; rename it")
        check_card(folder, typed)
        if len(names := datasets.get_dataset_config_names(folder)) > 1:
            fix = "save the one that you want by save_to_disk of `datasets`, and give that folder"
            raise DataError(f"{typed}: has several configurations: {joined(names, 80)}; {fix}")
        # The library's Arrow copy is only needed until the images are decoded. It is mapped, not
        # read: a file that was removed exists as long as it is mapped.
        with tempfile.TemporaryDirectory(prefix="ddp_mnist-", ignore_cleanup_errors=True) as place:
            table, files = read_tables(folder, place)
    listing = list_table(table, typed, options, folder)
    listing.tables = files
    return listing


def has_images(file: Path, name: str) -> bool:
    """Return whether a parquet file may hold images: has a column of such a name, or of structs.

    Raise OSError for a pointer of Git LFS.
    """
    from pyarrow.parquet import read_schema
    from pyarrow.types import is_struct

    with file.open("rb") as opened:
        if opened.read(len(LFS)) == LFS:
            raise OSError(None, f"{file.name} is a pointer of Git LFS: git lfs pull")
    named = (name, *NAMES["image"])
    return any(field.name in named or is_struct(field.type) for field in read_schema(file))


def is_saved(folder: str) -> bool:
    """Return whether `save_to_disk` wrote the folder: other tools have a state.json too."""
    is_one = all(Path(folder, name).is_file() for name in ("state.json", "dataset_info.json"))
    several = Path(folder, "dataset_dict.json")
    return is_one or (several.is_file() and "splits" in read_if_whole(several))


def check_card(folder: str, typed: str) -> None:
    """Raise DataError if a folder's card names data at an address.

    The library would make requests there even if it is offline. It knows addresses by `://`, and a
    chain of them by `::`.
    """
    import yaml
    from datasets import config
    from huggingface_hub import DatasetCard

    card, plain = Path(folder, config.REPOCARD_FILENAME), Path(folder, config.REPOYAML_FILENAME)
    named = {card: DatasetCard.load(card).data.to_dict()} if card.is_file() else {}
    if plain.exists():
        named[plain] = yaml.safe_load(regular(plain).read_text("utf-8")) or {}
    for file, about in named.items():
        if found := re.search("[^ '\"]*(://|::)[^ '\"]*", str(about.get("configs"))):
            fault = f"{file.name} names {found[0]}, and a folder is read without a network"
            raise DataError(f"{typed}: {fault}; fetch that, and take it out of the file")


def read_tables(folder: str, scratch: str) -> tuple[Any, list[str]]:
    """Return the tables that `load_dataset` finds in a folder, in as little memory as they need,
    and their files, which README.md may name elsewhere.
    """
    import datasets
    import pyarrow as pa
    from pyarrow.dataset import ParquetFragmentScanOptions

    builder = datasets.load_dataset_builder(folder, cache_dir=scratch)
    if hasattr(builder.config, "fragment_scan_options"):  # of parquet
        # otherwise pyarrow keeps in memory all that it has read of a file
        builder.config.fragment_scan_options = ParquetFragmentScanOptions(pre_buffer=False)
        builder.config.batch_size = 100
    # A card may count rows that are gone; the rows that are there are counted here.
    builder.download_and_prepare(verification_mode="no_checks")
    pa.default_memory_pool().release_unused()
    return builder.as_dataset(), [x for each in builder.config.data_files.values() for x in each]


def list_table(
    dataset: Any, typed: str, options: ImageOptions, folder: str | None = None
) -> Listing:
    """Return a table's images and labels. Raise DataError, which names column and row."""
    named = dict(dataset) if isinstance(dataset, dict) else {"train": dataset}
    splits, notes = choose_splits(named, typed, options)
    if options.for_evaluation and "train" in splits and not len(splits["train"]):
        del splits["train"]
    (begin, first), *others = splits.items()
    image_column, targets_in, unused = find_columns(first, typed, options)
    for column in (image_column, *targets_in):
        # Splits that were saved one by one may differ: label 3 may be another class in test.
        for split, rows in others:
            if (kind := first.features[column]) != (other := rows.features.get(column, "missing")):
                fault = f"{typed}: column {column} is {kind} in {begin} and {other} in {split}"
                raise DataError(f"{fault}; give both the same type and the same names")
    found, classes, careful = dict[str, list[list[Any]]](), list[str](), list[str]()
    groups = list[str]()
    for split, rows in splits.items():
        if len(rows) == 0:
            raise DataError(f"{typed}: split {split} has no rows; check its files")
        read = rows.with_format("arrow")[:]
        found[split] = [read.column(column).to_pylist() for column in targets_in]
        own = options.own_columns(f"{typed}: split {split}", [*rows.features], *uses_of(options))
        group = own.get(COLUMN, COLUMN)
        has_groups = group in rows.features and group not in targets_in
        groups += map(name_in, read.column(group).to_pylist() if has_groups else [""] * len(rows))
    if options.numbers:
        targets, careful = number_columns(found, typed, targets_in)
    else:
        names = getattr(first.features[targets_in[0]], "names", [])  # of a ClassLabel
        labels = {split: column for split, [column] in found.items()}
        targets, classes = number_labels(labels, typed, targets_in[0], names)
    images = {split: Cells(rows, image_column, folder) for split, rows in splits.items()}
    notes += unused
    place = folder or ""
    return Listing(typed, images, targets, classes, notes, image_column, place, careful, groups)


def uses_of(options: ImageOptions) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the uses of a table's columns: those that are needed, and others."""
    return ("image", *(options.numbers or ("label",))), (COLUMN,)


def find_columns(rows: Any, typed: str, options: ImageOptions) -> tuple[str, list[str], list[str]]:
    """Return the names of the image column and of those with the targets, and notes on unused ones.

    The targets are in options.numbers, else in a label column. Raise DataError without one, and as
    `own_columns`.
    """
    needed, others = uses_of(options)
    own = options.own_columns(typed, [*rows.features], needed, others)
    found, notes = list[str](), list[str]()
    for use in needed:
        names = (own[use],) if use in own else NAMES.get(use, (use,))
        may_guess = use not in own and use not in options.numbers
        fit = columns_for(use, names, rows.features, may_guess)
        if use == "label" and COLUMN in fit[1:]:
            fit.remove(COLUMN)
        if not fit:
            among = joined((f"{name} ({kind})" for name, kind in rows.features.items()), 120)
            if use in own:
                raise UsageError(f"--columns {use}={own[use]}: is not a column for {use}: {among}")
            fix = f"add one, named {use}, or say which it is: train --columns {use}=NAME"
            raise DataError(f"{typed}: no {use} column among {among}; {fix}")
        if unused := ", ".join(fit[1:]):
            other = f"{unused} (else train --columns {use}={fit[1]})"
            notes.append(f"{use}s are those of column {fit[0]}; not used: {other}")
        found.append(fit[0])
    return found[0], found[1:], notes


def columns_for(use: str, names: tuple[str, ...], features: Any, may_guess: bool) -> list[str]:
    """Return the columns for a use: those of these names, in their order, then others of its type,
    in the table's order, if that may be guessed from.
    """
    from datasets import ClassLabel, Image, Value

    found = list[str]()
    for name, kind in features.items():
        # Plain parquet without Hugging Face's metadata stores an image as {bytes, path}; others
        # have their files' bytes, or their paths.
        is_type = isinstance(kind, ClassLabel) and use == "label"
        is_named = name in names
        if use == "image":
            is_type = isinstance(kind, Image) or (isinstance(kind, dict) and "bytes" in kind)
            is_named &= is_type or (isinstance(kind, Value) and kind.dtype in FILES)
        if is_named or (is_type and may_guess):
            found.append(name)
    return sorted(found, key=lambda name: [*names, name].index(name))


@dataclass
class Cells:
    """A column of images: for each row the bytes of its file, or else its path."""

    rows: Any
    column: str
    folder: str | None  # in which the table lies, and paths begin

    def __iter__(self) -> Iterator[Cell]:
        from datasets import Image

        rows = self.rows
        if isinstance(rows.features[self.column], Image):
            rows = rows.cast_column(self.column, Image(decode=False))
        # more photos of several megabytes would fill the memory
        for batch in rows.select_columns([self.column]).with_format(None).iter(batch_size=100):
            for cell in batch[self.column]:
                content = cell["bytes"] or cell.get("path") if isinstance(cell, dict) else cell
                if isinstance(content, str) and self.folder:
                    content = str(Path(self.folder, content))
                yield content or None


@contextlib.contextmanager
def quiet_library(offline: bool) -> Iterator[None]:
    """Keep `datasets` in the block quiet and, if `offline`, off the network."""
    import datasets
    import huggingface_hub

    both: list[Any] = [datasets.config, huggingface_hub.constants]
    with contextlib.ExitStack() as afterwards:
        for library in (datasets, huggingface_hub):
            afterwards.callback(library.logging.set_verbosity, library.logging.get_verbosity())
            library.logging.set_verbosity(library.logging.CRITICAL)
        if not datasets.are_progress_bars_disabled():
            afterwards.callback(datasets.enable_progress_bars)
            datasets.disable_progress_bars()
        for settings in both:
            afterwards.callback(setattr, settings, "HF_HUB_OFFLINE", settings.HF_HUB_OFFLINE)
            settings.HF_HUB_OFFLINE |= offline  # which they read only at import
        yield
