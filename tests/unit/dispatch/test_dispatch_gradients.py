"""Calls that need gradients: an own backward runs where records speak for it, else PyTorch's."""

import contextlib
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn import functional as F

import tilewright as tw
from tilewright.compile import cxx
from tilewright.device import spec_of
from tilewright.dispatch.gradients import Way, generated_backward
from tilewright.environment import environment
from tilewright.impl import IMPLS
from tilewright.op import OPS
from tilewright.record import Record
from tilewright.space import config_dict
from tilewright.store import Store

CPU = torch.device("cpu")
ROWS, H = 48, 96
X = f"x=f32[{ROWS},{H}]"
GRAD = f"grad_output=f32[{ROWS},{H}], {X}"
ADDED = ", ".join(f"{n}=f32[{ROWS},{H}]" for n in ("grad_output", "grad_output_total", "total"))
STATISTICS = f"mean=f32[{ROWS},1], rstd=f32[{ROWS},1]"

pytestmark = pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))


@pytest.fixture
def store(tmp_path, monkeypatch):
    url = f"sqlite:///{tmp_path}/records.db"
    monkeypatch.setenv("TILEWRIGHT_STORE", url)
    tw.reload_records()
    with Store(url) as opened:
        yield opened
    tw.reload_records()


def record(store, text):
    """fused, with its heuristic config, won a duel against aten."""
    key, info, versions = environment(CPU)
    w = tw.Workload.parse(text)
    common = {"status": "ok", "device": key, "device_info": info, "versions": versions}
    common |= {"final": True, "duel": text}
    config = config_dict(IMPLS["fused"].heuristic(w, spec_of(None)))
    store.add(
        [
            Record(str(w), w.op, "fused", config, median_us=10.0, **common),
            Record(str(w), w.op, "aten", {}, median_us=20.0, **common),
        ]
    )
    tw.reload_records()


