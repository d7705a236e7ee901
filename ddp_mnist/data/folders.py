"""A folder of images, each in the folder of its class, or with its label in a metadata file."""

import functools
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from ddp_mnist.config.image_options import ImageOptions
from ddp_mnist.data.decode import image_endings
from ddp_mnist.data.listing import (
    SPLIT_OF,
    SPLIT_WORDS,
    Listing,
    choose_splits,
    number_columns,
    number_labels,
    shown_file,
)
from ddp_mnist.data.metadata import Described, is_outside, other_tables, read_metadata
from ddp_mnist.errors import DataError
from ddp_mnist.system.text import first_of, joined, printable, shown_name

# The names that have such a word, and the characters that separate words, as `datasets` defines
# them; also Train, TrainSet and the like.
BETWEEN = "[-._ 0-9]"
SPLIT_NAMES = {
    split: re.compile(f"(.*{BETWEEN})?({'|'.join(words)})(set)?({BETWEEN}.*)?", re.IGNORECASE)
    for split, words in SPLIT_WORDS.items()
}
# Suffixes of files that are clearly not images.
BESIDE_IMAGES = re.compile(r"\.(arrow|csv|db|ini|jsonl?|md|parquet|tsv|txt|xml)")
# What systems leave, and what our cache has for a data set.
CACHE_FILES = r"[a-z]+-[^/]+-[0-9a-f]{8}\.(broken\.txt|lock|tmp)"
JUNK = re.compile(rf"(^|/)(__MACOSX|__pycache__|\._[^/]*|{CACHE_FILES})(/|$)")
HIDDEN = re.compile(r"(^|/)\.(?![^/]+\.icloud$)")  # .1.png.icloud stands for an image elsewhere
CLASS_FOLDERS = (
    "put each image into the folder of its class, CLASS/, or train/CLASS/ and test/CLASS/"
)
# The file that marks a folder of ours, of a run or a cached data set, and what another one has then
OURS = {"status.json": ("config.json", '"run_id"'), "about.json": ("about.json", '"image_format"')}


def paths_in(folder: Path) -> list[Path]:
    """Return the paths in a folder, sorted and relative to it, without hidden ones and our own.

    A run may be written into the folder that it trains on: `cd photos; train --dataset .`
    So may the cache.
    """
    every = sorted(walk(folder))
    found = [path for path in every if not HIDDEN.search(str(path.relative_to(folder)))]
    ours = {path.parent for path in found if is_ours(path)} - {folder}
    links = {path for path in found if path.name == "latest" and path.is_symlink()}
    outside = [path for path in found if (ours | links).isdisjoint((path, *path.parents))]
    names = (path.relative_to(folder) for path in outside)
    return [path for path in names if not JUNK.search(str(path))]


def is_ours(file: Path) -> bool:
    """Return whether a file is the mark of a run or of a cached data set, by what it holds."""
    name, word = OURS.get(file.name, ("", ""))
    mark = file.with_name(name) if name else file
    return bool(name) and mark.is_file() and word in mark.read_text(errors="replace")


def walk(folder: Path) -> Iterator[Path]:
    """Yield what lies in a folder and its subfolders, following no link. Raise OSError."""

    def fail(error: OSError) -> None:
        raise error

    for place, folders, files in os.walk(folder, onerror=fail):
        yield from (Path(place, name) for name in (*folders, *files))


