"""Image files are opened by several threads, in order, and all broken ones are named at once."""

import re
import shutil
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pyarrow as pa
import pytest
from PIL.PngImagePlugin import PngInfo

from ddp_mnist.config.image_options import AS_THEY_ARE, ImageOptions
from ddp_mnist.data import decode_all, sources
from ddp_mnist.data.image_format import ImageFormat
from ddp_mnist.data.sources import find_source
from ddp_mnist.errors import DataError
from ddp_mnist.verbs.predict import read_image
from tests.data_sets import (
    DRAWN,
    TRAIN,
    cells_of,
    encoded,
    flat,
    folder_of,
    load,
    noise,
    of,
    picture,
    read,
    sizes,
    split_up,
    write_noise,
    write_split,
)

JPEG = encoded(picture((200, 120)), "JPEG")
HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"
BROKEN = {"empty": b"", "a text": b"no image", "cut short": JPEG[: len(JPEG) // 2]}
FLOATS = encoded(PIL.Image.new("F", (20, 12)), "TIFF")
UNKNOWN = "(damaged, or of no format that is read here: save it as PNG)"
TRUNCATED = "(image file is truncated (N bytes not processed))"


# --- Broken ones


def refused(own: Path, reading: ImageOptions = DRAWN) -> str:
    with pytest.raises(DataError) as raised:
        load(own, reading)
    return re.sub(r"\d+ bytes", "N bytes", str(raised.value))


def test_all_broken_files_are_named_at_once_and_the_advice_leads_out(tmp_path: Path) -> None:
    """Two are broken in their first bytes; that others are is seen when they are decoded."""
    own, kinds = write_noise(tmp_path / "own", *flat()), BROKEN | {"floats": FLOATS}
    for kind, content in kinds.items():
        (own / "cat" / f"{kind}.jpg").write_bytes(content)
    a_text, cut_short, empty, floats = (f"cat/{kind}.jpg" for kind in sorted(kinds))
    assert refused(own) == (
        f"--dataset {own}: 4 of 16 images cannot be read: {a_text} {UNKNOWN},"
        f" {cut_short} {TRUNCATED}, {empty} (empty), {floats} (mode F has no fixed range: save"
        " 8-bit images); replace them or move them out of the folder"
    )
    for file in (a_text, cut_short, floats):
        (own / file).unlink()
    noise(99).save(own / empty)
    assert len(read(own, DRAWN).targets) == 13


def test_rows_of_a_table_are_named_with_their_numbers(tmp_path: Path) -> None:
    images = [encoded(noise(number)) for number in range(17)]
    images[3:6], images[9:11] = BROKEN.values(), [b"", JPEG[:-200]]
    write_split(tmp_path, "train", image=cells_of(images[:12]))
    write_split(tmp_path, "test", image=cells_of(images[12:]))
    row = "split train, column image: row"
    assert refused(tmp_path, AS_THEY_ARE) == (
        f"--dataset {tmp_path}: 5 of 17 images cannot be read: {row} 3 (its cell is empty), {row} 4"
        f" {UNKNOWN}, {row} 5 {TRUNCATED}, {row} 9 (its cell is empty), {row} 10 {TRUNCATED};"
        " replace them or leave their rows out"
    )


@pytest.mark.parametrize("content", [b"no image", encoded(noise(5))[:100]])
def test_of_many_the_first_are_named(content: bytes, tmp_path: Path) -> None:
    """Also if none can be read, before or after the shape of all is known."""
    own = write_noise(tmp_path / "own", *flat(123))
    for file in own.rglob("*.png"):
        file.write_bytes(content)
    message = refused(own)
    assert f"{own}: 123 of 123 images cannot be read: cat/0.png (" in message
    assert message.count(".png (") == decode_all.SHOWN
    [place] = re.findall(r"\), \.\.\. \(all are in (.*)\); replace them or move them out", message)
    assert len(Path(place).read_text().splitlines()) == 123


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 1734\n"
PAGE = b"\n<!DOCTYPE html>\n<html><head>"


def deep(low: int, high: int, kind: str) -> bytes:
    return encoded(PIL.Image.fromarray(np.array([[low, high]] * 8, kind)), "TIFF")


NO_IMAGES = {
    "a pointer of Git LFS: git lfs pull": POINTER,
    "a web page or other text: fetch the image again": PAGE,
    "values from 100,000 to 900,000 do not fit 16 bits: scale them to 0 to 65535": deep(
        100_000, 900_000, "i4"
    ),
    "values from -1,000 to -200 do not fit 16 bits: scale": deep(-1000, -200, "i2"),
}


@pytest.mark.parametrize("why", NO_IMAGES)
def test_what_has_an_images_name_and_is_none_that_can_be_used_is_told(
    why: str, tmp_path: Path
) -> None:
    own = write_noise(tmp_path / "own", *flat())
    (own / "cat" / "0.png").write_bytes(NO_IMAGES[why])
    assert f"1 of 12 images cannot be read: cat/0.png ({why}" in refused(own)
    with pytest.raises(DataError, match=f"^{why}"):
        read_image(own / "cat" / "0.png", GREY, digit_photos=False)
    cells = cells_of([NO_IMAGES[why], *[encoded(noise(1))] * 11])
    write_split(tmp_path / "t", "train", image=cells)
    assert f"row 0 ({why}" in refused(tmp_path / "t")


def test_large_texts_and_profiles_of_png_are_no_harm(tmp_path: Path) -> None:
    text = PngInfo()
    text.add_text("workflow", "x" * 2_000_000, zip=True)
    text.add_itxt("XML:com.adobe.xmp", "y" * 3_000_000, zip=True)
    own = write_noise(tmp_path / "own", *flat())
    noise(9).save(own / "cat" / "0.png", pnginfo=text, icc_profile=bytes(2_000_000))
    assert sum(sizes(load(own))) == 12


def test_a_class_that_lost_its_last_image_is_as_if_it_had_none(tmp_path: Path) -> None:
    """Of three train images and one that is broken, in more than a hundred."""
    own = write_noise(tmp_path / "own", *[f"train/{path}" for path in flat(150)])
    write_noise(own / "test", *flat(4), "rare/0.png", "rare/1.png")
    (own / "train" / "rare").mkdir()
    words = "class rare has images in test .row 4. and none in train; "
    assert re.search(words, refused(own, AS_THEY_ARE))
    (own / "train" / "rare" / "0.png").write_bytes(BROKEN["a text"])
    left_out = re.escape("1 of 157 images cannot be read and were left out: train/rare/0.png (")
    assert re.search(f"{words}{left_out}.*; add some to train", refused(own, AS_THEY_ARE))
    shutil.rmtree(own / "test")
    assert ": no image of class rare can be read; 1 of 151 images" in refused(own, AS_THEY_ARE)
    noise(7).save(own / "train" / "rare" / "1.png")
    assert load(own).classes == ["cat", "dog", "rare"]


def test_files_of_two_classes_are_counted_each(tmp_path: Path) -> None:
    own = write_noise(tmp_path / "own", *flat(classes="ant cat dog owl"))
    for path in [f"{name}/same{n}.png" for name in ("cat", "dog", "owl") for n in range(4)]:
        noise(500).save(own / path)
    [said] = [line for line in load(own).caveats if "classes" in line]
    assert said == "12 images lie in two classes or more, as cat/same0.png: decide on one"


def test_classes_whose_names_are_read_alike_are_told(tmp_path: Path) -> None:
    names = ["cat", "Cat ", "ca\u200bt", "1", "1.0", "01", "dog", "dog 2"]
    own = write_noise(tmp_path / "own", *[f"{name}/{n}.png" for name in names for n in range(9)])
    found = load(own)
    assert len(found.classes) == 8
    alike = [line for line in found.caveats if line.startswith("classes")]
    both = "'1' and '1.0', 'Cat ' and 'cat' and 'ca\\u200bt'"
    kept = "look alike and are kept apart (2 such names): write each in one way"
    assert alike == [f"classes {both} {kept}"]


@pytest.mark.parametrize("kind", [pa.list_(cells_of([]).type), pa.list_(pa.uint8())])
def test_lists_in_a_column_are_no_images(kind: pa.DataType, tmp_path: Path) -> None:
    cells: list[list[int]] = [[]] * TRAIN
    write_split(tmp_path, "train", image=None, images=pa.array(cells, kind))
    assert re.search(r"no image column among label .*, images \(List", refused(tmp_path))


# --- Several threads


def test_several_threads_decode_what_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images of every size and kind, turned and transparent; and no filter of warnings is lost."""
    images: list[Any] = [picture((40 + 7 * n, 80 - n), (9 * n, 0, 200)) for n in range(20)]
    images += [noise(number).convert(mode) for number in range(9) for mode in ("L", "RGBA", "P")]
    images.append(JPEG)
    own, found = folder_of(tmp_path / "own", *images), {}
    for threads in (1, 4):
        monkeypatch.setattr(decode_all, "threads_for", lambda _, threads=threads: threads)
        before = [*warnings.filters]
        found[threads] = read(own)
        assert [*warnings.filters] == before
    one, four = found.values()
    assert one.image_format == four.image_format
    assert np.array_equal(one.images, four.images)
    assert np.array_equal(one.keys, four.keys)


# --- The whole picture


def test_images_of_another_ratio_are_kept_whole_and_predict_keeps_new_ones_whole(
    tmp_path: Path,
) -> None:
    own = folder_of(tmp_path / "own", *[picture((20, 12)), picture((12, 20))] * 2)
    images, cropped = load(own, ImageOptions(fit="pad")), load(own)
    assert images.image_format.fit == "pad" and cropped.image_format.fit == "crop"
    assert images.image_format.notes == ["images of 12x20, 20x12 became 12x12, kept whole on grey"]
    first = of(images, "train").images[0, 0]
    assert (first[:2] == 127).all() and (first[-2:] == 127).all()  # 12 x 7 of 12 x 12
    assert first[5, 1] < 30 and first[5, -2] > 170
    seen = read_image(own / "train/a/0.png", images.image_format, digit_photos=False)
    assert np.array_equal(of(images, "train").images[0], seen)
    assert images.digest != cropped.digest
    assert load(own).digest == cropped.digest  # both stay in the cache


# --- HEIC


GREY = ImageFormat((1, 9, 7), (0.5,), (0.5,), [], False, False)


@pytest.mark.skipif(bool(find_spec("pillow_heif")), reason="pillow-heif is installed")
def test_without_its_package_heic_cannot_be_read_and_a_line_says_what_it_needs(
    tmp_path: Path,
) -> None:
    """It is an image all the same: photos are not passed over because a package is missing."""
    own = write_noise(tmp_path / "own", *split_up())
    (own / "train/cat/IMG_4.HEIC").write_bytes(JPEG)  # as some programs save them
    assert sizes(load(own)) == (9, 8)
    for name in ("train/cat/IMG_1.HEIC", "test/dog/IMG_2.heif", "test/dog/IMG_3.jpg"):
        (own / name).write_bytes(HEIC)
    needs = "of a format that needs: pip install pillow-heif"
    said = refused(own, AS_THEY_ARE)
    assert "3 of 20 images cannot be read: " in said and said.count(needs) == 3
    with pytest.raises(DataError, match=f"^{needs}$"):
        read_image(own / "test/dog/IMG_2.heif", GREY, digit_photos=False)


def test_photos_that_become_readable_are_not_taken_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = write_noise(tmp_path / "own", *split_up(200))
    (own / "train/cat/IMG_1.HEIC").write_bytes(JPEG)
    before = find_source(str(own)).fingerprint
    assert find_source(str(own)).fingerprint == before
    monkeypatch.setattr(sources, "reads_heif", lambda: True)
    assert find_source(str(own)).fingerprint != before


def test_heic_is_read_where_its_package_is_installed(tmp_path: Path) -> None:
    pillow_heif = pytest.importorskip("pillow_heif")
    pillow_heif.from_pillow(picture((7, 9))).save(tmp_path / "it.HEIC", quality=-1)
    assert read_image(tmp_path / "it.HEIC", GREY, digit_photos=False).max() > 0
