"""Variances of values whose mean is far from zero, on the C++ target."""

import pytest
import torch

from row_schedules import FAR
from tilewright import use
from tilewright.compile import cxx
from tilewright.device import spec_of
from tilewright.dispatch.functions.fuse import fuse
from tilewright.impl import IMPLS
from tilewright.op import OPS
from tilewright.tensor_spec import TensorSpec

pytestmark = [
    pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing())),
    pytest.mark.usefixtures("forgets_functions"),
]


def wide(x):
    return x if x.dtype == torch.float64 else x.float()


FUNCTIONS = {
    "rows": lambda x: torch.var_mean(wide(x), -1),
    "columns": lambda x: torch.var_mean(wide(x), 0),
    "all": lambda x: torch.var_mean(wide(x)),
    "rows and columns": lambda x: (wide(x).var(-1), wide(x).mean(-1), wide(x).var(0)),
}
ROUNDINGS = 40
"""Of fp32, that sums of a few hundred squares may take, relative to the sum."""


def built(function, dtype):
    fuse(function, name="spread")
    w = OPS["spread"].workload(x=TensorSpec(dtype, (300, 500)))
    fused, spec = IMPLS["fused"], spec_of(None)
    return w, fused.build(fused.heuristic(w, spec), w, spec)


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=list(FUNCTIONS))
@pytest.mark.parametrize(("dtype", "centre", "spread"), [*FAR, ("f32", 1e5, 1.0)])
def test_huge_means_cost_variances_nothing(function, dtype, centre, spread):
    w, kernel = built(function, dtype)
    (x,) = w.operator.examples(w, "random", 0, torch.device("cpu"))
    x = (x.float() * spread + centre).to(x.dtype)
    eps = torch.finfo(torch.float32).eps
    for k, (own, truth) in enumerate(zip(kernel(x), function(x.double()), strict=True)):
        truth = truth.double()
        scale = centre if k == 1 else truth
        assert ((own.double() - truth).abs() <= ROUNDINGS * eps * scale).all()


@pytest.mark.parametrize("value", [0.0, 0.1, 1e6, 3e38, float("inf"), float("nan")])
def test_deviations_of_equal_values_are_never_the_root_of_less_than_nothing(value):
    _, kernel = built(lambda x: (x.std(-1), x.std(0)), "f32")
    x = torch.full((300, 500), value)
    for found in kernel(x):
        if abs(value) <= 1e6:
            assert (found >= 0).all()
            assert (found <= 1e-6 * abs(value)).all()
        else:
            assert not (found < torch.inf).any()


def one_more(n, value, more):
    x = torch.full((3, n), value)
    x[:, 7] += more
    return x


def every_second_more(n, value, more):
    x = torch.full((3, n), value)
    x[:, ::2] += more
    return x


ULP = 2.0**-14
"""Of a float at 1000."""


@pytest.mark.parametrize(
    ("kind", "n", "more"),
    [
        (one_more, 1000, ULP),
        (one_more, 50000, 64 * ULP),
        (one_more, 2**20, 0.1),
        (every_second_more, 2**20, ULP),
        (one_more, 2**22, 1.0),
        (every_second_more, 2**22, 1e-3),
    ],
)
def test_values_that_are_nearly_equal_have_the_variance_that_they_have(kind, n, more):
    x = kind(n, 1000.1, more)
    fused = fuse(lambda x: (x.var(-1), x - x.mean(-1, keepdim=True)), name="spread")
    with use("fused"):
        variance, apart = fused(x)
    truth = x.double()
    torch.testing.assert_close(variance.double(), truth.var(-1), rtol=0.02, atol=0)
    torch.testing.assert_close(
        apart.double(), truth - truth.mean(-1, keepdim=True), rtol=1e-6, atol=0.6 * ULP
    )


@pytest.mark.parametrize("n", [3, 37, 999, 5140, 50000, 262147])
@pytest.mark.parametrize("value", [1000.1, 0.1, -3300.7, 123456.789])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x.var(-1), x - x.mean(-1, keepdim=True)),
        lambda x: (x.var(-1), x.std(0), x.var(), x - x.mean(-1, keepdim=True)),
    ],
    ids=["rows", "several kernels"],
)
def test_equal_values_have_no_variance(function, value, n):
    x = torch.full((5, n), value)
    fused = fuse(function, name="spread")
    with use("fused"):
        for found in fused(x):
            assert torch.equal(found, torch.zeros_like(found))


def test_means_of_ordinary_values_are_no_less_exact_for_their_variance():
    torch.manual_seed(0)
    x = torch.randn(16, 50000)
    fused = fuse(lambda x: (x.mean(-1), x.var(-1)), name="spread")
    alone = fuse(lambda x: x.mean(-1), name="alone")
    with use("fused"):
        off, off_alone = ((m - x.double().mean(-1)).abs().max() for m in (fused(x)[0], alone(x)))
    assert off <= 2 * off_alone
