"""The images of a folder, split as `datasets` does it, with errors where it would lose some."""

import re
from collections import Counter
from pathlib import Path

from ddp_mnist.config.image_options import ImageOptions
from ddp_mnist.errors import DataError, printable

# The words in names of folders and files that mean a split, and what separates words, as `datasets`
# has them.
SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
APART = "[-._ 0-9]"
HEIF = (".heic", ".heif")  # a phone's photos
HEIF_FIX = "pip install pillow-heif"
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")  # describe images next to them
BESIDE_IMAGES = re.compile(r"\.(arrow|csv|db|ini|jsonl?|md|parquet|tsv|txt|xml|zip)", re.I)


def paths_in(folder: Path) -> list[Path]:
    """Return the paths in a folder, sorted, without hidden ones (.name, __name) and run folders.

    A run may be written into the folder that it trains on: `cd photos; train --dataset .`
    """

    def is_run(path: Path) -> bool:
        return (path / "status.json").exists() and (path / "config.json").exists()

    hidden = re.compile(r"(.*/)?(\.|__).*", re.DOTALL)
    every = sorted(folder.rglob("*"))  # follows no link
    found = [path for path in every if not hidden.fullmatch(str(path.relative_to(folder)))]
    links = (path for path in found if path.is_symlink())
    runs = {path.parent for path in found if path.name == "status.json" and is_run(path.parent)}
    runs |= {
        link for link in links if is_run(link) or (link.name == "latest" and not link.exists())
    }
    ours = runs - {folder}
    return [path for path in found if ours.isdisjoint((path, *path.parents))] if ours else found


def find_images(
    where: str, folder: str, found: list[Path] | None = None
) -> tuple[list[Path], list[str]]:
    """Return the images, relative to the folder, and a note on files with other endings, if any.

    Texts and tables are not worth a note. `found` are the paths in the folder, relative to it, if
    it was listed before. Raise DataError for a link to a folder or to nothing.
    """
    from ddp_mnist.data.decode import image_endings

    endings = image_endings()
    if found is None:
        found = [path.relative_to(folder) for path in paths_in(Path(folder))]
    seen = [path for path in found if Path(folder, path).is_file()]
    if links := [path for path in sorted({*found} - {*seen}) if Path(folder, path).is_symlink()]:
        fault = f"{where}: {links[0]} is a link to a folder or to nothing, and is not followed"
        raise DataError(f"{fault}; replace it with a copy, or with links to the files")
    odd = Counter(file.suffix or "no ending" for file in seen if file.suffix.lower() not in endings)
    kinds = [f"{end} ({n:,})" for end, n in odd.most_common() if not BESIDE_IMAGES.fullmatch(end)]
    kinds[5:] = [f"... {len(kinds) - 5} more kind{'s' * (len(kinds) > 6)}"] * (len(kinds) > 5)
    note = f"files without the suffix of an image were left out: {printable(', '.join(kinds))}"
    if phones := [end for end in odd if end.lower() in HEIF]:
        note += f" ({HEIF_FIX} to read {', '.join(phones)})"
    return [file for file in seen if file.suffix.lower() in endings], [note] if kinds else []


def tables_of(folder: str, found: list[Path]) -> tuple[list[Path], bool]:
    """Return the tables of a folder, and whether its card (README.md) names the files instead."""
    tables = [path for path in found if path.suffix == ".parquet" and path.name not in METADATA]
    card = Path(folder, "README.md")
    return tables, card.is_file() and b"configs:" in card.read_bytes()


def splits_of_images(
    folder: str, found: list[Path], images: list[Path], image_options: ImageOptions
) -> dict[str, list[Path]]:
    """Return the files of each split; {} if tables or the folder's card say what is read."""
    if not images or any(tables_of(folder, found)):
        return {}
    return split_files(images, [path for path in found if path.name in METADATA], image_options)


def split_files(
    images: list[Path], metadata: list[Path], image_options: ImageOptions
) -> dict[str, list[Path]]:
    """Return the files of each split.

    If a test split is to be drawn from train, names of files, and of classes at the top level, do
    not count as names of splits.
    """
    if image_options.test_size and not metadata and are_classes_at_the_top(images):
        return {"train": sorted(images, key=str)}
    return split_by_names([*images, *metadata], by_file=not image_options.test_size)


