"""`predict RUN IMAGE...`: the class of image files, for a person's own pictures too.

ddp-mnist predict runs/latest seven.png photos/
cat seven.png | ddp-mnist predict runs/latest -
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
import torch

from ddp_mnist import weights
from ddp_mnist.errors import DataError
from ddp_mnist.run_folder import storage_errors
from ddp_mnist.sources import as_grey

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
BATCH = 256
STDIN = Path("-")
COLUMNS, INCHES = 8, 1.3  # of what --show draws


def predict(run: str, images: Iterable[str]) -> Iterator[dict[str, Any]]:
    """One {file, label, probability, probabilities} per image; see `predict_and_see`."""
    for line, _ in predict_and_see(run, images):
        yield line


def predict_and_see(run: str, images: Iterable[str]) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    """Like `predict`, with what the model saw: uint8 [28, 28]. In the order given.

    Args:
        run: run folder.
        images: files, or folders whose images are taken in the order of their names; - is one
            image on stdin.

    Raises:
        CheckpointError: no finished run. DataError: no readable image.
    """
    trained = weights.from_bytes(weights.read_bytes(run), run)
    dtype = next(trained.model.parameters()).dtype
    files = [file for image in images for file in find_images(image)]
    for start in range(0, len(files), BATCH):
        batch = files[start : start + BATCH]
        pixels = np.stack([as_mnist(file) for file in batch])
        with torch.inference_mode():
            probabilities = trained.model(torch.from_numpy(pixels)).to(dtype).softmax(1)
        for file, row, seen in zip(batch, probabilities.tolist(), pixels, strict=True):
            best = max(range(len(row)), key=row.__getitem__)
            named = {name: round(p, 6) for name, p in zip(trained.classes, row, strict=True)}
            line = {
                "file": str(file),
                "label": trained.classes[best],
                "probability": round(row[best], 6),
                "probabilities": named,
            }
            yield line, seen


def find_images(path: str) -> list[Path]:
    """The file itself, or the images directly in a folder."""
    place = Path(path)
    if place == STDIN or not place.is_dir():
        return [place]
    files = sorted(p for p in place.iterdir() if p.suffix.lower() in SUFFIXES and p.is_file())
    if not files:
        raise DataError(f"{path}: holds no images; give files or a folder of them")
    return files


def as_mnist(file: Path) -> np.ndarray:
    """An image file as MNIST draws digits: uint8 [28, 28], bright strokes on black.

    28x28 images are taken as they are, but for dark strokes on a bright ground, which are
    inverted. Others are cropped to their strokes, scaled to fit 20x20 and placed with their centre
    of mass in the middle: how MNIST itself was made (LeCun et al., 1998, section III.A).
    """
    try:
        with PIL.Image.open(
            io.BytesIO(sys.stdin.buffer.read()) if file == STDIN else file
        ) as opened:
            upright = PIL.ImageOps.exif_transpose(opened)  # as viewers show it
            grey = np.asarray(as_grey(upright))
    except (OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError) as error:
        reason = (getattr(error, "strerror", None) or "").lower() or "no image that Pillow reads"
        raise DataError(f"{file}: {reason}; give a PNG or JPEG file") from error
    border = np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]])
    if np.median(border) > 127:
        grey = 255 - grey
    return grey if grey.shape == (28, 28) else centred(grey)


def centred(grey: np.ndarray) -> np.ndarray:
    """uint8 [H, W], bright strokes on black, to uint8 [28, 28] as MNIST places a digit."""
    strokes = grey > max(32, int(grey.max()) // 4)
    if not strokes.any():
        return np.zeros((28, 28), dtype=np.uint8)
    rows, columns = np.flatnonzero(strokes.any(1)), np.flatnonzero(strokes.any(0))
    crop = grey[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    scale = 20 / max(crop.shape)
    height, width = (max(1, round(side * scale)) for side in crop.shape)
    small = PIL.Image.fromarray(crop).resize(
        (width, height), PIL.Image.Resampling.BOX if scale < 1 else PIL.Image.Resampling.BILINEAR
    )
    pixels = np.asarray(small, dtype=np.float64)
    mass = max(pixels.sum(), 1.0)
    centre_y = (pixels.sum(1) * np.arange(height)).sum() / mass
    centre_x = (pixels.sum(0) * np.arange(width)).sum() / mass
    top = int(np.clip(round(13.5 - centre_y), 0, 28 - height))
    left = int(np.clip(round(13.5 - centre_x), 0, 28 - width))
    frame = np.zeros((28, 28), dtype=np.uint8)
    frame[top : top + height, left : left + width] = np.asarray(small)
    return frame


def draw(answers: Sequence[tuple[dict[str, Any], np.ndarray]], path: Path) -> None:
    """A picture of what `predict_and_see` gave. Raises StorageError."""
    from matplotlib.figure import Figure

    rows = -(-len(answers) // COLUMNS)
    figure = Figure(figsize=(COLUMNS * INCHES, rows * INCHES * 1.35), layout="constrained")
    places = figure.subplots(rows, COLUMNS).flat
    for axis, (line, seen) in zip(places, answers, strict=False):
        axis.imshow(seen, cmap="gray", vmin=0, vmax=255)
        name = Path(line["file"]).name
        axis.set_title(f"{name[-18:]}\n{line['label']} ({line['probability']:.2f})", fontsize=8)
    for axis in figure.axes:
        axis.axis("off")
    with storage_errors(path):
        figure.savefig(path, dpi=100)
