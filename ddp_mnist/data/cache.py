"""The cache: each data set is decoded once, into files that all of a machine's processes map.

`load` maps them, and chooses the rows to train and to test on.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ddp_mnist.config.flag_fields import refuse_address
from ddp_mnist.config.image_options import AS_THEY_ARE, ImageOptions
from ddp_mnist.data import held_out
from ddp_mnist.data.decode_all import decode_all, rows_of
from ddp_mnist.data.groups import (
    NONE,
    as_file,
    joined_by_copies,
    keys_of,
    named_by,
    on_two_sides,
    together,
    too_large,
)
from ddp_mnist.data.image_data import ImageData, files_in
from ddp_mnist.data.image_format import ImageFormat, mean_and_std
from ddp_mnist.data.listing import read_alike
from ddp_mnist.data.photos import SMALLEST, are_photos
from ddp_mnist.data.sources import Source, find_source
from ddp_mnist.errors import TOO_MANY, DataError, StorageError, UsageError, blame
from ddp_mnist.system.files import CHANGED, read_json, sealed
from ddp_mnist.system.locks import take
from ddp_mnist.system.text import escaped, joined, reason

# Raise it if what is cached would be another; a cache of another one is built again.
CACHE_FORMAT = 9
ABOUT = "about.json"  # everything but the arrays
ARRAYS = ("images", "targets", "keys", "decoded_keys", "groups", "part", "sums")
FILES = "files.json"  # the images' paths; large, and rarely read
MOST_CHECKED = 2**30  # bytes of images: more would take seconds at each start
HASH = 8  # hex digits, of the source in a folder's name
MOVE = "use --cache-dir or DDP_MNIST_CACHE to put it elsewhere"
Log = Callable[[str], None] | None


def cache_folder(cache_dir: str | None) -> Path:
    """Return --cache-dir, else DDP_MNIST_CACHE, else ~/.cache/ddp_mnist."""
    chosen = cache_dir or os.environ.get("DDP_MNIST_CACHE") or "~/.cache/ddp_mnist"
    refuse_address("--cache-dir" if cache_dir else "DDP_MNIST_CACHE", chosen)
    with blame(chosen, StorageError, MOVE):  # without a home folder, as in some containers
        return Path(chosen).expanduser()


def choose(
    dataset: str, cache_dir: str | None, options: ImageOptions = AS_THEY_ARE, log: Log = None
) -> tuple[str, list[str]]:
    """Return the data set to load, and warnings about the choice.

    `auto` is mnist if it is available, else digits. Any other name is used as given.
    """
    if dataset != "auto":
        return dataset, []
    try:
        load("mnist", cache_dir, options, check=lambda _: False, log=log)  # it is loaded again
        return "mnist", []
    except DataError as error:
        why = f"MNIST is not available: {str(error).partition(';')[0]}"
        instead = "INSTEAD OF MNIST, this is a run on the 1,797 digits built into scikit-learn"
        return "digits", [why, instead]


def load(
    dataset: str,
    cache_dir: str | None = None,
    options: ImageOptions = AS_THEY_ARE,
    *,
    refresh: bool = False,
    check: Callable[[str], bool] | None = None,
    log: Log = None,
) -> ImageData:
    """Return the data set from the cache, mapped; read and decode it first if it is not cached.

    One process per machine decodes, under a file lock; the others wait for it and map its files.
    `refresh` decodes again even if cached, and other sizes when they are needed. What was cached
    earlier is compared with its digests, unless `check`, called with its folder, says that another
    process of this machine does that. `log` is called with a line when decoding begins, as it can
    take a minute.

    Raise UsageError or DataError if the data set does not exist or cannot be read, if the cache is
    damaged, or if no test split can be drawn; StorageError if its folder cannot be written.
    """
    source = find_source(dataset)
    path = _path(source, cache_dir, options)
    if refresh:
        _forget(path, source)
    if found := _open(path, source):
        if check is None or check(str(path)):
            _check(path, found, source)
    else:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with take(path.with_name(f"{path.name}.lock"), wait=True):
                # Another process may have built it while this one waited for the lock.
                if not (found := _open(path, source)):
                    _build(path, source, options, log)
                    found = _open(path, source)
            if not found:
                raise OSError(f"{path.name} cannot be read back")
        except OSError as error:
            if error.errno in TOO_MANY:
                raise
            why = f"the cache cannot be written ({reason(error)})"
            raise StorageError(f"{path.parent}: {why}; {MOVE}") from error
    return _image_data(found, source, options)


def dir_of_run(dataset: str, saved: str | None, options: ImageOptions = AS_THEY_ARE) -> str | None:
    """Return the --cache-dir that a run has `saved`, if the data set is there; else None.

    The run may be a stranger's, so nothing is written where it says.
    """
    return saved if saved and cached(dataset, saved, options) else None


def cached(
    dataset: str, cache_dir: str | None = None, options: ImageOptions = AS_THEY_ARE
) -> ImageData | None:
    """Return the data set if it is in the cache, unchecked. Raises as `find_source` does."""
    source = find_source(dataset)
    found = _open(_path(source, cache_dir, options), source)
    return _image_data(found, source, options) if found else None


def holds_photos(dataset: str, cache_dir: str | None, options: ImageOptions, side: int) -> bool:
    """Return `are_photos` of a data set, as noted when it was cached, as squares of `side` too.

    Raises as `load` does for what cannot be read.
    """
    if options.size and min(options.size) < SMALLEST:
        return False
    source = find_source(dataset)
    for size in dict.fromkeys((options.size, options.size or (side, side))):
        found = _open(_path(source, cache_dir, replace(options, size=size)), source)
        if found:
            return bool(found["are_photos"])
    return are_photos(source.listing(options))


def _path(source: Source, cache_dir: str | None, options: ImageOptions) -> Path:
    """Return the folder of a source's images, read in this way."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "_", source.name)[:60]
    read_as = [options.size, options.grey, options.for_evaluation, options.numbers]
    # named only if typed: the folders of earlier versions lack them
    younger = {name: getattr(options, name) for name in ("fit", "class_folder", "columns")}
    typed = {name: x for name, x in younger.items() if x != getattr(AS_THEY_ARE, name)}
    read = json.dumps([*read_as, typed] if typed else read_as)
    place = hashlib.sha256(os.fsencode(source.place) + read.encode()).hexdigest()[:HASH]
    return cache_folder(cache_dir) / f"{source.kind}-{readable}-{place}"


