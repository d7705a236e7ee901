"""`verify` passes here, and each of its checks fails where it has to."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from ddp_mnist.config.faults import FAULTS
from ddp_mnist.config.recipe import Recipe
from ddp_mnist.errors import CheckFailed
from ddp_mnist.verbs import check_result as results
from ddp_mnist.verbs.check_result import FAIL, PASS, CheckResult
from ddp_mnist.verbs.flags import Verify
from ddp_mnist.verify import proofs, watch
from ddp_mnist.verify.proofs import Watched
from ddp_mnist.verify.watch import largest_difference
from tests.commands import REPOSITORY, Typed

MLP = watch.proof_config(model="mlp")
LAB = (REPOSITORY / "docs" / "lab.md").read_text()
GOOD = proofs.exact("samples", 2, "steps' images", [1, 2, 3], [1, 2, 3])
BAD = proofs.bounded("weights", 3, "weights after 45 steps", 1.0)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    """Return the run of one process that the others are compared with, of the quickest net."""
    return proofs.watched_run(1, tmp_path_factory.mktemp("proofs"), MLP)


def failed(checks: list[CheckResult]) -> set[str]:
    return {check.name for check in checks if check.status == FAIL}


@pytest.mark.parametrize("model", ["mlp", pytest.param("cnn", marks=pytest.mark.system)])
def test_all_checks_pass_here(
    model: str, typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = typed("verify", "--processes", "2", "--model", model)
    assert (ended.code, ended.err) == (0, "")
    *lines, last = ended.out.splitlines()
    assert last == "all 10 checks passed; written to verify.json"
    assert max(map(len, lines)) <= 80
    # which rank took which images: each rank of one and of two processes
    taken = [
        re.findall(r"\d+", line.partition("images,")[2]) for line in lines if "images," in line
    ]
    assert [len(places) for places in taken] == [6] * 3
    assert taken[0] == taken[1]  # rank 0 of two has the first half of what one process has
    assert not set(taken[1]) & set(taken[2])
    written = json.loads(Path("verify.json").read_text())
    assert (written["passed"], written["processes"], written["injected"]) == (True, [1, 2], None)
    names = [(check["name"], check["figures"]["processes"]) for check in written["checks"]]
    on_each = ["resume", "accumulation"]
    compared = ["samples", "learning rates", "gradients", "weights", "replicas"]
    assert names == [
        *((name, 1) for name in on_each),
        *((name, 2) for name in (*compared, *on_each, "metrics")),
    ]
    assert all(check["status"] == PASS for check in written["checks"])
    differences = re.findall(r"off by (\S+)", ended.out)
    assert len(differences) == 4
    assert all(float(difference) < 1e-11 for difference in differences)


@pytest.mark.parametrize(
    ("fault", "fails"),
    [
        ("sampler", {"samples", "gradients", "weights"}),
        ("gradients", {"gradients", "weights"}),
        ("parameter", {"gradients", "weights", "replicas"}),
        ("epoch", {"samples", "weights"}),
        ("schedule", {"learning rates", "weights"}),
    ],
)
def test_an_injected_fault_is_caught_by_the_check_that_is_meant_to(
    fault: str, fails: set[str], alone: Watched, tmp_path: Path
) -> None:
    checks = list(proofs.equal_to_one(proofs.watched_run(2, tmp_path, MLP, fault), alone))
    assert failed(checks) == fails
    assert is_caught(fault, checks)


def is_caught(fault: str, checks: list[CheckResult]) -> bool:
    """Return whether its own check finds it, in the words of the lab's page but for differences."""
    summary = proofs.failure_summary(checks, fault) or ""
    [text] = [check.text for check in checks if check.name == FAULTS[fault].caught_by]
    text = text.replace("after 15 steps", "after 45 steps")  # a test may train for one epoch only
    assert re.sub(r"\d\.\de[+-].*| \(Timed.*", "", text) in " ".join(LAB.split())
    return summary.startswith(f"verify --inject {fault}: caught by '{FAULTS[fault].caught_by}'")


