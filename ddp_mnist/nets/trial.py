"""Try a net and a task, forward and backward, before a run begins; a failure is one line."""

import contextlib
import hashlib
import pickle
from collections import Counter
from collections.abc import Callable
from itertools import chain

import torch
from torch import Tensor, nn

from ddp_mnist.core.nets import Shape
from ddp_mnist.core.optim import orthogonal
from ddp_mnist.core.recipe import Recipe
from ddp_mnist.core.seeding import generator, seed_forward, seed_generators
from ddp_mnist.core.task import Classification, Task
from ddp_mnist.core.wrappers import Normalised
from ddp_mnist.errors import UsageError, blame
from ddp_mnist.nets.build import is_known

# Steps of a user's net. A layer that is left out in 3 of 10 steps is left out in some of these but
# for one net in 5,000; in 1 of 10, but for one net in 12.
STEPS = 24
# What gloo sends between ranks, complex numbers as pairs. NCCL sends no others.
SENT = {torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.bfloat16}
SENT |= {torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128}
FIX = "correct its forward, or give another --image-size or a larger --batch-size"
DEFAULT_GENERATOR = "a default generator (torch, NumPy, random)"


def check(model: Normalised, name: str, outputs: int, shape: Shape, at_once: int = 2) -> None:
    """Raise UsageError if the net fails, or DDP would, which needs all gradients in each step.

    That holds for one process too, as its run may be resumed with several. A user's net may leave
    out a layer by chance or for some images, so it does many steps, the same ones each time.
    `at_once` is how many images BatchNorm gets in training: 1x1 maps of one image have no variance.
    The trial changes weights and BatchNorm's statistics: pass a net that will be discarded.
    """
    if lacks_parameters(model.net):
        raise UsageError(f"--model {name}: lacks parameters; put lists of layers in nn.ModuleList")
    for batch in (3, 1):  # as in an epoch's last batch, or predict's only one
        try_net(model.eval(), name, outputs, (batch, *shape))
    if at_once == 1:
        try_net(model.train(), name, outputs, (1, *shape))
    steps, unused = 1 if is_known(name) else STEPS, Counter[str]()
    for step in range(steps):
        model.zero_grad()
        try_net(model.train(), name, outputs, (2, *shape), step)
        for key, parameter in model.net.named_parameters():
            if parameter.grad is not None:
                parameter.detach().sub_(parameter.grad, alpha=1e-4)
            elif parameter.requires_grad:
                unused[key] += 1
    for key, count in unused.items():
        fault, fix = "has no part in the outputs", "use it in forward, or remove it"
        if count < steps:
            fault += f" of {count} of {steps} steps on trial, and DDP needs it in each"
            fix = "multiply by 0 what a step leaves out"
        raise UsageError(f"--model {name}: {key} {fault}; {fix}")
    for key, part in chain(model.net.named_parameters(), model.net.named_buffers()):
        if part.dtype not in SENT:
            fix = "make it int32 or float32"
            raise UsageError(f"--model {name}: {key} is {part.dtype}, which DDP cannot send; {fix}")


def takes_channels_last(net: Normalised, name: str, outputs: int, shape: Shape) -> bool:
    """Return whether the net has convolutions and trains in that memory format, which it then has.

    It fails if the net, which has to be one that trains, calls .view on its maps.
    """
    if not any(isinstance(module, nn.Conv2d) for module in net.modules()):
        return False
    try:
        for each in (net.to(memory_format=torch.channels_last).eval(), net.train()):
            try_net(each, name, outputs, (2, *shape))
    except UsageError:
        net.to(memory_format=torch.contiguous_format)
        return False
    return True


def lacks_parameters(net: nn.Module) -> bool:
    """Return whether a net lacks parameters, or hides layers in a plain list, untrained."""
    modules = {*net.modules()}
    values = chain.from_iterable(vars(module).values() for module in modules)
    listed = chain.from_iterable(value for value in values if isinstance(value, list))
    hidden = any(isinstance(each, nn.Module) and each not in modules for each in listed)
    return hidden or not [*net.parameters()]


