"""Workloads that differ in sizes alone: what follows from others is what a trace gives."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.nn import functional as F

import tilewright as tw
from random_graphs import (
    KINDS_OF_STEPS,
    MANY_MOVES,
    MANY_VIEWS,
    RARE_STEPS,
    forget,
    gradients_of,
    programs,
    run_examples,
    workload,
)
from tilewright.compile import cxx
from tilewright.dispatch.seeding import draws
from tilewright.errors import TilewrightError
from tilewright.fusion.frontend import families, symbolic, trace
from tilewright.fusion.frontend.families import SEEN_BEFORE, Family, outputs_of
from tilewright.fusion.frontend.lower import lower
from tilewright.fusion.frontend.reach import reached
from tilewright.fusion.frontend.varying import NotOfSizes, Sizes
from tilewright.impls.fused import graph_of
from tilewright.op import OPS, Workload
from tilewright.tensor_spec import TensorSpec

OTHERS = (2, 4, 5, 6, 7, 9, 16, 17, 25, 64)


@pytest.fixture(autouse=True)
def _forgotten(forgets_functions):
    families.forget()
    yield
    forget()
    families.forget()


@pytest.fixture
def traced(monkeypatch):
    """The workloads that were traced."""
    found = []

    def noted(w, *args, **kwargs):
        found.append(w)
        return run(w, *args, **kwargs)

    run = trace.traced
    monkeypatch.setattr(trace, "traced", noted)
    monkeypatch.setattr("tilewright.fusion.frontend.symbolic.traced", noted)
    return found


def resized(spec, sizes):
    """The layout with other sizes: strides in the same order, gaps as they were."""
    shape = tuple(sizes.get(n, n) for n in spec.shape)
    if spec.strides is None:
        return TensorSpec(spec.dtype, shape)
    inner_first = sorted(
        (d for d, s in enumerate(spec.strides) if s), key=lambda d: (spec.strides[d], spec.shape[d])
    )
    strides, step = [0] * len(shape), min((s for s in spec.strides if s), default=1)
    for d in inner_first:
        strides[d] = step
        step *= shape[d]
    return TensorSpec(spec.dtype, shape, tuple(strides))


def follows(function, w):
    """Whether its result is made of others'."""
    family = families._family_of(w)
    return family is not None and family[0].makers.get((function, ())) is not None


def told(function, *args):
    try:
        return function(*args)
    except TilewrightError as error:
        return type(error)


@pytest.mark.parametrize("kinds", [KINDS_OF_STEPS, MANY_MOVES, MANY_VIEWS, RARE_STEPS])
@pytest.mark.parametrize("of", [lambda w: w, gradients_of], ids=["forward", "gradients"])
def test_what_follows_from_other_sizes_is_what_a_trace_gives(kinds, of):
    followed = 0

    @given(programs(kinds=kinds, most_steps=8), st.data())
    def check(program, data):
        nonlocal followed
        there = sorted({n for s in program.specs for n in s.shape if n > 1})
        if not there:
            return
        some = data.draw(st.lists(st.sampled_from(there), min_size=1, max_size=2, unique=True))
        first = workload(program)
        for _ in range(8):
            sizes = {n: data.draw(st.sampled_from(OTHERS)) for n in some}
            specs = zip(first.tensors, (resized(s, sizes) for s in program.specs), strict=False)
            try:
                w = of(first.with_args(**dict(specs)))
            except TilewrightError:  # of these sizes the steps do not fit
                continue
            known = follows(lower, w)
            for function in (lower, outputs_of, draws):
                assert repr(told(function, w)) == repr(told(function.__wrapped__, w)), (function, w)
            followed += known

    run_examples(check, 12, shrink=False)
    assert followed > 3


def normalised(x, r, w, b):
    return F.layer_norm(x + r, x.shape[-1:], w, b)


