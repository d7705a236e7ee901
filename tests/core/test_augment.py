import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from ddp_mnist.core.augment import augment, augmentation_table
from ddp_mnist.core.batches import Rows
from ddp_mnist.data.image_format import ImageFormat
from tests.data_sets import COLOUR, GREY
from tests.run_checks import fit_recipe

PIXEL = 2 / 28  # in grid_sample's coordinates
# Strokes twice as wide as high, and pictures in grey.
WIDE = ImageFormat((1, 14, 28), (0.1307,), (0.3081,), [], True, False)
GREY_PICTURES = ImageFormat((1, 28, 28), (0.5,), (0.2,), [], False, False)
CHARACTERS = dataclasses.replace(COLOUR, characters=True)
STROKES_AND_PICTURES = pytest.mark.parametrize("image_format", [GREY, WIDE, COLOUR, GREY_PICTURES])


def batch_of(image_format: ImageFormat, count: int) -> torch.Tensor:
    """Return random pixels, the same each time."""
    stream, shape = torch.Generator().manual_seed(1), (count, *image_format.shape)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=stream)


def table_of(
    image_format: ImageFormat, rows: int, seed: int, epoch: int, epochs: int
) -> torch.Tensor:
    """Return the table for so many images of this kind."""
    images = torch.zeros(1, dtype=torch.uint8).expand(rows, *image_format.shape)
    recipe = fit_recipe(epochs=epochs, augment=image_format.kind)
    return augmentation_table(recipe, Rows(images, torch.zeros(rows, 1)), seed, epoch)


def moves(table: torch.Tensor, aspect: float = 1.0) -> torch.Tensor:
    """Return angle in degrees, log-scale and both shifts in pixels of 28, [4, N]."""
    (a, b, x), (c, d, y) = (row.unbind(1) for row in table.double().unbind(1))
    b, c = b / aspect, c * aspect  # in pixels, of which a unit has more in the longer direction
    assert torch.allclose(a, d) and torch.allclose(b, -c)  # a rotation and a scale, no shear
    log_scale = -torch.hypot(a, c).log()
    return torch.stack([torch.rad2deg(torch.atan2(c, a)), log_scale, x / PIXEL, y / PIXEL])


# --- The table


@STROKES_AND_PICTURES
def test_the_table_is_a_function_of_seed_and_epoch(image_format: ImageFormat) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    table = table_of(image_format, 100, seed=3, epoch=5, epochs=20)
    assert torch.equal(torch.get_rng_state(), before)
    lines = 2 if image_format.bright_on_black else 3
    assert (table.shape, table.dtype) == ((100, lines, 3), torch.float32)
    torch.manual_seed(2)
    assert torch.equal(table, table_of(image_format, 100, seed=3, epoch=5, epochs=20))
    for seed, epoch in [(3, 6), (4, 5), (5, 3)]:
        other = table_of(image_format, 100, seed=seed, epoch=epoch, epochs=20)
        assert (other != table).flatten(1).any(1).all()


@pytest.mark.parametrize("image_format", [GREY, WIDE])
def test_strokes_rotate_scale_and_shift_within_their_bounds(image_format: ImageFormat) -> None:
    _, height, width = image_format.shape
    draws = moves(table_of(image_format, 20_000, 0, 0, 1), height / width)
    for values, most in zip(draws, (18, math.log(1.20), 4, 4), strict=True):
        assert 0.996 * most < -values.min() <= most + 1e-5
        assert 0.996 * most < values.max() <= most + 1e-5
    # all four are drawn independently, and none leans to a side
    assert draws.corrcoef().fill_diagonal_(0).abs().max() < 0.03
    assert (draws.mean(1) / draws.std(1)).abs().max() < 0.03


def pictures(epoch: int, epochs: int, rows: int = 20_000) -> dict[str, torch.Tensor]:
    """Return what happens to pictures, each [N]; a crop's place is -1 at the left, 1 at the right.

    No line of a map mixes x and y: pictures are neither rotated nor sheared.
    """
    table = table_of(COLOUR, rows, 0, epoch, epochs).double()
    assert not table[:, 0, 1].any()
    assert not table[:, 1, 0].any()
    width, height = table[:, 0, 0].abs(), table[:, 1, 1]
    x, y = table[:, 0, 2] / (1 - width), table[:, 1, 2] / (1 - height)
    brightness, contrast, saturation = table[:, 2].unbind(1)
    return {
        "mirrored": (table[:, 0, 0] < 0).double(),
        "area": width * height,
        "log aspect": (width / height).log(),
        "x": x[width < 0.99],
        "y": y[height < 0.99],
        "brightness": brightness,
        "contrast": contrast,
        "saturation": saturation,
    }


