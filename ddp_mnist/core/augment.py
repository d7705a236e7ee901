"""Augmentation: random changes of a batch of images, the same for a sample on every rank.

One table of random numbers per epoch is drawn from (seed, epoch), with a row for each index, so
neither the world size nor a resume changes what happens to an image. The last epochs change images
less, so that training ends on images close to those that the net is tested on. The changes depend
on the kind of images that the recipe names: `strokes`, bright on black, are rotated, scaled and
shifted; `pictures` are mirrored, cropped and coloured; `characters` in pictures are not mirrored.
"""

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .batches import Rows
from .recipe import Recipe
from .seeding import generator

MAX_ROTATION_DEGREES = 18.0
MAX_SHIFT = 4 / 14  # of half a side: 4 of MNIST's 28 pixels
MAX_SCALE = 0.20
LEAST_AREA = 0.5  # the share of a picture that a crop keeps
MAX_ASPECT = 4 / 3  # the ratio of a crop's sides, in either direction
MAX_COLOUR = 0.2  # how far the factors of brightness, contrast and saturation may be from 1
LUMA = (0.299, 0.587, 0.114)  # weights of red, green and blue in grey (ITU-R BT.601)


def augmentation_table(recipe: Recipe, rows: Rows, seed: int, epoch: int) -> Tensor:
    """Return each row's changes in an epoch, float32 [rows, 2 or 3, 3].

    The first two rows are an inverse affine map in grid_sample's coordinates; a third one, for
    pictures, holds factors of brightness, contrast and saturation. All draws are uniform within the
    bounds above, and within half of them in the last quarter of all epochs. Built on the CPU for
    all rows at once, so every process holds the same bits.
    """
    stream = generator("augment", seed, epoch)
    strength = 0.5 if epoch >= 0.75 * recipe.epochs else 1.0
    if recipe.augment == "strokes":
        height, width = rows.images.shape[2:]
        u = strength * (torch.rand(len(rows), 4, generator=stream, dtype=torch.float64) * 2 - 1)
        return _rotations(u, height / width).float()
    u = torch.rand(len(rows), 8, generator=stream, dtype=torch.float64)
    return _crops(u, strength, mirrored=recipe.augment == "pictures").float()


def _rotations(u: Tensor, aspect: float) -> Tensor:
    """Return maps [rows, 2, 3] that rotate, scale and shift, of numbers in -1..1 [rows, 4]."""
    angle = u[:, 0] * math.radians(MAX_ROTATION_DEGREES)
    scale = torch.exp(u[:, 1] * math.log1p(MAX_SCALE))
    cos, sin = torch.cos(angle) / scale, torch.sin(angle) / scale
    shift = u[:, 2:] * MAX_SHIFT
    rows_x = torch.stack([cos, -sin * aspect, shift[:, 0]], dim=1)
    rows_y = torch.stack([sin / aspect, cos, shift[:, 1]], dim=1)
    return torch.stack([rows_x, rows_y], dim=1)


def _crops(u: Tensor, strength: float, mirrored: bool) -> Tensor:
    """Return maps and colour factors [rows, 3, 3], of numbers in 0..1 [rows, 8]."""
    area = 1 - strength * (1 - LEAST_AREA) * u[:, 0]
    aspect = torch.exp(strength * (2 * u[:, 1] - 1) * math.log(MAX_ASPECT))
    width, height = (area * aspect).sqrt().clamp(max=1), (area / aspect).sqrt().clamp(max=1)
    mirror = torch.where(u[:, 2] < (0.5 if mirrored else 0.0), -1.0, 1.0)
    zero = torch.zeros_like(area)
    rows_x = torch.stack([mirror * width, zero, (2 * u[:, 3] - 1) * (1 - width)], dim=1)
    rows_y = torch.stack([zero, height, (2 * u[:, 4] - 1) * (1 - height)], dim=1)
    colours = 1 + strength * MAX_COLOUR * (2 * u[:, 5:] - 1)
    return torch.stack([rows_x, rows_y, colours], dim=1)


def augment(images: Tensor, augmentations: Tensor) -> Tensor:
    """Return uint8 [B, C, H, W] with each image moved by its map, bilinear.

    `augmentations` are rows of `augmentation_table`, [B, 2 or 3, 3]; a third line changes the
    colours. Outside an image it is black for strokes; for pictures the edge is repeated, as a crop
    may reach a fraction of a pixel beyond it. Results are rounded, so a difference in the last bit
    of a float hardly ever shows.
    """
    pictures = augmentations.shape[1] > 2
    # Computed here because the matrix product in F.affine_grid may differ in the last bits with the
    # number of images in the batch.
    x, y = _pixel_centres(*images.shape[2:], images.device)
    slope_x, slope_y, offset = augmentations[:, :2, :, None, None].unbind(2)
    grid = slope_x * x + slope_y * y + offset
    moved = F.grid_sample(
        images.float(),
        grid.permute(0, 2, 3, 1),
        mode="bilinear",
        padding_mode="border" if pictures else "zeros",
        align_corners=False,
    ).round_()
    if pictures:
        moved = _coloured(moved, *augmentations[:, 2, :, None, None, None].unbind(1))
        moved = moved.round_().clamp_(0, 255)
    return moved.to(torch.uint8)


@functools.cache
def _pixel_centres(height: int, width: int, device: torch.device) -> list[Tensor]:
    """Return x and y of each pixel in grid_sample's coordinates, float32 [height, width] each."""
    y, x = (torch.linspace(1 / n - 1, 1 - 1 / n, n, device=device) for n in (height, width))
    return [x.expand(height, width), y[:, None].expand(height, width)]


def _coloured(x: Tensor, brightness: Tensor, contrast: Tensor, saturation: Tensor) -> Tensor:
    """Return pictures [B, C, H, W] with their brightness, contrast and saturation multiplied."""
    # The mean of whole numbers is exact in float64, whatever the order of the sum.
    mean = x.mean((1, 2, 3), keepdim=True, dtype=torch.float64).float()
    x = ((x - mean) * contrast + mean) * brightness
    if x.shape[1] == 1:
        return x
    red, green, blue = x.split(1, dim=1)
    grey = LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue
    return grey + (x - grey) * saturation