def call(function, rows, width=24):
    """What the function gives, and PyTorch, with gradients."""
    generator = torch.Generator().manual_seed(rows)
    x, r, *of_columns = (
        torch.randn(*shape, generator=generator, requires_grad=True)
        for shape in ((rows, width), (rows, width), (width,), (width,))
    )
    for f in (function, normalised):
        out = f(x, r, *of_columns)
        yield out, *torch.autograd.grad(out, (x, r, *of_columns), torch.ones_like(out) / 7)


@pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))
def test_new_row_counts_are_not_traced(traced, records_of_its_own):
    fused = tw.fuse(normalised, name="of_many_rows")
    for rows in range(3, 3 + SEEN_BEFORE + 1):
        torch.testing.assert_close(*call(fused, rows))
    traced.clear()
    for rows in (40, 7, 1000, 33, 2):
        torch.testing.assert_close(*call(fused, rows), rtol=1e-4, atol=1e-4)
    assert not traced
    torch.testing.assert_close(*call(fused, 24))  # as many rows as columns
    assert traced


def test_batches_and_lengths_may_both_vary(traced):
    text = "layer_norm(x=f16[{},{},40], weight=f16[40], bias=f16[40])"
    for sizes in ((3, 7), (4, 9), (5, 12)):
        graph_of(Workload.parse(text.format(*sizes)))
    traced.clear()
    for sizes in ((11, 13), (6, 5), (17, 300)):
        w = Workload.parse(text.format(*sizes))
        assert lower(w) == lower.__wrapped__(w)
        assert reached(w, ("x",)) == reached.__wrapped__(w, ("x",))
    symbolic, fourth, *direct = traced
    assert symbolic.tensors["x"].shape == (4, 9, 40)
    assert fourth.tensors["x"].shape == (11, 13, 40)
    assert len(direct) == 3


@pytest.mark.parametrize(
    "mean",
    [lambda x: x.mean(), lambda x: x.mean(0), lambda x: x / x.shape[0]],
    ids=["of all", "of columns", "by hand"],
)
def test_means_divide_by_the_size(traced, mean):
    op = tw.fuse(mean, name="a_mean") and OPS["a_mean"]
    for rows in (3, 5, 7, 9, 11):
        w = op.workload(x=TensorSpec("f32", (rows, 8)))
        back = gradients_of(w)
        assert (lower(w), lower(back)) == (lower.__wrapped__(w), lower.__wrapped__(back))
    assert follows(lower, w)
    assert follows(lower, back)


MEETING = [
    lambda x, y: x.var(0) * y,
    lambda x, y: x.std(0) * y,
    lambda x, y: torch.var_mean(x, 0, correction=1)[0] * y,
    lambda x, y: x[-1] * y,
]


@pytest.mark.parametrize("believed", [False, True])
@pytest.mark.parametrize("function", MEETING, ids=["var", "std", "var_mean", "last"])
def test_one_less_is_not_taken_for_a_size_that_grew_as_much(monkeypatch, function, believed):
    """From 9 to 17 rows one less grows as 4 to 8. The trace with symbols tells, and if it did not,
    the fourth workload would."""
    if believed:
        monkeypatch.setattr(families, "same_at_all_sizes", lambda *given: True)
    op = tw.fuse(function, name="one_less") and OPS["one_less"]
    for rows, others in ((100, 50), (9, 4), (17, 8), (33, 20), (41, 6), (11, 70)):
        x, y = TensorSpec("f32", (rows, 3)), TensorSpec("f32", (others, 3))
        w = op.workload(x=x, y=y)
        assert lower(w) == lower.__wrapped__(w)
        assert not follows(lower, w)
    assert (families._family_of(w) is not None) == believed


def test_two_growths_that_are_alike_tell_nothing():
    """Of 8 by 16 and 16 by 8 the product stays; of 2 by 3 and 4 by 6 both grow by 2."""
    for pairs in ([(8, 16), (16, 8)], [(2, 4), (3, 6)], [], [(n, n * n) for n in (2, 3, 5, 7, 11)]):
        with pytest.raises(NotOfSizes):
            Sizes(pairs)


