"""A folder of images, each in the folder of its class, or with its label in a metadata file."""

import csv
import io
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from ddp_mnist.config.image_options import ImageOptions
from ddp_mnist.data.decode import image_endings
from ddp_mnist.data.listing import LABELS, Listing, choose_splits, number_in, number_labels
from ddp_mnist.errors import DataError, blame
from ddp_mnist.system.text import first_of, joined, printable

# The words in names of folders and files that mean a split, and the characters that separate words,
# as `datasets` defines them; also Train, TrainSet and the like.
SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
APART = "[-._ 0-9]"
SPLIT_NAMES = {
    split: re.compile(f"(.*{APART})?({'|'.join(words)})(set)?({APART}.*)?", re.IGNORECASE)
    for split, words in SPLIT_WORDS.items()
}
EXACT = {word for words in SPLIT_WORDS.values() for word in words}
# Suffixes of files that are clearly not images.
BESIDE_IMAGES = re.compile(r"\.(arrow|csv|db|ini|jsonl?|md|parquet|tsv|txt|xml)")
JUNK = re.compile(r"(^|/)(__MACOSX|__pycache__|\._[^/]*)(/|$)")  # what systems leave
HIDDEN = re.compile(r"(^|/)\.")
CLASS_FOLDERS = "put each image into the folder of its class, of two or more"


def paths_in(folder: Path) -> list[Path]:
    """Return the paths in a folder, sorted and relative to it, without hidden ones and runs.

    A run may be written into the folder that it trains on: `cd photos; train --dataset .`
    """
    every = sorted(walk(folder))
    found = [path for path in every if not HIDDEN.search(str(path.relative_to(folder)))]
    runs = {path.parent for path in found if path.name == "status.json"}
    runs = {path for path in runs if is_run(path)} - {folder}
    links = {path for path in found if path.name == "latest" and path.is_symlink()}
    outside = [path for path in found if (runs | links).isdisjoint((path, *path.parents))]
    names = (path.relative_to(folder) for path in outside)
    return [path for path in names if not JUNK.search(str(path))]


def is_run(folder: Path) -> bool:
    """Return whether a folder is that of a run, whose config.json has its id."""
    config = folder / "config.json"
    return config.exists() and '"run_id"' in config.read_text(errors="replace")


def walk(folder: Path) -> Iterator[Path]:
    """Yield what lies in a folder and its subfolders, following no link. Raise OSError."""

    def fail(error: OSError) -> None:
        raise error

    for place, folders, files in os.walk(folder, onerror=fail):
        yield from (Path(place, name) for name in (*folders, *files))


def is_metadata(file: Path) -> bool:
    """Return whether a file describes the images next to it."""
    return file.stem == "metadata" and file.suffix in READERS


def find_images(typed: str, folder: str, paths: list[Path]) -> tuple[list[Path], list[str]]:
    """Return the images among `paths_in` a folder, and a note on files with other endings, if any.

    Texts and tables are not worth a note. Raise DataError for a link to a folder or to nothing.
    """
    endings = image_endings()
    images, odd = list[Path](), Counter[str]()
    for path in paths:
        suffix, file = path.suffix.lower(), Path(folder, path)
        if file.is_file():
            if suffix in endings:
                images.append(path)
            elif not BESIDE_IMAGES.fullmatch(suffix):
                odd[path.suffix or "no ending"] += 1
        elif file.is_symlink():
            fault = f"{typed}: {path} is a link to a folder or to nothing, and is not followed"
            raise DataError(f"{fault}; replace it with a copy, or with links to the files")
    kinds = [f"{ending} ({count:,})" for ending, count in odd.most_common()]
    shown = printable(", ".join(first_of(kinds, 5)))
    note = f"files without the suffix of an image were left out: {shown}"
    return images, [note] if odd else []


