import math
import operator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilewright as tw
from on_targets import TARGETS, executable
from tilewright.fusion.ir import COMPARISONS, Graph, Node
from tilewright.fusion.numbers import hoist_numbers
from tilewright.impls.fused import graph_of
from tilewright.op import Workload

NEAR_ONE = [0.9, 0.99, 0.9999, 1 - 1e-7, 1 - 1e-9, math.nextafter(1, 0), 1 + 1e-9]
WEIGHTS = [*NEAR_ONE, 0.0, 1e-9, 0.5, 0.5 - 1e-12, -0.7, 1.0, 1e30, math.inf, math.nan]
SHAPES = "x=f32[64,96], end=f32[64,96]"


def gradients_of(weight, dtype="f32"):
    shapes = SHAPES.replace("f32", dtype)
    return Workload.parse(f"lerp_backward(grad_output={dtype}[64,96], {shapes}, weight={weight})")


def of_pytorch(tensors, weight):
    grad, x, end = tensors
    x, end = x.clone().requires_grad_(), end.clone().requires_grad_()
    return torch.autograd.grad(torch.lerp(x, end, weight), [x, end], grad)


@pytest.fixture(scope="module", params=TARGETS)
def compiled_for_another_weight(request):
    """What was built for a weight of 0.2."""
    w = gradients_of(0.2)
    return executable(request.param, w), w.operator.examples(w, "random", 0)[:3]


@pytest.mark.parametrize("weight", WEIGHTS)
def test_a_kernel_for_another_weight_gives_pytorchs_gradients_to_the_bit(
    compiled_for_another_weight, weight
):
    run, tensors = compiled_for_another_weight
    expected = of_pytorch(tensors, weight)
    assert all(map(_same, run(*tensors, scalars=(weight,)), expected))
    assert expected[0].any() == (weight != 1)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f64"])
@pytest.mark.parametrize("weight", [0.9999, 1 - 1e-9])
def test_so_do_kernels_of_other_dtypes_for_their_own_weight(target, dtype, weight):
    w = gradients_of(weight, dtype)
    tensors = w.operator.examples(w, "random", 0)[:3]
    assert all(map(_same, executable(target, w)(*tensors), of_pytorch(tensors, weight)))


@pytest.mark.parametrize("target", TARGETS)
def test_lerp_takes_one_of_its_two_forms_as_a_whole(target):
    """Both its factor and what that is added to: 0.5 - 1e-12 is 0.5 in fp32."""
    w = Workload.parse(f"lerp({SHAPES}, weight=0.2)")
    x, end = w.operator.examples(w, "random", 0)[:2]
    run = executable(target, w)
    for weight in WEIGHTS:
        if abs(weight) < 1e30:
            found = run(x, end, scalars=(weight,))
            exact = torch.lerp(x.double(), end.double(), weight)
            most = x.abs() + end.abs() + (weight * (end - x)).abs()
            assert ((found - exact).abs() <= 2.0**-22 * most).all(), weight
    assert _same(run(x, end, scalars=(1.0,)), end)
    assert _same(run(x, end, scalars=(0.0,)), x)


@pytest.mark.parametrize("weight", NEAR_ONE)
def test_public_calls_give_pytorchs_gradients_beside_another_weight(weight):
    torch.manual_seed(0)
    tensors = torch.randn(3, 64, 96).unbind()
    for by in (0.2, weight):
        grad, x, end = (t.clone().requires_grad_() for t in tensors)
        with tw.use("fused"):
            found = torch.autograd.grad(tw.lerp(x, end, by), [x, end], grad)
        assert all(map(_same, found, of_pytorch(tensors, by)))


@pytest.mark.parametrize("weight", NEAR_ONE)
def test_numbers_of_a_function_are_pythons(weight, forgets_functions):
    def faded(x, keep, drop=0.5):
        return torch.where(x > 0, x * (1 - keep), x / (1 - keep * keep) + drop * 0)

    fused = tw.fuse(faded, name="faded", scalars=["keep", "drop"])
    x = torch.randn(1000)
    for by in (0.3, weight):
        assert _same(fused(x, by), faded(x, by))


def test_what_follows_from_numbers_alone_is_one_number_to_a_kernel():
    graph = graph_of(gradients_of(0.9))
    assert graph.scalars == ("f32", "f32")
    assert {n.op for n in graph.nodes} == {"load", "scalar", "mul"}
    assert sorted(graph.numbers((0.9999,))) == sorted([0.9999, 1 - 0.9999])


def test_numbers_that_meet_tensors_as_they_are_stay():
    graph = graph_of(
        Workload.parse(
            "lerp_backward(grad_output=f32[8], x=f32[8], end=f32[8], weight=0.3, grads=[end])"
        )
    )
    assert graph.scalars == ("f32",)
    assert graph.numbers is None


def scalar_graph(*steps):
    """Of one element, in fp32: the last step is added to it."""
    nodes = [Node("scalar", (), "f32", (1,), 0), Node("scalar", (), "f32", (1,), 1), *steps]
    nodes += [Node("load", (), "f32", (1,), 0)]
    nodes += [Node("add", (len(nodes) - 1, len(nodes) - 2), "f32", (1,))]
    return Graph(tuple(nodes), (1,), (), ((len(nodes) - 1, None),), ("f32", "f32")).check()


@given(st.floats(), st.floats())
def test_each_step_of_numbers_is_that_of_fp64(a, b):
    for op in ("add", "sub", "mul", "div", "maximum", "minimum", "pow", "fmod", "atan2"):
        graph = hoist_numbers(scalar_graph(Node(op, (0, 1), "f32", (1,))))
        assert [n.op for n in graph.nodes] == ["scalar", "scalar", "scalar", "load", "add"]
        exact = getattr(torch, op)(*torch.tensor([a, b], dtype=torch.float64))
        assert _same(torch.tensor(graph.numbers((a, b)), dtype=torch.float64), exact[None])
    for op in COMPARISONS:
        graph = hoist_numbers(
            scalar_graph(Node(op, (0, 1), "bool", (1,)), Node("cast", (2,), "f32", (1,)))
        )
        assert graph.numbers((a, b)) == (float(getattr(operator, op)(a, b)),)


def test_a_number_rounds_to_halves_where_the_program_says_so():
    steps = Node("cast", (0,), "bf16", (1,)), Node("cast", (2,), "f32", (1,))
    assert hoist_numbers(scalar_graph(*steps)).numbers((1 / 3, 0.0)) == (0.333984375,)


def _same(found, expected):
    return torch.equal(found.nan_to_num(nan=0.25), expected.nan_to_num(nan=0.25)) and torch.equal(
        found.isnan(), expected.isnan()
    )
