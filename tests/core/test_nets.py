import math

import pytest
import torch
import torch.nn.functional as F

from ddp_mnist.config.recipe import NETS
from ddp_mnist.core.nets import CNN, MODELS
from ddp_mnist.core.wrappers import Normalised, ShiftedViews, as_tested
from ddp_mnist.data.image_format import ImageFormat
from ddp_mnist.nets.build import build_net
from ddp_mnist.task import Classification, Task
from ddp_mnist.training.model_file import NETS_VERSION
from tests.data_sets import COLOUR, GREY, images

PHOTO = ImageFormat((3, 112, 128), (0.5, 0.4, 0.3), (0.2, 0.2, 0.2), [], False, False)
KINDS = Classification([*"0123456789"])
OURS = ["cnn", "cnn_deep", "mlp", "cnn_bn"]
NINE = [(y, x) for y in range(3) for x in range(3)]  # corners of the views in a padded image


class Numbers(Task):
    columns = ("angle",)


def make(name: str, classes: int = 10) -> Normalised:
    """Return a net that takes pixels, with the weights of seed 0."""
    torch.manual_seed(0)
    return build_net(name, Classification([*map(str, range(classes))]), GREY)


def test_the_names_are_those_of_the_flag() -> None:
    assert list(MODELS) == list(NETS) == OURS


@pytest.mark.parametrize("name", OURS)
def test_the_seed_decides_the_weights_and_their_dtype_that_of_the_logits(name: str) -> None:
    net, again = make(name), make(name)
    torch.testing.assert_close(net.state_dict(), again.state_dict(), rtol=0, atol=0)
    single, double = net(images(4)), again.double()(images(4))
    for logits, dtype in ((single, torch.float32), (double, torch.float64)):
        assert (logits.shape, logits.dtype) == ((4, 10), dtype)
        assert logits.isfinite().all()
        assert logits.std() > 1e-3
    assert torch.allclose(single.double(), double, atol=1e-4)
    assert make(name, 47)(images(2)).shape == (2, 47)


@pytest.mark.parametrize("name", ["cnn", "cnn_deep", "mlp"])
def test_a_sample_does_not_see_the_batch_that_it_is_in(name: str) -> None:
    model, batch = make(name).double(), images(12)
    together = model(batch)
    alone = torch.cat([model(batch[i : i + 1]) for i in range(12)])
    assert torch.allclose(together, alone, rtol=1e-12, atol=1e-12)


def test_only_the_deep_net_averages_nine_views_and_of_classes_alone() -> None:
    """Its average is among the numbers of the last test."""
    numbers = Numbers([0.0], [1.0])  # which a shift may change
    nets = ("cnn_deep", KINDS, True), ("cnn", KINDS, False), ("cnn_deep", numbers, False)
    for name, task, averages in nets:
        net = build_net(name, task, GREY)
        assert (type(as_tested(net)) is ShiftedViews) == averages
        assert averages or as_tested(net) is net
    batch = images(3)
    net = make("cnn_deep").double().eval()
    moved = [F.pad(batch, (1, 1, 1, 1))[..., y : y + 28, x : x + 28] for y, x in NINE]
    mean = sum(net(each) for each in moved) / 9
    assert torch.allclose(as_tested(net)(batch), mean, rtol=1e-12)


SIDES = [(14, 0, 1), (28, 0, 3), (55, 0, 6), (56, 1, 3), (96, 1, 5), (112, 2, 3), (224, 3, 3)]


@pytest.mark.parametrize(("side", "blocks", "maps"), SIDES)
def test_larger_images_get_more_blocks(side: int, blocks: int, maps: int) -> None:
    """The head sees 3x3, or the means of a map that is less than twice as large."""
    for wide in (1, 2):
        net = CNN(5, (3, side, wide * side))
        assert len(net.deeper) == blocks
        seen = list[torch.Size]()
        net.deeper.register_forward_hook(lambda *a: seen.append(a[2].shape))  # noqa: B023
        assert net(torch.rand(2, 3, side, wide * side)).shape == (2, 5)
        assert min(seen[0][2:]) == maps


@pytest.mark.parametrize(
    ("name", "image_format", "expected"),
    [
        ("cnn", GREY, 346.7558624882951),
        ("cnn_deep", GREY, 428.04555493218015),
        ("mlp", GREY, 2436764.327454491),
        ("cnn_bn", GREY, 2168960.5315724476),
        ("cnn", COLOUR, 335.0224724320284),
        ("cnn_deep", COLOUR, 469.8267912563163),
        ("mlp", COLOUR, 4479283.806112266),
        ("cnn_bn", COLOUR, 2461099.983633092),
        ("cnn", PHOTO, 452.32532814438974),
        ("cnn_deep", PHOTO, 569.9617419800575),
        ("cnn_bn", PHOTO, 1724102502244.5725),
    ],
)
def test_the_same_weights_compute_the_same_in_this_version(
    name: str, image_format: ImageFormat, expected: float
) -> None:
    """Fails when old weights would mean something else: then raise NETS_VERSION."""
    assert NETS_VERSION == 4
    net = MODELS[name](3, image_format.shape).double().eval()
    for number, tensor in enumerate(net.state_dict().values()):
        if tensor.is_floating_point():
            waves = torch.linspace(-1, 2, tensor.numel(), dtype=torch.float64).sin().abs()
            tensor.copy_(waves.reshape(tensor.shape) + 0.01 * number)
    pixels = torch.arange(math.prod(image_format.shape)).remainder(251).to(torch.uint8)
    mean, std = image_format.mean, image_format.std
    model = as_tested(Normalised(net, mean, std, shifted_views=name == "cnn_deep"))
    logits = model(pixels.reshape(1, *image_format.shape))
    assert logits[0, 0].item() == pytest.approx(expected, rel=1e-9)
