"""The error bound: no honest algorithm leaves it, and it is not much wider than they need."""

import functools
import math
from dataclasses import replace

import pytest
import torch

from tilewright.dispatch.functions.fuse import fuse
from tilewright.dispatch.functions.operator import backward_operator
from tilewright.errors import NoErrorRule
from tilewright.impls._vendor import vendor
from tilewright.measure import error_rules
from tilewright.measure.batch import Batch
from tilewright.measure.error_bound import bounds, truth_and_tolerance
from tilewright.measure.error_rules import BINARY, RULES, SAFETY, UNARY, Arithmetic, Pair
from tilewright.measure.error_rules_convolution import rounded_to_tf32
from tilewright.measure.expected import expect
from tilewright.measure.verify import Verifier
from tilewright.op import OPS, Workload
from tilewright.tensor_spec import TensorSpec

pytestmark = pytest.mark.usefixtures("forgets_functions")
CPU = torch.device("cpu")
F32 = Arithmetic(torch.float32, torch.float32, False, CPU)
TF32 = Arithmetic(torch.float32, torch.float32, False, CPU, tf32=True)
HALF = Arithmetic(torch.float32, torch.float16, False, CPU)


def positive(n, seed=0):
    values = torch.rand(n, generator=torch.Generator().manual_seed(seed)) * 3 + 0.1
    return values.double()


def off_by(pair, computed):
    """The error of an fp32 result as a fraction of what the pair allows."""
    allowed = SAFETY * F32.u * pair.error
    return float(((computed.double() - pair.value).abs() / allowed.clamp_min(1e-300)).max())


DOMAINS = {
    **dict.fromkeys(("asin", "acos", "atanh"), lambda x: x / 4),
    "acosh": lambda x: x + 1,
}
"""Of functions that are not for all positive numbers."""


@pytest.mark.parametrize("name", [entry[0] for entry in UNARY])
def test_a_function_of_one_argument_keeps_its_bound_and_carries_errors_on(name):
    function = {n: f for n, f, *_ in UNARY}[name]
    x = DOMAINS.get(name, lambda x: x)(positive(4096)).float()
    exact = RULES[name](F32, Pair(x.double()))
    if exact.error is None or not exact.error.any():
        assert torch.equal(function(x).double(), exact.value)
    else:
        assert off_by(exact, function(x)) <= 1
    # An argument that is itself off by 8 roundings.
    moved = x.double() * (1 + 8 * F32.u)
    inexact = RULES[name](F32, Pair(x.double(), 8 * x.double()))
    assert off_by(inexact, function(moved)) <= 1


@pytest.mark.parametrize(
    "name", [*(entry[0] for entry in BINARY), "maximum", "minimum", "fmax", "fmin"]
)
def test_a_function_of_two_arguments_keeps_its_bound_and_carries_errors_on(name):
    function = {n: f for n, f, *_ in BINARY}.get(name) or getattr(torch, name)
    a, b = positive(4096, 1).float(), positive(4096, 2).float()
    inexact = RULES[name](F32, Pair(a.double(), 8 * a.double()), Pair(b.double(), 8 * b.double()))
    for sa in (-8, 8):
        for sb in (-8, 8):
            got = function(a.double() * (1 + sa * F32.u), b.double() * (1 + sb * F32.u))
            assert off_by(inexact, got.float()) <= 1


def test_a_result_that_the_arithmetic_holds_exactly_has_no_error():
    a, b = (torch.randint(-999, 999, (512,)).double() for _ in range(2))
    for name in ("add", "sub", "mul"):
        assert RULES[name](F32, Pair(a), Pair(b)).error is None
    third = RULES["div"](F32, Pair(torch.tensor([1.0]).double()), 3.0)
    assert float(third.error) == pytest.approx(1 / 3)


def test_a_constant_that_the_arithmetic_does_not_hold_has_an_error():
    assert F32.lift(0.5).error is None
    assert float(F32.lift(0.3).error) == pytest.approx(0.3)
    in_f64 = Arithmetic(torch.float64, torch.float64, False, CPU)
    assert in_f64.lift(0.3).error is None


