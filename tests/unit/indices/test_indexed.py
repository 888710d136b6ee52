"""Operators with an index tensor: against a loop over positions, and what their indices are."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.errors import InvalidArgument
from tilewright.indexed import DISTRIBUTIONS, draw, expected_distinct
from tilewright.op import OPS, Workload
from tilewright.suite import SUITES

INDEXED = [name for name in OPS if OPS[name].indexed]
DTYPES = ("f16", "bf16", "f32", "f64", "i32", "i64")
ROUNDED = (("prod", "f16"), ("prod", "bf16"))
"""PyTorch rounds at each of up to ten factors, or leaves the range."""
REDUCTIONS = {
    "sum": sum,
    "prod": math.prod,
    "mean": lambda terms: sum(terms) / len(terms),
    "amax": max,
    "amin": min,
}


def sequentially(x, dim, index, src, reduce, include_self):
    """Position by position, in Python numbers."""
    own = {place: [x[place].item()] for place in itertools.product(*map(range, x.shape))}
    hit = {}
    for position in itertools.product(*map(range, index.shape)):
        place = (*position[:dim], int(index[position]), *position[dim + 1 :])
        hit.setdefault(place, []).append(src[position].item())
    out = x.double().clone() if x.is_floating_point() else x.clone()
    for place, terms in hit.items():
        if reduce == "last":
            out[place] = terms[-1]
        else:
            value = REDUCTIONS[reduce]((own[place] if include_self else []) + terms)
            out[place] = value if x.is_floating_point() else math.floor(value)
    return out


@st.composite
def elementwise(draw):
    """Shapes of x, index and src for scatter and its kin, with the rest of a workload's text."""
    rank = draw(st.integers(1, 6))
    dim = draw(st.integers(-rank, rank - 1))
    x = draw(st.lists(st.integers(1, 3), min_size=rank, max_size=rank))
    index = [draw(st.integers(1, n)) for n in x]
    index[dim] = draw(st.integers(1, 4))
    src = [n + draw(st.integers(0, 1)) for n in index]
    dtype, kind = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(("i32", "i64")))
    spread = draw(st.sampled_from(DISTRIBUTIONS))
    text = f"x={dtype}{x}, dim={dim}, index={kind}{index}, src={dtype}{src}".replace(" ", "")
    return text.replace(",dim", ", dim"), spread


@settings(max_examples=60)
@given(elementwise(), st.sampled_from(["last", *REDUCTIONS]), st.booleans())
def test_the_exact_result_is_that_of_a_loop_over_positions(drawn, reduce, include_self):
    text, spread = drawn
    op = {"last": "scatter", "sum": "scatter_add"}.get(reduce, "scatter_reduce")
    more = "" if op != "scatter_reduce" else f", reduce={reduce}, include_self={include_self}"
    w = Workload.parse(f"{op}({text}{more})!indices={spread}")
    x, index, src = w.operator.examples(w, "integer", 0, "cpu")
    if op == "scatter_add":
        include_self = True
    expected = sequentially(x, w["dim"], index, src, reduce, include_self)
    torch.testing.assert_close(w.operator.truth(w, [x, index, src])[0], expected)
    if x.is_floating_point():  # PyTorch's integer means round towards zero on some devices
        found = w.operator.reference(**w.call([x, index, src]))
        torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=0.02)


@st.composite
def rows(draw):
    """The same for index_add and its kin, whose flat index may be longer than x."""
    rank = draw(st.integers(1, 6))
    dim = draw(st.integers(-rank, rank - 1))
    x = draw(st.lists(st.integers(1, 3), min_size=rank, max_size=rank))
    x[dim] = draw(st.integers(1, 5))
    source = list(x)
    source[dim] = draw(st.integers(1, 9))
    dtype, kind = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(("i32", "i64")))
    spread = draw(st.sampled_from(DISTRIBUTIONS))
    text = f"x={dtype}{x}, dim={dim}, index={kind}[{source[dim]}], source={dtype}{source}"
    return text, spread


