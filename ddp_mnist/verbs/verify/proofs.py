"""The verb `verify`: prove on this machine what the trainer promises, by training on its CPU.

Each proof is a small run in float64, so that no fault hides behind rounding: correct float32 code
on two processes drifts a hundredth away from one process, float64 some 1e-13.
"""

import itertools
import math
import signal
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ddp_mnist.cluster import hardware
from ddp_mnist.cluster.launch import find_launch
from ddp_mnist.cluster.local_world import LocalWorld, run_world
from ddp_mnist.cluster.world import join_world
from ddp_mnist.config.distribution import Distribution
from ddp_mnist.config.mistakes import MISTAKES
from ddp_mnist.config.recipe import Recipe, resolve_recipe
from ddp_mnist.config.train_config import RunFlags, TrainConfig
from ddp_mnist.core.batches import Rows
from ddp_mnist.core.evaluation import evaluate_split, make_eval_loader
from ddp_mnist.data import cache
from ddp_mnist.data.image_data import ImageData
from ddp_mnist.data.sources import from_anywhere
from ddp_mnist.data.splits import subset
from ddp_mnist.errors import CheckFailed, DdpMnistError, UsageError
from ddp_mnist.nets.build import factory_of
from ddp_mnist.system.console import Console, coloured
from ddp_mnist.system.files import check_place, storage_errors, to_json, write_atomically
from ddp_mnist.system.text import count, escaped
from ddp_mnist.task import find_loss, options_of
from ddp_mnist.training import model_file
from ddp_mnist.verbs import check_result
from ddp_mnist.verbs.check_result import FAIL, PASS, CheckResult, check, describe, failed, worst
from ddp_mnist.verbs.flags import Verify
from ddp_mnist.verbs.verify import watch
from ddp_mnist.verbs.verify.mistakes import count_padding
from ddp_mnist.verbs.verify.watch import RankRecord, proof_config, weights_of

LIMIT = 1e-9  # of a relative difference
PARTS = 3  # that a step is split into
HOUR = 3600  # seconds, for a large data set; a rank that hangs is given up after --dist-timeout
STOPS_AT = 20  # the step at which a run is interrupted
# Rows, and images per process and pass: fewer rows than processes, a short last pass, full passes
SHARDS = ((1, 4), (7, 4), (101, 10), (360, 30))
FIX = (
    "with a net, loss or task of your own: it may be BatchNorm, Dropout, or a loss that is not of"
    " one image alone; without one, and without --inject: install the versions in constraints.txt,"
    " and do not trust results from this machine until verify passes"
)


@dataclass(frozen=True)
class Watched:
    """A run of one world: its flags and folder, and each rank's record."""

    config: TrainConfig
    folder: Path
    ranks: list[RankRecord]


def run(flags: Verify) -> None:
    """Print each check as it is done; write them all to --save.

    Raise CheckFailed if one failed or a fault was injected.
    """
    save = Path(flags.save)
    check_place(flags.save, "--save")
    if flags.gpu and not hardware.gpus():
        raise UsageError("--gpu: torch sees none here; ask ddp-mnist doctor why, or leave it out")
    console, checks = Console(True), list[CheckResult]()
    config, part = config_of(flags), watch.PROOF["batch_size"] // PARTS
    sizes = [n for n in range(2, flags.processes + 1) if part % n == 0]
    for line in verify(sizes, config, flags.gpu):
        if isinstance(line, CheckResult):
            checks.append(line)
        console.print(str(line), coloured=True)
    head = {"passed": worst(checks) == PASS, "processes": [1, *sizes], "injected": flags.inject}
    trained = {name: getattr(config.recipe, name) for name in ("model", "loss", "task")}
    head |= {"dataset": flags.dataset, **trained}
    with storage_errors(save, "--save"):
        write_atomically(save, to_json(describe(checks, "checks", **head)).encode())
    if wrong := failure_summary(checks, flags.inject):
        raise CheckFailed(wrong)
    passed = coloured(PASS, f"all {len(checks)} checks passed")
    console.print(f"{passed}; written to {escaped(save)}", coloured=True)


def config_of(flags: Verify) -> TrainConfig:
    """Return the run to prove, with as many epochs as take watch.STEPS or more.

    Raise UsageError for a net or a loss that cannot be found from here: the processes run in a
    separate folder, but find what this one finds.
    """
    rows = len(images_of(flags.dataset, flags.task).rows["train"])
    _, recipe = resolve_recipe(Recipe(**watch.PROOF), rows, 1)
    epochs = math.ceil(watch.STEPS / recipe.steps_per_epoch)
    typed = {"model": flags.model, "loss": flags.loss, "task": flags.task, "inject": flags.inject}
    changed: dict[str, Any] = {name: value for name, value in typed.items() if value}
    if flags.inject:
        changed = {**MISTAKES[flags.inject].recipe, **changed}
        epochs = max(epochs, MISTAKES[flags.inject].epochs)
    config = proof_config(**changed, epochs=epochs)
    factory_of(str(config.recipe.model))
    find_loss(config.recipe.loss)
    timeout = 5 if flags.inject == "exit" else config.distribution.dist_timeout  # it hangs
    distribution = replace(config.distribution, dist_timeout=timeout)
    run = replace(config.run, dataset=from_anywhere(flags.dataset))
    return replace(config, run=run, distribution=distribution)