def find_images(typed: str, folder: str, paths: list[Path]) -> tuple[list[Path], list[str]]:
    """Return the images among `paths_in` a folder, and notes on those that are not on this disk
    and on files with other endings, if any.

    Texts and tables are worth no note here. Raise DataError for a link to a folder or to nothing.
    """
    endings = image_endings()
    images, away, odd = list[Path](), list[Path](), Counter[str]()
    for path in paths:
        suffix, file = path.suffix.lower(), Path(folder, path)
        if suffix == ".icloud":
            away += [path] * (Path(path.stem).suffix.lower() in endings)
        elif not file.is_file() and file.is_symlink():
            fault = f"{typed}: {shown_name(str(path))} is a link to a folder or to nothing"
            fix = "replace it with a copy, or with links to the files"
            raise DataError(f"{fault}, and is not followed; {fix}")
        elif suffix in endings and not file.is_dir():
            images.append(path)  # a pipe too, which predict says that it cannot read
        elif file.is_file() and not BESIDE_IMAGES.fullmatch(suffix):
            odd[path.suffix or "no ending"] += 1
    notes = list[str]()
    if away:
        those = f"{len(away):,} of {len(images) + len(away):,} images are not on this disk"
        notes.append(f"{those}, as {shown_name(str(away[0]))}: let iCloud fetch them")
    if odd:
        kinds = [f"{ending} ({count:,})" for ending, count in odd.most_common()]
        shown = printable(", ".join(first_of(kinds, 5)))
        notes.append(f"files without the suffix of an image were left out: {shown}")
    return images, notes


def list_folder(
    typed: str, folder: str, paths: list[Path], options: ImageOptions
) -> Listing | None:
    """Return the images of a folder, by split and class, with notes on all that are left out.

    Return None if there are no images. Raise DataError if the class of an image is not clear.
    """
    there, notes = find_images(typed, folder, paths)
    if not there and notes:
        raise DataError("; ".join([f"{typed}: holds no image that can be read", *notes]))
    if not there:
        return None
    described, unused = read_metadata(typed, folder, paths, options)
    labels = {image: row.target for image, row in described.items()}
    images = sorted({*there, *labels}, key=str)  # one that is not there counts as broken
    for name in map(str, (folder, *images)):
        if name != name.encode(errors="replace").decode():
            raise DataError(f"{typed}: {name} has a name that is not UTF-8; rename it")
    split_of, in_splits, guessed = find_splits(images, described)
    unused += guessed
    taken = {image: split for image, split in split_of.items() if not labels or image in labels}
    left_out = [image for image in images if image not in taken]
    no_train = not options.for_evaluation and "train" not in taken.values()
    check_paths(typed, {*taken} - {*there}, left_out)
    # as `train station` of three stations
    is_guess = bool(guessed) and not labels and len({*taken.values()}) == 1
    if len(left_out) > len(taken) or (left_out and (no_train or is_guess)):
        kind, fix = "split", "rename that, or put images into train/CLASS/ and test/CLASS/"
        if labels and left_out[0] not in labels:
            kind, fix = "metadata file", "add them, or move it if the folders are the classes"
        first, other = (shown_name(str(next(iter(x), "none"))) for x in (left_out, taken))
        few = f"{len(left_out):,} of {len(there):,} images are in no {kind}, as {first}"
        raise DataError(f"{typed}: {few}, but {other} is; {fix}")
    found = {s: each for s in SPLIT_WORDS if (each := [x for x in taken if taken[x] == s])}
    if undescribed := sorted({*split_of.values()} - found.keys()):
        fault = f"{typed}: no metadata file describes the images of {undescribed[0]}"
        raise DataError(f"{fault}; add one, or move the others elsewhere if folders are classes")
    splits, more = choose_splits(found, typed, options)
    if not labels:
        class_folders, fault = find_class_folders(splits, in_splits, options.class_folder)
        tables = other_tables(folder, paths)
        if fault:
            task = ["if that has numbers to learn, give --task MODULE:CLASS"] * bool(unused)
            raise DataError("; ".join([f"{typed}: {fault}", *unused, *tables, *task]))
        labels = {image: place.name for image, place in class_folders.items()}
        places = {*class_folders.values()}
        unused += [*empty_classes(folder, paths, places, images), *like_splits(places)]
        unused += [f"{table}, and was not used" for table in tables[:1]]
    of_split = {split: [labels[image] for image in each] for split, each in splits.items()}
    classes, careful = list[str](), list[str]()
    if options.numbers:
        each_column = {split: [*zip(*each, strict=True)] for split, each in of_split.items()}
        targets, careful = number_columns(each_column, typed, options.numbers)
    else:
        targets, classes = number_labels(of_split, typed, "label")
    no_row = [image for image in left_out if described and image not in described]
    careful += left_out_of(taken, no_row, folder, ", which no metadata file has: add rows for them")
    rest = [x for x in (*left_out, *hidden_images(folder, labels)) if x not in no_row]
    unused += left_out_of(taken, rest, folder)
    cells = {split: [str(Path(folder, file)) for file in each] for split, each in splits.items()}
    notes += unused + more
    column = "file_name" if described else ""
    groups = [described[image].group for each in splits.values() for image in each if described]
    return Listing(typed, cells, targets, classes, notes, column, folder, careful, groups)


