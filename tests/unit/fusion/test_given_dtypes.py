"""What a fused function makes of its tensors' dtypes, though halves are traced in fp32."""

import math

import pytest
import torch
from fused_on_cpu import assert_verified

import tilewright as tw
from tilewright.compile import cxx
from tilewright.errors import NoImplementation
from tilewright.op import Workload

pytestmark = [
    pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing())),
    pytest.mark.usefixtures("forgets_functions"),
]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def masked_by_the_least(x):
    y = x + 0
    return y.masked_fill(y.isnan(), torch.finfo(y.dtype).min)


def factor_of_a_dtype(x):
    return x * {torch.float16: 2, torch.bfloat16: 3.0}.get(x.dtype, 5)


def rounded_where_the_weight_is_a_half(x):
    """As transformers' T5LayerNorm has it."""
    y = x.to(torch.float32).square()
    if x.dtype in (torch.float16, torch.bfloat16):
        y = y.to(x.dtype)
    return y - 1


def written_at_places(x):
    y = x + 0
    y[:, 0] = torch.finfo(y.dtype).min
    return y


def without_a_bound_of_halves(x):
    return x.clamp(min=0.0 if x.dtype == torch.float32 else None, max=1.0)


def summed_in_fp64_of_halves(x):
    return x.nan_to_num(0, 1, 2).sum(-1, dtype=None if x.dtype == torch.float32 else torch.float64)


def cast_and_written_to(x):
    y = x + 0
    wide = y.float()
    wide.mul_(2)
    return wide + y


FUNCTIONS = {
    "nan_to_num": lambda x: x.nan_to_num(),
    "of_what_was_computed": lambda x: torch.nan_to_num(x * 1, 2.0, neginf=-7.0),
    "of_fp32": lambda x: x.float().nan_to_num(),
    "masked_by_the_least": masked_by_the_least,
    "factor_of_a_dtype": factor_of_a_dtype,
    "rounded_where_the_weight_is_a_half": rounded_where_the_weight_is_a_half,
    "written_at_places": written_at_places,
    "without_a_bound_of_halves": without_a_bound_of_halves,
    "summed_in_fp64_of_halves": summed_in_fp64_of_halves,
    "cast_and_written_to": cast_and_written_to,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers_that_follow_from_a_dtype_are_those_of_the_dtype_that_was_given(name, dtype):
    function = FUNCTIONS[name]
    x = torch.tensor([1.0, -3.0, math.inf, -math.inf, math.nan, 0.0], dtype=dtype).repeat(2, 1)
    own, right = tw.fuse(function, name=name)(x), function(x)
    assert own.dtype == right.dtype
    torch.testing.assert_close(own, right, equal_nan=True)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    tw.fuse(function, name=name)(leaves[0]).sum().backward()
    function(leaves[1]).sum().backward()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_what_is_widened_may_be_written_to(dtype):
    def centred(x):
        wide = x.float()
        wide -= 1
        return wide * x

    x = torch.randn(5, 33, dtype=dtype)
    torch.testing.assert_close(tw.fuse(centred)(x), centred(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "shift"), [(1, 1), (4, 0), (4, 4), (4, 1)])
def test_a_roll_that_moves_nothing_is_a_step_like_others(size, shift, dtype):
    rolled = tw.fuse(lambda x: torch.roll(x, shift, 0) * x, name="rolled")
    x = torch.randn(size, 8).to(dtype).requires_grad_()
    found, expected = rolled(x), torch.roll(x, shift, 0) * x
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(y.sum(), x)[0] for y in (found, expected)]
    torch.testing.assert_close(*grads)


def test_a_cast_of_what_is_wide_is_none_of_halves():
    """bf16 has numbers that fp16 does not hold."""

    def narrowed_where_it_is_wide(x):
        y = x * 4e4
        return (y.half() if y.dtype == torch.float32 else y) / 4e4

    x = torch.randn(5, 33, dtype=torch.bfloat16)
    own, right = tw.fuse(narrowed_where_it_is_wide)(x), narrowed_where_it_is_wide(x)
    assert own.dtype == right.dtype
    torch.testing.assert_close(own, right)