@pytest.mark.parametrize(("epoch", "strength"), [(0, 1.0), (3, 0.5)])
def test_pictures_are_mirrored_cropped_and_coloured_within_their_bounds(
    epoch: int, strength: float
) -> None:
    """In the last of four epochs half as much, but for the mirror and the place of the crop."""
    found = pictures(epoch, 4)
    area, aspect = 1 - 0.5 * strength, strength * math.log(4 / 3)
    colour = (1 - 0.2 * strength, 1 + 0.2 * strength)
    for name, (least, most) in {
        "area": (area, 1),
        "log aspect": (-aspect, aspect),
        "x": (-1, 1),
        "y": (-1, 1),
        **dict.fromkeys(("brightness", "contrast", "saturation"), colour),
    }.items():
        margin = 0.05 * (most - least)
        assert least - 1e-4 <= found[name].min() < least + margin, name
        assert most - margin < found[name].max() <= most + 1e-4, name
    assert found["mirrored"].mean().item() == pytest.approx(0.5, abs=0.02)
    whole = [values for values in found.values() if len(values) == 20_000]
    leans = {"area", "log aspect"}  # these two are clamped where a crop would leave the picture
    assert torch.stack(whole).corrcoef().fill_diagonal_(0).abs().max() < 0.03
    for name in found.keys() - leans:
        middle = {"mirrored": 0.5, "x": 0, "y": 0}.get(name, 1)
        assert found[name].mean().item() == pytest.approx(middle, abs=0.02), name


def test_pictures_of_characters_are_not_mirrored() -> None:
    """A mirror makes a 2 of a 5, or what is no character; all else is as for other pictures."""
    both = [table_of(each, 2000, 0, 0, 4) for each in (COLOUR, CHARACTERS)]
    assert (both[1][:, 0, 0] > 0).all() and (both[0][:, 0, 0] < 0).any()
    for table in both:
        table[:, 0, 0].abs_()
    assert torch.equal(*both)


def test_the_last_quarter_of_the_epochs_moves_images_half_as_far() -> None:
    for epoch, epochs, share in [(15, 20, 0.5), (19, 20, 0.5), (3, 4, 0.5), (14, 20, 1), (0, 1, 1)]:
        ours, whole = (moves(table_of(GREY, 50, 0, epoch, of)) for of in (epochs, 1000))
        assert torch.allclose(ours, share * whole, atol=1e-4)


# --- What it does to images


@STROKES_AND_PICTURES
def test_it_is_the_affine_grid_of_torch(image_format: ImageFormat) -> None:
    batch, table = batch_of(image_format, 64), table_of(image_format, 64, 0, 0, 1)[:, :2]
    grid = F.affine_grid(table, list(batch.shape), align_corners=False)
    expected = F.grid_sample(batch.float(), grid, align_corners=False).round()
    moved = augment(batch, table)
    assert moved.dtype == torch.uint8
    assert (moved.float() - expected).abs().max() <= 1
    assert (moved.float() == expected).float().mean() > 0.999
    assert (moved != batch).flatten(1).any(1).all()
    assert torch.equal(batch, batch_of(image_format, 64))
    identity = torch.eye(2, 3).expand(64, 2, 3)
    assert torch.equal(augment(batch, identity), batch)  # bit for bit


def changed(pixels: torch.Tensor, mirror: float = 1, *colours: float) -> torch.Tensor:
    """Return a picture after a mirror (-1) or none, with brightness, contrast and saturation."""
    brightness, contrast, saturation = colours or (1, 1, 1)
    rows = [[mirror, 0, 0], [0, 1, 0], [brightness, contrast, saturation]]
    return augment(pixels[None], torch.tensor([rows], dtype=torch.float32))[0]


@pytest.mark.parametrize("image_format", [COLOUR, GREY_PICTURES])
def test_mirror_and_colours_are_what_their_names_say(image_format: ImageFormat) -> None:
    [pixels] = batch_of(image_format, 1)
    exact = pixels.double()
    assert torch.equal(changed(pixels), pixels)
    assert torch.equal(changed(pixels, -1), pixels.flip(2))
    brighter = (exact * 1.2).round().clamp(max=255)
    flatter = (exact.mean() + 0.8 * (exact - exact.mean())).round()
    assert (changed(pixels, 1, 1.2, 1, 1) - brighter).abs().max() <= 1
    assert (changed(pixels, 1, 1, 0.8, 1) - flatter).abs().max() <= 1
    pale = changed(pixels, 1, 1, 1, 0)
    if len(pixels) == 1:
        assert torch.equal(pale, pixels)  # grey has no saturation
        return
    luma = torch.einsum("chw,c->hw", exact, torch.tensor([0.299, 0.587, 0.114]).double())
    assert (pale - luma.round()).abs().max() <= 1
    assert torch.equal(pale[0], pale[1]) and torch.equal(pale[0], pale[2])


@pytest.mark.parametrize("image_format", [COLOUR, GREY_PICTURES])
def test_a_crop_at_the_edge_is_not_darkened(image_format: ImageFormat) -> None:
    table = table_of(image_format, 2000, 0, 0, 1)
    table[:, 2] = 1  # all colours stay
    flat = torch.full((2000, *image_format.shape), 200, dtype=torch.uint8)
    assert torch.equal(augment(flat, table), flat)


@STROKES_AND_PICTURES
def test_a_sample_becomes_the_same_in_any_batch_bit_for_bit(image_format: ImageFormat) -> None:
    batch, table = batch_of(image_format, 72), table_of(image_format, 72, 0, 0, 1)
    together = augment(batch, table)
    for size in (1, 2, 3, 5, 24, 36):
        parts = zip(batch.split(size), table.split(size), strict=True)
        assert torch.equal(torch.cat([augment(*part) for part in parts]), together)
    order = torch.randperm(72)
    assert torch.equal(augment(batch[order], table[order]), together[order])
