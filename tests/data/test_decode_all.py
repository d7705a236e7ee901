"""Image files are opened by several threads, in order, and all broken ones are named at once."""

import re
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from ddp_mnist.config.image_options import AS_THEY_ARE, ImageOptions
from ddp_mnist.data import decode_all
from ddp_mnist.data.decode_all import SHOWN
from ddp_mnist.data.image_format import ImageFormat
from ddp_mnist.errors import DataError
from ddp_mnist.verbs.predict import read_image
from tests.data_sets import (
    DRAWN,
    cells_of,
    encoded,
    flat,
    folder_of,
    load,
    noise,
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
UNKNOWN = "(of no format that Pillow knows)"
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
    a_text, cut_short, empty, floats = (f"{own}/cat/{kind}.jpg" for kind in sorted(kinds))
    assert refused(own) == (
        f"--dataset {own}: 4 of 16 images cannot be read: {a_text} {UNKNOWN},"
        f" {cut_short} {TRUNCATED}, {empty} {UNKNOWN}, {floats} (mode F has no fixed range: save"
        " 8-bit images); replace them or move them out of the folder"
    )
    for file in (a_text, cut_short, floats):
        Path(file).unlink()
    noise(99).save(empty)
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
    assert f"{own}: 123 of 123 images cannot be read: {own}/cat/0.png (" in message
    assert message.count(".png (") == SHOWN
    [place] = re.findall(r"\), \.\.\. \(all are in (.*)\); replace them or move them out", message)
    assert len(Path(place).read_text().splitlines()) == 123


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
    for name in ("train/cat/IMG_1.HEIC", "test/dog/IMG_2.heif"):
        (own / name).write_bytes(HEIC)
    needs = "of a format that needs: pip install pillow-heif"
    said = refused(own, AS_THEY_ARE)
    assert "2 of 19 images cannot be read: " in said and said.count(needs) == 2
    with pytest.raises(DataError, match=f"^{needs}$"):
        read_image(own / "test/dog/IMG_2.heif", GREY, digit_photos=False)


def test_heic_is_read_where_its_package_is_installed(tmp_path: Path) -> None:
    pillow_heif = pytest.importorskip("pillow_heif")
    pillow_heif.from_pillow(picture((7, 9))).save(tmp_path / "it.HEIC", quality=-1)
    assert read_image(tmp_path / "it.HEIC", GREY, digit_photos=False).max() > 0