def _open(path: Path, source: Source) -> dict[str, Any] | None:
    """Return about.json and the arrays; None if they are missing, cut short, or of other files."""
    try:
        about = read_json(path / ABOUT)
        outside = about.pop("outside")
        now = CACHE_FORMAT, path.name, source.fingerprint
        if tuple(about.pop(name) for name in ("format", "folder", "fingerprint")) != now:
            return None
        if outside != source.facts_outside(name for name, *_ in outside):
            return None
        # Mapped, not read: the processes of a machine share one copy in memory. "c" looks writable
        # to torch, which warns of anything else; a write would stay in this process.
        arrays = {name: np.load(path / f"{name}.npy", mmap_mode="c") for name in ARRAYS}
        about |= {"name": source.name, "source": f"{source.kind}:{source.place}"}
        return about | arrays | {"files": path / FILES, "warnings": [*source.warnings]}
    except (OSError, EOFError, KeyError, TypeError, ValueError) as error:
        if getattr(error, "errno", None) in TOO_MANY:
            raise
        return None


def _forget(path: Path, source: Source) -> None:
    """Let all that is cached of the source, whatever the size, be decoded again on its next use."""
    name = path.name[:-HASH]
    for about in path.parent.glob(f"{name}{'?' * HASH}/{ABOUT}"):
        with contextlib.suppress(OSError, KeyError, TypeError, ValueError):
            if read_json(about)["fingerprint"] == source.fingerprint:
                about.unlink()


def _build(path: Path, source: Source, options: ImageOptions, log: Log) -> None:
    """Decode into a temporary folder, then rename it: a folder with its final name is complete."""
    temporary = path.with_name(f"{path.name}.tmp")
    if temporary.exists():
        shutil.rmtree(temporary)  # of a killed process; no other writes now
    temporary.mkdir()

    def tell(what: str) -> None:
        if log:
            log(f"reading    {source.name}, decoded once into {escaped(path.parent)}: {what}")

    try:
        fingerprint, listing = source.fingerprint, source.listing(options)
        about, arrays = decode_all(listing, options, temporary, tell)
        for name, values in arrays.items():
            np.save(temporary / f"{name}.npy", values)
        about |= {"format": CACHE_FORMAT, "folder": path.name, "fingerprint": fingerprint}
        about["are_photos"] = are_photos(listing)
        about["outside"] = source.facts_outside([*listing.files.values(), *listing.tables])
        files = [listing.files.get(number, "") for number in range(len(listing))]
        relative = [name.removeprefix(f"{source.place}/") for name in files]
        (temporary / FILES).write_text(json.dumps(relative), encoding="utf-8")
        checked = [file for file in temporary.iterdir() if file.stat().st_size <= MOST_CHECKED]
        about["sha256s"] = {file.name: _sha256(file) for file in checked}
        (temporary / ABOUT).write_text(json.dumps(sealed(about)), encoding="utf-8")
        for file in temporary.iterdir():  # a power cut must leave no zeros under the final name
            with file.open("rb") as written:
                os.fsync(written.fileno())
        if path.exists():
            shutil.rmtree(path)
        temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _check(path: Path, found: dict[str, Any], source: Source) -> None:
    """Raise DataError, which names the file, if the cache does not hold what was written."""
    fix = f"remove {path}, and the next command decodes it again"
    for name, digest in found["sha256s"].items():
        with blame(f"{source.typed}: {path / name}", DataError, fix):
            if _sha256(path / name) != digest:
                raise DataError(f"{source.typed}: {path / name} {CHANGED}; {fix}")


