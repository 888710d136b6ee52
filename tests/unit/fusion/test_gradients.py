"""Gradient operators: what autograd computes, any subset of it, and what that costs."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from emulated import Emulated
from lerp_patterns import SHAPES_OF_RANK_3, lerp_text, patterns_of_rank_3
from program_graphs import LERP, broadcasts
from tilewright.compile import cxx
from tilewright.device import DEVICES, spec_of
from tilewright.errors import InvalidArgument
from tilewright.fusion.cuda import target
from tilewright.fusion.frontend.lower import lower
from tilewright.fusion.passes import optimise
from tilewright.impl import IMPLS
from tilewright.impls._vendor import vendor
from tilewright.impls.fused import graph_of
from tilewright.measure.verify import Verifier
from tilewright.op import OPS, Workload
from tilewright.rounding import rounded

needs_compiler = pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))
SHAPE = "grad_output=f64[5,4,7], x=f64[5,4,7]"
STATISTICS = "mean=f64[5,4,1], rstd=f64[5,4,1]"


def computed(text):
    """The operator's gradients by name, its tensors by name."""
    w = Workload.parse(text)
    tensors = w.operator.examples(w, "random", 0)
    found = w.operator.truth(w, tensors)
    names = w["grads"] if "grads" in w.operator.parameters else ("x",)
    return dict(zip(names, found, strict=True)), dict(zip(w.tensors, tensors, strict=True))


def autograd_of(function, grad_output, **arguments):
    leaves = {n: t.detach().clone().requires_grad_() for n, t in arguments.items()}
    function(**leaves).backward(grad_output)
    return {n: t.grad for n, t in leaves.items()}


def assert_equal(found, expected):
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-12, msg=name)


def test_layer_norms_gradients_are_autograds():
    found, t = computed(f"layer_norm_backward({SHAPE}, {STATISTICS}, weight=f64[7])")
    expected = autograd_of(
        lambda x, weight, bias: F.layer_norm(x, (7,), weight, bias, 1e-5),
        t["grad_output"],
        x=t["x"],
        weight=t["weight"],
        bias=torch.zeros_like(t["weight"]),
    )
    assert_equal(found, expected)


def test_rms_norms_gradients_are_autograds():
    found, t = computed(f"rms_norm_backward({SHAPE}, rstd=f64[5,4,1], weight=f64[7])")
    expected = autograd_of(
        lambda x, weight: F.rms_norm(x, (7,), weight, 1e-5),
        t["grad_output"],
        x=t["x"],
        weight=t["weight"],
    )
    assert_equal(found, expected)


def test_softmaxs_gradient_is_autograds():
    found, t = computed("softmax_backward(grad_output=f64[5,4,7], output=f64[5,4,7], dim=1)")
    expected = autograd_of(lambda x: F.softmax(x, 1), t["grad_output"], x=t["output"].log())
    assert_equal(found, expected)


def test_bias_layer_norms_gradients_are_autograds():
    parameters = ", ".join(f"{n}=f64[7]" for n in ("bias0", "bias1", "weight"))
    found, t = computed(f"bias_layer_norm_backward({SHAPE}, {STATISTICS}, {parameters})")

    def forward(x, bias0, bias1, weight, bias):
        return F.layer_norm(rounded(rounded(x + bias0) + bias1), (7,), weight, bias, 1e-5)

    arguments = {n: t[n] for n in ("x", "bias0", "bias1", "weight")}
    expected = autograd_of(
        forward, t["grad_output"], **arguments, bias=torch.zeros_like(t["weight"])
    )
    assert_equal(found, expected)


ADDED = "grad_output=f64[5,4,7], grad_output_total=f64[5,4,7], total=f64[5,4,7]"


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_gradients_of_a_residual_addition_and_its_norm_are_autograds(kind):
    centred = kind == "layer_norm"
    statistics = STATISTICS if centred else "rstd=f64[5,4,1]"
    found, t = computed(f"add_{kind}_backward({ADDED}, {statistics}, weight=f64[7])")
    x, residual = t["total"] / 3, t["total"] * 2 / 3
    bias = {"bias": torch.zeros_like(t["weight"])} if centred else {}
    given = {"x": x, "residual": residual, "weight": t["weight"], **bias}
    leaves = {n: v.clone().requires_grad_() for n, v in given.items()}
    out = OPS[f"add_{kind}"].reference(**leaves, eps=1e-5)
    torch.autograd.backward(out, [t["grad_output"], t["grad_output_total"]])
    assert_equal(found, {n: v.grad for n, v in leaves.items()})
    torch.testing.assert_close(found["x"], leaves["residual"].grad)


SHAPES = [(2, 3), (1, 3), (2, 1), (1, 1), (3,), (1,), ()]


