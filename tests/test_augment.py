import math

import torch
import torch.nn.functional as F

from ddp_mnist.augment import affine_table, apply_affine
from tests.training import images

PIXEL = 2 / 28  # in grid_sample's coordinates


def moves(table: torch.Tensor) -> torch.Tensor:
    """Return angle in degrees, log-scale and both shifts in pixels, [4, N]."""
    (a, b, x), (c, d, y) = (row.unbind(1) for row in table.double().unbind(1))
    assert torch.allclose(a, d) and torch.allclose(b, -c)  # a rotation and a scale, no shear
    log_scale = -torch.hypot(a, c).log()
    return torch.stack([torch.rad2deg(torch.atan2(c, a)), log_scale, x / PIXEL, y / PIXEL])


# --- The table


def test_the_table_is_a_function_of_seed_and_epoch() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    table = affine_table(100, seed=3, epoch=5, epochs=20)
    assert torch.equal(torch.get_rng_state(), before)
    assert (table.shape, table.dtype) == ((100, 2, 3), torch.float32)
    torch.manual_seed(2)
    assert torch.equal(table, affine_table(100, seed=3, epoch=5, epochs=20))
    for seed, epoch in [(3, 6), (4, 5), (5, 3)]:
        other = affine_table(100, seed=seed, epoch=epoch, epochs=20)
        assert (other != table).flatten(1).any(1).all()


def test_the_table_holds_rotations_scales_and_shifts_within_their_bounds() -> None:
    draws = moves(affine_table(20_000, 0, 0, 1))
    for values, most in zip(draws, (18, math.log(1.20), 4, 4), strict=True):
        assert 0.996 * most < -values.min() <= most + 1e-5
        assert 0.996 * most < values.max() <= most + 1e-5
    # all four are drawn independently, and none leans to a side
    assert draws.corrcoef().fill_diagonal_(0).abs().max() < 0.03
    assert (draws.mean(1) / draws.std(1)).abs().max() < 0.03


def test_the_last_quarter_of_the_epochs_moves_images_half_as_far() -> None:
    for epoch, epochs, share in [(15, 20, 0.5), (19, 20, 0.5), (3, 4, 0.5), (14, 20, 1), (0, 1, 1)]:
        ours, whole = (moves(affine_table(50, 0, epoch, of)) for of in (epochs, 1000))
        assert torch.allclose(ours, share * whole, atol=1e-4)


# --- What it does to images


def test_it_is_the_affine_grid_of_torch() -> None:
    batch, table = images(64), affine_table(64, 0, 0, 1)
    grid = F.affine_grid(table, [64, 1, 28, 28], align_corners=False)
    expected = F.grid_sample(batch[:, None].float(), grid, align_corners=False)[:, 0].round()
    moved = apply_affine(batch, table)
    assert moved.dtype == torch.uint8
    assert (moved.float() - expected).abs().max() <= 1
    assert (moved.float() == expected).float().mean() > 0.999
    assert (moved != batch).flatten(1).any(1).all()
    assert torch.equal(batch, images(64))
    identity = torch.eye(2, 3).expand(64, 2, 3)
    assert torch.equal(apply_affine(batch, identity), batch)  # bit for bit


def test_a_sample_becomes_the_same_in_any_batch_bit_for_bit() -> None:
    batch, table = images(72), affine_table(72, 0, 0, 1)
    together = apply_affine(batch, table)
    for size in (1, 2, 3, 5, 24, 36):
        parts = zip(batch.split(size), table.split(size), strict=True)
        assert torch.equal(torch.cat([apply_affine(*part) for part in parts]), together)
    order = torch.randperm(72)
    assert torch.equal(apply_affine(batch[order], table[order]), together[order])
