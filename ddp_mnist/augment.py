"""Random rotation, scale and shift of a whole batch, the same for a sample on whichever rank it is.

One table of random numbers per epoch, made from (seed, epoch) and read by sample number: neither
the world size nor a resume can change what happens to an image. The last epochs move images less,
so that training ends on images close to those that the net will be tested on.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ddp_mnist.seeding import generator

MAX_ROTATION_DEGREES = 18.0
MAX_SHIFT_PIXELS = 4.0
MAX_SCALE = 0.20


def affine_table(rows: int, seed: int, epoch: int, epochs: int) -> Tensor:
    """Return an inverse affine map per sample, float32 [rows, 2, 3], in grid_sample's coordinates.

    Rotation, log-scale and both shifts are uniform within the bounds above, and within half of them
    in the last quarter of all epochs. Built on the CPU for all rows at once, so every process holds
    the same bits.
    """
    stream = generator("augment", seed, epoch)
    strength = 0.5 if epoch >= 0.75 * epochs else 1.0
    u = strength * (torch.rand(rows, 4, generator=stream, dtype=torch.float64) * 2 - 1)
    angle = u[:, 0] * math.radians(MAX_ROTATION_DEGREES)
    scale = torch.exp(u[:, 1] * math.log1p(MAX_SCALE))
    cos, sin = torch.cos(angle) / scale, torch.sin(angle) / scale
    shift = u[:, 2:] * MAX_SHIFT_PIXELS / 14  # 28 pixels span 2 units, -1 to 1
    rows_x = torch.stack([cos, -sin, shift[:, 0]], dim=1)
    rows_y = torch.stack([sin, cos, shift[:, 1]], dim=1)
    return torch.stack([rows_x, rows_y], dim=1).float()


def apply_affine(images: Tensor, maps: Tensor) -> Tensor:
    """Move each image, uint8 [B, 28, 28], by its map, a row of `affine_table` [B, 2, 3].

    Bilinear, with zeros from outside, and rounded: a difference in the last bit of a float stays
    invisible.
    """
    # The grid is written out instead of F.affine_grid, whose matrix product may differ in the
    # last bits with the number of images in the batch.
    axis = torch.linspace(-27 / 28, 27 / 28, 28, device=images.device)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    m = maps[:, :, :, None, None]
    grid = m[:, :, 0] * x + m[:, :, 1] * y + m[:, :, 2]
    moved = F.grid_sample(
        images[:, None].float(), grid.permute(0, 2, 3, 1), mode="bilinear", align_corners=False
    )
    return moved[:, 0].round_().clamp_(0, 255).to(torch.uint8)