def images_of(dataset: str, task: str | None) -> ImageData:
    """Return the images that the runs use."""
    return cache.load(dataset, options=options_of(vars(RunFlags()) | {"task": task}))


def with_run_dir(config: TrainConfig, run_dir: str, **recipe: Any) -> TrainConfig:
    """Return the same run with its own folder, and other values in its recipe."""
    run, recipe_of_it = replace(config.run, run_dir=run_dir), replace(config.recipe, **recipe)
    return replace(config, run=run, recipe=recipe_of_it)


def verify(sizes: Sequence[int], config: TrainConfig, on_gpu: bool) -> Iterator[CheckResult | str]:
    """Yield each check's result at once, and lines that show which rank took which images.

    For each of `sizes`, so many processes are compared with one. A run that breaks down is a failed
    check, and the last one; a wrong flag raises UsageError. The fault of `config` is injected into
    all runs but that of one process; resume, accumulation and the GPU are then not checked.
    """
    fault = config.recipe.inject
    with tempfile.TemporaryDirectory(prefix="ddp-mnist-verify-") as scratch:
        try:
            alone = watched_run(1, Path(scratch), config)
            for size in (1, *sizes):
                run = alone if size == 1 else watched_run(size, Path(scratch), config)
                yield from who_took_what(run)
                if size > 1:
                    yield from equal_to_one(run, alone)
                if not fault:
                    yield resume_is_exact(run)
                    yield accumulation_is_exact(size, alone)
                if size > 1:
                    yield metrics_are_exact(size, alone, fault)
            if on_gpu and not fault:
                yield from equal_on("cuda", alone)
        except UsageError:
            raise
        except (DdpMnistError, OSError) as error:
            yield failed("runs", f"{type(error).__name__}: {error}", FIX)


def watched_run(size: int, folder: Path, config: TrainConfig, name: str = "on") -> Watched:
    """Train in `folder`/`name`-`size`; only several processes make the mistake of `config`."""
    inject = config.recipe.inject if size > 1 else None
    config = with_run_dir(config, f"{name}-{size}", inject=inject)
    ranks = run_world(size, watch.train_and_watch, config, folder=folder, timeout_s=HOUR)
    return Watched(config, folder / f"{name}-{size}", ranks)


def who_took_what(run: Watched) -> Iterator[str]:
    """Yield the images that each rank took first, by their row in the train split.

    Augmented images are shown by a digest of their pixels.
    """
    data = images_of(run.config.run.dataset, run.config.recipe.task)
    train = subset(data, "train").take([*range(len(data.rows["train"]))])[0]
    places = {watch.digest_of_image(image): place for place, image in enumerate(train)}
    for rank, record in enumerate(run.ranks):
        images = record.images[0]
        shown = " ".join(f"{places.get(image, image[:6]):>4}" for image in images[:6])
        yield f"      step 1, rank {rank} of {len(run.ranks)}: {len(images)} images, {shown} ..."


def equal_to_one(run: Watched, alone: Watched) -> Iterator[CheckResult]:
    """Compare images, learning rates, gradients and weights of N processes with those of one."""
    size, [one] = len(run.ranks), alone.ranks
    yield exact("samples", size, "steps' images", watch.per_step(run.ranks), watch.per_step([one]))
    rates = [rank.learning_rates for rank in run.ranks]
    yield exact("learning rates", size, "ranks' schedules", rates, [one.learning_rates] * size)
    first = abs(run.ranks[0].gradient_norms[0] / one.gradient_norms[0] - 1)
    yield bounded("gradients", size, "first gradient's norm", first)
    yield near("weights", size, f"weights after {len(one.images)} steps", run.folder, alone)
    digests = [rank.summary["model_sha256"] for rank in run.ranks]
    yield exact("replicas", size, "ranks' weights", digests, digests[:1] * size)


def resume_is_exact(run: Watched) -> CheckResult:
    """Compare `run` with one that a signal to its last rank interrupts and that is then resumed."""
    size, folder = len(run.ranks), run.folder.parent
    name = f"interrupted-on-{size}"
    config = with_run_dir(run.config, name)
    until = (watch.train_until, config, STOPS_AT, signal.SIGTERM, size - 1)
    LocalWorld(size, *until, folder=folder).outcomes(HOUR)
    go_on = watch.just_train, watch.resumed(config)
    [again, *_] = run_world(size, *go_on, folder=folder, timeout_s=HOUR)
    resumed = len(again.get("resumed_from", []))  # a finished run would have returned nothing
    (net, log), (unbroken, lines) = map(watch.what_stays, (folder / name, run.folder))
    found, expected = [(net, resumed), *log], [(unbroken, 1), *lines]
    return exact("resume", size, "weights and log lines", found, expected)


