"""How often a model is right, of answers that are made up; real ones are in test_report.py."""

import dataclasses

import numpy as np
import pytest
import torch

from ddp_mnist.core.task import Classification, Task
from ddp_mnist.verbs import answers
from ddp_mnist.verbs.answers import Answers, Counts

CLASSES = ["cat", "dog", "owl"]
SHARES = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.05, 0.05, 0.9], [0.4, 0.35, 0.25]])
OF_CLASSES = Answers(
    "validation",
    ["a.png", "b.png", "c.png", "d.png"],
    torch.tensor([0, 2, 2, 1]),
    SHARES.argmax(1),
    SHARES,
    torch.zeros(4),
)


class Beetle(Task):
    columns = ("length_mm", "winged", "spotted")


BEETLE = Beetle([20.0, 0.5, 0.2], [4.0, 0.5, 0.4])
BEETLE.are_labels = [False, True, True]
OF_NUMBERS = Answers(
    "test",
    ["a.png", "b.png", "c.png"],
    torch.tensor([[17.0, 1, 0], [24.9, 0, 0], [30, 1, 1]]),
    torch.tensor([[29.12345678, 0.2, 0.00008068], [25, 0.1, 0.6], [30, 0.9, 0.5]]),
    torch.zeros(3, 0),
    torch.tensor([3.0, 0.1, 5.0]),
    groups=["A", "A", "B"],
)


def test_each_image_is_a_row_with_the_probability_of_each_class() -> None:
    heading, *rows = answers.table(Classification(CLASSES), [OF_CLASSES])
    assert heading == ["file", "split", "group", "truth", "answer", "cat", "dog", "owl"]
    assert rows[1] == ["b.png", "validation", "", "owl", "dog", 0.2, 0.5, 0.3]
    assert [row[:5] for row in rows[2:]] == [
        ["c.png", "validation", "", "owl", "owl"],
        ["d.png", "validation", "", "dog", "cat"],
    ]


def test_of_many_classes_each_row_has_the_probability_of_truth_and_answer() -> None:
    """With all of them, 1,000 classes and 50,000 images would be 50 million cells."""
    many = dataclasses.replace(OF_CLASSES, probabilities=torch.cat([SHARES, torch.zeros(4, 38)], 1))
    heading, _, row, *_ = answers.table(Classification([*CLASSES, *map(str, range(38))]), [many])
    assert heading[3:] == ["truth", "answer", "truth_probability", "answer_probability"]
    assert row[3:] == ["owl", "dog", 0.3, 0.5]


def test_of_numbers_each_row_has_truth_and_answer_and_the_group() -> None:
    heading, first, *_, last = answers.table(BEETLE, [OF_NUMBERS])
    columns = [f"{kind}_{name}" for name in BEETLE.columns for kind in ("truth", "answer")]
    assert heading == ["file", "split", "group", *columns]
    assert first == ["a.png", "test", "A", 17, 29.12346, 1, 0.2, 0, 8.068e-05]
    assert last[:3] == ["c.png", "test", "B"]


def test_each_class_is_counted() -> None:
    matrix = np.array([[3, 1, 0], [0, 0, 0], [2, 0, 5]])
    counts = answers.class_counts(CLASSES, matrix)
    assert [each[:4] for each in counts] == [("cat", 4, 3, 5), ("dog", 0, 0, 1), ("owl", 7, 5, 5)]
    heading, cat, dog, owl = answers.count_table(counts)
    assert heading == [
        *("class", "n", "groups", "right", "recall", "recall_low", "recall_high"),
        *("answered", "precision", "precision_low", "precision_high"),
    ]
    assert cat[:5] == ["cat", 4, None, 3, 0.75] and cat[7:9] == [5, 0.6]
    assert cat[5:7] == pytest.approx([0.300642, 0.954413], abs=1e-6)
    assert dog[:-1] == ["dog", 0, None, 0, None, None, None, 1, 0.0, 0.0]
    assert dog[-1] == pytest.approx(0.793450, abs=1e-6)
    assert owl[8:] == [1.0, pytest.approx(0.565518, abs=1e-6), 1.0]


def test_the_groups_of_each_class_are_counted() -> None:
    """An image without a group is one by itself."""
    grouped = dataclasses.replace(OF_CLASSES, groups=["A", "B", "B", ""])
    matrix = np.array([[1, 0, 0], [1, 0, 0], [0, 1, 1]])
    assert [each.groups for each in answers.class_counts(CLASSES, matrix, grouped)] == [1, 1, 1]
    apart = dataclasses.replace(OF_CLASSES, groups=["A", "B", "", "B"])
    assert [each.groups for each in answers.class_counts(CLASSES, matrix, apart)] == [1, 1, 2]


def test_labels_are_counted_and_the_worst_images_told() -> None:
    """A column of other numbers has no counts; a label that is right is not told."""
    assert answers.label_counts(BEETLE, OF_NUMBERS) == [
        Counts("winged", images=2, right=1, answered=1),
        Counts("spotted", images=1, right=0, answered=1),
    ]
    worst = answers.worst_numbers(OF_NUMBERS, BEETLE, most=2)
    assert worst == {
        2: {"told": ["length_mm 30, is 30", "missed spotted (0.50)"]},
        0: {"told": ["length_mm 29.12, is 17", "missed winged (0.20)"]},
    }
    [*_, last] = answers.worst_numbers(OF_NUMBERS, BEETLE, most=9).values()
    assert last == {"told": ["length_mm 25, is 24.9", "false spotted (0.60)"]}


def test_the_limit_decides_how_many_are_answered_and_right() -> None:
    """A limit of 0.3 says nothing of three classes, one of which always reaches a third."""
    assert answers.by_limit(OF_CLASSES) == [
        *((0.4, 4, 2), (0.5, 3, 2), (0.6, 2, 2), (0.7, 1, 1), (0.8, 1, 1), (0.9, 1, 1)),
        (0.95, 0, 0),
    ]
