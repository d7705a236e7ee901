"""The tutorials' commands are taken, or refused with what to do instead."""

import re
import shlex

import pytest
from torch.distributed import launch

from ddp_mnist import cli
from ddp_mnist.config.train_config import TrainConfig
from ddp_mnist.errors import UsageError
from tests.commands import REPOSITORY, Typed

PAGE = (REPOSITORY / "docs" / "tutorials.md").read_text("utf-8")
[TABLE] = re.findall(r"^## Word for word\n(.*?)^## ", PAGE, re.DOTALL | re.MULTILINE)
WORD_FOR_WORD = re.findall(r"^\| `(python .*?)`.*? \| `(.*?)`", TABLE, re.MULTILINE)


def config_of(command: str) -> TrainConfig:
    """Return what the arguments behind train or train.py mean."""
    return cli.train_config(shlex.split(re.split(r"train(?:\.py)?(?: |$)", command)[1]))


def launched(command: str) -> dict[str, object]:
    """Return how the old launcher reads a command, but for the script and its arguments."""
    read = vars(launch.parse_args(shlex.split(command)[3:]))
    return {name: read[name] for name in read if name[:6] not in ("traini", "module")}


def test_the_page_has_the_tutorials_commands() -> None:
    assert len(WORD_FOR_WORD) == 5


@pytest.mark.parametrize(("command", "ours"), WORD_FOR_WORD)
def test_a_command_is_taken_or_answered_with_ours(command: str, ours: str) -> None:
    config = config_of(ours)
    if " -g" in command:
        with pytest.raises(UsageError) as refused:
            config_of(command)
        line = "-g: .*; leave it out, and put CUDA_VISIBLE_DEVICES=0 .*"
        assert re.fullmatch(line, str(refused.value))
    else:
        assert config_of(command) == config
    if "torch.distributed.launch" in command:
        nodes = {"nnodes": "2", "node_rank": 0, "nproc_per_node": "2", "master_port": 12345}
        assert nodes.items() <= launched(command).items()
        assert launched(ours) == launched(command)


def test_underscores_are_dashes_at_other_verbs_but_not_behind_two_dashes(typed: Typed) -> None:
    asked = "choose from test, validation, train"
    for flags in ("--dist_timeout 9 --split x", "--dist-timeout=9 --split=x"):
        assert asked in typed("evaluate", "r", *flags.split()).err
    words = ["--a_b=c_d", "e_f", "--", "--g_h"]
    assert cli.with_dashes(words) == ["--a-b=c_d", *words[1:]]