def shapes_that_broadcast(first=SHAPES):
    """Every way in which three operands of rank at most 2 broadcast to (2, 3)."""
    for x, end, weight in itertools.product(first, SHAPES, [*SHAPES, None]):
        operands = [s for s in (x, end, weight) if s is not None]
        if torch.broadcast_shapes(*operands) == (2, 3):
            yield x, end, weight


def test_lerps_reference_gradients_are_autograds_for_every_broadcast_pattern():
    patterns = list(shapes_that_broadcast())
    assert len(patterns) == 198
    for x, end, weight in patterns:
        found, t = computed(lerp_text((2, 3), x, end, weight))
        arguments = {n: t[n] for n in ("x", "end", "weight") if n in t}
        by = {} if weight is not None else {"weight": 0.3}
        expected = autograd_of(
            lambda by=by, **given: torch.lerp(given["x"], given["end"], {**given, **by}["weight"]),
            t["grad_output"],
            **arguments,
        )
        assert_equal(found, expected)


def cpu_kernel(w):
    fused, spec = IMPLS["fused"], spec_of(None)
    return fused.build(fused.heuristic(w, spec), w, spec)


def emulated_kernel(w):
    """That for an H200, on a CPU."""
    graph, spec = graph_of(w), DEVICES["h200"]
    return Emulated(graph, target.heuristic(graph, spec), spec, w)


@needs_compiler
def test_the_sum_over_a_missing_leading_dim_is_there():
    """Paddle's lerp_grad returned only the first |x| elements of the gradient for these shapes."""
    text = lerp_text((2, 2, 3, 4), (2, 3, 4), (2, 2, 3, 4), None)
    found, t = computed(text)
    right = (t["grad_output"] * (1 - 0.3)).sum(0)
    torch.testing.assert_close(found["x"], right)
    for made in (cpu_kernel, emulated_kernel):
        dx, dend = made(Workload.parse(text))(*t.values())
        torch.testing.assert_close(dx, right, rtol=1e-6, atol=1e-6)  # 0.3 is an fp32 number
        torch.testing.assert_close(dend, t["grad_output"] * 0.3, rtol=1e-6, atol=1e-6)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("x", SHAPES, ids=str)
def test_kernels_of_lerp_and_its_gradients_are_right_for_every_broadcast_pattern(x):
    for _, end, weight in shapes_that_broadcast([x]):
        for shape in (None, (2, 3)):
            w = Workload.parse(lerp_text(shape, x, end, weight, "f32"))
            tensors = w.operator.examples(w, "random", 0)
            found = cpu_kernel(w)(*tensors)
            found = found if isinstance(found, tuple) else (found,)
            for mine, right in zip(found, w.operator.truth(w, tensors), strict=True):
                torch.testing.assert_close(mine.double(), right, rtol=1e-5, atol=1e-6, msg=str(w))


def squeezed(shape):
    """Without the leading dims of size 1, which broadcasting adds again."""
    return tuple(itertools.dropwhile(lambda n: n == 1, shape))


def test_patterns_of_rank_3_are_all_that_cover_each_dim():
    assert sum(len(list(patterns_of_rank_3(x))) for x in SHAPES_OF_RANK_3) == 7**3


@pytest.mark.slow
@pytest.mark.parametrize("x", SHAPES_OF_RANK_3, ids=str)
def test_a_missing_leading_dim_gives_the_plan_of_one_of_size_1(x):
    for end, weight in patterns_of_rank_3(x):
        for shape in (None, (2, 3, 4)):
            plans = {
                (g.nodes, g.space, tuple(a.strides for a in g.inputs),
                 tuple((i, a.strides) for i, a in g.outputs))
                for operands in ((x, end, weight), map(squeezed, (x, end, weight)))
                for g in [graph_of(Workload.parse(lerp_text(shape, *operands, "f32")))]
            }  # fmt: skip
            assert len(plans) == 1, (shape, x, end, weight)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("x", SHAPES_OF_RANK_3, ids=str)
def test_kernels_of_lerp_and_its_gradients_are_right_for_every_pattern_of_rank_3(x):
    for end, weight in patterns_of_rank_3(x):
        for shape in (None, (2, 3, 4)):
            w = Workload.parse(lerp_text(shape, x, end, weight, "f32"))
            tensors = w.operator.examples(w, "random", 0)
            found = cpu_kernel(w)(*tensors)
            found = found if isinstance(found, tuple) else (found,)
            for mine, right in zip(found, w.operator.truth(w, tensors), strict=True):
                torch.testing.assert_close(mine.double(), right, rtol=1e-5, atol=1e-6, msg=str(w))


@needs_compiler
def test_kernels_of_lerps_gradients_are_right_for_some_kinds_of_broadcast():
    for named in broadcasts((3, 5, 4), 12):
        w = Workload.parse(LERP.format(d="f32", **named))
        message = Verifier(w, torch.device("cpu")).check(cpu_kernel(w)).message
        # How well PyTorch's own rounding errors turn out on a few elements is luck.
        assert message == "" or "PyTorch's largest error" in message, message


