from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from ddp_mnist.augment import (
    MAX_ROTATION_DEGREES,
    MAX_SCALE,
    MAX_SHIFT_PIXELS,
    affine_table,
    apply_affine,
)

PIXEL = 2 / 28  # in grid_sample's coordinates


def images(count: int) -> torch.Tensor:
    """uint8 [count, 28, 28]."""
    stream = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (count, 28, 28), dtype=torch.uint8, generator=stream)


def maps(count: int, x: float = 0.0, y: float = 0.0) -> torch.Tensor:
    """Where each pixel is read: x pixels to the right of its own place, y below it."""
    table = torch.zeros(count, 2, 3)
    table[:, 0, 0] = table[:, 1, 1] = 1
    table[:, 0, 2], table[:, 1, 2] = x * PIXEL, y * PIXEL
    return table


# --- The table


def test_the_table_is_a_function_of_seed_and_epoch() -> None:
    table = affine_table(100, seed=3, epoch=5, epochs=20)
    assert table.shape == (100, 2, 3)
    assert table.dtype == torch.float32
    assert torch.equal(table, affine_table(100, seed=3, epoch=5, epochs=20))
    for seed, epoch in [(3, 6), (4, 5), (5, 3)]:
        other = affine_table(100, seed=seed, epoch=epoch, epochs=20)
        assert (other != table).flatten(1).any(1).all()


def test_the_table_neither_uses_nor_changes_the_global_stream() -> None:
    torch.manual_seed(1)
    first, before = affine_table(5, 0, 0, 1), torch.get_rng_state()
    torch.manual_seed(2)
    assert torch.equal(affine_table(5, 0, 0, 1), first)
    torch.manual_seed(1)
    affine_table(5, 0, 0, 1)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_table_holds_rotations_scales_and_shifts_within_their_bounds() -> None:
    table = affine_table(20_000, 0, 0, 1).double()
    (a, b, x), (c, d, y) = (row.unbind(1) for row in table.unbind(1))
    assert torch.allclose(a, d) and torch.allclose(b, -c)  # a rotation and a scale, no shear
    angle = torch.rad2deg(torch.atan2(c, a))
    scale = 1 / torch.sqrt(a * d - b * c)
    assert (MAX_ROTATION_DEGREES, MAX_SCALE, MAX_SHIFT_PIXELS) == (18, 0.20, 4)
    for value, low, high in [
        (angle, -18, 18),
        (scale, 1 / 1.20, 1.20),
        (x / PIXEL, -4, 4),
        (y / PIXEL, -4, 4),
    ]:
        near = 0.002 * (high - low)
        assert low - 1e-5 <= value.min() < low + near
        assert high - near < value.max() <= high + 1e-5
    # all four are drawn independently, and none leans to a side
    draws = torch.stack([angle, scale.log(), x, y])
    assert draws.corrcoef().fill_diagonal_(0).abs().max() < 0.03
    assert (draws.mean(1) / draws.std(1)).abs().max() < 0.03


def test_the_last_quarter_of_the_epochs_moves_images_half_as_far() -> None:
    def moves(epoch: int, epochs: int) -> torch.Tensor:
        """Angle, log-scale and both shifts, [4, 50]."""
        table = affine_table(50, 0, epoch, epochs).double()
        (a, _, x), (c, _, y) = (row.unbind(1) for row in table.unbind(1))
        return torch.stack([torch.atan2(c, a), -torch.hypot(a, c).log(), x, y])

    for epoch, epochs, share in [(15, 20, 0.5), (19, 20, 0.5), (3, 4, 0.5), (14, 20, 1), (0, 1, 1)]:
        assert torch.allclose(moves(epoch, epochs), share * moves(epoch, 1000), atol=1e-6)


# --- What it does to images


def test_the_identity_returns_the_image_bit_for_bit() -> None:
    batch = images(50)
    assert torch.equal(apply_affine(batch, maps(50)), batch)


@pytest.mark.parametrize(("x", "y"), [(1, 0), (0, 1), (-3, 2), (3, -3)])
def test_whole_pixels_roll_and_zeros_come_in(x: int, y: int) -> None:
    batch = images(10)
    rolled = torch.roll(batch, (-y, -x), dims=(1, 2))
    if y:
        rolled[:, (slice(28 - y, 28) if y > 0 else slice(0, -y))] = 0
    if x:
        rolled[:, :, (slice(28 - x, 28) if x > 0 else slice(0, -x))] = 0
    moved = apply_affine(batch, maps(10, x, y)).int()
    # a coordinate that is off in its last bit mixes in 1e-5 of the neighbour
    assert (moved - rolled.int()).abs().max() <= 1


def test_half_a_pixel_is_the_mean_of_two() -> None:
    image = torch.zeros(1, 28, 28, dtype=torch.uint8)
    image[0, 14, 14] = 200
    moved = apply_affine(image, maps(1, x=0.5))
    assert moved[0, 14, 13:15].tolist() == [100, 100]
    assert moved.sum() == 200


@pytest.mark.parametrize("degrees", [90, -90, 180])
def test_right_angles_turn_the_image(degrees: int) -> None:
    batch, angle = images(5), math.radians(degrees)
    table = maps(5)
    table[:, 0, 0] = table[:, 1, 1] = math.cos(angle)
    table[:, 0, 1], table[:, 1, 0] = -math.sin(angle), math.sin(angle)
    turned = torch.rot90(batch, degrees // 90, dims=(1, 2))
    assert (apply_affine(batch, table).int() - turned.int()).abs().max() <= 1


def test_it_is_the_affine_grid_of_torch() -> None:
    batch, table = images(64), affine_table(64, 0, 0, 1)
    grid = F.affine_grid(table, [64, 1, 28, 28], align_corners=False)
    expected = F.grid_sample(batch[:, None].float(), grid, align_corners=False)[:, 0].round()
    moved = apply_affine(batch, table)
    assert moved.dtype == torch.uint8
    assert (moved.float() - expected).abs().max() <= 1
    assert (moved.float() == expected).float().mean() > 0.999


def test_a_sample_becomes_the_same_in_any_batch_bit_for_bit() -> None:
    batch, table = images(72), affine_table(72, 0, 0, 1)
    together = apply_affine(batch, table)
    for size in (1, 2, 3, 5, 24, 36):
        parts = zip(batch.split(size), table.split(size), strict=True)
        assert torch.equal(torch.cat([apply_affine(*part) for part in parts]), together)
    order = torch.randperm(72)
    assert torch.equal(apply_affine(batch[order], table[order]), together[order])


def test_it_changes_images_and_leaves_its_input_alone() -> None:
    batch = images(8)
    before = batch.clone()
    moved = apply_affine(batch, affine_table(8, 0, 0, 1))
    assert torch.equal(batch, before)
    assert (moved != batch).flatten(1).any(1).all()
    blank = torch.zeros(2, 28, 28, dtype=torch.uint8)
    assert torch.equal(apply_affine(blank, affine_table(2, 0, 0, 1)), blank)