def list_folder(
    typed: str, folder: str, paths: list[Path], options: ImageOptions
) -> Listing | None:
    """Return the images of a folder, by split and class, with notes on all that are left out.

    The topmost folder that is named like a split decides; or else the names of the files, if all of
    them have such a word. Return None if there are no images. Raise DataError if the class of an
    image is not clear.
    """
    there, notes = find_images(typed, folder, paths)
    if not there and notes:
        raise DataError("; ".join([f"{typed}: holds no image that can be read", *notes]))
    if not there:
        return None
    labels, unused = read_metadata(typed, folder, paths, options.columns)
    images = sorted({*there, *labels}, key=str)  # one that is not there counts as broken
    for path in map(str, (folder, *images)):
        if path != path.encode(errors="replace").decode():
            raise DataError(f"{typed}: {path} has a name that is not UTF-8; rename it")
    by_folders = split_by_folders(images, has_labels=bool(labels))
    split_of = by_folders or split_by_files(images) or dict.fromkeys(images, "train")
    taken = {image: split for image, split in split_of.items() if not labels or image in labels}
    left_out = [image for image in images if image not in taken]
    if len(left_out) > len(taken):
        kind, fix = "split", "rename that, or put images into train/CLASS/ and test/CLASS/"
        if labels:
            kind, fix = "metadata file", "add them, or move it if the folders are the classes"
        few = f"{len(left_out):,} of {len(images):,} images are in no {kind}, as {left_out[0]}"
        raise DataError(f"{typed}: {few}, but {next(iter(taken), 'none')} is; {fix}")
    if unnamed := [image for image in taken if labels and labels[image] in (None, "")]:
        raise DataError(f"{typed}: {unnamed[0]} has no label in its metadata file; add it")
    by_split = {s: [image for image in taken if taken[image] == s] for s in SPLIT_WORDS}
    found = {split: each for split, each in by_split.items() if each}
    if undescribed := sorted({*split_of.values()} - found.keys()):
        fault = f"{typed}: no metadata file describes the images of {undescribed[0]}"
        raise DataError(f"{fault}; add one, or move the others elsewhere if folders are classes")
    splits, more = choose_splits(found, typed, options)
    if not labels:
        for each in splits.values():
            check_class_folders(typed, each, bool(by_folders), unused)
            labels |= {image: image.parent.name for image in each}
        unused += empty_classes(folder, paths, images)
    of_split = {split: [labels[image] for image in each] for split, each in splits.items()}
    classes = list[str]()
    if options.columns:
        targets = {split: np.array(each, np.float32) for split, each in of_split.items()}
    else:
        targets, classes = number_labels(of_split, typed, "label")
    every = {path.relative_to(folder) for path in walk(Path(folder))} - labels.keys()
    hidden = [p for p in every if HIDDEN.search(str(p)) and not JUNK.search(str(p))]
    left_out += sorted(path for path in hidden if path.suffix.lower() in image_endings())
    if left_out:
        note = f"{len(left_out):,} of {len(taken) + len(left_out):,} images were left out"
        unused.append(f"{note}, as {printable(str(left_out[0]))}")
    cells = {split: [str(Path(folder, file)) for file in each] for split, each in splits.items()}
    return Listing(typed, cells, targets, classes, notes + unused + more)


def split_by_folders(images: list[Path], has_labels: bool) -> dict[Path, str]:
    """Return the split of each image that lies in a folder of such a name; {} if none does.

    Classes like cat/1.png may be named anything but exactly like a split.
    """
    tops = {image.parts[0].lower() for image in images}
    if not has_labels and all(len(each.parts) <= 2 for each in images) and tops.isdisjoint(EXACT):
        return {}
    found = {image: next(filter(None, map(split_in, image.parts[:-1])), "") for image in images}
    return {image: split for image, split in found.items() if split}


def split_by_files(images: list[Path]) -> dict[Path, str]:
    """Return the split of each image by its file's name; {} unless all have one, train as well."""
    found = {image: split_in(image.name) for image in images}
    return found if "train" in found.values() and "" not in found.values() else {}


