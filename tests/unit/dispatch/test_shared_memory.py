"""Tensors written in place that have memory of one that is read: one error, whatever runs."""

import contextlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewright as tw
from tilewright.impls._in_place import refuse_shared


def calls(index):
    """In-place forms that move `src` by `index`, one of rows or of elements."""
    columns = index[:, None].repeat(1, 8)
    yield "index_add", lambda x, src: tw.index_add_(x, 0, index, src)
    yield "index_reduce", lambda x, src: tw.index_reduce_(x, 0, index, src, "amax")
    yield "scatter", lambda x, src: tw.scatter_(x, 0, columns, src)
    yield "scatter_add", lambda x, src: tw.scatter_add_(x, 0, columns, src)
    yield "scatter_reduce", lambda x, src: tw.scatter_reduce_(x, 0, columns, src, "prod")


SERVED = {
    None: [name for name, _ in calls(torch.zeros(1, dtype=torch.int64))],
    "aten": [name for name, _ in calls(torch.zeros(1, dtype=torch.int64))],
    "rows_cpp": ["index_add", "index_reduce"],
    "sums_widened": ["index_add", "scatter_add", "scatter_reduce"],
}


@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("forced", SERVED)
def test_it_is_refused_in_the_same_words(forced, dtype, differentiable):
    if forced == "sums_widened" and dtype == torch.float32:
        pytest.skip("it sums halves")
    x, index = torch.randn(40, 8).to(dtype), torch.randint(20, (20,))
    for name, call in calls(index):
        if name not in SERVED[forced]:
            continue
        moved = "src" if name.startswith("scatter") else "source"
        words = f"^{name}: x is written in place and shares memory with {moved}; clone {moved}"
        memory = x.clone().requires_grad_(differentiable) * 1
        with tw.use(forced) if forced else contextlib.nullcontext():
            for _ in range(2):  # anew, then prepared
                with pytest.raises(tw.SharedMemory, match=words):
                    call(memory[5:25], memory[:20])
            with pytest.raises(RuntimeError, match="shares memory"):  # as PyTorch raises
                call(memory[:20], memory[:20])
            assert torch.equal(memory, x)


@pytest.mark.parametrize("forced", [None, "aten", "rows_cpp"])
def test_what_lies_between_or_beside_is_no_part_of_it(forced):
    index = torch.randint(20, (20,))
    views = {
        "above": lambda m: (m[:20, :8], m[20:, :8]),
        "left": lambda m: (m[:20, :8], m[:20, 8:]),
        "even": lambda m: (m[:20, ::2], m[:20, 1::2]),
    }
    for name, call in calls(index):
        if name not in SERVED[forced]:
            continue
        for which, view in views.items():
            if (forced, which) == ("rows_cpp", "even"):
                continue  # it takes rows without gaps
            memory = torch.randn(40, 16)
            x, src = (t.clone() for t in view(memory))
            with tw.use(forced) if forced else contextlib.nullcontext():
                torch.testing.assert_close(call(*view(memory)), call(x, src))


def test_an_index_that_is_written_to_is_refused_too():
    x, ones = torch.arange(10), torch.ones(10, dtype=torch.int64)
    for call in (lambda: tw.scatter_(x, 0, x, 7), lambda: tw.index_add_(x, 0, x, ones)):
        with pytest.raises(tw.SharedMemory, match="shares memory with index; clone index"):
            call()
    assert torch.equal(x, torch.arange(10))


X, GRAD, WEIGHT = (2, 4, 5, 5), (2, 6, 5, 5), (6, 4, 3, 3)
DETOURS = ("contiguous", "channels_last", "per_image")


def lying_at(memory, start, shape):
    return memory[start : start + math.prod(shape)].view(shape)


@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("forced", [None, "aten", *(f"conv2d_weight_grad_{d}" for d in DETOURS)])
@pytest.mark.parametrize(
    ("into_at", "bias_at", "words"),
    [
        (600, 610, "into is written in place and shares memory with into_bias; clone into_bias"),
        (100, 900, "into is written in place and shares memory with x; clone x"),
        (300, 900, "into is written in place and shares memory with grad_output; clone grad_outp"),
        (600, 0, "into_bias is written in place and shares memory with x; clone x"),
        (600, 499, "into_bias is written in place and shares memory with grad_output"),
        (600, 816, None),
    ],
)
def test_gradients_that_are_added_to_lie_apart(forced, into_at, bias_at, words, differentiable):
    numbers = torch.randn(1000)
    memory = numbers.clone().requires_grad_(differentiable) * 1
    given = {"x": lying_at(memory, 0, X), "grad_output": lying_at(memory, 200, GRAD)}
    into = {"into": lying_at(memory, into_at, WEIGHT)}
    both = {**into, "into_bias": lying_at(memory, bias_at, (6,))}
    calls = {"conv2d_weight_bias_grad": (tw.conv2d_weight_bias_grad_, both)}
    if into_at < 600:
        calls["conv2d_weight_grad"] = tw.conv2d_weight_grad_, into
    for name, (call, written) in calls.items():
        with tw.use(forced) if forced else contextlib.nullcontext():
            for _ in range(2):  # anew, then prepared
                if words is None:
                    call(**given, kernel_size=3, padding=1, **written)
                    continue
                with pytest.raises(tw.SharedMemory, match=f"^{name}: {words}"):
                    call(**given, kernel_size=3, padding=1, **written)
    assert torch.equal(memory, numbers) == (words is not None)


@st.composite
def strided(draw):
    sizes = draw(st.lists(st.integers(1, 4), max_size=3))
    strides = [draw(st.integers(0, 12)) for _ in sizes]
    return sizes, strides, draw(st.integers(0, 12))


@settings(max_examples=600)
@given(strided(), strided())
def test_no_tensors_with_an_element_in_common_pass(mine, other):
    memory = torch.arange(200, dtype=torch.int32)
    a, b = (memory.as_strided(*layout) for layout in (mine, other))
    if set(a.flatten().tolist()) & set(b.flatten().tolist()):
        with pytest.raises(tw.SharedMemory):
            refuse_shared("scatter_", "x", a, src=b)