ROUNDED = {
    "error_of_a_cast": lambda x, like: x - x.to(like.dtype).float(),
    "error_of_a_cast_as_another": lambda x, like: x - x.type_as(like),
    "rounded_and_returned": lambda x, like: x.to(like).float(),
    "rounded_twice": lambda x, like: (x.to(like.dtype).float() * 3).to(like.dtype).double() + x,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ROUNDED)
def test_what_is_cast_to_a_dtype_that_was_given_is_rounded_to_it(name, dtype):
    function, like = ROUNDED[name], torch.ones((), dtype=dtype)
    x = torch.randn(5, 33)
    own, right = tw.fuse(function, name=name)(x, like), function(x, like)
    assert own.dtype == right.dtype
    torch.testing.assert_close(own, right, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_kernels_of_both_targets_have_these_numbers(dtype):
    tw.fuse(masked_by_the_least)
    assert_verified(Workload.parse(f"masked_by_the_least(x={dtype}[9,40])"))


def other_steps_for_halves(x):
    y = x * 2
    if x.dtype == torch.float32:
        return y.exp()
    return y.sin()


def one_more_step_for_halves(x):
    y = x * 2
    return y if x.dtype == torch.float32 else y.sin()


def one_step_less_for_halves(x):
    y = x * 2
    return y.sin() if x.dtype == torch.float32 else y


def other_operands_for_halves(x):
    y = x * 2
    return x - y.exp() if x.dtype == torch.float32 else y.exp() - x


def whole_numbers_of_halves(x):
    y = x * 2
    return (y if x.dtype == torch.float32 else y.to(torch.int32)) * 0.5


def other_arguments_for_halves(x):
    y = x * 2
    return y.var(-1) if x.dtype == torch.float32 else y.var(-1, correction=0)


@pytest.mark.parametrize(
    "function",
    [
        other_steps_for_halves,
        one_more_step_for_halves,
        one_step_less_for_halves,
        other_operands_for_halves,
        whole_numbers_of_halves,
        other_arguments_for_halves,
    ],
)
def test_other_steps_for_halves_are_refused_with_their_line_or_left_to_pytorch(function):
    fused, x = tw.fuse(function), torch.randn(3, 5)
    torch.testing.assert_close(fused(x), function(x))
    for given in (x.half(), x.bfloat16().requires_grad_()):
        with pytest.raises(NoImplementation, match=r"dtype.*test_given_dtypes\.py:\d+.*fallback="):
            fused(given)
    left = tw.fuse(function, name="left_to_pytorch", fallback=True)
    assert torch.equal(left(x.half()), function(x.half()))


def computed_and_read_through_its_cast(x):
    y = x * 1
    y.half().mul_(2)
    return y


def written_through_a_view_of_a_cast(x):
    y = x * 1
    y.view(-1).to(torch.float16)[:2] = 7
    return y.sum(-1)


def cast_and_read_after_a_write(x):
    y = x * 1
    z = y.type(torch.float16)
    y.mul_(2)
    return z


def argument_behind_a_cast(x):
    y = x.half()
    y += 1
    return y


@pytest.mark.parametrize(
    "function",
    [
        computed_and_read_through_its_cast,
        written_through_a_view_of_a_cast,
        cast_and_read_after_a_write,
        argument_behind_a_cast,
    ],
)
def test_a_write_to_a_half_that_a_cast_gave_as_it_was_is_refused_where_both_are_needed(function):
    fused, x = tw.fuse(function), torch.randn(3, 5)
    for other in (x, x.bfloat16()):
        torch.testing.assert_close(fused(other), function(other))
    with pytest.raises(NoImplementation, match=r"one tensor.*test_given_dtypes\.py:\d+.*clone\(\)"):
        fused(x.half())


def test_a_write_to_a_half_that_a_cast_gave_as_it_was_is_taken_where_one_is_needed():
    def cast_and_written_to(x):
        y = (x * 2).half()
        y += 1
        z = y.half().clone()
        z[0] = 3
        return y, z

    x = torch.randn(3, 5).half()
    torch.testing.assert_close(tw.fuse(cast_and_written_to)(x), cast_and_written_to(x))
