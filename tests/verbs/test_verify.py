"""`verify` passes here, and each of its checks fails where it has to."""

import json
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from ddp_mnist.cluster.local_world import run_world
from ddp_mnist.config.mistakes import MISTAKES
from ddp_mnist.config.train_config import TrainConfig
from ddp_mnist.errors import CheckFailed, PeerError
from ddp_mnist.system.files import read_json
from ddp_mnist.verbs.check_result import FAIL, PASS, CheckResult
from ddp_mnist.verbs.flags import Verify
from ddp_mnist.verbs.verify import proofs, watch
from tests.commands import REPOSITORY, Typed
from tests.run_checks import with_flags

MLP = watch.proof_config(model="mlp")
SGD = watch.proof_config(model="mlp", optimizer="sgd")
BATCHNORM = watch.proof_config(model="cnn_bn", epochs=1, inject="batchnorm")
LAB = (REPOSITORY / "docs" / "lab.md").read_text()
GOOD = proofs.exact("samples", 2, "steps' images", [1, 2, 3], [1, 2, 3])
BAD = proofs.bounded("weights", 3, "weights after 45 steps", 1.0)
CAUGHT = {  # the checks that each fault fails
    "sampler": {"samples", "gradients", "weights"},
    "gradients": {"gradients", "weights"},
    "parameter": {"gradients", "weights", "replicas"},
    "epoch": {"samples", "weights"},
    "schedule": {"learning rates", "weights"},
    "batchnorm": {"gradients", "weights"},  # of each process's own share, not of the batch
}
Runs = dict[str, proofs.Watched]


def watch_all(configs: list[TrainConfig]) -> list[watch.RankRecord]:
    return [watch.train_and_watch(config) for config in configs]


def watched(size: int, folder: Path, **configs: TrainConfig) -> Runs:
    """Train with each of the flags in one world; a folder is named like its flags."""
    named = {name: proofs.with_run_dir(config, name) for name, config in configs.items()}
    ranks = run_world(size, watch_all, list(named.values()), folder=folder)
    each = zip(named.items(), zip(*ranks, strict=True), strict=True)
    return {name: proofs.Watched(config, folder / name, [*seen]) for (name, config), seen in each}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return the runs of one process that others are compared with, of the quickest nets."""
    batchnorm = proofs.with_run_dir(BATCHNORM, "run", inject=None)
    folder = tmp_path_factory.mktemp("one")
    return watched(1, folder, adamw=MLP, sgd=SGD, batchnorm=batchnorm)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return those of two processes, one for each fault."""
    configs = {name: proofs.with_run_dir(MLP, "run", inject=name) for name in CAUGHT}
    configs |= {"batchnorm": BATCHNORM, "sgd": SGD}
    return watched(2, tmp_path_factory.mktemp("two"), **configs)


def failed(checks: list[CheckResult]) -> set[str]:
    return {check.name for check in checks if check.status == FAIL}


@pytest.mark.usefixtures("here")
def test_all_checks_pass_here(typed: Typed) -> None:
    printed = typed("verify", "--processes", "2", "--model", "mlp").succeeds()
    *lines, last = printed.splitlines()
    assert last == "all 10 checks passed; written to verify.json"
    # which rank took which images: each rank of one and of two processes
    told = [line.partition("images,")[2] for line in lines if "images," in line]
    taken = [re.findall(r"\d+", places) for places in told]
    assert [len(places) for places in taken] == [6] * 3
    assert taken[0] == taken[1]  # rank 0 of two has the first half of what one process has
    assert not set(taken[1]) & set(taken[2])
    written = json.loads(Path("verify.json").read_text())
    assert (written["passed"], written["processes"], written["injected"]) == (True, [1, 2], None)
    names = [(check["name"], check["figures"]["processes"]) for check in written["checks"]]
    on_each = ["resume", "accumulation"]
    compared = ["samples", "learning rates", "gradients", "weights", "replicas"]
    of_two = [*compared, *on_each, "metrics"]
    assert names == [(name, 1) for name in on_each] + [(name, 2) for name in of_two]
    assert all(check["status"] == PASS for check in written["checks"])
    differences = re.findall(r"off by (\S+)", printed)
    assert len(differences) == 4
    assert all(float(difference) < 1e-11 for difference in differences)