def left_out_of(
    taken: Collection[Path], images: list[Path], folder: str, why: str = ""
) -> Iterator[str]:
    """Yield a sentence on images that were left out, if any, besides those that were taken."""
    if images:
        those = f"{len(images):,} of {len(taken) + len(images):,} images were left out, as"
        yield f"{those} {shown_file(str(images[0]), folder)}{why}"


def hidden_images(folder: str, taken: Collection[Path]) -> list[Path]:
    """Return the images that are hidden, or in hidden folders, sorted, but for those taken."""
    there = {path.relative_to(folder) for path in walk(Path(folder))}.difference(taken)
    hidden = [p for p in there if HIDDEN.search(str(p)) and not JUNK.search(str(p))]
    return sorted(path for path in hidden if path.suffix.lower() in image_endings())


def check_paths(typed: str, missing: set[Path], left_out: list[Path]) -> None:
    """Raise DataError if a table names images in folders by their names alone."""
    names = {each.name for each in missing}
    if bare := [image for image in left_out if image.name in names]:
        fault = f"{bare[0]} is in no metadata file, but {bare[0].name} is"
        raise DataError(f"{typed}: {fault}; give paths in its column of files, as {bare[0]}")


def find_splits(
    images: list[Path], described: Mapping[Path, Described]
) -> tuple[dict[Path, str], bool, list[str]]:
    """Return the split of each image that has one, whether folders are named so, and notes on it.

    A column `split` of the metadata decides; or else the topmost folder that is named like a split;
    or else the names of the files, if all of them have such a word; else all are train.
    """
    given = {image: row.split for image, row in described.items() if row.split}
    others = [image for image in described if image not in given] if given else images
    by_folders = split_by_folders(others, has_labels=bool(described))
    by_files = {} if given or by_folders else split_by_files(images)
    split_of = given | by_folders or by_files or dict.fromkeys(images, "train")
    return split_of, bool(by_folders), guessed_splits(by_folders, by_files)


def split_by_folders(images: list[Path], has_labels: bool) -> dict[Path, str]:
    """Return the split of each image that lies in a folder of such a name; {} if none does.

    A folder of images may be that of a class, as `bullet train`. It is that of a split if those
    next to it are too; or if it has a split's name, no more, and labels are from elsewhere or it
    lies on top, where splits are expected.
    """
    beside: dict[Path, set[str]] = {}  # the folders of images in each folder
    for image in images:
        beside.setdefault(image.parent.parent, set()).add(image.parent.name)

    @functools.cache
    def split_of(parent: Path) -> str:
        if is_outside(parent):
            return ""
        *above, folder = parent.parts or ("",)
        names = beside[parent.parent] - {""}
        is_split = all(map(split_in if has_labels else is_exact, names))
        is_split |= is_exact(folder) and (has_labels or not above)
        return next(filter(None, map(split_in, [*above, *[folder] * is_split])), "")

    return {image: split for image in images if (split := split_of(image.parent))}


def guessed_splits(by_folders: Collection[Path], by_files: Collection[Path]) -> list[str]:
    """Return a note on folders and files that are taken for splits by a word in their names."""
    names = {name for image in by_folders for name in image.parts[:-1] if split_in(name)}
    names |= {image.name for image in [*by_files][:1]}
    guessed = sorted(name for name in names if not is_exact(name))
    shown = printable(joined(guessed, 80))
    return [f"taken for splits by their names: {shown}"] if guessed else []


