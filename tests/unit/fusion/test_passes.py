"""Each rewrite of the fusion compiler, alone on a graph made for it."""

from dataclasses import replace

import pytest
import torch

from tilewright.compile import cxx
from tilewright.device import spec_of
from tilewright.dispatch.functions.fuse import fuse
from tilewright.fusion import passes
from tilewright.fusion.frontend.lower import lower
from tilewright.fusion.ir import Access, Graph, Node
from tilewright.fusion.plan import plan_rows
from tilewright.impl import IMPLS
from tilewright.impls.fused import graph_of
from tilewright.measure.verify import Verifier
from tilewright.op import OPS, Workload
from tilewright.tensor_spec import DTYPES

ONE = (8, 40)
ROW = (8, 1)
needs_cxx = pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))


def graph(*nodes, outputs=None, space=ONE):
    """A graph whose last node (or `outputs`) is stored."""
    loads = [n for n in nodes if n.op == "load"]
    inputs = [Access((40 if n.shape[0] > 1 else 0, 1), n.dtype, 16) for n in loads]
    stored = [len(nodes) - 1] if outputs is None else outputs
    accesses = [Access((40, 1) if nodes[i].shape == ONE else (1, 0), "f32", 16) for i in stored]
    return Graph(
        tuple(nodes), space, tuple(inputs), tuple(zip(stored, accesses, strict=True))
    ).check()


def load(dtype="f32", index=0, shape=ONE):
    return Node("load", (), dtype, shape, index)


def const(value, dtype="f32"):
    return Node("const", (), dtype, (1, 1), value)


def ops(g):
    return [n.op for n in passes.remove_dead(g).nodes]


def test_small_powers_become_products_and_roots():
    expected = {1: [], 2: ["mul"], 3: ["mul", "mul"], 0.5: ["sqrt"], -0.5: ["rsqrt"]}
    for exponent, steps in {**expected, -1: ["reciprocal"], 5: ["const", "pow"]}.items():
        g = graph(load(), const(exponent), Node("pow", (0, 1), "f32", ONE))
        assert ops(passes.fold_constants(g)) == ["load", *steps]


def test_reductions_beside_one_in_fp64_are_widened_and_rounded_back():
    wide = Node("cast", (0,), "f64", ONE)
    total, greatest = Node("sum", (1,), "f64", ROW), Node("amax", (0,), "f32", ROW)
    g = passes.widen_reductions(graph(load(), wide, total, greatest, outputs=[2, 3]))
    assert [(n.op, n.dtype) for n in g.nodes if n.op in ("sum", "amax")] == [
        ("sum", "f64"),
        ("amax", "f64"),
    ]
    stored = g.nodes[g.outputs[1][0]]
    assert (stored.op, stored.dtype) == ("cast", "f32")
    alone = graph(load(), greatest)
    assert passes.widen_reductions(alone) is alone


@pytest.mark.parametrize(
    ("op", "args", "chosen"), [("div", (1, 2), (2.5, 0.0)), ("sub", (2, 1), (-0.6, 0.4))]
)
def test_a_boolean_as_a_number_beside_a_constant_chooses_one_of_two(op, args, chosen):
    mask = Node("cast", (0,), "f32", ONE)
    g = passes.choose_constants(graph(load("bool"), mask, const(0.4), Node(op, args, "f32", ONE)))
    assert ops(g) == ["load", "const", "const", "where"]
    assert [n.attr for n in passes.remove_dead(g).nodes[1:3]] == pytest.approx(chosen)


def test_a_number_or_a_boolean_beside_a_varying_one_chooses_nothing():
    mask = Node("cast", (0,), "f32", ONE)
    g = graph(load("bool"), mask, load(index=1), Node("div", (1, 2), "f32", ONE))
    assert passes.choose_constants(g) == g
    g = graph(load(), const(0.4), Node("div", (0, 1), "f32", ONE))
    assert passes.choose_constants(g) == g


def test_a_cast_to_what_a_value_is_or_was_widened_from_folds():
    g = graph(load("f16"), Node("cast", (0,), "f32", ONE), Node("cast", (1,), "f16", ONE))
    assert ops(passes.fold_casts(g)) == ["load"]


