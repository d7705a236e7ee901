"""The images of a folder, split as `datasets` does it, with an error if it would lose some."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ddp_mnist.config.image_options import ImageOptions
from ddp_mnist.data.decode import image_endings
from ddp_mnist.data.image_files import ImageFiles, choose_splits
from ddp_mnist.errors import DataError, first_of, printable

# The words in names of folders and files that mean a split, and the characters that separate words,
# as `datasets` defines them.
SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
SPLIT_OF = {word: split for split, words in SPLIT_WORDS.items() for word in words}
SPLIT_ENDING = re.compile(r"(set)?([-._ 0-9].*)?$")  # of Test, test_set, TestSet and test-2
APART = "[-._ 0-9]"
HEIF = (".heic", ".heif")  # a phone's photos
HEIF_FIX = "pip install pillow-heif"
BESIDE_IMAGES = (  # files that are clearly not images
    *(".arrow", ".csv", ".db", ".ini", ".json", ".jsonl", ".md"),
    *(".parquet", ".tsv", ".txt", ".xml", ".zip"),
)


@dataclass(frozen=True)
class Listing:
    """The contents of a folder, by paths relative to it."""

    where: str  # as errors begin
    folder: str
    paths: list[Path]
    images: list[Path]
    notes: list[str]  # on what is left out
    image_options: ImageOptions

    @property
    def tables(self) -> list[Path]:
        return [p for p in self.paths if p.suffix == ".parquet" and not is_metadata(p)]

    @property
    def card_names_files(self) -> bool:
        """Whether the data set's card (README.md) says which files to read."""
        card = Path(self.folder, "README.md")
        return card.is_file() and b"configs:" in card.read_bytes()


def is_metadata(file: Path) -> bool:
    """Return whether a file describes the images next to it."""
    return file.name in ("metadata.csv", "metadata.jsonl", "metadata.parquet")


def paths_in(folder: Path) -> list[Path]:
    """Return the paths in a folder, sorted and relative to it, without hidden ones and runs.

    Names of hidden ones begin with a dot or `__`. A run may be written into the folder that it
    trains on: `cd photos; train --dataset .`
    """

    def is_run(path: Path) -> bool:
        return (path / "status.json").exists() and (path / "config.json").exists()

    hidden = re.compile(r"(^|/)(\.|__)")
    every = sorted(folder.rglob("*"))  # follows no link
    found = [path for path in every if not hidden.search(str(path.relative_to(folder)))]
    runs = {path.parent for path in found if path.name == "status.json" and is_run(path.parent)}
    for link in found:
        if link.is_symlink() and (is_run(link) or (link.name == "latest" and not link.exists())):
            runs.add(link)
    runs.discard(folder)
    outside = [path for path in found if not runs or runs.isdisjoint((path, *path.parents))]
    return [path.relative_to(folder) for path in outside]


def find_images(
    where: str, folder: str, found: Sequence[Path] | None = None
) -> tuple[list[Path], list[str]]:
    """Return the images, relative to the folder, and a note on files with other endings, if any.

    Texts and tables are not worth a note. `found` are the paths in the folder, relative to it, if
    it was listed before. Raise DataError for a link to a folder or to nothing.
    """
    endings = image_endings()
    images, odd = list[Path](), Counter[str]()
    for path in paths_in(Path(folder)) if found is None else found:
        suffix = path.suffix.lower()
        if Path(folder, path).is_file():
            if suffix in endings:
                images.append(path)
            elif suffix not in BESIDE_IMAGES:
                odd[path.suffix or "no ending"] += 1
        elif Path(folder, path).is_symlink():
            fault = f"{where}: {path} is a link to a folder or to nothing, and is not followed"
            raise DataError(f"{fault}; replace it with a copy, or with links to the files")
    kinds = [f"{ending} ({count:,})" for ending, count in odd.most_common()]
    shown = printable(", ".join(first_of(kinds, 5)))
    note = f"files without the suffix of an image were left out: {shown}"
    if phones := [ending for ending in odd if ending.lower() in HEIF]:
        note += f" ({HEIF_FIX} to read {', '.join(phones)})"
    return images, [note] if odd else []


def list_images(where: str, folder: str, paths: list[Path], image_options: ImageOptions) -> Listing:
    """Return the Listing of a folder. Raise DataError for a name that `datasets` cannot read."""
    images, notes = find_images(where, folder, paths)
    for path in map(str, (folder, *images)):
        if path != path.encode(errors="replace").decode():
            raise DataError(f"{where}: {path} has a name that is not UTF-8; rename it")
    return Listing(where, folder, paths, images, notes, image_options)