@pytest.mark.parametrize(("fault", "fails"), CAUGHT.items())
def test_an_injected_fault_is_caught_by_the_check_that_is_meant_to(
    fault: str, fails: set[str], one: Runs, two: Runs
) -> None:
    alone = one["batchnorm" if fault == "batchnorm" else "adamw"]
    checks = list(proofs.equal_to_one(two[fault], alone))
    assert failed(checks) == fails
    assert is_caught(fault, checks)


def is_caught(fault: str, checks: list[CheckResult]) -> bool:
    """Return whether its own check finds it, in the words of the lab's page but for differences."""
    summary = proofs.failure_summary(checks, fault) or ""
    [text] = [check.text for check in checks if check.name == MISTAKES[fault].caught_by]
    text = text.replace("after 15 steps", "after 45 steps")  # a test may train for one epoch only
    assert re.sub(r"\d\.\de[+-].*| for \d+ s \(rank.*", "", text) in " ".join(LAB.split())
    return summary.startswith(f"verify --inject {fault}: caught by '{MISTAKES[fault].caught_by}'")


def test_the_lab_has_a_row_and_a_command_for_each_fault() -> None:
    row = r"^\| `(\w+)` .* \| `([\w ]+)`(?:; code 6 in `status.json`)? \|$"
    rows = dict(re.findall(row, LAB, re.MULTILINE))
    assert rows == {name: fault.caught_by for name, fault in MISTAKES.items()}
    for verb in ("train", "verify"):
        typed = re.findall(rf"ddp[-_]mnist {verb} [^`]*?--inject (\w+)", LAB)
        assert set(typed) >= MISTAKES.keys(), verb


def test_padded_rows_in_the_metrics_are_caught(one: Runs) -> None:
    check = proofs.metrics_are_exact(2, one["adamw"], "padding")
    assert check.text == "2 processes: 3 of 4 splits' metrics differ, must be 0"
    assert is_caught("padding", [check])


def test_fault_60_a_rank_that_leaves_out_a_collective_is_told_and_caught(tmp_path: Path) -> None:
    config = proofs.config_of(Verify(inject="exit", model="mlp"))
    assert config.distribution.dist_timeout == 5
    with pytest.raises(PeerError) as ended:
        proofs.watched_run(2, tmp_path, with_flags(config, dist_timeout=2))
    status = read_json(tmp_path / "on-2" / "status.json")
    assert (status["exit_code"], status["error"]) == (6, str(ended.value))
    waits = r"all 2 ranks are alive, but have waited for each other for 2 s"
    places = r"\(rank 0 at fit.py:\d+, rank 1 at mistakes.py:\d+\); let every rank take part"
    assert re.match(f"{waits} {places}", str(ended.value))
    assert is_caught("exit", [proofs.failed("runs", f"PeerError: {ended.value}", proofs.FIX)])


def test_sgd_is_proven_too(one: Runs, two: Runs) -> None:
    checks = [*proofs.equal_to_one(two["sgd"], one["sgd"]), proofs.resume_is_exact(two["sgd"])]
    assert failed(checks) == set()


LOST = proofs.failed("runs", "PeerError: lost contact with rank 1")
WAIT = proofs.failed("runs", "PeerError: all 2 ranks are alive, but have waited for each other")
FULL = proofs.failed("runs", "StorageError: /tmp: cannot be written")
BROKE_DOWN = "the runs broke down before '{}' could find it"


@pytest.mark.parametrize(
    ("fault", "checks", "summary"),
    [
        (None, [GOOD, BAD], "verify: 1 of 2 checks failed (weights); do what their lines say"),
        ("gradients", [GOOD, BAD], "verify --inject gradients: NOT caught by 'gradients'"),
        ("batchnorm", [GOOD, LOST], f"verify --inject batchnorm: {BROKE_DOWN.format('weights')}"),
        # only ranks that wait for each other are the fault exit
        ("exit", [GOOD, FULL], f"verify --inject exit: {BROKE_DOWN.format('runs')}"),
        ("exit", [GOOD, LOST], f"verify --inject exit: {BROKE_DOWN.format('runs')}"),
        ("exit", [GOOD, WAIT], "verify --inject exit: caught by 'runs', as it should be"),
    ],
)
def test_failed_checks_are_summed_up_in_a_line(
    fault: str | None, checks: list[CheckResult], summary: str
) -> None:
    assert str(proofs.failure_summary(checks, fault)).startswith(summary)
    assert proofs.failure_summary([GOOD, GOOD], None) is None


