"""What an index covers of a wider tensor, and what lies beyond, as the kernels are told of it."""

import math
import re

import torch
from hypothesis import given
from hypothesis import strategies as st

from indexing import shapes
from tilewright.impls.indices.elements._boxes import beyond, box_of
from tilewright.tensor_spec import TensorSpec


def evaluated(expression, **values):
    """A C++ expression of unsigned integers, with conditions in front of one another."""
    plain = re.sub(r"(\d)u(ll)?\b", r"\1", expression.removeprefix("(").removesuffix(")"))
    *choices, otherwise = plain.replace("/", "//").split(" : ")
    for choice in choices:
        condition, value = choice.split(" ? ")
        if eval(condition, {}, values):
            return eval(value, {}, values)
    return eval(otherwise, {}, values)


@st.composite
def covered(draw):
    """x, an index that is no wider but along the dim, and that dim."""
    shape = draw(shapes(300))
    dim = draw(st.integers(0, len(shape) - 1))
    index = [draw(st.integers(max(1, n - 3), n)) for n in shape]
    index[dim] = draw(st.integers(1, 9))
    align = draw(st.sampled_from([4, 8, 256]))
    return TensorSpec("f32", tuple(shape), align=align), TensorSpec("i64", tuple(index)), dim


@given(covered())
def test_a_box_and_what_lies_beyond_are_all_of_x_each_once(given_):
    x, index, dim = given_
    rows = x.shape[dim]
    box, rest = box_of(x, index, dim, rows), beyond(x, index, dim)
    outer, inner = math.prod(index.shape[:dim]), math.prod(index.shape[dim + 1 :])
    numbers = [
        evaluated(box.address, slice=o, row=r, column=c)
        for o in range(outer)
        for r in range(rows)
        for c in range(inner)
    ]
    elements = torch.arange(x.numel).view(x.shape)
    narrow = [slice(n if d != dim else rows) for d, n in enumerate(index.shape)]
    assert numbers == elements[tuple(narrow)].flatten().tolist()
    assert not box.dense or numbers == list(range(len(numbers)))
    assert (
        box.dense
        or index.shape[:dim] != x.shape[:dim]
        or index.shape[dim + 1 :] != x.shape[dim + 1 :]
    )
    found = []
    if rest is not None:
        macros = rest.macros
        assert rest.vector * 4 <= min(x.align, 16)
        for i in range(rest.ends[-1]):
            start = evaluated(macros["BEYOND_AT(i)"], i=i)
            assert start % rest.vector == 0
            found += range(start, start + rest.vector)
    assert sorted(numbers + found) == list(range(x.numel))
    assert (rest is None) == (not found)