def leaves(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def outputs(found):
    return found if isinstance(found, tuple) else (found,)


CASES = {
    "layer_norm": (
        f"layer_norm_backward({GRAD}, {STATISTICS}, weight=f32[{H}])",
        ((ROWS, H), (H,), (H,)),
        lambda x, w, b: tw.layer_norm(x, (H,), w, b),
        lambda x, w, b: F.layer_norm(x, (H,), w, b),
    ),
    "rms_norm": (
        f"rms_norm_backward({GRAD}, rstd=f32[{ROWS},1], weight=f32[{H}])",
        ((ROWS, H), (H,)),
        lambda x, w: tw.rms_norm(x, (H,), weight=w),
        lambda x, w: F.rms_norm(x, (H,), w),
    ),
    "softmax": (
        f"softmax_backward(grad_output=f32[{ROWS},{H}], output=f32[{ROWS},{H}])",
        ((ROWS, H),),
        lambda x: tw.softmax(x, -1),
        lambda x: F.softmax(x, -1),
    ),
    "lerp": (
        f"lerp_backward({GRAD}, end=f32[{H}], weight=f32[{ROWS},1])",
        ((ROWS, H), (H,), (ROWS, 1)),
        tw.lerp,
        torch.lerp,
    ),
    "bias_layer_norm": (
        f"bias_layer_norm_backward({GRAD}, bias0=f32[{H}], bias1=f32[{H}], {STATISTICS},"
        f" weight=f32[{H}])",
        ((ROWS, H), (H,), (H,), (H,), (H,)),
        tw.bias_layer_norm,
        lambda x, b0, b1, w, b: F.layer_norm(x + b0 + b1, (H,), w, b),
    ),
    "add_layer_norm": (
        f"add_layer_norm_backward({ADDED}, {STATISTICS}, weight=f32[{H}])",
        ((ROWS, H), (ROWS, H), (H,), (H,)),
        tw.add_layer_norm,
        lambda x, r, w, b: (F.layer_norm(x + r, (H,), w, b), x + r),
    ),
    "add_rms_norm": (
        f"add_rms_norm_backward({ADDED}, rstd=f32[{ROWS},1], weight=f32[{H}])",
        ((ROWS, H), (ROWS, H), (H,)),
        tw.add_rms_norm,
        lambda x, r, w: (F.rms_norm(x + r, (H,), w), x + r),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_recorded_backward_gives_pytorchs_gradients(name, store):
    text, shapes, own, right = CASES[name]
    record(store, text)
    tensors = leaves(*shapes)
    out, expected = outputs(own(*tensors)), outputs(right(*tensors))
    assert {type(o.grad_fn).__name__ for o in out} == {"GeneratedBackward"}
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(o.shape, generator=generator) for o in expected]
    found = torch.autograd.grad(out, tensors, weights)
    torch.testing.assert_close(
        found, torch.autograd.grad(expected, tensors, weights), rtol=1e-4, atol=1e-4
    )


def many_at_once(out, leaves, weights):
    return torch.autograd.grad(out, leaves, weights, is_grads_batched=True)


def mapped(out, leaves, weights):
    return torch.func.vmap(lambda g: torch.autograd.grad(out, leaves, g, retain_graph=True))(
        weights
    )


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("gradients", [many_at_once, mapped])
@pytest.mark.parametrize(("implementation", "node"), [(None, "Generated"), ("fused", "Recomputed")])
def test_many_gradients_are_computed_at_once(implementation, node, gradients, store):
    text, shapes, own, right = CASES["layer_norm"]
    record(store, text)
    tensors = leaves(*shapes)
    with tw.use(implementation) if implementation else contextlib.nullcontext():
        out, expected = own(*tensors), right(*tensors)
        assert type(out.grad_fn).__name__ == f"{node}Backward"
        weights = torch.randn(5, *out.shape)
        torch.testing.assert_close(
            gradients(out, tensors, weights),
            gradients(expected, tensors, weights),
            rtol=1e-4,
            atol=1e-4,
        )


def test_what_is_asked_for_around_the_forward_holds_in_another_threads_backward(store):
    text, shapes, own, _ = CASES["layer_norm"]
    record(store, text)
    with tw.use("inductor_max", op="layer_norm_backward"):
        out = own(*leaves(*shapes)).sum()
    with (
        ThreadPoolExecutor(1) as thread,
        pytest.raises(tw.NoImplementation, match="max-autotune tunes Triton"),
    ):
        thread.submit(out.backward).result()


def test_what_is_asked_for_around_the_backward_holds_there(store):
    text, shapes, own, _ = CASES["layer_norm"]
    record(store, text)
    out = own(*leaves(*shapes)).sum()
    with (
        tw.use("inductor_max", op="layer_norm_backward"),
        pytest.raises(tw.NoImplementation, match="max-autotune tunes Triton"),
    ):
        out.backward()


@pytest.mark.parametrize("name", CASES)
def test_without_a_record_the_graph_is_pytorchs(name, store):
    _, shapes, own, right = CASES[name]
    tensors = leaves(*shapes)
    found, expected = outputs(own(*tensors)), outputs(right(*tensors))
    assert [type(o.grad_fn) for o in found] == [type(o.grad_fn) for o in expected]


def test_x_and_residual_have_one_gradient_that_is_computed_once(store, monkeypatch):
    text, shapes, *_ = CASES["add_rms_norm"]
    record(store, text)
    x, residual, weight = leaves(*shapes)
    asked = set()
    choose = Way.asked

    def spy(way, wanted):
        asked.add(choose(way, wanted := list(wanted)))
        return choose(way, wanted)

    monkeypatch.setattr(Way, "asked", spy)
    for wanted in ((x, residual, weight), (residual,), (x, weight)):
        for leaf in (x, residual, weight):
            leaf.requires_grad_(any(leaf is one for one in wanted))
        out, total = tw.add_rms_norm(x, residual, weight)
        found = torch.autograd.grad(out.sum() + (2 * total).sum(), wanted)
        expected = F.rms_norm(x + residual, (H,), weight).sum() + (2 * (x + residual)).sum()
        right = torch.autograd.grad(expected, wanted)
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
    assert asked == {("x", "weight"), ("x",)}


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "softmax", "lerp"])
def test_gradients_of_gradients_are_pytorchs(name, store):
    text, shapes, own, right = CASES[name]
    record(store, text)
    tensors = leaves(*shapes)

    def second(function):
        out = function(*(2 * t for t in tensors))  # whose history goes on
        (first,) = torch.autograd.grad(out.square().sum(), tensors[:1], create_graph=True)
        return torch.autograd.grad(first.square().sum(), tensors[:2])

    torch.testing.assert_close(second(own), second(right), rtol=1e-3, atol=1e-3)


def test_a_gradient_without_an_own_formula_leaves_the_call_to_pytorch(store):
    text, *_ = CASES["layer_norm"]
    record(store, text)
    x, bias = leaves((ROWS, H), (H,))
    out = tw.layer_norm(x, (H,), None, bias)  # a bias without a weight
    assert type(out.grad_fn).__name__ == "NativeLayerNormBackward0"