def test_a_mask_hands_on_the_errors_of_what_it_keeps():
    mask, x = torch.tensor([True, False]), torch.tensor([2.0, 3.0], dtype=torch.float64)
    for factors in ((Pair(mask), Pair(x, x / 2)), (Pair(x, x / 2), Pair(mask))):
        product = RULES["mul"](F32, *factors)
        assert product.value.tolist() == [2.0, 0.0]
        assert product.error.tolist() == [3.0, 0.0]  # and a rounding of 2


def doubtful(*values, error=4.0):
    value = torch.tensor(values).double()
    return Pair(value, torch.full_like(value, error))


@pytest.mark.parametrize("name", ["sign", "floor", "ceil", "round", "trunc"])
def test_a_function_of_steps_may_be_on_either_side_of_one_nearby(name):
    function, near = getattr(torch, name), {"sign": 0.0, "round": 2.5}.get(name, 2.0)
    x = doubtful(near - F32.u, near + F32.u, 1.3)
    jumped = RULES[name](F32, x)
    low, high = function(torch.tensor([near - 0.1, near + 0.1]))
    assert torch.equal(jumped.value, function(x.value))
    step = float(high - low)
    assert (SAFETY * F32.u * jumped.error).tolist() == pytest.approx([step, step, 0.0])


def test_what_is_cut_off_surely_is_known_exactly():
    x = doubtful(-1.0, 1.0, -F32.u)
    assert RULES["relu"](F32, x).error.tolist() == [0.0, 4.0, 3.5]  # 8 u around each
    assert RULES["maximum"](F32, x, 3.0).error.tolist() == [0.0, 0.0, 0.0]
    both = RULES["minimum"](F32, x, doubtful(-2.0, 1.0, 0.0, error=1.0))
    assert both.error.tolist() == [1.0, 4.0, 4.0]


@pytest.mark.parametrize("name", ["lt", "le", "gt", "ge"])
def test_a_comparison_near_its_threshold_is_undecided(name):
    found = RULES[name](F32, doubtful(-1.0, -4 * F32.u, 4 * F32.u, 1.0), 0.0)
    assert found.value.tolist() == getattr(torch, name)(torch.tensor([-1, -1, 1, 1]), 0).tolist()
    assert (SAFETY * F32.u * found.error).tolist() == [0.0, 1.0, 1.0, 0.0]
    assert RULES[name](F32, doubtful(-1.0, 1.0), 0.0).error is None
    assert RULES["eq"](F32, doubtful(4 * F32.u), 0.0).error.all()
    assert RULES["ne"](F32, doubtful(16 * F32.u), 0.0).error is None
    handed_on = doubtful(4 * F32.u)
    assert RULES["eq"](F32, handed_on, handed_on).error is None
    lo, hi = bounds(found.value, SAFETY * F32.u * found.error, torch.bool)
    assert (lo == hi).tolist() == [True, False, False, True]
    assert (lo <= hi).all()


def test_what_an_undecided_comparison_chooses_may_be_either():
    above = RULES["gt"](F32, doubtful(1.0, F32.u, -F32.u, -1.0), 0.0)
    chosen = RULES["where"](F32, above, Pair(torch.full((4,), 5.0).double()), 2.0)
    assert chosen.value.tolist() == [5.0, 5.0, 2.0, 2.0]
    assert (SAFETY * F32.u * chosen.error).tolist() == [0.0, 3.0, 3.0, 0.0]
    total = RULES["sum"](F32, chosen, [0])
    assert reach(total) == pytest.approx(6, abs=1e-4)
    factor = RULES["convert_element_type"](F32, above, torch.float32)
    assert reach(RULES["sum"](F32, factor, [0])) == pytest.approx(2, abs=1e-5)
    whole = RULES["convert_element_type"](F32, above, torch.int64)
    assert whole.value.tolist() == [1, 1, 0, 0]
    assert (SAFETY * F32.u * whole.error).tolist() == [0.0, 1.0, 1.0, 0.0]


