import errno
import re
import time

import pytest

from ddp_mnist import cli, errors
from ddp_mnist.cluster.signals import EXIT_CODES
from ddp_mnist.errors import (
    CODES,
    MORE_FILES,
    DataError,
    DdpMnistError,
    StorageError,
    UsageError,
    blame,
)
from ddp_mnist.system.deadline import with_deadline


@pytest.mark.parametrize(
    ("error", "kind", "line", "blamed"),
    [
        (ValueError("no zip\nat ..."), DataError, "photos: ValueError: no zip; name others", True),
        (SystemExit(0), DataError, "photos: SystemExit: 0; name others", True),
        (OSError(errno.EIO, "Bad", "/x"), DataError, "photos: /x: Bad; name others", False),
        (OSError(errno.ENOSPC, "Full"), StorageError, "photos: Full; name others", False),
        (OSError(errno.EMFILE, "Many"), UsageError, f"photos: Many; {MORE_FILES}", False),
        (StorageError("--run-dir x: no"), StorageError, "--run-dir x: no", False),
    ],
)
def test_what_is_to_blame_is_named_with_a_librarys_own_words(
    error: BaseException, kind: type[DdpMnistError], line: str, blamed: bool
) -> None:
    """Libraries wrap the system's errors, whose words count; ours pass through."""
    with pytest.raises(kind) as raised, blame("photos", DataError, "name others"):
        if isinstance(error, OSError):
            raise RuntimeError("wrapped") from error
        raise error
    assert (str(raised.value), raised.value.blamed) == (line, blamed)
    assert type(raised.value) is kind


def test_every_exit_code_is_known_to_the_other_ranks_and_told() -> None:
    ours = [each for each in vars(errors).values() if isinstance(each, type)]
    codes = {each.code for each in ours if issubclass(each, DdpMnistError)}
    assert {*EXIT_CODES.values(), *codes} == {*CODES}
    assert re.findall(r"\b(\d+) ", cli.HELP) == [str(code) for code in (0, *CODES)]


def test_a_deadline_ends_the_wait_and_not_the_call() -> None:
    assert with_deadline(lambda: 7, 5) == 7
    with pytest.raises(ZeroDivisionError):
        with_deadline(lambda: 1 / 0, 5)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"^no answer within 0\.1 s$"):
        with_deadline(lambda: time.sleep(1), 0.1)
    assert time.monotonic() - began < 0.9
