"""Functions of booleans alone, and results that are integers: on the CPU target, and by the kernels
for an H200, emulated."""

import warnings

import pytest
import torch

from emulated import Emulated
from tilewright.compile import cxx
from tilewright.device import DEVICES, spec_of
from tilewright.dispatch.functions.fuse import fuse
from tilewright.fusion.cuda import target
from tilewright.impl import IMPLS
from tilewright.impls.fused import graph_of
from tilewright.op import OPS, Workload

H200, FUSED = DEVICES["h200"], IMPLS["fused"]
pytestmark = pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))


def attention_bias(m):
    return torch.where(m, 0.0, float("-inf"))


def scaled_mask(m):
    return 1.0 - m * 0.5


def divided_mask(m):
    return m / 3


def count_of_mask(m):
    return m.sum(-1)


def any_of_mask(m):
    return m.any(-1)


def share_of_mask(m):
    return m.float().mean(-1)


def turned_mask(m):
    return m & ~m.any(-1, keepdim=True)


def count_and_twice(x):
    return (x > 0).sum(-1), x * 2


def counts_of_columns(x):
    return torch.count_nonzero(x > 0.5, 0)


def count_of_all(x):
    return (x > 0).sum()


def three_or_four(x):
    return torch.where(x > 0, 3, 4)


OF_BOOLEANS = (
    attention_bias, scaled_mask, divided_mask, count_of_mask, any_of_mask, share_of_mask,
    turned_mask,
)  # fmt: skip
TO_INTEGERS = (count_and_twice, counts_of_columns, count_of_all, three_or_four)
CASES = [
    *((f, "bool", shape) for f in OF_BOOLEANS for shape in ([6, 8], [5, 33])),
    *((f, d, s) for f in TO_INTEGERS for d in ("f32", "f16") for s in ([37, 40], [5, 33])),
]


@pytest.mark.parametrize("kernel", ["cpu", "h200"])
@pytest.mark.parametrize(("function", "dtype", "shape"), CASES)
def test_results_are_pytorchs_bit_for_bit(function, dtype, shape, kernel):
    if function.__name__ not in OPS:
        fuse(function)
    name = next(iter(OPS[function.__name__].parameters))
    w = Workload.parse(f"{function.__name__}({name}={dtype}{shape})".replace(" ", ""))
    t = torch.rand(shape) > 0.5 if dtype == "bool" else torch.randn(shape).to(w.main.torch_dtype)
    if kernel == "cpu":
        run = FUSED.build(FUSED.heuristic(w, spec_of(None)), w, spec_of(None))
    else:
        graph = graph_of(w)
        assert target.unsupported(graph, H200) is None
        run = Emulated(graph, target.heuristic(graph, H200), H200, w)
    found, expected = run(t), function(t)
    pairs = (
        [(found, expected)]
        if isinstance(expected, torch.Tensor)
        else zip(found, expected, strict=True)
    )
    for mine, theirs in pairs:
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)


def test_a_call_compiles_and_does_not_fall_back():
    mask = torch.rand(6, 8) > 0.5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for function in OF_BOOLEANS:
            assert torch.equal(fuse(function)(mask), function(mask))


def test_a_function_of_booleans_is_verified():
    from tilewright.measure.verify import Verifier

    if attention_bias.__name__ not in OPS:
        fuse(attention_bias)
    w = Workload.parse("attention_bias(m=bool[6,8])")
    run = FUSED.build(FUSED.heuristic(w, spec_of(None)), w, spec_of(None))
    assert Verifier(w, torch.device("cpu")).check(run).message == ""


def orders(m, k, x, y):
    return m < k, m <= k, m > k, m >= k, m == k, m != k, m < True


def bounds(m, k, x, y):
    return m.clamp(min=k), m.clamp(-0.5, 0.5), torch.fmax(m, k), torch.fmin(m, k), m.signbit()


def of_masks_of_two_widths(m, k, x, y):
    a, b = x > 0, y > 0
    return a != b, a == b, a ^ b, a < b, torch.where(m, a, b), torch.where(a < b, x, 0.0)


def of_results_of_rows(m, k, x, y):
    return m.any(-1) < k.any(-1), (m < k).sum(-1), m.all(0) == k.any(0), x.clamp(min=y)


def divided_doubles(m, k, x, y):
    return y % 0.7, y // 0.7, torch.remainder(y, -0.7), x % y, y % x, (y % x) > x


@pytest.mark.parametrize("kernel", ["cpu", "h200"])
@pytest.mark.parametrize(
    "function", [orders, bounds, of_masks_of_two_widths, of_results_of_rows, divided_doubles]
)
def test_steps_of_booleans_beside_numbers_of_either_width_are_pytorchs(function, kernel):
    if function.__name__ not in OPS:
        fuse(function)
    w = Workload.parse(f"{function.__name__}(m=bool[5,19], k=bool[5,19], x=f32[5,19], y=f64[5,19])")
    m, k = (torch.rand(5, 19) > 0.5 for _ in range(2))
    tensors = m, k, torch.randn(5, 19), torch.randn(5, 19, dtype=torch.float64)
    spec, graph = spec_of(None), graph_of(w)
    if kernel == "cpu":
        run = FUSED.build(FUSED.heuristic(w, spec), w, spec)
    else:
        run = Emulated(graph, target.heuristic(graph, H200), H200, w)
    for own, right in zip(run(*tensors), function(*tensors), strict=True):
        torch.testing.assert_close(own, right)