FULL = {
    "layer_norm_backward": f"{SHAPE}, {STATISTICS}, weight=f64[7]",
    "rms_norm_backward": f"{SHAPE}, rstd=f64[5,4,1], weight=f64[7]",
    "bias_layer_norm_backward": f"{SHAPE}, {STATISTICS}, bias0=f64[7], bias1=f64[7], weight=f64[7]",
    "add_layer_norm_backward": f"{ADDED}, {STATISTICS}, weight=f64[7]",
    "add_rms_norm_backward": f"{ADDED}, rstd=f64[5,4,1], weight=f64[7]",
    "lerp_backward": "grad_output=f64[5,4,7], x=f64[4,1], end=f64[5,4,7], weight=f64[5,1,7]",
}


@pytest.mark.parametrize("name", FULL)
def test_every_subset_of_gradients_is_that_part_of_all(name):
    whole, _ = computed(f"{name}({FULL[name]})")
    for size in range(1, len(whole)):
        for subset in itertools.combinations(whole, size):
            found, _ = computed(f"{name}({FULL[name]}, grads=[{','.join(subset)}])")
            assert tuple(found) == subset
            assert_equal(found, whole)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", FULL)
def test_kernels_of_every_subset_of_gradients_are_right(name):
    arguments = FULL[name].replace("f64", "f32")
    whole = Workload.parse(f"{name}({arguments})")["grads"]
    for size in range(1, len(whole) + 1):
        for subset in itertools.combinations(whole, size):
            w = Workload.parse(f"{name}({arguments}, grads=[{','.join(subset)}])")
            for made in (cpu_kernel, emulated_kernel):
                message = Verifier(w, torch.device("cpu")).check(made(w)).message
                assert message == "" or "PyTorch's largest error" in message, (str(w), message)


@pytest.mark.parametrize("name", FULL)
def test_a_gradient_that_is_not_asked_for_costs_no_traffic_and_no_step(name):
    whole = Workload.parse(f"{name}({FULL[name]})")
    for gradient in whole["grads"]:
        w = Workload.parse(f"{name}({FULL[name]}, grads=[{gradient}])")
        assert len(w.outputs) == 1
        assert w.bytes[0] <= whole.bytes[0]
        assert w.bytes[1] < whole.bytes[1]
        graph, all_of_it = optimise(lower(w)), optimise(lower(whole))
        assert len(graph.nodes) < len(all_of_it.nodes)
        loaded = {n.attr for n in graph.nodes if n.op == "load"}
        listed = list(w.tensors.values())
        assert w.bytes[0] == sum(listed[i].distinct_bytes for i in loaded)


def test_a_gradient_that_does_not_exist_is_named():
    text = f"layer_norm_backward({FULL['layer_norm_backward']}, grads=[y])"
    with pytest.raises(InvalidArgument, match="no gradient of 'y'; ask for some of x, weight"):
        Workload.parse(text)
    with pytest.raises(InvalidArgument, match=r"ask for some of x$"):
        Workload.parse(f"layer_norm_backward({SHAPE}, {STATISTICS}, grads=[weight])")


def test_pytorchs_result_runs_no_step_of_the_forward():
    w = Workload.parse(lerp_text((5, 7), (5, 1), (5, 7), (5, 7), "f32"))
    run = vendor(w)
    run(*w.operator.examples(w, "random", 0))
    names = {
        n.target.__name__ for n in run.graph([torch.empty(1)]).graph.nodes if n.op[:4] == "call"
    }
    assert not any(name.startswith("lerp") for name in names)


def test_reductions_of_one_graph_have_their_own_axes():
    text = (
        "lerp_backward(grad_output=f32[16,3,24,24], x=f32[16,1,1,1], end=f32[16,3,24,24],"
        " weight=f32[3,1,24])"
    )
    graph = optimise(lower(Workload.parse(text)))
    assert graph.reduction_sets == ((1, 2, 3), (0, 2))
    assert [graph.count(i) for i in graph.reductions] == [3 * 24 * 24, 16 * 24]
    one = optimise(lower(Workload.parse("layer_norm(x=f32[8,40])")))
    assert one.reduction_sets == ((1,),)
    assert (one.reduced, one.kept) == ((1,), (0,))


def test_gradient_operators_name_the_operator_they_differentiate():
    pairs = {name: OPS[name].gradient_of for name in OPS if OPS[name].gradient_of}
    assert all(name == f"{of}_backward" and of in OPS for name, of in pairs.items())
    norms = [f"{of}layer_norm" for of in ("", "bias_", "add_")] + ["rms_norm", "add_rms_norm"]
    assert {"lerp", "softmax", *norms} <= set(pairs.values())