@settings(max_examples=60)
@given(rows(), st.sampled_from([*REDUCTIONS]), st.booleans())
def test_rows_are_reduced_as_a_loop_over_positions_does(drawn, reduce, include_self):
    text, spread = drawn
    op = "index_add" if reduce == "sum" else "index_reduce"
    more = "" if reduce == "sum" else f", reduce={reduce}, include_self={include_self}"
    w = Workload.parse(f"{op}({text}{more})!indices={spread}")
    x, index, source = w.operator.examples(w, "integer", 0, "cpu")
    line = [1] * x.dim()
    line[w["dim"]] = -1
    everywhere = index.view(line).expand(source.shape)
    include_self = include_self or reduce == "sum"
    expected = sequentially(x, w["dim"], everywhere, source, reduce, include_self)
    torch.testing.assert_close(w.operator.truth(w, [x, index, source])[0], expected)
    if x.is_floating_point() and (reduce, w["x"].dtype) not in ROUNDED:
        found = w.operator.reference(**w.call([x, index, source]))
        torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("padding", [-1, 2])
def test_an_embeddings_gradient_is_that_of_autograd(scaled, padding):
    text = f"num_weights=9, padding_idx={padding}, scale_grad_by_freq={scaled}"
    w = Workload.parse(f"embedding_backward(grad=f64[4,6,5], index=i64[4,6], {text})")
    grad, index = w.operator.examples(w, "random", 0, "cpu")
    table = torch.nn.Embedding(
        9, 5, None if padding < 0 else padding, scale_grad_by_freq=scaled, dtype=torch.float64
    )
    table(index).backward(grad)
    torch.testing.assert_close(w.operator.truth(w, [grad, index])[0], table.weight.grad)


@settings(max_examples=60)
@given(
    st.sampled_from(DISTRIBUTIONS),
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.integers(1, 20),
    st.integers(0, 5),
)
def test_indices_are_in_range_and_of_their_kind(spread, shape, size, seed):
    generator = torch.Generator().manual_seed(seed)
    index = draw(spread, shape, 0, size, generator, "cpu")
    assert tuple(index.shape) == tuple(shape)
    assert index.dtype == torch.int64
    assert 0 <= int(index.min()) <= int(index.max()) < size
    columns = index.reshape(shape[0], -1)
    if spread == "sorted":
        assert (columns.diff(dim=0) >= 0).all()
    if spread == "unique" and shape[0] <= size:
        assert all(len(set(c.tolist())) == shape[0] for c in columns.T)
    if spread == "constant":
        assert len(set(index.flatten().tolist())) == 1


@pytest.mark.parametrize("asked", ["unique", "balanced"])
@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("index_add(x=f32[20,4], dim=0, index=i64[20], source=f32[20,4])", "unique"),
        ("index_add(x=f32[20,4], dim=0, index=i64[60], source=f32[60,4])", "balanced"),
        ("scatter(x=f32[20,4], dim=0, index=i64[20,4], src=2.0)", "unique"),
        ("scatter(x=f32[20,4], dim=0, index=i64[21,4], src=2.0)", "balanced"),
        ("gather(x=f32[20,4], dim=-1, index=i32[20,12])", "balanced"),
        ("gather(x=f32[], dim=0, index=i64[])", "unique"),
        ("embedding_backward(grad=f32[5,8,4], index=i64[5,8], num_weights=40)", "unique"),
        ("embedding_backward(grad=f32[5,8,4], index=i64[5,8], num_weights=10)", "balanced"),
    ],
)
def test_indices_are_called_unique_where_none_repeats_and_balanced_where_all_do(text, name, asked):
    w = Workload.parse(f"{text}!indices={asked}")
    assert w.distribution == name
    assert str(w) == f"{Workload.parse(text)}!indices={name}"
    index = dict(zip(w.tensors, w.operator.examples(w, "random", 0, "cpu"), strict=True))["index"]
    along = w.operator.name in ("scatter", "gather") and index.dim() > 1
    lines = index.movedim(w["dim"], 0).unbind(1) if along else [index]
    for line in lines:
        often = line.unique(return_counts=True)[1]
        assert (often.max() == 1) == (name == "unique")
        assert often.max() - often.min() <= 1