def _image_data(found: dict[str, Any], source: Source, options: ImageOptions) -> ImageData:
    """Return the data set, with the rows to train and to test on."""
    del found["sha256s"], found["are_photos"]
    part = found.pop("part")
    rows, found["caveats"] = rows_of(part), found.pop("careful")
    found["groups"] = groups = _groups_of(found, part >= 0, source, options)
    same = held_out.alike(found["keys"], found["decoded_keys"])
    keys = together(same, groups)
    if groups is not None:
        files = files_in(found["files"])
        found["caveats"] += joined_by_copies(groups, same, keys, files)
        found["caveats"] += too_large(groups, found["group_names"], files)
        found["caveats"] += read_alike("groups", found["group_names"])
    labels = held_out.strata(found["targets"])
    test_share, has_validation = None, "validation" in rows
    if "test" not in rows:
        test_share = _draw_test(found, rows, keys, labels, source, options)
    elif groups is not None:
        each = [f"{len(np.unique(keys[these])):,} in {split}" for split, these in rows.items()]
        found["notes"].insert(0, f"groups: {', '.join(each)}")
        found["caveats"] += on_two_sides(groups, rows, files_in(found["files"]))
    rows.setdefault("train", np.arange(0))
    train, test = ({*labels[rows[split]].tolist()} for split in ("train", "test"))
    is_fold = bool(options.fold and test_share)
    if lacking := _named(train - test, found["classes"]):
        larger = ", or give a larger --test-size" if test_share and not is_fold else ""
        found["caveats"].append(f"the test has no image of {lacking}: add images{larger}")
    if is_fold and (lacking := _named(test - train, found["classes"])):
        found["caveats"].append(f"train has, in this fold, no image of {lacking}: add images")
    mean, std = mean_and_std(found.pop("sums")[rows["train"]], found["images"].shape[1:])
    more = {"mean": mean, "std": std, "notes": found.pop("notes")}
    found["image_format"] = ImageFormat.from_dict(found["image_format"] | more)
    return ImageData(**found, rows=rows, test_share=test_share, has_validation=has_validation)


def _named(labels: set[int], classes: list[str]) -> str:
    return joined((f'"{classes[label]}"' for label in sorted(labels)), 80)


def _groups_of(
    found: dict[str, Any], is_read: np.ndarray, source: Source, options: ImageOptions
) -> np.ndarray | None:
    """Return the key of each image's group, see groups.py; None if there are no groups.

    The flag beats a column, which may have its name for another reason. Raise UsageError if it
    finds nothing, unless these are images to evaluate a run on.
    """
    groups, files = found["groups"], list[str]()
    if options.group:
        if (groups != NONE).any():
            found["notes"].append(
                "the column of groups is not used, as --group says what belongs together"
            )
        files = files_in(found["files"])
        names = named_by(options.group, files)
        groups, found["group_names"] = keys_of(names), sorted({*names} - {""})
        groups[~is_read] = NONE
        of_both = f"{found['digest']} ".encode() + groups.tobytes()
        found["digest"] = hashlib.sha256(of_both).hexdigest()
        if (groups == NONE).all() and options.test_size != 0:
            first = next(filter(None, files), "")
            why = f"finds nothing in the paths of {source.typed}{as_file(first)}; correct it"
            if not first:
                why = f"the images of {source.typed} have no paths; add a column group"
            raise UsageError(f"--group {options.group}: {why}")
    if (groups == NONE).all():
        return None
    if (alone := np.flatnonzero(is_read & (groups == NONE))).size:
        first = (files or files_in(found["files"]))[alone[0]]
        those = f"{len(alone):,} of {is_read.sum():,} images have no group, so each is drawn alone"
        found["caveats"].append(
            f"{those}{as_file(first)}: if others show the same thing, give them one group"
        )
    return groups


def _draw_test(
    found: dict[str, Any],
    rows: dict[str, np.ndarray],
    keys: np.ndarray,
    labels: np.ndarray,
    source: Source,
    options: ImageOptions,
) -> float:
    """Move the test from the train rows to its own, and return its share; 0 if that is all.

    What decides it becomes part of the digest.
    """
    train = rows["train"]
    if options.test_size == 0:
        rows["test"] = rows.pop("train")
        found["notes"].append("there is no test split, so all images count")
        return 0.0
    what = keys[train], labels[train]
    if options.fold:
        number, folds = options.fold
        drawn, share = held_out.draw_fold(*what, number, folds, source.typed), 1 / folds
        decided_by, how = f"fold {number}/{folds}", f"are the test, fold {number} of {folds}"
    else:
        drawn, share = held_out.draw_test(*what, options.test_size, source.typed)
        of_what = "pixels" if found["groups"] is None else "groups' names"
        how = f"are held out for the test, by a hash of their {of_what}: with --test-size"
        decided_by, how = f"{share}", f"{how} {share:.3g} each stays there as the folder grows"
    rows |= {"train": np.delete(train, drawn), "test": train[drawn]}
    found["digest"] = hashlib.sha256(f"{found['digest']} {decided_by}".encode()).hexdigest()
    those = f"{len(drawn):,} of {len(train):,} images"
    if found["groups"] is not None:
        few, every = (len(np.unique(keys[each])) for each in (rows["test"], train))
        those += f", {few:,} of {every:,} groups,"
    found["notes"].insert(0, f"{those} {how}")
    return share