def test_what_is_said_of_undecided_comparisons_is_undecided_where_it_depends_on_them():
    above = RULES["gt"](F32, doubtful(1.0, F32.u, -1.0), 0.0)
    true, false = (Pair(torch.full((3,), v)) for v in (True, False))
    tells = {
        "logical_not": (above,),
        "logical_and": (above, true),
        "bitwise_or": (above, false),
        "logical_xor": (above, true),
    }
    for name, operands in tells.items():
        assert (RULES[name](F32, *operands).error > 0).tolist() == [False, True, False], name
    assert not RULES["logical_and"](F32, above, false).error.any()
    assert not RULES["bitwise_or"](F32, above, true).error.any()
    squares = RULES["mul"](F32, above, above)
    assert squares.value.dtype == torch.bool
    assert (squares.error > 0).tolist() == [False, True, False]
    assert not RULES["any"](F32, above).error.any()  # the first is, surely
    assert RULES["any"](F32, above.map(lambda t: t[1:])).error.all()
    assert RULES["all"](F32, above.map(lambda t: t[:2])).error.all()
    count = RULES["sum"](F32, above, [0])
    lo, hi = bounds(count.value, SAFETY * F32.u * count.error, torch.int64)
    assert (int(lo), int(hi)) == (1, 3)
    assert RULES["convert_element_type"](F32, count, torch.bool).error is None  # at least one
    assert RULES["eq"](F32, count, 2).error.all()
    assert RULES["eq"](F32, count, 3).error.all()
    assert RULES["ne"](F32, count, 4).error is None
    product = RULES["prod"](F32, above.map(lambda t: t[:2]), 0)
    assert int(product.value) == 1
    assert reach(product) >= 1


def test_the_greatest_of_some_is_as_surely_known_as_those_that_may_be_it():
    above = RULES["gt"](F32, doubtful(1.0, -F32.u), 0.0)
    chosen = RULES["where"](F32, above, Pair(torch.tensor([3.0, 2.0]).double()), -1e9)
    greatest = RULES["amax"](F32, chosen, [0])
    assert float(greatest.value) == 3
    assert reach(greatest) == 0
    least = RULES["amin"](F32, chosen, [0])
    assert reach(least) == pytest.approx(1e9, rel=1e-6)


def test_one_of_two_integers_reaches_to_the_other():
    above = RULES["gt"](F32, doubtful(F32.u, -F32.u), 0.0)
    for dtype in (torch.int8, torch.int32, torch.int64):
        most = torch.iinfo(dtype).max
        for sentinel in (most, -most):
            a, b = (Pair(torch.full((2,), v, dtype=dtype)) for v in (sentinel, 3))
            chosen = RULES["where"](F32, above, a, b)
            lo, hi = bounds(chosen.value, SAFETY * F32.u * chosen.error, dtype)
            for either in (a.value, b.value):
                assert ((lo <= either) & (either <= hi)).all()
    counts = torch.tensor([2**62 + 1, -(2**62) - 1])
    assert all(torch.equal(end, counts) for end in bounds(counts, torch.zeros(2), torch.int64))


def test_an_undecided_comparison_counts_once_in_any_arithmetic():
    f64 = Arithmetic(torch.float64, torch.float64, False, CPU)
    above = RULES["gt"](f64, doubtful(f64.u, 1.0), 0.0)
    count = RULES["sum"](f64, above, [0])
    lo, hi = bounds(count.value, SAFETY * f64.u * count.error, torch.int64)
    assert (int(lo), int(hi)) == (1, 3)


def test_between_a_number_and_an_infinity_anything_goes():
    above = RULES["gt"](F32, doubtful(F32.u, -F32.u, 1.0, -1.0), 0.0)
    for other in (-math.inf, math.nan):
        chosen = RULES["where"](F32, above, Pair(torch.ones(4).double()), other)
        lo, hi = bounds(chosen.value, SAFETY * F32.u * chosen.error, torch.float16)
        assert lo[:2].tolist() == [-math.inf] * 2
        assert hi[:2].tolist() == [math.inf] * 2
        assert (lo[2], hi[2]) == (1, 1)
        assert str(float(lo[3])) == str(float(hi[3])) == str(other)
    same = RULES["where"](F32, above, Pair(torch.full((4,), math.inf).double()), math.inf)
    assert not same.error.any()


def test_what_is_copied_keeps_its_errors():
    above = RULES["gt"](F32, doubtful(F32.u, 1.0), 0.0)
    zeros = Pair(torch.zeros(2, dtype=torch.bool))
    for copied in (
        RULES["copy"](F32, zeros, above),
        RULES["copy"](F32, Pair(torch.zeros(2, dtype=torch.int32)), above),
        RULES["slice_scatter"](F32, zeros, above, 0, 0, 2, 1),
        RULES["cat"](F32, [above, zeros], 0),
    ):
        assert (SAFETY * F32.u * copied.error[:2]).tolist() == [1.0, 0.0]