def test_half_a_size_is_no_product():
    with pytest.raises(NotOfSizes):
        Sizes([(4, 6)]).varying(2, 3)


def test_a_size_of_a_trace_is_a_product_or_not():
    env = ShapeEnv()
    n, m = (
        env.create_symintnode(
            env.create_symbol(hint, ConstantSource(name), DimDynamic.DYNAMIC, None),
            hint=hint,
            source=ConstantSource(name),
        )
        for name, hint in (("n", 6), ("m", 10))
    )
    for product in (n, 8 * n, n * m * 2, torch.sym_float(n * 3), 7, 0.5):
        assert symbolic._is_product(product), product
    for other in (n + 1, n * n, n // 2, n + m, n % 4, torch.sym_float(n // 2), n / 2):
        assert not symbolic._is_product(other), other
    assert not symbolic._of_products(n < m)


def test_results_are_made_of_products_of_sizes():
    sizes = Sizes([(2, 3), (5, 11)])
    one = TensorSpec("f32", (2, 5, 10), (50, 10, 1)), ("sum", 20.0, 1, True, None, 30.0)
    other = TensorSpec("f32", (3, 11, 33), (363, 33, 1)), ("sum", 20.0, 1, True, None, 99.0)
    made = sizes.varying(one, other)([7, 13])
    assert made == (
        TensorSpec("f32", (7, 13, 91), (1183, 91, 1)),
        ("sum", 20.0, 1, True, None, 273.0),
    )
    assert sizes.varying(one, one)([7, 13]) is one


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (2, 4),
        (2, 3.0),
        (0, 3),
        (3, 0),
        (0.5, 0.25),
        (0.0, -0.0),
        (1, True),
        ((2,), (3, 3)),
        ("a", "b"),
    ],
)
def test_what_is_no_product_of_sizes_is_told(one, other):
    with pytest.raises(NotOfSizes):
        Sizes([(2, 3), (5, 11)]).varying(one, other)


def branches(x):
    return x * 2 if x.shape[0] > 64 else x + 1


def halved(x):
    return x[: x.shape[0] // 2] * 3


def but_one(x):
    return x[1:] - x[:-1]


def scaled(x):
    return x / x.shape[0] ** 0.5


def unbiased(x):
    return x.var(0)


def loops(x):
    return sum((x * k for k in range(x.shape[0] % 3)), x)


@pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))
@pytest.mark.parametrize("asks", [branches, halved, but_one, scaled, unbiased, loops])
def test_what_asks_how_large_a_dim_is_is_traced_for_each(asks, records_of_its_own):
    fused = tw.fuse(asks, name=f"which_{asks.__name__}")
    for rows in (2, 6, 4, 3, 5, 64, 65, 128, 7, 9):
        x = torch.randn(rows, 5)
        torch.testing.assert_close(fused(x), asks(x))


def test_a_width_that_is_asked_for_leaves_the_rows(traced):
    def wide(x):
        return x * 2 if x.shape[1] > 8 else x

    op = tw.fuse(wide, name="wide") and OPS["wide"]

    def graph(*shape):
        return graph_of(op.workload(x=TensorSpec("f32", shape)))

    for shape in ((3, 4), (5, 6), (7, 8), (9, 10), (11, 6), (13, 6), (15, 6), (17, 6)):
        graph(*shape)
    traced.clear()
    assert [n.op for n in graph(100, 6).nodes] == ["load"]
    assert not traced
    assert [n.op for n in graph(100, 12).nodes] != ["load"]


def test_counts_of_too_many_are_refused_at_any_size():
    def counted(x):
        return (x > 0).sum(0).float()

    tw.fuse(counted, name="counted")
    texts = [f"counted(x=f32[{rows},3])" for rows in (5, 7, 9, 11, 12, 2**24 + 2)]
    *counts, refused = (graph_of(Workload.parse(text)) for text in texts)
    assert not any(isinstance(graph, str) for graph in counts)
    assert "a count of 16777218 elements" in refused