def accumulation_is_exact(size: int, alone: Watched) -> CheckResult:
    """Compare accumulated steps with undivided ones."""
    config = replace(alone.config, recipe=replace(alone.config.recipe, grad_accum=PARTS))
    run = watched_run(size, alone.folder.parent, config, "parts-on")
    return near("accumulation", size, f"weights by {PARTS} parts a step", run.folder, alone)


def equal_on(device: str, alone: Watched) -> Iterator[CheckResult]:
    """Compare training on a GPU with that of one process on the CPU.

    One process does it, and two that share the GPU over gloo. A test passes "cpu".
    """
    there = replace(alone.config.distribution, cpu=device == "cpu", backend="gloo")
    config = replace(alone.config, distribution=there)
    for size in (1, 2):
        run = watched_run(size, alone.folder.parent, config, device)
        used, steps = run.ranks[0].summary["device"], len(run.ranks[0].learning_rates)
        if not used.startswith(device):
            yield failed("GPU", f"{count(size, 'process')}: trained on {used}", FIX)
            return
        yield near("GPU", size, f"weights on {used}, {steps} steps", run.folder, alone)


def metrics_are_exact(size: int, alone: Watched, fault: str | None) -> CheckResult:
    """Compare metrics with row-by-row counts, also on shards of unequal length."""
    data = alone.config.run.dataset, alone.config.recipe.task
    shards = (count_shards, str(alone.folder), *data, fault)
    [(counted, by_hand), *_] = run_world(size, *shards, folder=alone.folder.parent)
    return exact("metrics", size, "splits' metrics", counted, by_hand)


def count_shards(
    run: str, dataset: str, own_task: str | None, fault: str | None
) -> tuple[list[Any], list[Any]]:
    """Return scores and confusion matrices of SHARDS: by all ranks together, and row by row."""
    flags, images = Distribution(cpu=True), images_of(dataset, own_task)
    trained = model_file.from_bytes(model_file.read_bytes(run), run)
    net, task = trained.model, trained.task
    together, by_hand = [], []
    with join_world(flags, find_launch(flags), full_precision=True) as world, torch.no_grad():
        if fault == "padding":
            count_padding(world.accelerator)
        test = subset(images, "test")
        tried = test.take([*range(min(len(test), max(SHARDS)[0]))])[0]
        predictions = [task.predict(net(image[None])) for image in tried]
        for count_of_rows, per_process in SHARDS:
            rows = Rows(test.images, test.targets, test.rows[:count_of_rows])
            loader = make_eval_loader(world.accelerator, rows, per_process)
            metrics = evaluate_split(world.accelerator, net, loader, task)
            together.append((f"{metrics.score:.9g}", metrics.details.get("confusion")))
            pairs = [*zip(predictions, rows.targets[rows.rows].split(1), strict=False)]
            score = sum(task.score(*pair).item() for pair in pairs) / len(pairs)
            matrix = torch.zeros(task.outputs, task.outputs, dtype=torch.int64)
            for guess, label in pairs if images.classes else ():
                matrix[label, guess] += 1
            by_hand.append((f"{score:.9g}", matrix.tolist() if images.classes else None))
    return together, by_hand


def near(name: str, size: int, what: str, run: Path, alone: Watched) -> CheckResult:
    """Compare the weights of a run with those of one process."""
    difference = watch.largest_difference(weights_of(run), weights_of(alone.folder))
    return bounded(name, size, what, difference)


def bounded(name: str, size: int, what: str, difference: float) -> CheckResult:
    """Return a FAIL if the difference is above LIMIT, or NaN."""
    problem = "" if difference <= LIMIT else f", must be at most {LIMIT:.0e}"
    text = f"{count(size, 'process')}: {what}, off by {difference:.1e}{problem}"
    return check(name, problem, text, FIX, figures={"processes": size, "difference": difference})


def exact(name: str, size: int, what: str, found: list[Any], expected: list[Any]) -> CheckResult:
    """Return a FAIL if any of them differs, or is missing."""
    different = sum(a != b for a, b in itertools.zip_longest(found, expected))
    problem = ", must be 0" if different else ""
    text = f"{count(size, 'process')}: {different} of {len(expected)} {what} differ{problem}"
    figures = {"processes": size, "different": different, "compared": len(expected)}
    return check(name, problem, text, FIX, figures=figures)


def failure_summary(checks: Sequence[CheckResult], fault: str | None) -> str | None:
    """Return the failure in one line, or None. An injected fault is always a failure."""
    if not fault:
        return check_result.failure_summary("verify", checks)
    name = MISTAKES[fault].caught_by
    # Any breakdown of the runs has this name; with `exit`, it must be ranks that wait for ever.
    sign = "have waited for each other" if name == "runs" else ""
    found = {c.status for c in checks if c.name == name and sign in c.text}
    text = f"NOT caught by '{name}'; verify is broken here, do not rely on it"
    if found == {FAIL}:
        text = f"caught by '{name}', as it should be; leave out --inject for the real check"
    elif checks[-1].name == "runs":
        text = f"the runs broke down before '{name}' could find it; see the line above"
    return f"verify --inject {fault}: {text}"