def test_the_lab_has_a_row_and_a_command_for_each_fault() -> None:
    row = r"^\| `(\w+)` .* \| `([\w ]+)`(?:; code 6 in `status.json`)? \|$"
    rows = dict(re.findall(row, LAB, re.MULTILINE))
    assert rows == {name: fault.caught_by for name, fault in FAULTS.items()}
    for verb in ("train", "verify"):
        typed = re.findall(rf"ddp[-_]mnist {verb} [^`]*?--inject (\w+)", LAB)
        assert set(typed) >= FAULTS.keys(), verb


def test_padded_rows_in_the_metrics_are_caught(alone: Watched) -> None:
    check = proofs.metrics_are_exact(2, alone, "padding")
    assert check.text == "2 processes: 3 of 4 splits' confusion matrices differ, must be 0"
    assert is_caught("padding", [check])


def test_a_rank_that_leaves_is_caught(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    config = proofs.config_of(Verify(inject="exit", model="mlp"))
    assert config.distribution.dist_timeout == 5
    *_, last = proofs.verify([2], "exit", config)
    assert isinstance(last, CheckResult)
    assert last.text.startswith("PeerError: lost contact with rank 1 of 2 (")
    assert is_caught("exit", [last])


def test_sgd_is_proven_too(tmp_path: Path) -> None:
    config = watch.proof_config(model="mlp", optimizer="sgd")
    one, two = (proofs.watched_run(size, tmp_path, config) for size in (1, 2))
    checks = [*proofs.equal_to_one(two, one), proofs.resume_is_exact(two)]
    assert [check.name for check in checks if check.status == FAIL] == []


def test_a_fault_that_is_not_caught_is_a_failure_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proofs, "verify", lambda *_: iter([GOOD, BAD]))
    file = tmp_path / "v.json"
    with pytest.raises(CheckFailed, match="--inject gradients: NOT caught by 'gradients'"):
        proofs.run(Verify(inject="gradients", save=str(file)))
    written = json.loads(file.read_text())
    assert (written["passed"], written["injected"]) == (False, "gradients")


def test_runs_that_break_down_are_no_word_on_a_fault() -> None:
    broken = proofs.results.failed("runs", "PeerError: lost contact with rank 1", proofs.FIX)
    summary = proofs.failure_summary([GOOD, broken], "batchnorm") or ""
    assert summary.startswith("verify --inject batchnorm: the runs broke down before 'weights'")


def test_only_a_rank_that_is_waited_for_is_the_fault_exit() -> None:
    full = proofs.results.failed("runs", "StorageError: /tmp: cannot be written", proofs.FIX)
    assert "broke down before 'runs' could find it" in (
        proofs.failure_summary([GOOD, full], "exit") or ""
    )


def test_flags_of_verify_mean_what_they_mean_for_train() -> None:
    assert proofs.config_of(Verify()).recipe.model == "cnn"
    assert proofs.config_of(Verify(inject="batchnorm")).recipe.model == "cnn_bn"
    typed = proofs.config_of(Verify(inject="batchnorm", model="cnn"))
    assert typed.recipe.model == "cnn"  # which has none: train refuses it
    loss = "torch.nn.functional:cross_entropy"
    assert proofs.config_of(Verify(loss=loss)).recipe.loss == loss
    many = proofs.config_of(Verify(inject="epoch", dataset="patches"))
    assert (many.recipe.epochs, proofs.config_of(Verify(dataset="patches")).recipe.epochs) == (2, 1)


def test_failed_checks_are_summed_up_in_a_line() -> None:
    assert proofs.failure_summary([GOOD, GOOD], None) is None
    summary = proofs.failure_summary([GOOD, BAD], None) or ""
    assert summary.startswith("verify: 1 of 2 checks failed (weights); do what their lines say")


def test_the_fix_knows_the_fault_that_was_injected_and_what_a_net_does() -> None:
    """Only what a net computes may differ by its BatchNorm, so other checks fail for real."""
    wrong, runs = proofs.exact("samples", 2, "images", [1], [2]), results.failed("runs", "", "x")
    for model, fault, expected in (
        ("cnn", None, (proofs.FIX, proofs.FIX, "x")),
        ("cnn_bn", None, (proofs.BY_NET, proofs.FIX, "x")),
        ("own_net:Net", None, (proofs.BY_NET, proofs.FIX, "x")),
        ("cnn_bn", "batchnorm", (proofs.BY_FAULT, proofs.BY_FAULT, "x")),
        ("cnn", "exit", (proofs.FIX, proofs.FIX, proofs.BY_FAULT)),
    ):
        recipe = Recipe(model=model)
        fixes = tuple(proofs.explained(check, recipe, fault).fix for check in (BAD, wrong, runs))
        assert fixes == expected
        assert proofs.explained(GOOD, recipe, fault) == GOOD