def test_what_rounding_decides_is_named_and_may_be_taken_as_decided():
    near = doubtful(2 - F32.u, 0.5)
    steps = {
        "floor": (near,),
        "sign": (doubtful(F32.u, 1.0),),
        "gt": (near, 2.0),
        "remainder": (near, 1.0),
        "div": (near, 1.0),
    }
    for name, operands in steps.items():
        mode = {"rounding_mode": "floor"} if name == "div" else {}
        found = replace(F32, choices=[])
        assert (RULES[name](found, *operands, **mode).error > 1e3).tolist() == [True, False], name
        assert found.choices == [name]
        decided = replace(F32, choices=[], decided=True)
        error = RULES[name](decided, *operands, **mode).error
        assert error is None or error.max() < 1e3, name
        assert not decided.choices


COMPARING = {
    "ones_where_greater": lambda x, y: torch.where(x > y, torch.ones_like(x), torch.zeros_like(x)),
    "counts_of_greater": lambda x, y: (x > y).sum(1, dtype=torch.float32),
    "greater_and_ones": lambda x, y: (torch.where(x > y, x, y), torch.ones_like(x)),
    "low_bits": lambda x, y: ((x * 4).to(torch.int32) & 1) ^ (y > 0),
    "off_the_mean": lambda x, y: ((x - x.mean(1, keepdim=True)) != 0).any(1) | (y > 0).all(1),
}


@pytest.mark.parametrize("dtype", ["f16", "f32", "f64"])
@pytest.mark.parametrize("name", COMPARING)
def test_functions_that_compare_have_bounds_which_pytorch_keeps(name, dtype):
    fuse(COMPARING[name], name=name)
    w = OPS[name].workload(x=TensorSpec(dtype, (8, 33)), y=TensorSpec(dtype, (8, 33)))
    verdict = Verifier(w, CPU).check(vendor(w))
    assert verdict.ok, verdict.message
    assert all(a.vendor_within for a in verdict.outputs)


def test_the_gradient_of_a_threshold_is_zero():
    fuse(lambda x, t: torch.where(x > t, x, 0.0), name="over_a_threshold")
    spec = TensorSpec("f32", (8, 33))
    w = backward_operator(OPS["over_a_threshold"]).workload(grad_output=spec, x=spec, t=spec)
    assert Verifier(w, CPU).check(vendor(w)).message == ""


