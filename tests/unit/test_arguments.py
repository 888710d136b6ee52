"""Names, numbers and counts of the arguments that the public functions take."""

import numpy as np
import pytest
import torch

import tilewright as tw
from tilewright.errors import InvalidArgument

X = torch.arange(6.0).reshape(2, 3)
INDEX = torch.tensor([[0, 1, 1], [0, 1, 0]])
ROWS = torch.tensor([1, 1])
SRC = torch.full((2, 3), 2.0)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_names_and_counts_of_arguments_are_checked_alike_with_gradients(requires_grad):
    x = X.clone().requires_grad_(requires_grad)
    with pytest.raises(InvalidArgument, match="unknown argument 'self'; known: x, dim, index, src"):
        tw.scatter(self=x, dim=0, index=INDEX, src=SRC)
    with pytest.raises(InvalidArgument, match="argument 'src' is given twice"):
        tw.scatter(x, 0, INDEX, src=SRC, value=2.0)
    with pytest.raises(InvalidArgument, match="5 positional arguments, but there are 4"):
        tw.scatter(x, 0, INDEX, SRC, "add")
    with pytest.raises(InvalidArgument, match="index=None should be"):
        tw.gather(x, 0, None)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_numbers_of_numpy_are_numbers(requires_grad):
    x = X.clone().requires_grad_(requires_grad)
    for alpha in (np.float32(0.5), np.float64(0.5), np.int64(3)):
        mine = tw.index_add(x, np.int64(-2), ROWS, SRC, alpha=alpha)
        torch.testing.assert_close(mine, torch.index_add(x, -2, ROWS, SRC, alpha=alpha.item()))
    table = tw.embedding_backward(SRC, ROWS, np.int64(4), padding_idx=np.int32(-1))
    assert torch.equal(table[1], torch.full((3,), 4.0))
    for zero in (np.float32(0.0), np.float32(-0.0), np.float64(0.0), np.float64(-0.0)):
        for _ in range(3):
            written = tw.scatter(X, 0, INDEX, zero)
            assert torch.equal(written.signbit(), torch.scatter(X, 0, INDEX, zero).signbit())