def test_what_differs_is_counted_and_bounded() -> None:
    assert str(GOOD) == "PASS  samples        2 processes: 0 of 3 steps' images differ"
    check = proofs.exact("x", 2, "steps' images", [1, 5, 3], [1, 2, 3])
    assert (check.status, check.figures["different"]) == (FAIL, 1)
    assert check.text == "2 processes: 1 of 3 steps' images differ, must be 0"
    assert BAD.text == "3 processes: weights after 45 steps, off by 1.0e+00, must be at most 1e-09"
    weights = {"a": torch.ones(2), "b": torch.tensor([1.0, float("nan")])}
    nan = largest_difference({"a": torch.ones(2), "b": torch.ones(2)}, weights)
    bounded = [proofs.bounded("x", 2, "", difference) for difference in (1e-9, 1.1e-9, nan)]
    assert [check.status for check in bounded] == [PASS, FAIL, FAIL]


def test_a_run_that_was_not_interrupted_proves_nothing(
    alone: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proofs, "STOPS_AT", 1000)
    check = proofs.resume_is_exact(alone)
    assert check.status == FAIL
    assert "0 of 50 weights and log lines differ, but it was resumed 0 times" in check.text


def test_a_net_that_depends_on_the_number_of_processes_is_found(tmp_path: Path) -> None:
    """BatchNorm of each process's own share is not that of the batch."""
    config = watch.proof_config(model="cnn_bn", epochs=1)
    one = proofs.watched_run(1, tmp_path, config)
    checks = list(proofs.equal_to_one(proofs.watched_run(2, tmp_path, config, "batchnorm"), one))
    assert failed(checks) == {"gradients", "weights"}
    assert is_caught("batchnorm", checks)


def test_a_run_that_breaks_down_is_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs, "watched_run", Mock(side_effect=ConnectionError("was killed")))
    [check] = proofs.verify([2, 3])
    assert isinstance(check, CheckResult)
    assert (check.name, check.status, check.text) == ("runs", FAIL, "ConnectionError: was killed")


def test_the_numbers_of_processes_that_can_be_compared() -> None:
    assert proofs.sizes_up_to(2) == [2]
    assert proofs.sizes_up_to(8) == [2, 3, 4, 6, 8]


def test_training_on_another_device_is_compared_with_the_cpu(alone: Watched) -> None:
    """Here the CPU stands in for the GPU; another seed stands in for a GPU that computes wrong."""
    good = list(proofs.equal_on("cpu", alone))
    assert [(check.status, check.name) for check in good] == [(PASS, "GPU")] * 2
    assert good[0].text == "1 process: weights on cpu, 45 steps, off by 0.0e+00"
    assert 0 < good[1].figures["difference"] < 1e-9  # two processes
    run = dataclasses.replace(alone.config.run, seed=1)
    other = Watched(dataclasses.replace(alone.config, run=run), alone.folder, alone.ranks)
    shutil.rmtree(alone.folder.parent / "cpu-1")
    wrong = next(proofs.equal_on("cpu", other))
    assert (wrong.status, wrong.name) == (FAIL, "GPU")
    assert wrong.figures["difference"] > 1e-3
    assert "must be at most 1e-09" in wrong.text


def test_training_that_was_not_on_the_gpu_proves_nothing(alone: Watched) -> None:
    [check] = proofs.equal_on("cuda", alone)
    assert (check.status, check.text) == (FAIL, "1 process: trained on cpu")


def test_a_gpu_that_is_not_there_is_refused(typed: Typed) -> None:
    ended = typed("verify", "--gpu")
    assert (ended.code, ended.out) == (2, "")
    assert ended.error_lines == [
        "ddp-mnist: error: --gpu: torch sees none here; ask ddp-mnist doctor why, or leave it out"
        " (code 2)"
    ]