def splits_of_images(listing: Listing) -> dict[str, list[Path]]:
    """Return the images of each split, and the metadata files that describe them.

    They are {} if tables or the folder's card say which files to read. If a test split is to be
    drawn from train, names of files, and of classes at the top level, do not count as names of
    splits.
    """
    images, drawn = listing.images, listing.image_options.test_size
    if not images or listing.tables or listing.card_names_files:
        return {}
    metadata = [*filter(is_metadata, listing.paths)]
    if drawn and not metadata and are_classes_at_the_top(images):
        return {"train": sorted(images, key=str)}
    return split_by_names([*images, *metadata], by_file=not drawn)


def are_classes_at_the_top(images: list[Path]) -> bool:
    """Return whether all images lie like cat/1.png, and not like train/1.png."""
    tops = {file.parts[0].lower() for file in images}
    return all(len(file.parts) == 2 for file in images) and tops.isdisjoint(SPLIT_OF)


def split_by_names(files: list[Path], by_file: bool = True) -> dict[str, list[Path]]:
    """Return the files of each split as `datasets` finds them, in its order."""
    files = sorted(files, key=str)
    for of_file, end in ((False, f"({APART}.*)?"), (True, f"{APART}.*"))[: 1 + by_file]:
        found = dict[str, list[Path]]()
        for split, words in SPLIT_WORDS.items():
            word = re.compile(f"(.*{APART})?({'|'.join(words)}){end}")
            for file in files:
                names = (file.name,) if of_file else file.parent.parts
                if any(map(word.fullmatch, names)):
                    found.setdefault(split, []).append(file)
        if found:
            return found
    return {"train": files}


def image_files(listing: Listing, found: dict[str, list[Path]]) -> ImageFiles:
    """Return the images of these splits; the class of each is its folder."""
    splits, notes = choose_splits(found, listing.where, listing.image_options)
    classes = sorted({file.parent.name for files in found.values() for file in files})
    label_of = {name: label for label, name in enumerate(classes)}
    labels = {
        split: np.array([label_of[file.parent.name] for file in files], np.int64)
        for split, files in splits.items()
    }
    folder = Path(listing.folder)
    paths = {split: [str(folder / file) for file in files] for split, files in splits.items()}
    return ImageFiles(listing.where, paths, labels, classes, notes)


def check_splits(listing: Listing, splits: dict[str, list[Path]]) -> list[str]:
    """Return notes on files that are left out.

    Raise DataError if an image is in two splits, in a split other than its folder's name says, or
    in no class, or if only one split has a metadata file.
    """
    used = [file for files in splits.values() for file in files]
    unused = sorted({*listing.images}.difference(used))
    if found := _find_fault(listing, splits, used, unused):
        raise DataError(f"{listing.where}: {found}")
    note = f"images outside the splits were left out: {len(unused):,}, as"
    return listing.notes + [f"{note} {printable(str(file))}" for file in unused[:1]]


def _find_fault(
    listing: Listing, splits: dict[str, list[Path]], used: list[Path], unused: list[Path]
) -> str:
    """Return the fault of the images' folders and how to correct it, or "" without one."""
    images, image_options = listing.images, listing.image_options
    if len({*used}) < len(used):
        [(file, _)] = Counter(used).most_common(1)
        return f"{file} is in two splits by its folders; rename its class"

    flat = are_classes_at_the_top(images)
    tops = sorted({file.parts[0] for file in images if len(file.parts) > 1})
    words = {top: SPLIT_ENDING.sub("", top.lower()) for top in tops}
    meant = {top: SPLIT_OF[word] for top, word in words.items() if word in SPLIT_OF}
    read_as = {file.parts[0]: split for split, files in splits.items() for file in files}
    misread = any(read_as.get(top) != split for top, split in meant.items())
    if misread and len({*meant.values()}) > 1 and not (flat and image_options.test_size):
        return f"found the folders {', '.join(meant)}; rename them to {', '.join(meant.values())}"

    described = {file: split for split in splits for file in splits[split] if is_metadata(file)}
    if described:  # the classes are in them
        file, lacks = next(iter(described)), ", ".join(splits.keys() - described.values())
        fix = f"give it one, or move {file} elsewhere if the folders are the classes"
        fault = f"{file} describes images, and split {lacks} has no such file; {fix}"
        return fault if lacks else ""

    if len(unused) > len(used):
        few = f"{len(unused):,} of {len(images):,} images are in no split, as {unused[0]}, but"
        return f"{few} {used[0]} is; rename that, or put images into train/CLASS/ and test/CLASS/"
    fix = "put each image into the folder of its class, of two or more"
    depths = {len(file.parts): str(file) for file in used}
    if len(depths) > 1:
        return f"{' and '.join(depths.values())} are not equally deep; {fix}"
    classes = {file.parent.name for file in splits.get("train", used)}
    if len(classes) == 1 and not image_options.for_evaluation:
        return f"there is only one class, {classes.pop() or 'the folder itself'}; {fix}"
    return ""