def test_the_choice_of_a_backward_is_made_once_for_equal_calls(store, monkeypatch):
    text, shapes, *_ = CASES["layer_norm"]
    record(store, text)
    x, w, b = leaves(*shapes)
    bound = {"x": x, "normalized_shape": (H,), "weight": w, "bias": b}
    way = generated_backward(OPS["layer_norm"], bound)
    assert (way.backward, way.draws, way.reach) == (OPS["layer_norm_backward"], False, None)
    assert way.reads == {"grad_output", "x", "mean", "rstd", "weight"}
    monkeypatch.setattr("tilewright.dispatch.gradients._choose", None)
    assert generated_backward(OPS["layer_norm"], bound) == way


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("name", ["add_layer_norm", "add_rms_norm"])
def test_a_sum_of_which_no_term_needs_a_gradient_requires_none(name, forced, store):
    text, shapes, own, right = CASES[name]
    grads = "weight,bias" if name == "add_layer_norm" else "weight"
    record(store, text.replace(")", f", grads=[{grads}])"))
    x, residual, *parameters = leaves(*shapes)
    given = (x.detach(), residual.detach(), *parameters)
    with tw.use("fused", op=name) if forced else contextlib.nullcontext():
        out, total = own(*given)
    assert type(out.grad_fn).__name__ == ("RecomputedBackward" if forced else "GeneratedBackward")
    assert not total.requires_grad
    found, expected = (torch.autograd.grad(o.sum(), parameters) for o in (out, right(*given)[0]))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("forced", [False, True])
def test_what_an_output_does_not_follow_from_has_no_gradient_of_it(forced, store):
    text, shapes, own, _ = CASES["add_layer_norm"]
    record(store, text)
    x, residual, weight, bias = leaves(*shapes)
    with tw.use("fused", op="add_layer_norm") if forced else contextlib.nullcontext():
        _, total = own(x, residual, weight, bias)
    found = torch.autograd.grad(total.sum(), (x, residual, weight, bias), allow_unused=True)
    assert torch.equal(found[0], torch.ones_like(x))
    assert torch.equal(found[1], found[0])
    assert found[2:] == (None, None)


@pytest.mark.parametrize(
    ("text", "call", "own"),
    [
        (CASES["softmax"][0], lambda x, y, op: op.softmax(x, -1), "result"),
        (None, lambda x, y, op: op.saved_sum(x, y), ""),
        (None, lambda x, y, op: op.saved_relu(x, y), "x"),
    ],
)
def test_what_no_gradient_reads_is_not_kept_in_memory(text, call, own, store, forgets_functions):
    """As PyTorch keeps it: the result of a softmax, no term of a sum."""

    class Own:
        softmax = staticmethod(tw.softmax)
        saved_sum = staticmethod(tw.fuse(lambda x, y: 2.0 * x + y, name="saved_sum"))
        saved_relu = staticmethod(tw.fuse(lambda x, y: torch.relu(x) + y, name="saved_relu"))

    if text:
        record(store, text)
    x, y = leaves((ROWS, H), (ROWS, H))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda _: None):
        out = call(x, y, Own)
    assert type(out.grad_fn).__name__ == "GeneratedBackward"
    expected = {"result": [out.data_ptr()], "x": [x.data_ptr()], "": []}[own]
    assert [t.data_ptr() for t in kept] == expected


def unless_changed(out, leaves):
    """The gradients, or that autograd refuses since an argument was written to."""
    try:
        return torch.autograd.grad(out.sum(), leaves)
    except RuntimeError as error:
        return re.search("modified by an inplace operation", str(error))[0]


@pytest.mark.parametrize("changed", range(3))
def test_an_argument_may_change_before_the_backward_where_pytorch_does_not_read_it(changed, store):
    needs = ", ".join(f"{n}=f32[{ROWS},{H}]" for n in ("grad_output", "x", "end"))
    record(store, f"lerp_backward({needs}, weight=f32[{ROWS},{H}], grads=[x,end])")
    found = []
    for function in (tw.lerp, torch.lerp):
        x, end, weight = leaves(*[(ROWS, H)] * 3)
        tensors = [x, end, weight.detach()]
        out = function(*tensors)
        generated = type(out.grad_fn).__name__ == "GeneratedBackward"
        assert generated == (function is tw.lerp)
        with torch.no_grad():
            tensors[changed].mul_(2)
        found.append(unless_changed(out, (x, end)))
    if changed == 2:
        assert found == ["modified by an inplace operation"] * 2
    else:
        torch.testing.assert_close(*found)
