"""Writes to parts of what a fused function made, and their gradients, on both targets."""

import pytest
import torch
from fused_on_cpu import assert_verified

import tilewright as tw
from tilewright.compile import cxx
from tilewright.dispatch.fuse import backward_operator
from tilewright.op import OPS
from tilewright.tensor_spec import TensorSpec

pytestmark = [
    pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing())),
    pytest.mark.usefixtures("forgets_functions"),
]


def scaled_head(x):
    y = x.clone()
    y[:, :3] *= 2
    return y


def moved_column(x):
    y = x.clone()
    y[:, 0] = x[:, 1]
    return y


def box_of_another(x):
    y = x.clone()
    y[1:3, 2:5] = x[0:2, 0:3] * 2
    return y.sum(0)


def column_of_a_transpose(x):
    y = x.exp() + 1
    y.t()[1:3].mul_(3)
    return y


def twice_the_same(x):
    y = x * 2
    y[..., 0].copy_(x[..., 1])
    y[..., 0].add_(1)
    return y


def every_other_of_nothing(x):
    y = torch.empty_like(x)
    y[:, ::2] = x[:, ::2] * 2
    y[:, 1::2] = x[:, ::2].exp()
    return y


def row_over_pieces(x):
    y = x * 2
    y[:, 1:3] += x[:, :2]
    y[0] *= x[1]
    return y


WRITES = [
    *(scaled_head, moved_column, box_of_another, column_of_a_transpose, twice_the_same),
    *(every_other_of_nothing, row_over_pieces),
]


@pytest.mark.parametrize("function", WRITES)
def test_a_write_to_a_part_has_pytorchs_values_and_gradients(function):
    fused = tw.fuse(function, name="writes")
    x = torch.randn(6, 10, requires_grad=True)
    own, right = fused(x), function(x)
    torch.testing.assert_close(own, right)
    weights = torch.randn_like(right)
    found = torch.autograd.grad(own, x, weights)
    torch.testing.assert_close(found, torch.autograd.grad(right, x, weights))
    assert type(own.grad_fn).__name__ == "GeneratedBackward"


VERIFIED = [(f, "f32") for f in (moved_column, row_over_pieces)] + [(scaled_head, "bf16")]


@pytest.mark.parametrize(("function", "dtype"), VERIFIED)
def test_kernels_of_writes_verify(function, dtype):
    tw.fuse(function, name="writes")
    w = OPS["writes"].workload(x=TensorSpec(dtype, (6, 10)))
    assert_verified(w)
    backward = backward_operator(OPS["writes"], 1)
    assert_verified(backward.workload(grad_output=w.outputs[0], x=w.main))