def is_exact(name: str) -> bool:
    """Return whether a folder's name is a split's and nothing more."""
    return name.lower() in SPLIT_OF


def split_by_files(images: list[Path]) -> dict[Path, str]:
    """Return the split of each image by its file's name; {} unless all have one, train as well."""
    found = {image: split_in(image.name) for image in images}
    return found if "train" in found.values() and "" not in found.values() else {}


def split_in(name: str) -> str:
    """Return the split that a name of a file or folder means; "" if none."""
    return next((split for split, names in SPLIT_NAMES.items() if names.fullmatch(name)), "")


def find_class_folders(
    splits: Mapping[str, list[Path]], in_splits: bool, which: str
) -> tuple[dict[Path, Path], str]:
    """Return the folder of each image's class, the last or the first on its path, and what is
    unclear about them; "" if nothing is.

    With `in_splits`, some folders are those of splits, see `split_by_folders`.
    """
    images = [image for each in splits.values() for image in each]
    found = first_folders(images, in_splits)
    loose = next((image for image in images if image not in found), None)
    if which == "first" and loose:
        fix = "put each image below the folder of its class, or leave out --class-folder first"
        return found, f"which folder is the class of {shown_name(str(loose))}? {fix}"
    if which == "first":
        return found, ""
    fault = next(filter(None, (without_class(each, in_splits) for each in splits.values())), "")
    classes = {split: {found[x].name for x in each if x in found} for split, each in splits.items()}
    first, *others = classes.values()
    if fault and not loose and len(first) > 1 and first.union(*others) == first:
        shown = joined(map(shown_name, sorted(first)), 40)
        fault += (
            f"; or, if its first folder is the class ({shown}), give train --class-folder first"
        )
    return {image: image.parent for image in images}, fault


def first_folders(images: list[Path], in_splits: bool) -> dict[Path, Path]:
    """Return the topmost folder of each image below that of its split, if any, and below those
    that all images share; images without one are left out.
    """
    starts = dict.fromkeys(images, 0)
    for image in images if in_splits else ():
        is_split = [bool(split_in(name)) for name in image.parts[:-1]]
        starts[image] = is_split.index(True) + 1
    own = {image: Path(*image.parts[start:-1]) for image, start in starts.items()}
    shared = len(Path(os.path.commonpath(own.values())).parts)
    ends = {image: start + shared + 1 for image, start in starts.items()}
    return {
        image: Path(*image.parts[:end]) for image, end in ends.items() if end < len(image.parts)
    }


def without_class(images: list[Path], in_splits: bool) -> str:
    """Return which images of a split do not lie in folders of classes, side by side; "" if all do.

    With `in_splits`, none of these may be that of the split.
    """
    first = images[0]
    for image in images:
        *above, folder = image.parts[:-1] or ("",)
        is_split = in_splits and split_in(folder) and not any(map(split_in, above))
        if is_split or not folder or image.parts[:-2] != first.parts[:-2]:
            both = " and ".join(shown_name(str(each)) for each in dict.fromkeys((first, image)))
            return f"which folder is the class of {both}? {CLASS_FOLDERS}"
    return ""


def like_splits(classes: Iterable[Path]) -> list[str]:
    """Return a note on folders of classes that are named exactly like a split, if any."""
    alike = sorted(str(each) for each in classes if is_exact(each.name))
    return [f"taken for classes, not for splits: {printable(joined(alike, 80))}"] if alike else []


def empty_classes(
    folder: str, paths: list[Path], classes: set[Path], images: list[Path]
) -> list[str]:
    """Return a note on folders next to those of the classes that hold no image, if any."""
    above = {each.parent for each in classes}
    beside = {path for path in paths if path.parent in above}
    beside -= {place for image in images for place in image.parents}
    empty = sorted(str(p) for p in beside if Path(folder, p).is_dir())
    return [f"without an image: {printable(joined(empty, 80))}"] if empty else []