@pytest.mark.parametrize(("kept", "through"), [("bf16", "f16"), ("f16", "bf16"), ("f32", "i32")])
def test_a_cast_through_a_dtype_that_does_not_hold_the_value_is_kept(kept, through):
    to, back = Node("cast", (0,), through, ONE), Node("cast", (1,), kept, ONE)
    g = graph(load(kept), to, back)
    for run in (passes.fold_casts, passes.drop_roundings):
        assert ops(run(g)) == ["load", "cast", "cast"], run.__name__


def test_a_cast_that_rounds_is_kept():
    g = graph(load(), Node("cast", (0,), "f16", ONE), Node("cast", (1,), "f32", ONE))
    assert ops(passes.fold_casts(g)) == ["load", "cast", "cast"]


def test_the_relaxed_policy_drops_a_rounding_between_two_steps_but_not_that_of_a_store():
    middle = [load(), Node("cast", (0,), "f16", ONE), Node("cast", (1,), "f32", ONE)]
    end = [*middle, Node("neg", (2,), "f32", ONE), Node("cast", (3,), "f16", ONE)]
    assert ops(passes.drop_roundings(graph(*end))) == ["load", "neg", "cast"]


def test_a_value_that_is_stored_narrow_keeps_its_rounding_beside_a_relaxed_use():
    nodes = [load(), Node("cast", (0,), "f16", ONE), Node("cast", (1,), "f32", ONE)]
    g = passes.drop_roundings(graph(*nodes, Node("neg", (2,), "f32", ONE), outputs=[1, 3]))
    assert sorted(ops(g)) == ["cast", "load", "neg"]


def test_equal_steps_and_equal_reductions_are_one():
    total = Node("sum", (0,), "f32", ROW)
    g = graph(load(), total, total, Node("add", (1, 2), "f32", ROW))
    assert ops(passes.merge_common(g)) == ["load", "sum", "add"]
    other = graph(load(), total, Node("sum", (0,), "f32", (1, 40)), Node("add", (1, 2), "f32", ONE))
    assert ops(passes.merge_common(other)).count("sum") == 2


def test_zeros_of_both_signs_are_two_constants():
    chosen = Node("where", (3, 1, 2), "f32", ONE)
    g = graph(load(), const(0.0), const(-0.0), Node("gt", (0, 1), "bool", ONE), chosen)
    assert ops(passes.merge_common(g)).count("const") == 2


def test_a_sum_beside_a_variance_becomes_its_mean():
    nodes = [load(), Node("m2", (0,), "f32", ROW), Node("sum", (0,), "f32", ROW), const(40.0)]
    nodes += [Node("div", (2, 3), "f32", ROW), Node("add", (1, 4), "f32", ROW)]
    assert "mean" in ops(passes.merge_moments(graph(*nodes)))


def test_a_sum_over_other_dims_than_the_variance_is_no_mean_of_it():
    nodes = [load(), Node("m2", (0,), "f32", ROW), Node("sum", (0,), "f32", (1, 40)), const(8.0)]
    nodes += [Node("div", (2, 3), "f32", (1, 40)), Node("add", (1, 4), "f32", ONE)]
    assert "mean" not in ops(passes.merge_moments(graph(*nodes)))


FAR = {"f32": 2.0**-130, "f64": 2.0**-1074}
"""Powers of two whose reciprocals are infinite."""


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [(4.0, "f32", "mul"), (-0.5, "f64", "mul"), (2.0**-126, "f32", "mul"), (3.0, "f32", "div"),
     (0.0, "f32", "div"), (2.0**-130, "f64", "mul"), (FAR["f32"], "f32", "div"),
     (-FAR["f64"], "f64", "div"), (2.0**127, "f32", "div")],
)  # fmt: skip
def test_division_is_a_product_by_powers_of_two_of_which_the_reciprocal_is_one(
    value, dtype, expected
):
    g = graph(load(dtype), const(value, dtype), Node("div", (0, 1), dtype, ONE))
    assert ops(passes.multiply_by_reciprocals(g))[-1] == expected


def test_rows_are_divided_by_their_sum_of_exponentials_once_and_by_other_sums_at_each_element():
    divided = Node("div", (4, 5), "f32", ONE)
    g = passes.remove_dead(passes.multiply_by_reciprocals(softmaxed(SUM, divided)))
    assert [(n.op, n.shape) for n in g.nodes[-2:]] == [("reciprocal", ROW), ("mul", ONE)]
    other = replace(SUM, args=(3,))  # may be 0
    assert ops(passes.multiply_by_reciprocals(softmaxed(other, divided)))[-1] == "div"


