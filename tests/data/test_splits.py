from itertools import chain

import pytest
import torch

from ddp_mnist.data.cache import load as load_cached
from ddp_mnist.data.splits import rows_of_splits
from tests.data_sets import of


@pytest.mark.parametrize("val_size", [0, 287, 1437])
def test_validation_rows_are_held_out_the_same_for_every_seed(val_size: int) -> None:
    digits, found = load_cached("digits"), []
    for seed in (0, 1):
        torch.manual_seed(seed)
        train, validation, test = rows_of_splits(digits.hold_out(val_size))
        found.append([train.rows.tolist(), validation.rows.tolist()])
        assert (len(train), len(validation), len(test)) == (1437 - val_size, val_size, 360)
        assert train.rows.dtype == validation.rows.dtype == torch.int64
        assert torch.equal(test.targets[test.rows], of(digits, "test").labels)
    assert found[0] == found[1]
    assert sorted(chain(*found[0])) == list(range(1437))
    of_every_version = digits.hold_out(287).rows["validation"][:5].tolist()
    assert of_every_version == [1, 2, 13, 17, 24]