@pytest.fixture
def gradients_at_a_threshold():
    """Of relu behind what batch norm does to columns, where the slope is 0 or 1 and all others of
    the column hear of it: a workload, its tensors, and the gradients by fp32 with each choice for
    one element of column 1 that equals the column's mean but for rounding."""
    fuse(lambda x: torch.relu(x - x.mean(0)), name="rectified_columns")
    x, grad = (torch.randn(64, 4, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    x[5, 1] = (x[:, 1].sum() - x[5, 1]) / 63
    spec = TensorSpec("f32", (64, 4))
    w = backward_operator(OPS["rectified_columns"]).workload(grad_output=spec, x=spec)

    def with_choices(turned):
        passed = grad * ((x > x.mean(0)) ^ turned)
        return passed - passed.mean(0)

    def turned(column):
        at = torch.zeros(64, 4, dtype=torch.bool)
        at[5, column] = True
        return with_choices(at)

    return w, [grad, x], with_choices(torch.zeros(64, 4, dtype=torch.bool)), turned


def test_gradients_behind_a_threshold_may_take_either_side_there_alone(gradients_at_a_threshold):
    w, tensors, gradients, turned = gradients_at_a_threshold
    ((value, tolerance),) = truth_and_tolerance(w, tensors)
    assert ((gradients - value).abs() <= tolerance).all()
    for column in range(4):
        within = (turned(column) - value).abs()[:, column] <= tolerance[:, column]
        assert within.tolist() == [column == 1] * 64
    ((_, least),) = truth_and_tolerance(w, tensors, decided=True)
    others = [0, 2, 3]
    torch.testing.assert_close(least[:, others], tolerance[:, others])
    assert (least[:, 1] < tolerance[:, 1] / 100).all()


def test_which_side_of_a_threshold_was_taken_is_no_error(gradients_at_a_threshold):
    w, tensors, gradients, turned = gradients_at_a_threshold
    (expected,) = expect(w, Batch(), tensors, [gradients], keep_truth=True)
    assert not expected.widened
    assert expected.mismatch(turned(1)) is None
    ((value, _),) = truth_and_tolerance(w, tensors)
    misrounded = int((gradients != value.float())[:, [0, 2, 3]].sum()) / gradients.numel()
    for found in (gradients, turned(1)):
        assert expected.worst_ulp(found) <= expected.vendor_ulp < 4
        assert expected.misrounded(found) == expected.vendor_misrounded == misrounded > 0
    assert expected.bound_ulp < 100
    assert expected.truth[:, 1].isnan().all()
    assert not expected.truth[:, [0, 2, 3]].isnan().any()
    wrong = expected.mismatch(gradients + torch.eye(64, 4))
    assert wrong.index == (0, 0)
    assert "exceeds" in expected.mismatch(turned(1) + torch.eye(64, 4)[:, [1, 0, 3, 2]]).text(
        "(0, 1)"
    )
    assert expected.worst_ulp(gradients + 1e-5) > 50


def test_infinite_and_nan_intermediates_have_finite_errors():
    x = torch.tensor([math.inf, -math.inf, math.nan, 1.0]).double()
    shifted = RULES["sub"](F32, Pair(x, torch.ones_like(x)), Pair(torch.full_like(x, 2.0)))
    scaled = RULES["mul"](F32, RULES["exp"](F32, shifted), Pair(x, torch.ones_like(x)))
    total = RULES["sum"](F32, scaled, [0])
    for pair in (shifted, scaled, total):
        assert pair.error.isfinite().all()


def reach(pair):
    """How far an fp32 result may be from the pair's value."""
    return float(SAFETY * F32.u * pair.error)


@pytest.mark.parametrize("squared", [lambda r: ("mul", r, r), lambda r: ("square", r)])
def test_what_may_have_jumped_is_squared_where_it_may_have_jumped_to(squared):
    nearly = Pair(torch.tensor(3.0).double(), torch.tensor(4.0).double())
    rest = RULES["remainder"](F32, nearly, 1.0)
    assert float(rest.value) == 0
    name, *operands = squared(rest)
    assert reach(RULES[name](F32, *operands)) == pytest.approx(1)  # 0.9999 ** 2
    assert reach(RULES["cos"](F32, rest)) == pytest.approx(1 - math.cos(1), rel=1e-5)
    assert reach(RULES["var"](F32, rest.map(lambda t: torch.stack([t, t])), [0], 0)) > 0.25
    assert reach(RULES["prod"](F32, rest.map(lambda t: torch.stack([t, t])), 0)) > 0.99


def test_a_root_of_what_may_be_more_than_zero_may_be_more_than_zero():
    zero = Pair(torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64))
    assert reach(RULES["sqrt"](F32, zero)) == pytest.approx(math.sqrt(SAFETY * F32.u), rel=1e-3)


def test_what_is_too_small_for_normal_numbers_is_rounded_in_steps_of_its_own():
    a, b, c = (Pair(torch.tensor(v).double()) for v in (1e-30, 1e-20, 1e30))
    product = RULES["mul"](F32, RULES["mul"](F32, a, b), c)
    assert reach(product) > float(product.value) > 0  # which fp32 makes 0
    factors = torch.full((300,), 0.6)
    computed = functools.reduce(torch.mul, factors)  # the least number times 0.6 is rounded to it
    assert 0 < float(computed) < reach(RULES["prod"](F32, Pair(factors.double()), 0))


def test_integers_have_no_numbers_below_normal_ones():
    counts = Pair(torch.tensor([0, 3, 7]))
    for product in (RULES["mul"](F32, counts, counts), RULES["prod"](F32, counts, 0)):
        assert product.error is None or not product.error.any()


def test_rounding_an_exact_value_leaves_no_doubt():
    x = torch.tensor([1 + 2**-11, 1.0, 1 + 2**-12]).double()
    rounded = RULES["rounded"](HALF, Pair(x))
    assert torch.equal(rounded.value, torch.tensor([1.0, 1.0, 1.0]).double())
    assert rounded.error is None


def test_rounding_near_a_tie_admits_both_neighbours():
    tie = 1 + 2**-11
    x = torch.tensor([tie * (1 + HALF.u), 1.1]).double()
    rounded = RULES["rounded"](HALF, Pair(x, torch.full_like(x, 4.0)))
    reach = SAFETY * HALF.u * rounded.error
    assert float(reach[0]) == 2**-10
    assert float(reach[1]) == 0


def test_a_relaxed_policy_admits_the_rounding_and_its_absence():
    relaxed = Arithmetic(torch.float32, torch.float16, True, CPU)
    x = positive(512)
    pair = RULES["rounded"](relaxed, Pair(x))
    reach = SAFETY * relaxed.u * pair.error
    for kept in (x, x.half().double()):
        assert ((kept - pair.value).abs() <= reach).all()


def test_the_exact_policy_refuses_an_unrounded_intermediate_and_the_relaxed_one_does_not():
    text = (
        "bias_layer_norm(x=f16[9,64], bias0=f16[64], bias1=f16[64], weight=f16[64], bias=f16[64])"
    )

    def unrounded(*tensors):
        w = Workload.parse(text)
        return w.operator.reference(**w.call([t.float() for t in tensors])).half()

    assert not Verifier(Workload.parse(text), CPU).check(unrounded).ok
    assert Verifier(Workload.parse(text + "!relaxed"), CPU).check(unrounded).message == ""


def test_bounds_are_the_rounded_ends_and_hold_infinities_and_nan():
    value = torch.tensor([1.0, 65520.0, math.inf, math.nan]).double()
    lo, hi = bounds(value, torch.tensor([1e-3, 1.0, 1.0, math.nan]).double(), torch.float16)
    assert lo.tolist()[:3] == [0.9990234375, 65504.0, math.inf]
    assert hi.tolist()[:3] == [1.0009765625, math.inf, math.inf]
    assert lo[3].isnan()
    assert hi[3].isnan()


def test_an_operation_without_a_rule_is_named(monkeypatch):
    monkeypatch.delitem(error_rules.RULES, "rsqrt")
    with pytest.raises(NoErrorRule, match=r"rms_norm: .*aten.rsqrt.default.*error_rules.py"):
        Verifier(Workload.parse("rms_norm(x=f32[2,8])"), CPU)


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize(
    "text",
    [
        "layer_norm(x=d[64,5140], weight=d[5140], bias=d[5140])",
        "rms_norm(x=d[64,5140], weight=d[5140])",
        "softmax(x=d[32,5140])",
        "lerp(x=d[64,1], end=d[999], weight=d[999])",
        "bias_layer_norm(x=d[32,999], bias0=d[999], bias1=d[999], weight=d[999], bias=d[999])",
    ],
)
def test_pytorchs_own_result_lies_within_the_bound_itself(text, dtype):
    w = Workload.parse(text.replace("=d[", f"={dtype}["))
    tensors = w.operator.examples(w, "random", 0, "cpu")
    out = vendor(w)(*tensors)
    ((value, tolerance),) = truth_and_tolerance(w, tensors)
    lo, hi = bounds(value, tolerance, out.dtype)
    assert ((out >= lo) & (out <= hi)).all()
    if dtype == "f32":  # and the bound is within two decimal digits of what is needed
        used = (out.double() - value).abs() / tolerance.clamp_min(1e-300)
        assert used.max() > 0.01


def lane_sums(x, lanes):
    """Sequential sums in so many lanes, joined by a tree."""
    steps = -(-x.shape[1] // lanes)
    x = torch.nn.functional.pad(x, (0, steps * lanes - x.shape[1])).reshape(-1, steps, lanes)
    total = torch.zeros(x.shape[0], lanes)
    for i in range(steps):
        total += x[:, i]
    while total.shape[1] > 1:
        total = total[:, ::2] + total[:, 1::2]
    return total


def two_pass(x, lanes):
    mean = lane_sums(x, lanes) / x.shape[1]
    return mean, lane_sums((x - mean).square(), lanes) / x.shape[1]


def shifted(x, lanes):
    shift = x[:, :1]
    mean = lane_sums(x - shift, lanes) / x.shape[1]
    return shift + mean, lane_sums((x - shift).square(), lanes) / x.shape[1] - mean.square()


def welford(x, lanes):
    steps = x.shape[1] // lanes
    x = x.reshape(-1, steps, lanes)
    mean, squares, count = torch.zeros(x.shape[0], lanes), torch.zeros(x.shape[0], lanes), steps
    for i in range(steps):
        delta = x[:, i] - mean
        mean = mean + delta / (i + 1)
        squares = squares + delta * (x[:, i] - mean)
    while mean.shape[1] > 1:
        a, b = mean[:, ::2], mean[:, 1::2]
        squares = squares[:, ::2] + squares[:, 1::2] + (b - a).square() * (count / 2)
        mean, count = a + (b - a) / 2, count * 2
    return mean, squares / count


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
@pytest.mark.parametrize(
    ("moments", "lanes"), [(two_pass, 8), (two_pass, 256), (shifted, 256), (welford, 32)]
)
def test_every_usual_way_to_find_a_variance_passes(moments, lanes, dtype):
    w = Workload.parse(f"layer_norm(x={dtype}[16,5120], weight={dtype}[5120])")

    def executable(x, weight):
        mean, var = moments(x.float(), lanes)
        return ((x.float() - mean) * torch.rsqrt(var + 1e-5) * weight.float()).to(x.dtype)

    assert Verifier(w, CPU).check(executable).message == ""


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_an_online_softmax_passes(dtype):
    w = Workload.parse(f"softmax(x={dtype}[16,5120])")

    def executable(x):
        wide, lanes = x.float(), 32
        lane = wide.reshape(16, -1, lanes)
        most, total = torch.full((16, lanes), -math.inf), torch.zeros(16, lanes)
        for i in range(lane.shape[1]):
            new = torch.maximum(most, lane[:, i])
            safe = new.nan_to_num(neginf=0.0)
            total = total * torch.exp(most - safe) + torch.exp(lane[:, i] - safe)
            most = new
        row = most.amax(1, keepdim=True)
        total = lane_sums(total * torch.exp(most - row), 1)
        return (torch.exp2((wide - row) * math.log2(math.e)) / total).to(x.dtype)

    assert Verifier(w, CPU).check(executable).message == ""


# --- operands rounded to TF32 ---------------------------------------------------------------------


def weight_gradient(x, grad):
    shape = (grad.shape[1], x.shape[1], 1, 1)
    like = x.new_empty(1).expand(shape)
    sizes = (None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1, (False, True, False))
    pairs = Pair(grad.double()), Pair(x.double()), Pair(like.double())
    return RULES["convolution_backward"](TF32, *pairs, *sizes)[1]


def test_tf32_is_fp32_whose_last_bits_were_rounded():
    given = torch.tensor([1.0, 1 + 2**-11, 1 + 2**-11 - 2**-23, -1 - 2**-11, 3e38, math.inf])
    expected = torch.tensor([1.0, 1 + 2**-10, 1.0, -1 - 2**-10, 3e38, math.inf])
    assert torch.equal(rounded_to_tf32(given)[[0, 1, 2, 3, 5]], expected[[0, 1, 2, 3, 5]])
    assert rounded_to_tf32(torch.tensor([math.nan])).isnan().all()
    assert rounded_to_tf32(given[4:5]).view(torch.int32) & 0x1FFF == 0


@pytest.mark.parametrize("same_sign", [False, True])
@pytest.mark.parametrize("rounds", [False, True])
def test_operands_rounded_or_truncated_to_tf32_stay_within_the_bound(same_sign, rounds):
    x, grad = torch.randn(8, 16, 20, 20), torch.randn(8, 24, 20, 20)
    if same_sign:
        x, grad = x.abs(), grad.abs()
    found = weight_gradient(x, grad)
    narrow = rounded_to_tf32 if rounds else truncated_to_tf32
    of_narrow = weight_gradient(narrow(x), narrow(grad)).value
    off = (of_narrow - found.value).abs() / (SAFETY * TF32.u * found.error)
    assert 0.0 < off.max() < 1.0
    # One lost pixel in 3200 is seen.
    lost = weight_gradient(x[:, :, :, 1:], grad[:, :, :, 1:]).value
    assert ((lost - found.value).abs() > 4 * SAFETY * TF32.u * found.error).any()


def truncated_to_tf32(t):
    return (t.view(torch.int32) & ~0x1FFF).view(torch.float32)


def test_integers_are_exact_in_tf32_up_to_eleven_bits():
    ones = torch.ones(1, 4, 2, 2)
    assert weight_gradient(2048 * ones, ones).error is None
    assert weight_gradient(2049 * ones, ones).error is not None