@needs_cxx
@pytest.mark.parametrize("dtype", FAR)
def test_a_quotient_is_in_range_where_the_reciprocal_is_not(dtype):
    x, quotients = torch.tensor([0.0, FAR[dtype], -(2.0**-20)], dtype=DTYPES[dtype]), "quotients"
    try:
        far = fuse(lambda x: x / FAR[dtype], name=quotients)
        assert torch.equal(far(x), x / FAR[dtype])
    finally:
        OPS.remove(quotients)


def softmaxed(*after, dtype="f16"):
    """exp(x - max x), and what is done with it."""
    wide = [Node("cast", (0,), "f32", ONE), Node("amax", (1,), "f32", ROW)]
    shifted = [Node("sub", (1, 2), "f32", ONE), Node("exp", (3,), "f32", ONE)]
    nodes = [load(dtype), *wide, *shifted, *after]
    return graph(*nodes, outputs=[len(nodes) - 1])


SUM = Node("sum", (4,), "f32", ROW)
INVERSE = Node("reciprocal", (5,), "f32", ROW)
TOTAL = Node("sum", (4,), "f32", (1, 1))


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ((SUM, INVERSE, Node("mul", (4, 6), "f32", ONE), Node("cast", (7,), "f16", ONE)), True),
        ((SUM, Node("div", (4, 5), "f32", ONE), Node("cast", (6,), "bf16", ONE)), True),
        ((Node("cast", (4,), "f16", ONE),), True),
        ((Node("cast", (4,), "bf16", ONE),), False),  # which holds what would be flushed
        ((SUM, Node("div", (4, 5), "f32", ONE)), False),  # stored in fp32
        ((Node("sub", (4, 1), "f32", ONE), Node("cast", (5,), "f16", ONE)), False),
        # what was flushed to zero might be multiplied up
        ((Node("mul", (4, 1), "f32", ONE), Node("cast", (5,), "bf16", ONE)), False),
        # terms of either sign are summed
        ((Node("mul", (4, 1), "f32", ONE), Node("sum", (5,), "f32", ROW),
          Node("cast", (6,), "f16", ROW)), False),
    ],
)  # fmt: skip
def test_exponentials_that_are_rounded_to_halves_are_quick(after, expected):
    found = ops(passes.quick_exponentials(softmaxed(*after)))
    assert ("quick_exp" in found) is expected
    assert ("exp" in found) is not expected


@pytest.mark.parametrize(
    ("dtype", "expected"), [("f16", "shifted_exp"), ("bf16", "raised_exp"), ("f32", "exp")]
)
def test_softmax_has_the_exponentials_that_its_type_allows(dtype, expected):
    found = ops(graph_of(Workload.parse(f"softmax(x={dtype}[8,640])")))
    assert [op for op in found if op.endswith("exp")] == [expected]


def of_distances(x):
    at = torch.arange(x.shape[-1], device=x.device)
    return torch.softmax(x - (at[:, None] - at).abs(), -1)


def of_earlier(x):
    later = torch.ones_like(x, dtype=torch.bool).triu(1)
    return torch.softmax(x.masked_fill(later, float("-inf")), -1)


@pytest.mark.parametrize(
    ("function", "dtype", "expected"),
    [(of_distances, "bf16", "exp"), (of_distances, "f16", "raised_exp"),
     (of_earlier, "bf16", "raised_exp"), (of_earlier, "f16", "raised_exp")],
)  # fmt: skip
def test_exponentials_far_from_zero_are_exact_where_halves_tell(
    function, dtype, expected, forgets_functions
):
    fuse(function)
    found = ops(graph_of(Workload.parse(f"{function.__name__}(x={dtype}[512,512])")))
    assert [op for op in found if op.endswith("exp")] == [expected]


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ((SUM, INVERSE, Node("mul", (4, 6), "f32", ONE), Node("cast", (7,), "f16", ONE)), True),
        ((SUM, Node("div", (4, 5), "f32", ONE), Node("cast", (6,), "f16", ONE)), True),
        ((Node("cast", (4,), "f16", ONE),), False),  # divided by nothing
        ((SUM, Node("cast", (5,), "f16", ROW)), False),
        ((TOTAL, Node("div", (4, 5), "f32", ONE), Node("cast", (6,), "f16", ONE)), False),
    ],
)
def test_exponentials_share_a_factor_only_where_their_rows_sum_divides_it_out(after, expected):
    found = ops(passes.shifted_exponentials(passes.quick_exponentials(softmaxed(*after))))
    assert ("shifted_exp" in found) is expected