def test_a_fault_that_is_not_caught_is_a_failure_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proofs, "verify", lambda *_: iter([GOOD, BAD]))
    file = tmp_path / "v.json"
    with pytest.raises(CheckFailed, match="--inject gradients: NOT caught by 'gradients'"):
        proofs.run(Verify(inject="gradients", save=str(file)))
    written = read_json(file)
    assert (written["passed"], written["injected"]) == (False, "gradients")


def test_flags_of_verify_mean_what_they_mean_for_train() -> None:
    loss = "torch.nn.functional:cross_entropy"
    for flags, model, epochs in (
        (Verify(), "cnn", 3),
        (Verify(inject="batchnorm"), "cnn_bn", 3),
        (Verify(inject="batchnorm", model="cnn"), "cnn", 3),  # which has none: train refuses it
        (Verify(loss=loss), "cnn", 3),
        (Verify(dataset="patches"), "cnn", 1),
        (Verify(dataset="patches", inject="epoch"), "cnn", 2),
    ):
        recipe = proofs.config_of(flags).recipe
        assert (recipe.model, recipe.epochs) == (model, epochs)
        assert (recipe.loss, recipe.inject) == (flags.loss, flags.inject)


def test_what_differs_is_counted_and_bounded() -> None:
    assert str(GOOD) == "PASS  samples        2 processes: 0 of 3 steps' images differ"
    check = proofs.exact("x", 2, "steps' images", [1, 5, 3], [1, 2, 3])
    assert (check.status, check.figures["different"]) == (FAIL, 1)
    assert check.text == "2 processes: 1 of 3 steps' images differ, must be 0"
    assert BAD.text == "3 processes: weights after 45 steps, off by 1.0e+00, must be at most 1e-09"
    weights = {"a": torch.ones(2), "b": torch.tensor([1.0, float("nan")])}
    nan = watch.largest_difference({"a": torch.ones(2), "b": torch.ones(2)}, weights)
    bounded = [proofs.bounded("x", 2, "", difference) for difference in (1e-9, 1.1e-9, nan)]
    assert [check.status for check in bounded] == [PASS, FAIL, FAIL]


def test_a_run_that_was_not_interrupted_proves_nothing(
    one: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proofs, "STOPS_AT", 1000)
    check = proofs.resume_is_exact(one["adamw"])
    assert check.status == FAIL
    assert "1 of 50 weights and log lines differ" in check.text


def test_a_run_that_breaks_down_is_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs, "watched_run", Mock(side_effect=ConnectionError("was killed")))
    [check] = proofs.verify([2, 3], MLP, on_gpu=False)
    assert isinstance(check, CheckResult)
    assert (check.name, check.status, check.text) == ("runs", FAIL, "ConnectionError: was killed")


def test_training_on_a_gpu_is_compared_with_the_cpu(one: Runs) -> None:
    """Here the CPU stands in for the GPU; where no GPU is used, nothing is proven."""
    shown = [f"{check.status} {check.text}" for check in proofs.equal_on("cpu", one["adamw"])]
    for text, who in zip(shown, ("1 process", "2 processes"), strict=True):
        assert re.fullmatch(rf"PASS {who}: weights on cpu, 45 steps, off by \S+", text)
    [check] = proofs.equal_on("cuda", one["adamw"])
    assert (check.status, check.text) == (FAIL, "1 process: trained on cpu")


def test_a_gpu_that_is_not_there_is_refused(typed: Typed) -> None:
    ended = typed("verify", "--gpu")
    assert (ended.code, ended.out) == (2, "")
    line = (
        "ddp-mnist: error: --gpu: torch sees none here; ask ddp-mnist doctor why, or leave it out"
    )
    assert ended.error_lines == [f"{line} (code 2)"]
