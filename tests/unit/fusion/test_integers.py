"""Tensors of whole numbers: compared, cast and computed exactly, beside floats and alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

import tilewright as tw
from on_targets import TARGETS, executable
from tilewright.dispatch.functions.fuse import fuse
from tilewright.errors import NoImplementation
from tilewright.measure.verify import Verifier
from tilewright.op import OPS
from tilewright.profiling.explain import show
from whole_numbers import EXACT, MASKS, SMALL, assert_equal, edges

pytestmark = pytest.mark.usefixtures("forgets_functions")


def run(target, function, *tensors):
    fuse(function, name="of_integers")
    w, given_ = OPS["of_integers"].workload_of(*tensors)
    return executable(target, w)(*given_)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtypes", ["ii", "ll", "il"])
@pytest.mark.parametrize("name", EXACT)
def test_whole_numbers_of_any_size_are_exact(target, dtypes, name):
    kinds = {"i": torch.int32, "l": torch.int64}
    a, b = (edges(kinds[d], 5 * 37, i).view(5, 37) for i, d in enumerate(dtypes))
    x = torch.randn(5, 37, generator=torch.Generator().manual_seed(2))
    assert_equal(run(target, EXACT[name], a, b, x), EXACT[name](a, b, x))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "dtypes", [(torch.int32,) * 2, (torch.int64,) * 2, (torch.int64, torch.int32)]
)
@pytest.mark.parametrize("name", SMALL)
def test_arithmetic_of_whole_numbers_is_pytorchs(target, dtypes, name):
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-99, 99, (6, 40), generator=generator, dtype=d) for d in dtypes)
    assert_equal(run(target, SMALL[name], a, b), SMALL[name](a, b))


@pytest.mark.parametrize("target", TARGETS)
@given(st.data())
def test_they_broadcast_and_lie_in_memory_as_they_like(target, data):
    shape = data.draw(st.lists(st.sampled_from([1, 2, 3, 17]), min_size=1, max_size=3))
    sizes = [data.draw(st.sampled_from([1, n])) for n in shape]
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    step = data.draw(st.sampled_from([1, 3]))
    a = torch.arange(-9, -9 + step * 17**3, dtype=dtype)[::step][: torch.Size(sizes).numel()].view(
        sizes
    )
    x = torch.randn(shape)

    def function(a, x):
        return torch.where(a < -3, x, 0.5) * a, a.clamp(min=-5)

    assert_equal(run(target, function, a, x), function(a, x))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("rows", "columns"), [(40, 1003), (33, 64), (3, 4096)])
@pytest.mark.parametrize("name", MASKS)
def test_beside_reductions_they_pass_verification(target, dtype, rows, columns, name):
    fuse(MASKS[name], name="of_integers")
    tensors = torch.zeros(rows, columns, dtype=dtype), torch.zeros(rows, columns)
    w, _ = OPS["of_integers"].workload_of(*tensors)
    verdict = Verifier(w, torch.device("cpu")).check(executable(target, w))
    assert verdict.ok, verdict.message


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
def test_gradients_are_those_of_the_floats(dtype, first):
    def function(m, x):
        return torch.softmax(x.masked_fill(m == 0, -1e9), -1) * m

    m = torch.randint(0, 3, (40, 103), dtype=dtype)
    x = torch.randn(40, 103, requires_grad=True)
    named = tw.fuse(function if first else (lambda x, m: function(m, x)), name="with_masks")
    with tw.use("fused"):
        (found,) = torch.autograd.grad(named(*((m, x) if first else (x, m))).square().sum(), x)
    (right,) = torch.autograd.grad(function(m, x).square().sum(), x)
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda a, x: a // 2, r"floor_divide|div.Tensor_mode.*integer arithmetic; cast first"),
        (lambda a, x: a & 1, "integer arithmetic; cast first"),
        (lambda a, x: a % -3, r"remainder.*\*, abs, .*maximum and % by a positive number are"),
        (lambda a, x: a % (a + 1), "% by a positive number are taken"),
        (lambda a, x: a.sum(), "integer arithmetic; cast first"),
        (lambda a, x: a.amax(-1) + x, "integer arithmetic; cast first"),
        (lambda a, x: a**2, "integer arithmetic; cast first"),
        (lambda a, x: x[:, None][a], "index.*gather and scatter of one element of each row"),
        (lambda a, x: a[a] + x, "gather.*of torch.int64; floats are"),
        (lambda a, x: x.expand(2, 6).gather(1, a.expand(2, 6)), "one element of each row is taken"),
        (lambda a, x: F.embedding(a, x[:, None]), "gather and scatter of one element of each row"),
    ],
)
def test_other_steps_of_them_are_named(function, told):
    fused = tw.fuse(function, name="refused_integers")
    with pytest.raises(NoImplementation, match=told):
        fused(torch.arange(6), torch.randn(6))


@pytest.mark.parametrize(
    ("function", "number"),
    [
        (lambda a: a.clamp(-3, 2**40), 2**40),
        (lambda a: a.clamp(-(2**31) - 1), -(2**31) - 1),
        (lambda a: a.clamp_min(2**31), 2**31),
        (lambda a: a.clone().clamp_max_(-(2**40)), -(2**40)),
        (lambda a: torch.add(a, a, alpha=2**40), 2**40),
        (lambda a: torch.sub(a, 1, alpha=2**40), 2**40),
    ],
)
def test_bounds_beyond_the_dtype_are_refused_as_pytorch_refuses_them(function, number):
    a = torch.arange(3, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="cannot be converted to type int without overflow"):
        function(a)
    with pytest.raises(NoImplementation, match=rf"with {number} of torch\.int32.*\.long\(\)"):
        tw.fuse(function, name="of_integers")(a)
    assert_equal(tw.fuse(function, name="of_integers")(a.long()), function(a.long()))


def test_summands_and_factors_beyond_the_dtype_wrap_as_pytorchs_do():
    def function(a):
        return a + 2**40, 2**31 - a, a * 2**31, a.clamp(-(2**31), 2**31 - 1)

    a = torch.arange(3, dtype=torch.int32)
    for own, right in zip(tw.fuse(function, name="of_integers")(a), function(a), strict=True):
        assert_equal(own, right)


def test_a_calls_numbers_and_sizes_need_no_other_function():
    fused = tw.fuse(lambda a, x, by: torch.where(a > 2, x, by), name="chosen", scalars=["by"])
    for n in (5, 64, 1000):
        a, x = torch.arange(n) % 7, torch.randn(n)
        assert_equal(fused(a, x, 0.25), torch.where(a > 2, x, 0.25))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_compilers_of_gpus_know_that_whole_numbers_wrap(dtype):
    """Else they take a + 1 > a to be true without a look at a."""
    fuse(lambda a: a + 1 > a, name="of_integers")
    w, _ = OPS["of_integers"].workload_of(torch.zeros(4096, dtype=dtype))
    assert "setp" in show(w, "ptx", device_spec="h200").partition("ld.global")[2]
