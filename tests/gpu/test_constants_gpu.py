"""Constants and casts in the middle of a function are PyTorch's on a GPU, bit for bit."""

import pytest
import torch

import tilewright as tw
from constants_and_casts import FUNCTIONS, X

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("forgets_functions")]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_constants_and_casts_are_pytorch_s(function):
    x = X.cuda()
    own = tw.fuse(function, name="constants")(x)
    for result, right in zip(own, function(x), strict=True):
        torch.testing.assert_close(result, right, rtol=0, atol=0, equal_nan=True)


def test_reciprocals_of_all_floats_are_exact():
    """One by one, and of a vector at once, as row kernels take them."""
    one_by_one = tw.fuse(lambda x: x.reciprocal(), name="one_by_one")
    at_once = tw.fuse(lambda x: (x.reciprocal(), x.amax(-1)), name="at_once")
    for start in range(-(1 << 31), 1 << 31, 1 << 28):
        bits = torch.arange(start, start + (1 << 28), device="cuda", dtype=torch.int32)
        x = bits.view(torch.float32).view(-1, 1024)
        right = 1 / x
        for found in (one_by_one(x), at_once(x)[0]):
            same = found.view(torch.int32) == right.view(torch.int32)
            same |= found.isnan() & right.isnan()
            assert same.all(), x[~same][:4]