def try_net(
    model: nn.Module, name: str, outputs: int, shape: tuple[int, ...], step: int = 0
) -> None:
    """Compute the outputs [B, outputs] of images [B, C, H, W], and in training a backward.

    Images and what the net draws are functions of the `step`. Raise UsageError if the net fails, or
    returns something else.
    """
    mode = "in training " if model.training else ""
    prefix = f"--model {name}, {mode}on images {list(shape)}"
    seed_forward(torch.device("cpu"), "trial", step)
    images = random_images(shape)
    with blame(prefix, UsageError, FIX), torch.set_grad_enabled(model.training):
        found = model(images)
        if model.training:
            found.sum().backward()
    returned = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
    if returned != (legal := [shape[0], outputs]):
        fix = "correct its last layer and keep the images apart"
        raise UsageError(f"{prefix}: gives {returned}, must be {legal}; {fix}")


def random_images(shape: tuple[int, ...]) -> Tensor:
    """Return noise, uint8 [B, C, H, W], each image of another mean, from 2 to 98 %."""
    brightness = torch.exp(8 * torch.rand(shape[0], 1, 1, 1) - 4)
    return torch.rand(shape).pow(1 / brightness).mul_(255).to(torch.uint8)


def check_task(task: Task, prefix: str, targets: Tensor) -> None:
    """Raise UsageError unless the task gives each image's loss and score, the outputs a gradient.

    Errors begin with `prefix`, the flag as it was typed. The trial runs where the targets of some
    images are, as constants in the user's file may be on another device.
    """

    def loss_and_score(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return the loss and the score of each image, from the same random numbers each time."""
        seed_forward(targets.device, "trial")
        score = task.score(task.predict(outputs.detach()), targets)
        found = {"loss": task.loss(outputs, targets), "score": score}
        return {name: torch.as_tensor(each) for name, each in found.items()}

    for some in (targets[:3], targets[:1]):
        count = len(some)
        outputs = torch.linspace(-2, 2, count * task.outputs, device=targets.device)
        outputs = outputs.view(count, task.outputs).requires_grad_()
        case = f"{prefix}, on outputs {list(outputs.shape)} and targets {list(some.shape)}"
        with blame(case, UsageError):
            predicted = list(task.predict(outputs.detach()).shape)
            if predicted != list(some.shape):
                raise UsageError(f"{case}: predict gives {predicted}, must be {list(some.shape)}")
            found, again = loss_and_score(outputs, some), loss_and_score(outputs, some)
            for name, each in found.items():
                if each.shape != some.shape[:1]:
                    fix = f"give that of each image, [{count}], e.g. by reduction='none'"
                    raise UsageError(f"{case}: gives a {name} of shape {list(each.shape)}; {fix}")
            found["loss"].sum().backward()
            if not is_close(again["loss"], found["loss"]):
                fix = f"keep nothing between calls; draw from {DEFAULT_GENERATOR}"
                raise UsageError(f"{case}: gives others at a second call; {fix}")
            if not isinstance(task, Classification):
                task.count(task.predict(outputs.detach()).cpu(), some.cpu())
            alone = [loss_and_score(outputs[n : n + 1], some[n : n + 1]) for n in range(count)]
            for name, each in found.items():
                if not is_close(torch.cat([row[name] for row in alone]), each):
                    fault = f"the {name} of an image depends on other images, or on chance"
                    raise UsageError(f"{case}: {fault}, so N processes would not train as one")


def is_close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found.double(), expected.double(), rtol=1e-5, atol=1e-6, equal_nan=True)


# --- What ranks would compute otherwise


@torch.no_grad()
def digest_of_step(net: nn.Module, recipe: Recipe) -> str:
    """Return a digest of what a step makes of the same gradients, to the last bit.

    Ranks share averaged gradients, not weights: if one clips them, orthogonalises them or adds them
    with other instructions or another number of threads, its weights drift from the others'.
    """
    digest, shared = hashlib.sha256(), generator("trial")
    gradients = [torch.rand(parameter.shape, generator=shared) for parameter in net.parameters()]
    if recipe.max_grad_norm:
        gradients = [gradient / gradient.norm() for gradient in gradients]
    if recipe.optimizer == "muon" and (kernels := [each for each in gradients if each.ndim == 4]):
        gradients += orthogonal(kernels)
    for gradient in gradients:
        digest.update(gradient.lerp(gradient.square(), 0.1).numpy().tobytes())
    return digest.hexdigest()[:8]


# --- What a checkpoint would lose


def check_state(make: Callable[[], Normalised], name: str, shape: Shape) -> str | None:
    """Raise UsageError if a net that is resumed would differ from one that went on.

    After a step, a net that `make` made goes on beside another one, which has nothing of it but its
    state_dict, as after a resume; both draw the same random numbers. If their logits are equal,
    return a sentence on the numbers that the state_dict lacks all the same, as a count of calls;
    None without such a number.
    """
    unbroken = made(make)
    before = _outside_state_dict(unbroken.net)
    images = torch.randint(0, 256, (2, 2, *shape), dtype=torch.uint8)
    with blame(f"--model {name}", UsageError, FIX):
        _logits(unbroken.train(), images[0], step=0)
        resumed = made(make)
        resumed.load_state_dict(unbroken.state_dict())
    after, there = (_outside_state_dict(net.net) for net in (unbroken, resumed))
    lost = [key for key, part in after.items() if part != there.get(key)]
    counts = [key for key in lost if isinstance(after[key], str) and key in before]
    for training in (True, False):
        pair = (net.train(training) for net in (unbroken, resumed))
        ours, theirs = (_logits(net, images[1], step=1) for net in pair)
        if not is_close(ours, theirs):
            what = f"forward changes {', '.join(lost)}" if lost else "forward has a memory"
            fault = "is not in its state_dict, so a resumed run would differ from an unbroken one"
            fix = f"make it a persistent buffer, or draw random numbers from {DEFAULT_GENERATOR}"
            raise UsageError(f"--model {name}: {what}, which {fault}; {fix}")
    if not counts:
        return None
    return (
        f"--model {name}: forward changes {', '.join(counts)}, which is not in its state_dict; if"
        " the logits ever depend on it, a resumed run will differ"
    )


def check_apart(net: Normalised, name: str, shape: Shape) -> None:
    """Raise UsageError if a net's outputs for an image depend on the others, as on a batch's mean.

    That is by a fiftieth of what they differ between images, and more than by rounding: kernels for
    other numbers of images add up in another order. Pass a net after some steps: many begin with a
    last layer of zeros.
    """
    seed_forward(torch.device("cpu"), "trial")
    images = random_images((3, *shape))
    net.eval()
    together, *alone = (_logits(net, some, step=0) for some in (images, *images.split(1)))
    dtypes = {part.dtype for part in net.parameters() if part.is_floating_point()}
    rounding = max((torch.finfo(dtype).eps for dtype in dtypes), default=0)
    least = 0.02 * (together - together.mean(0)).abs().max()
    least += 8 * rounding * together.abs().max()
    if (together - torch.cat(alone)).abs().max() > least:
        fault = "the outputs for an image depend on other images in its batch, or on chance"
        fix = "keep the images apart, and draw random numbers in training alone"
        raise UsageError(f"--model {name}, in eval mode: {fault}; {fix}")


def made(make: Callable[[], Normalised]) -> Normalised:
    """Return a net that is the same at each call."""
    seed_generators(torch.device("cpu"), 0)
    return make()


def _logits(net: Normalised, images: Tensor, step: int) -> Tensor:
    seed_forward(torch.device("cpu"), "trial", step)
    with torch.set_grad_enabled(net.training):
        return net(images).detach().float()


def _outside_state_dict(net: nn.Module) -> dict[str, bytes | str]:
    """Return attributes and buffers that no state_dict has: numbers as text, others as bytes."""
    found, of_all = dict[str, bytes | str](), vars(nn.Module()).keys()
    for prefix, module in net.named_modules():
        parts = {key: part for key, part in vars(module).items() if key not in of_all}
        parts |= {key: getattr(module, key) for key in module._non_persistent_buffers_set}
        for key, part in parts.items():
            name = f"{prefix}.{key}".strip(".")
            state = part.get_state() if isinstance(part, torch.Generator) else part
            with contextlib.suppress(Exception):  # e.g. a lambda, which has no bytes
                found[name] = repr(part) if isinstance(part, int | float) else pickle.dumps(state)
    return found