def split_in(name: str) -> str:
    """Return the split that a name of a file or folder means; "" if none."""
    return next((split for split, names in SPLIT_NAMES.items() if names.fullmatch(name)), "")


def check_class_folders(typed: str, images: list[Path], in_splits: bool, unused: list[str]) -> None:
    """Raise DataError if a split's images do not lie in folders of classes, side by side.

    With `in_splits`, none of these may be that of the split. `unused` are notes on metadata files
    without labels, which may be what was meant.
    """
    first = images[0]
    for image in images:
        *above, folder = image.parts[:-1] or ("",)
        is_split = in_splits and split_in(folder) and not any(map(split_in, above))
        if is_split or not folder or image.parts[:-2] != first.parts[:-2]:
            both = first if image is first else f"{first} and {image}"
            fault = f"{typed}: which folder is the class of {both}? {CLASS_FOLDERS}"
            fix = "if that has numbers to learn, give --task MODULE:CLASS"
            raise DataError("; ".join([fault, *unused, *[fix] * bool(unused)]))


def empty_classes(folder: str, paths: list[Path], images: list[Path]) -> list[str]:
    """Return a note on folders next to those of the classes that hold no image, if any."""
    classes = {image.parent for image in images}
    beside = {path for path in paths if path.parent in {each.parent for each in classes}}
    empty = sorted(str(p) for p in beside - classes if Path(folder, p).is_dir())
    return [f"without an image: {printable(joined(empty, 80))}"] if empty else []


def read_metadata(
    typed: str, folder: str, paths: list[Path], columns: tuple[str, ...]
) -> tuple[dict[Path, Any], list[str]]:
    """Return the label of each image that a metadata file names, and notes on files without any.

    Labels are as they stand there: 007 in a CSV file is a word, and so is NA. With `columns`, it is
    the numbers of these instead. Raise DataError for a bad row, or if these columns are missing.
    """
    labels, notes = dict[Path, Any](), list[str]()
    for file in filter(is_metadata, paths):
        with blame(f"{typed}: {file}", DataError):
            rows = [row for row in READERS[file.suffix](Path(folder, file)) if any(row.values())]
            there = {name for row in rows for name in row}
            wanted = columns or tuple(name for name in LABELS if name in there)[:1] or ("label",)
            if missing := [name for name in ("file_name", *wanted) if name not in there]:
                notes.append(f"{file} has no column {' and '.join(missing)}, and was not used")
                continue
            for row in rows:
                image = Path(os.path.normpath(file.parent / row["file_name"]))
                label = row.get(wanted[0])
                if columns:
                    at = f"{typed}: {file}: {image}, column"
                    label = tuple(number_in(row.get(name), f"{at} {name}") for name in columns)
                if labels.setdefault(image, label) != label:
                    both = f"{image} has the labels {labels[image]} and {label}"
                    raise DataError(f"{typed}: {file}: {both}; decide on one")
    if all(isinstance(each, str) and re.fullmatch(r"0|[1-9]\d*", each) for each in labels.values()):
        labels = {image: int(each) for image, each in labels.items()}
    if columns and not labels:
        named = ", ".join(("file_name", *columns))
        fault = f"{typed}: holds no metadata.csv with the columns {named}"
        raise DataError("; ".join([fault, *notes, "add what is missing" if notes else "add one"]))
    return labels, notes


READERS: dict[str, Callable[[Path], list[dict[str, Any]]]] = {  # of metadata files, by suffix
    ".csv": lambda file: [*csv.DictReader(io.StringIO(file.read_text("utf-8-sig")))],
    ".jsonl": lambda file: [
        json.loads(x) for x in file.read_text("utf-8-sig").split("\n") if x.strip()
    ],
    ".parquet": lambda file: import_module("pyarrow.parquet").read_table(file).to_pylist(),
}