@pytest.mark.parametrize(
    ("function", "text", "vast", "why"),
    [
        (
            lambda x, at: x.gather(1, at) * 2,
            "vast(x=f32[3,{0}], at=i64[3,1])",
            2**31,
            "an index along a dim of 2147483648 elements",
        ),
        (
            lambda x, at: x.reshape(-1).gather(0, at) * 2,
            "vast(x=f32[{0},65536], at=i64[1])",
            2**15,
            "an index along a dim of 2147483648 elements",
        ),
        (
            lambda x: torch.where(x.long() == x.shape[0], 1.0, x),
            "vast(x=f32[{0},3])",
            2**24 + 1,
            "16777217 beside whole numbers in f32",
        ),
    ],
    ids=["dim", "elements", "number"],
)
def test_sizes_that_are_refused_are_of_no_family(function, text, vast, why):
    tw.fuse(function, name="vast")
    for size in (5, 7, 9, 11, 12):
        w = Workload.parse(text.format(size))
        assert not isinstance(graph_of(w), str)
    assert follows(lower, w)
    assert why in graph_of(Workload.parse(text.format(vast)))


def test_masks_are_those_of_the_size():
    def dropped(x, r):
        return F.dropout(x, 0.25) + r

    tw.fuse(dropped, name="dropped")
    text = "dropped(x=bf16[{rows},8], r=bf16[{rows},8], seed=i64[])"
    for rows in (3, 5, 7, 9, 11):
        w = Workload.parse(text.format(rows=rows))
        assert lower(w) == lower.__wrapped__(w)
    assert follows(lower, w)
    for rows in (3, 5, 7, 9, 11):
        assert draws(Workload.parse(f"dropped(x=bf16[{rows},8], r=bf16[{rows},8])"))


def test_another_function_of_the_name_has_families_of_its_own():
    for factor in (2.0, 3.0):
        tw.fuse(lambda x, factor=factor: x * factor, name="renamed")
        for rows in (3, 5, 7, 9, 11):
            graph = graph_of(OPS["renamed"].workload(x=TensorSpec("f32", (rows, 4))))
            assert [n.attr for n in graph.nodes if n.op == "const"] == [factor]


def test_what_is_refused_is_refused_in_words_at_any_size():
    def sorted_rows(x):
        return x.sort()[0]

    tw.fuse(sorted_rows, name="sorted_rows")
    for rows in (3, 5, 7, 9, 11):
        w = OPS["sorted_rows"].workload(x=TensorSpec("f32", (rows, 4)))
        assert "sort" in graph_of(w)


def test_rows_of_one_and_none_are_not_of_a_family():
    w = [Workload.parse(f"softmax(x=f32[{rows},6])") for rows in (3, 5, 7, 9)]
    for each in w:
        lower(each)
    _, sizes = families._family_of(w[-1])
    assert sizes == (9,)
    for rows in (0, 1):
        assert families._family_of(Workload.parse(f"softmax(x=f32[{rows},6])")) is None
    with pytest.raises(NotOfSizes):
        Family(w[0], w[0])


@pytest.mark.parametrize(
    "function",
    [
        lambda x, labels: F.cross_entropy(x.tril(), labels, reduction="none"),
        lambda x, labels: x * torch.arange(x.shape[0])[:, None] + labels[:, None],
    ],
    ids=["labels", "rows"],
)
def test_positions_and_labels_of_other_sizes_follow(function):
    tw.fuse(function, name="of_positions")
    text = "of_positions(x=f32[{0},{1}], labels=i64[{0}])"
    for sizes in ((3, 7), (4, 9), (5, 12), (11, 13)):
        graph_of(Workload.parse(text.format(*sizes)))
    for sizes in ((6, 5), (17, 300)):
        w = Workload.parse(text.format(*sizes))
        assert follows(lower, w)
        assert lower(w) == lower.__wrapped__(w)
