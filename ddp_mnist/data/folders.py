"""`datasets` goes by the names of files and folders: this finds the images that it would lose."""

import re
from collections import Counter
from pathlib import Path

from ddp_mnist.errors import DataError, printable

BESIDE_IMAGES = re.compile(r"\.(arrow|csv|db|ini|jsonl?|md|parquet|tsv|txt|xml|zip)", re.I)


def find_images(where: str, folder: str) -> tuple[list[Path], list[str]]:
    """Return the images, relative to the folder, and a note on files with other endings, if any.

    Hidden files (.name, __name), texts and tables need no word. A linked folder is a DataError.
    """
    from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder

    endings = frozenset(ImageFolder.EXTENSIONS)
    paths = (path.relative_to(folder) for path in sorted(Path(folder).rglob("*")))
    shown = [path for path in paths if not any(p.startswith((".", "__")) for p in path.parts)]
    seen = [path for path in shown if Path(folder, path).is_file()]
    if links := [path for path in sorted({*shown} - {*seen}) if Path(folder, path).is_symlink()]:
        fault = f"{where}: {links[0]} is a link to a folder or to nothing, and is not followed"
        raise DataError(f"{fault}; replace it with a copy, or with links to the files")
    odd = Counter(file.suffix or "no ending" for file in seen if file.suffix.lower() not in endings)
    kinds = [f"{end} ({n:,})" for end, n in odd.most_common() if not BESIDE_IMAGES.fullmatch(end)]
    kinds[5:] = [f"... {len(kinds) - 5} more kind{'s' * (len(kinds) > 6)}"] * (len(kinds) > 5)
    note = f"files without the suffix of an image were left out: {printable(', '.join(kinds))}"
    return [file for file in seen if file.suffix.lower() in endings], [note] if kinds else []


def check_names(where: str, folder: str, images: list[Path]) -> None:
    """Raise DataError for a path that is no UTF-8, as `datasets` can read none of these."""
    for path in map(str, (folder, *images)):
        if path != path.encode(errors="replace").decode():
            raise DataError(f"{where}: {path} has a name that is not UTF-8; rename it")


def check_images(
    where: str,
    splits: dict[str, list[Path]],
    images: list[Path],
    odd: list[str],
    for_evaluation: bool = False,
) -> list[str]:
    """Return a note on images that are in no split, if any.

    Raise DataError for one that is in two, in another than its folder means, or in no class.
    """
    from datasets.data_files import SPLIT_KEYWORDS

    split_of = {word: str(split) for split, words in SPLIT_KEYWORDS.items() for word in words}
    used = [file for files in splits.values() for file in files]
    twice = [str(file) for file, count in Counter(used).items() if count > 1]
    read_as = {file.parts[0]: split for split, files in splits.items() for file in files}
    tops = sorted({file.parts[0] for file in images if len(file.parts) > 1})
    classes = sorted({file.parent.name for file in splits.get("train", used)})
    end = re.compile(r"(set)?([-._ 0-9].*)?$")  # of Test, test_set, TestSet and test-2
    meant = {name: split_of.get(end.sub("", name.lower())) for name in [*tops, *classes]}
    tops = [top for top in tops if meant[top]]
    depths = {len(file.parts): str(file) for file in used}
    by_folder = classes and {*used} <= {*images}  # else an archive or metadata.csv has the classes
    fault, fix = "", "put each image into the folder of its class, of two or more"
    if twice:
        fault, fix = f"{twice[0]} is in two splits by its folders", "rename its class"
    elif len({meant[top] for top in tops}) > 1 and any(read_as.get(t) != meant[t] for t in tops):
        fault = f"found the folders {', '.join(tops)}"
        fix = f"rename them to {', '.join(str(meant[top]) for top in tops)}"
    elif by_folder and len(depths) > 1:
        fault = f"{' and '.join(depths.values())} are not equally deep"
    elif by_folder and len(classes) == 1:
        if not classes[0] or meant[classes[0]]:
            fault = f"{used[0]} is in no class"
        elif not for_evaluation:
            fault = f"there is only one class, {classes[0]}"
    if fault:
        raise DataError("; ".join([f"{where}: {fault}", *odd, fix]))
    rest = sorted({*images} - {*used})
    note = f"images outside the splits were left out: {len(rest):,}, as"
    return [f"{note} {printable(str(file))}" for file in rest[:1]]