def test_a_suite_whose_tokens_each_have_eight_rows_is_balanced():
    for w in SUITES["scatter_moe"].workloads():
        assert w.distribution == "balanced"
        assert w["index"].numel == 8 * w["x"].shape[0]


@pytest.mark.parametrize("spread", DISTRIBUTIONS)
def test_the_places_hit_are_as_many_as_expected(spread):
    generator = torch.Generator().manual_seed(0)
    index = draw(spread, (3000,), 0, 4000, generator, "cpu")
    assert index.unique().numel() == pytest.approx(expected_distinct(spread, 3000, 4000), rel=0.05)


def test_a_seed_fixes_the_indices_and_the_distribution_is_part_of_the_workload():
    text = "index_add(x=f32[50,4], dim=0, index=i64[90], source=f32[90,4])"
    uniform, zipf = Workload.parse(text), Workload.parse(f"{text}!indices=zipf")
    assert (uniform.distribution, zipf.distribution) == ("uniform", "zipf")
    assert uniform != zipf
    first, again, other = (zipf.operator.examples(zipf, "random", s)[1] for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert Workload.parse("softmax(x=f32[4,8])").distribution is None


def test_in_place_only_the_rows_that_are_hit_count_as_traffic():
    text = "index_add(x=f32[1000,64], dim=0, index=i64[5000], source=f32[5000,64])"
    read, written = Workload.parse(f"{text}!donate=x!indices=constant").bytes
    assert (read, written) == (5000 * 8 + 5000 * 256 + 256, 256)
    assert Workload.parse(f"{text}!indices=constant").bytes[1] == 1000 * 256


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scatter(x=f32[4,5], dim=2, index=i64[4,5], src=f32[4,5])", "dim=2 is out of range"),
        ("scatter(x=f32[4,5], dim=0, index=f32[4,5], src=f32[4,5])", "index is f32, expected i64"),
        ("scatter(x=f32[4,5], dim=0, index=i64[4], src=f32[4,5])", "differ in rank"),
        ("scatter(x=f32[4,5], dim=0, index=i64[4,6], src=f32[4,6])", "exceeds x [4, 5] in dim 1"),
        ("scatter_add(x=f32[4,5], dim=0, index=i64[4,5], src=f32[3,5])", "exceeds src [3, 5]"),
        ("scatter_add(x=f32[4], dim=0, index=i64[4], src=f64[4])", "src is f64, but x is f32"),
        ("gather(x=f32[4], dim=0, index=i64[4])!indices=wide", "'!indices=wide' should be one of"),
        (
            "scatter_reduce(x=f32[4], dim=0, index=i64[4], src=f32[4], reduce=max)",
            "unknown reduce=max; did you mean amax? known: sum, prod, mean, amax, amin",
        ),
        (
            "index_add(x=f32[4,5], dim=0, index=i64[7], source=f32[6,5])",
            "source has shape [6, 5], but x [4, 5] and 7 indices along dim=0 need [7, 5]",
        ),
        ("index_add(x=f32[4], dim=0, index=i64[2,2], source=f32[4])", "expected one dim"),
        (
            "embedding_backward(grad=f32[4,5], index=i64[5], num_weights=3)",
            "grad is one dim longer than index",
        ),
        ("softmax(x=f32[4])!indices=zipf", "is for operators with an index tensor"),
    ],
)
def test_a_call_that_pytorch_would_refuse_is_refused_in_words(text, message):
    with pytest.raises(InvalidArgument) as caught:
        Workload.parse(text)
    assert message in str(caught.value)


def test_no_example_can_be_made_where_there_is_no_place():
    w = Workload.parse("index_add(x=f32[0,4], dim=0, index=i64[3], source=f32[3,4])")
    with pytest.raises(InvalidArgument, match="there is no place that an index could name"):
        w.operator.examples(w, "random")
