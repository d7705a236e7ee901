"""Budgets: the flags of each verb, the public names, the code lines of each room.

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
from ddp_mnist.verbs import flags
from tests.commands import REPOSITORY
from tests.test_architecture import DOCUMENTED, PACKAGE, functions, length, nesting

FLAGS = {
    "train": "dataset image_size grey test_size run_dir resume seed cache_dir checkpoint_every keep"
    " log_every trackers profile quiet dry_run"
    " preset model weights epochs batch_size optimizer lr weight_decay warmup label_smoothing loss"
    " task class_weights augment val_size target_accuracy patience metrics grad_accum max_grad_norm"
    " inject backend init_method rank world_size local_rank cpu dist_timeout start_timeout"
    " mixed_precision sync_bn comm_hook compile",
    "evaluate": "run split dataset cache_dir metrics batch_size json",
    "predict": "run images show top digit_photos json",
    "report": "run out png dataset cache_dir",
    "export": "run format out license",
    "prepare": "dataset image_size grey task cache_dir refresh",
    "doctor": "processes minutes dataset cache_dir run_dir json",
    "verify": "processes gpu model loss task dataset inject save",
}
PUBLIC = {
    api: "train evaluate predict",
    task: "Task Classification make_task task_from find_task options_of balanced",
}
OF_A_TASK = "columns name outputs loss predict score better metrics scaled unscaled"
OF_ALL_TASKS = "training_loss count answer about"  # which a task of one's own keeps
# Code lines; those of the top folder are its own modules.
ROOMS = {
    ".": 866,
    "cluster": 1_342,
    "config": 582,
    "data": 1_402,
    "nets": 440,
    "system": 225,
    "training": 1_616,
    "verbs": 1_037,
    "verbs/doctor": 514,
    "verbs/verify": 325,
}
TESTS = 12_000


@pytest.mark.parametrize("verb", FLAGS)
def test_the_flags_of_a_verb(verb: str) -> None:
    groups: tuple[type[Flags], ...] = (RunFlags, Recipe, Distribution)
    if verb != "train":
        groups = (getattr(flags, verb.capitalize()),)
    found = [field.name for group in groups for field in flag_fields(group)]
    assert sorted(found) == sorted(FLAGS[verb].split())


def test_the_names_that_a_user_may_rely_on() -> None:
    for module, names in PUBLIC.items():
        own = [
            n for n, x in vars(module).items() if getattr(x, "__module__", "") == module.__name__
        ]
        assert sorted(n for n in own if not n.startswith("_")) == sorted(names.split())
    found = sorted(name for name in vars(task.Task) if not name.startswith("_"))
    assert found == sorted(f"{OF_A_TASK} {OF_ALL_TASKS}".split())


def code_lines(path: Path) -> int:
    """Return how many lines hold code: blank ones, comments and docstrings are free."""
    no_code = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    lines: set[int] = set()
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type not in no_code | {tokenize.ENCODING, tokenize.ENDMARKER}:
                lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node):
            lines -= {*range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)}
    return len(lines)


def test_every_room_has_a_ceiling() -> None:
    folders = {path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")}
    assert folders == {*ROOMS}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_stays_below_its_ceiling(room: str) -> None:
    assert sum(map(code_lines, (PACKAGE / room).glob("*.py"))) <= ROOMS[room]


def test_the_tests_stay_below_theirs() -> None:
    assert sum(map(code_lines, (REPOSITORY / "tests").rglob("*.py"))) <= TESTS


def test_no_function_is_long() -> None:
    limits = {"ddp_mnist.train.fit": 100}
    long = [(name, length(node)) for name, node in functions()]
    assert [each for each in long if each[1] > limits.get(each[0], 60)] == []


def test_the_training_can_be_read_at_once() -> None:
    assert len((PACKAGE / "train.py").read_text().splitlines()) <= 155
    [fit] = [node for name, node in functions() if name == "ddp_mnist.train.fit"]
    loops = [node for node in ast.walk(fit) if isinstance(node, ast.For)]
    [batches] = [loop for loop in loops if "loader" in ast.unparse(loop.iter)]
    assert length(batches) <= 55
    assert nesting(batches) <= 3
