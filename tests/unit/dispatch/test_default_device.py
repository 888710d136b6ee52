"""torch.set_default_device, a function mode, changes nothing of what a fused function computes."""

import pytest
import torch
from torch.nn import functional as F

import tilewright as tw
from tilewright.compile import cxx
from tilewright.errors import NoImplementation

pytestmark = [
    pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing())),
    pytest.mark.usefixtures("forgets_functions"),
]


def halved_product(x):
    return F.dropout(x.prod(-1), 0.5) * torch.full((4,), 2.0)


def running_sum(x):
    return x.cumsum(-1)


@pytest.mark.parametrize("default", ["cpu", "meta"])
def test_functions_are_traced_as_without_one(default):
    x = (torch.rand(4, 6) + 0.5).requires_grad_()
    line = running_sum.__code__.co_firstlineno + 1
    with torch.device(default):
        out = tw.fuse(halved_product)(x)
        out.sum().backward()
        with pytest.raises(NoImplementation, match=rf"cumsum.*test_default_device\.py:{line}"):
            tw.fuse(running_sum)(x)
    out, kept = out.detach(), out.detach() != 0
    torch.testing.assert_close(out, 4 * kept * x.detach().prod(-1))
    torch.testing.assert_close(x.grad, out[:, None] / x.detach())