def are_classes_at_the_top(images: list[Path]) -> bool:
    """Return whether all images lie as cat/1.png does, and not as train/1.png."""
    words = {word for each in SPLIT_WORDS.values() for word in each}
    tops = {file.parts[0].lower() for file in images}
    return all(len(file.parts) == 2 for file in images) and tops.isdisjoint(words)


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


def not_described(splits: dict[str, list[Path]], rows: dict[str, int]) -> list[str]:
    """Return a note on images of the splits that no metadata file names, if any."""
    images = {
        split: sum(file.name not in METADATA for file in files) for split, files in splits.items()
    }
    missing = sum(max(0, count - rows.get(split, 0)) for split, count in images.items())
    note = f"{missing:,} of {sum(images.values()):,} images are in no metadata file and were left"
    return [f"{note} out"] if missing else []


def check_names(where: str, folder: str, images: list[Path]) -> None:
    """Raise DataError for a path that is not UTF-8: `datasets` cannot read it."""
    for path in map(str, (folder, *images)):
        if path != path.encode(errors="replace").decode():
            raise DataError(f"{where}: {path} has a name that is not UTF-8; rename it")


def check_images(
    where: str,
    splits: dict[str, list[Path]],
    images: list[Path],
    odd: list[str],
    image_options: ImageOptions,
) -> list[str]:
    """Return a note on images that are in no split, if any.

    Raise DataError if an image is in two splits, in a split other than its folder's name says, or
    in no class, or if one split has a metadata file and another has none.
    """
    unused = sorted({*images}.difference(*splits.values()))
    if found := _find_fault(splits, images, unused, image_options):
        fault, fix = found
        raise DataError("; ".join([f"{where}: {fault}", *odd, fix]))
    note = f"images outside the splits were left out: {len(unused):,}, as"
    return [f"{note} {printable(str(file))}" for file in unused[:1]]


def _find_fault(
    splits: dict[str, list[Path]],
    images: list[Path],
    unused: list[Path],
    image_options: ImageOptions,
) -> tuple[str, str] | None:
    """Return what is wrong with the images' folders, if anything is, and how to correct it."""
    split_of = {word: split for split, words in SPLIT_WORDS.items() for word in words}
    ending = re.compile(r"(set)?([-._ 0-9].*)?$")  # of Test, test_set, TestSet and test-2

    def meant_by(folder: str) -> str | None:
        return split_of.get(ending.sub("", folder.lower()))

    used = [file for files in splits.values() for file in files]
    for file, count in Counter(used).items():
        if count > 1:
            return f"{file} is in two splits by its folders", "rename its class"

    flat = are_classes_at_the_top(images)
    folders = sorted({file.parts[0] for file in images if len(file.parts) > 1})
    meant = {name: split for name in folders if (split := meant_by(name))}
    read_as = {file.parts[0]: split for split, files in splits.items() for file in files}
    misread = any(read_as.get(name) != split for name, split in meant.items())
    if misread and len({*meant.values()}) > 1 and not (flat and image_options.test_size):
        return (
            f"found the folders {', '.join(meant)}",
            f"rename them to {', '.join(meant.values())}",
        )

    metadata = {s: [str(f) for f in files if f.name in METADATA] for s, files in splits.items()}
    lacks = [split for split, files in metadata.items() if not files]
    if lacks and (alone := [file for files in metadata.values() for file in files]):
        return (
            f"{alone[0]} describes images, and split {lacks[0]} has no such file",
            f"give it one, or move {alone[0]} elsewhere if the folders are the classes",
        )

    classes = sorted({file.parent.name for file in splits.get("train", used)})
    if not classes or not {*used} <= {*images}:
        return None  # the classes are in an archive or in metadata
    complete = not unused and (len(splits) > 1 or "train" in splits)
    if flat and not complete and not image_options.test_size:
        split, [file, *_] = next(iter(splits.items()))
        return (
            f"{file} is in the split {split} by a word in its name, and others are in none",
            f"give e.g. --test-size {max(1, len(images) // 5)} to hold images out whatever their"
            " names are",
        )
    fix = "put each image into the folder of its class, of two or more"
    depths = {len(file.parts): str(file) for file in used}
    if len(depths) > 1:
        return f"{' and '.join(depths.values())} are not equally deep", fix
    if len(classes) == 1 and (not classes[0] or meant_by(classes[0])):
        return f"{used[0]} is in no class", fix
    if len(classes) == 1 and not image_options.for_evaluation:
        return f"there is only one class, {classes[0]}", fix
    return None