@pytest.mark.parametrize(
    ("op", "narrow"), [("add", True), ("sub", True), ("mul", True), ("div", False)]
)
def test_arithmetic_of_upcast_halves_that_is_rounded_back_is_native(op, narrow):
    nodes = [load("f16"), load("f16", 1), *(Node("cast", (i,), "f32", ONE) for i in (0, 1))]
    nodes += [Node(op, (2, 3), "f32", ONE), Node("cast", (4,), "f16", ONE)]
    result = passes.remove_dead(passes.narrow_arithmetic(graph(*nodes)))
    assert (result.nodes[-1].op == op) == narrow


def test_a_step_that_no_output_needs_is_gone():
    unused = Node("exp", (1,), "f32", ONE)
    g = graph(load(), load(index=1), unused, Node("neg", (0,), "f32", ONE))
    assert [n.op for n in passes.remove_dead(g).nodes] == ["load", "neg"]


def test_what_is_broadcast_is_computed_once_before_it_is():
    scaled = fuse(lambda x, w: x + torch.tanh(w.expand_as(x)) * 2, name="scaled_after_expand")
    try:
        w = Workload.parse("scaled_after_expand(x=f32[8,40], w=f32[40])")
        shapes = {n.op: n.shape for n in graph_of(w).nodes}
        assert (shapes["tanh"], shapes["mul"], shapes["add"]) == ((1, 40), (1, 40), (8, 40))
        x, row = torch.randn(8, 40), torch.randn(40)
        torch.testing.assert_close(scaled(x, row), x + torch.tanh(row) * 2)
    finally:
        OPS.remove("scaled_after_expand")


@pytest.mark.parametrize(("recompute", "kept"), [(True, "f16"), (False, "f32")])
def test_a_widened_value_is_kept_as_it_came_and_widened_again(recompute, kept):
    graph = graph_of(Workload.parse("layer_norm(x=f16[8,640], weight=f16[640], bias=f16[640])"))
    plan = plan_rows(graph, "two_pass", recompute)
    carried = {plan.graph.nodes[i].dtype for p in plan.phases for i in p.carried_out}
    assert carried == {kept}


def test_axes_that_every_tensor_walks_as_one_are_merged_unless_a_reduction_tells_them_apart():
    text = "lerp(x=f32[4,5,6], end=f32[4,5,6], weight=0.5)"
    assert passes.collapse_dims(lower(Workload.parse(text))).space == (120,)
    apart = "lerp_backward(grad_output=f32[4,5,6], x=f32[5,6], end=f32[4,5,6], weight=0.5)"
    assert graph_of(Workload.parse(apart)).space == (4, 30)


def test_axes_follow_the_order_of_memory():
    text = "lerp(x=f32[2,8,5,6]@channels_last, end=f32[2,8,5,6]@channels_last, weight=0.5)"
    assert graph_of(Workload.parse(text)).space == (480,)
    wide = "lerp(x=f32[6,4], end=f32[4], weight=0.5)"
    assert passes.order_dims(lower(Workload.parse(wide))) == lower(Workload.parse(wide))


RELAXED = (
    "bias_layer_norm(x=bf16[64,200], bias0=bf16[200], bias1=bf16[200], weight=bf16[200],"
    " bias=bf16[200])"
)


def test_relaxed_workloads_have_fewer_roundings():
    narrow = [
        sum(n.dtype == "bf16" for n in graph_of(Workload.parse(RELAXED + flag)).nodes)
        for flag in ("", "!relaxed")
    ]
    assert narrow[1] < narrow[0]


@needs_cxx
def test_a_relaxed_kernel_passes_where_roundings_may_be_dropped_and_an_exact_one_everywhere():
    fused, spec = IMPLS["fused"], spec_of(None)
    for flag in ("", "!relaxed"):
        w = Workload.parse(RELAXED + flag)
        built = fused.build(fused.heuristic(w, spec), w, spec)
        message = Verifier(w, torch.device("cpu")).check(built).message
        assert message == "" or "PyTorch's largest error" in message
