"""Budgets: the flags of each verb, the public names, how deep the core is, how long all is.

    make check

Whoever adds one pays here, in sight, and says in the commit what it is worth. `make test` does not
count: whoever tries a line of his own should not be told that it is one too many.
"""

import ast
import tokenize
from pathlib import Path

import pytest

from ddp_mnist import api, task
from ddp_mnist.config.distribution import Distribution
from ddp_mnist.config.flag_fields import Flags, flag_fields
from ddp_mnist.config.recipe import Recipe
from ddp_mnist.config.train_config import RunFlags
from ddp_mnist.core import task as core_task
from ddp_mnist.verbs import flags
from tests.commands import REPOSITORY
from tests.test_architecture import DOCUMENTED, PACKAGE, closure

FIT = "ddp_mnist.core.fit"

FLAGS = {
    "train": "dataset image_size grey test_size run_dir resume seed cache_dir checkpoint_every keep"
    " log_every trackers profile quiet dry_run fit class_folder columns group fold"
    " preset model weights freeze epochs batch_size optimizer lr weight_decay warmup"
    " label_smoothing loss task class_weights augment val_size target_accuracy patience metrics"
    " grad_accum max_grad_norm inject backend init_method rank world_size local_rank cpu"
    " dist_timeout start_timeout mixed_precision sync_bn comm_hook compile",
    "evaluate": "run split dataset columns cache_dir metrics batch_size json",
    "predict": "run images show top sure digit_photos json csv",
    "report": "run out png dataset cache_dir",
    "export": "run format out license",
    "prepare": "dataset image_size grey fit class_folder columns task cache_dir refresh",
    "doctor": "processes minutes expect_busbw expect_tflops dataset cache_dir run_dir json",
    "verify": "processes gpu model loss task dataset inject save",
}
PUBLIC = {
    api: "train evaluate predict",
    core_task: "Task Classification balanced",
    task: "make_task task_from about_task find_task find_loss find_score options_of",
}
OF_A_TASK = "columns name outputs loss predict score better metrics scaled unscaled"
OF_ALL_TASKS = "training_loss count"  # which a task of one's own keeps
# Code lines.
CLOSURE_OF_FIT, PACKAGE_LINES, TEST_LINES = 1_000, 10_790, 16_060


@pytest.mark.parametrize("verb", FLAGS)
def test_the_flags_of_a_verb(verb: str) -> None:
    groups: tuple[type[Flags], ...] = (RunFlags, Recipe, Distribution)
    if verb != "train":
        groups = (getattr(flags, verb.capitalize()),)
    found = [field.name for group in groups for field in flag_fields(group)]
    assert sorted(found) == sorted(FLAGS[verb].split())


def test_the_names_that_a_user_may_rely_on() -> None:
    for module, names in PUBLIC.items():
        found = vars(module).items()
        own = [n for n, x in found if getattr(x, "__module__", "") == module.__name__]
        public = {n for n in own if not n.startswith("_")}
        assert public == {*names.split()}
    of_task = sorted(name for name in vars(task.Task) if not name.startswith("_"))
    assert of_task == sorted(f"{OF_A_TASK} {OF_ALL_TASKS}".split())


def code_lines(path: Path) -> set[int]:
    """Return the lines that hold code: blank ones, comments and docstrings are free."""
    no_code = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    lines: set[int] = set()
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type not in no_code | {tokenize.ENCODING, tokenize.ENDMARKER}:
                lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node):
            lines -= {*range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)}
    return lines


def test_what_fit_needs_can_be_read_to_the_ground() -> None:
    paths = [REPOSITORY / Path(*name.split(".")).with_suffix(".py") for name in closure(FIT)]
    assert sum(len(code_lines(path)) for path in paths) <= CLOSURE_OF_FIT


def test_package_and_tests_stay_below_their_ceilings() -> None:
    for folder, most in ((PACKAGE, PACKAGE_LINES), (REPOSITORY / "tests", TEST_LINES)):
        total = sum(len(code_lines(path)) for path in folder.rglob("*.py"))
        assert total <= most, folder.name


def test_no_function_is_long() -> None:
    long = {}
    for path in PACKAGE.rglob("*.py"):
        lines = code_lines(path)
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                count = len(lines & {*range(node.lineno, (node.end_lineno or 0) + 1)})
                if count > (110 if (path.stem, node.name) == ("fit", "fit") else 60):
                    long[f"{path.name}: {node.name}"] = count
    assert long == {}
