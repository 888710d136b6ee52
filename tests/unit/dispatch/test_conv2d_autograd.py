"""tw.conv2d amid what PyTorch has around autograd: hooks, checkpoints, threads, modes, faults."""

import threading
from itertools import product

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import graph
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tilewright as tw

pytestmark = pytest.mark.usefixtures("conv2d_chooses")


def leaves(dtype=torch.double):
    shapes = (2, 4, 6, 6), (3, 4, 3, 3), (3,)
    torch.manual_seed(0)
    return [torch.randn(s, dtype=torch.double).to(dtype).requires_grad_() for s in shapes]


def grads_of(tensors):
    return [None if t.grad is None else t.grad.as_subclass(torch.Tensor) for t in tensors]


# --- each gives the same with tw.conv2d and with F.conv2d ---------------------------------------


def hooks_of_tensors(f):
    x, w, b = leaves()
    seen = []
    w.register_hook(lambda g: g * 2)
    w.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    graph.register_multi_grad_hook((x, w, b), lambda found: seen.extend(found))
    out = f(x, w, b, padding=1)
    out.register_hook(lambda g: g * 3)
    out.square().sum().backward()
    return seen, grads_of((x, w, b))


class Layer(nn.Module):
    def __init__(self, f, weight, bias):
        super().__init__()
        self.f, self.weight, self.bias = f, nn.Parameter(weight), nn.Parameter(bias)

    def forward(self, x):
        return self.f(x, self.weight, self.bias, padding=1)


def hooks_of_modules(f):
    x, w, b = leaves()
    layer, seen = Layer(f, w.detach(), b.detach()), []
    layer.register_full_backward_hook(lambda m, inputs, outputs: seen.extend((*inputs, *outputs)))
    layer.register_full_backward_pre_hook(lambda m, outputs: (outputs[0] * 2,))
    layer.register_forward_hook(lambda m, inputs, out: out * 2)
    layer(x).square().sum().backward()
    return seen, grads_of((x, layer.weight, layer.bias))


def hooks_of_nodes(f):
    x, w, b = leaves()
    out, seen = f(x, w, b), []
    out.grad_fn.register_prehook(lambda grads: (grads[0] * 2,))
    out.grad_fn.register_hook(lambda inputs, outputs: seen.extend(inputs[:3]))
    out.sum().backward()
    return seen if f is F.conv2d else [g for g in seen if g is not None], grads_of((x, w, b))


def many_threads(f):
    tensors = leaves()
    out = f(*tensors).square().sum()
    threads = [
        threading.Thread(target=out.backward, kwargs={"retain_graph": True}) for _ in range(4)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return grads_of(tensors)


def a_graph_kept(f):
    tensors = leaves()
    out = f(*tensors).sum()
    out.backward(retain_graph=True)
    out.backward()
    return grads_of(tensors)


def a_graph_of_the_gradients(f):
    tensors = leaves()
    found = torch.autograd.grad(f(*tensors).square().sum(), tensors, create_graph=True)
    sum(g.square().sum() for g in found).backward()
    return found, grads_of(tensors)


def checkpoints(f, reentrant):
    x, w, b = leaves()
    checkpoint(lambda x: f(x, w, b).relu(), x, use_reentrant=reentrant).sum().backward()
    return grads_of((x, w, b))


def deterministic_mode(f):
    tensors = leaves()
    torch.use_deterministic_algorithms(True)
    try:
        f(*tensors).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    return grads_of(tensors)


class Named(torch.Tensor):
    """A subclass by torch_function alone."""


def a_subclass(f, place):
    tensors = leaves()
    tensors[place] = tensors[place].detach().as_subclass(Named).requires_grad_()
    out = f(*tensors)
    out.sum().backward()
    return type(out), [type(t.grad) for t in tensors], grads_of(tensors)


def gradients_that_are_a_subclass(f, make):
    tensors = leaves()
    out = f(*tensors)
    found = torch.autograd.grad(out, tensors, make(torch.ones_like(out)))
    return [type(g) for g in found], [getattr(g, "a", g) for g in found]


def fake_tensors(f):
    with FakeTensorMode():
        tensors = leaves()
    out = f(*tensors)
    out.sum().backward()
    return out.shape, [(type(t.grad), t.grad.shape, t.grad.stride()) for t in tensors]


def meta_tensors(f):
    tensors = [t.detach().to("meta").requires_grad_() for t in leaves()]
    out = f(*tensors)
    out.sum().backward()
    return out.shape, [(t.grad.device, t.grad.shape) for t in tensors]


class SeenOperators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def a_dispatch_mode_in_the_backward(f):
    tensors = leaves()
    out = f(*tensors)
    with SeenOperators() as mode:
        out.backward(torch.ones_like(out))
    return mode.seen, grads_of(tensors)


class SeenFunctions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def a_function_mode(f):
    tensors = leaves()
    with SeenFunctions() as mode:
        out = f(*tensors)
    out.sum().backward()
    return mode.seen, grads_of(tensors)


def functional_calls(f):
    x, w, b = (t.detach() for t in leaves())
    layer = Layer(f, w, b)
    given = {n: (p.detach() * 2).requires_grad_() for n, p in layer.named_parameters()}
    torch.func.functional_call(layer, given, (x,)).sum().backward()
    return grads_of(given.values())


def saved_elsewhere(f):
    tensors, moved = leaves(), []
    with graph.saved_tensors_hooks(lambda t: moved.append(t.shape) or t.numpy(), torch.from_numpy):
        out = f(*(t.detach().requires_grad_() for t in tensors[:2]), tensors[2])
    out.sum().backward()
    return sorted(moved), grads_of(tensors)


def saved_on_the_cpu(f):
    tensors = leaves()
    with graph.save_on_cpu():
        out = f(*tensors)
    out.sum().backward()
    return grads_of(tensors)


def autocast(f):
    tensors = leaves(torch.float)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            f(*tensors)
        out = f(*tensors) + f(*tensors)
    out.float().sum().backward()
    return out, grads_of(tensors)


def inference_mode(f):
    with torch.inference_mode():
        out = f(*leaves())
    return out.is_inference(), out.clone()


def traced_by_jit(f):
    x, w, b = leaves()
    traced = torch.jit.trace(lambda x, w, b: f(x, w, b, padding=1), (x, w, b))
    traced(torch.ones(3, 4, 8, 9, dtype=torch.double), w, b).sum().backward()
    kinds = {n.kind() for n in traced.inlined_graph.nodes()}
    return "aten::_convolution" in kinds, grads_of((w, b))


def exported(f, strict):
    x, w, b = leaves()
    layer, sizes = Layer(f, w.detach(), b.detach()), ({0: torch.export.Dim("n")},)
    program = torch.export.export(layer, (x.detach(),), dynamic_shapes=sizes, strict=strict)
    calls = [n.target for n in program.graph.nodes if n.op == "call_function"]
    return calls, program.module()(torch.ones(5, 4, 6, 6, dtype=torch.double))


def no_gradient_at_all(f):
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return None

    tensors = leaves()
    Nothing.apply(f(*tensors)).sum().backward()
    return grads_of(tensors)


def one_weight_twice(f):
    x, w, b = leaves()
    (f(x, w, b).square().sum() + f(x * 2, w, b, padding=1).sum()).backward()
    return grads_of((x, w, b))


def one_tensor_as_both(f):
    torch.manual_seed(0)
    both = torch.randn(3, 3, 3, 3, dtype=torch.double, requires_grad=True)
    f(both, both, padding=1).square().sum().backward()
    return grads_of([both])


def weights_that_are_no_leaves(f):
    x, w, b = leaves()
    doubled, flat = w * 2, torch.ones(200, dtype=torch.double, requires_grad=True)
    doubled.retain_grad()
    out = f(x, doubled, b * 2) + f(x, flat[7 : 7 + w.numel()].view(w.shape))
    out.sum().backward()
    return grads_of((x, w, b, doubled, flat))


def gradients_there_already(f):
    x, w, b = leaves()
    w.grad = there = torch.ones_like(w)
    f(x, w, b).sum().backward()
    return w.grad is there, there


def gradients_of_some(f, *places):
    tensors = leaves()
    f(*tensors).sum().backward(inputs=[tensors[i] for i in places])
    return grads_of(tensors)


def frozen_after_the_forward(f):
    x, w, b = leaves()
    out = f(x, w, b)
    w.requires_grad_(False)
    out.sum().backward()
    return grads_of((x, w, b))


def outputs_changed_in_place(f):
    tensors = leaves()
    out = f(*tensors)
    out[0].mul_(2)
    out.view(-1).add_(1)
    out.relu_()
    out.sum().backward()
    return grads_of(tensors)


def an_mkldnn_input(f):
    x, w, b = leaves(torch.float)
    f(x.detach().to_mkldnn(), w, b).to_dense().sum().backward()
    return grads_of((w, b))


def a_reach_that_overflows(f):
    tensors = leaves()
    out = f(*tensors, dilation=2**62)
    out.sum().backward()
    return out, grads_of(tensors)


SAME = {
    **{f.__name__: f for f in (
        hooks_of_tensors, hooks_of_modules, hooks_of_nodes, many_threads, a_graph_kept,
        a_graph_of_the_gradients, deterministic_mode, fake_tensors, meta_tensors,
        a_dispatch_mode_in_the_backward, a_function_mode, functional_calls, saved_elsewhere,
        saved_on_the_cpu, autocast, inference_mode, traced_by_jit, no_gradient_at_all,
        one_weight_twice, one_tensor_as_both, weights_that_are_no_leaves, gradients_there_already,
        frozen_after_the_forward, outputs_changed_in_place, an_mkldnn_input,
        a_reach_that_overflows,
    )},
    "checkpoints": lambda f: checkpoints(f, False),
    "reentrant checkpoints": lambda f: checkpoints(f, True),
    "a subclass as input": lambda f: a_subclass(f, 0),
    "a subclass as weight": lambda f: a_subclass(f, 1),
    "a subclass as gradient": lambda f: gradients_that_are_a_subclass(
        f, lambda g: g.as_subclass(Named)
    ),
    "a wrapper as gradient": lambda f: gradients_that_are_a_subclass(f, lambda g: TwoTensor(g, g)),
    "exported": lambda f: exported(f, False),
    "exported strictly": lambda f: exported(f, True),
    "gradients of the weight": lambda f: gradients_of_some(f, 1),
    "gradients of the others": lambda f: gradients_of_some(f, 0, 2),
}  # fmt: skip


@pytest.mark.parametrize("surroundings", SAME)
def test_results_and_gradients_are_pytorchs(surroundings):
    found, expected = (SAME[surroundings](f) for f in (tw.conv2d, F.conv2d))
    assert_same(found, expected)


def assert_same(found, expected):
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected)
    elif isinstance(expected, (list, tuple)):
        for a, b in zip(found, expected, strict=True):
            assert_same(a, b)
    else:
        assert found == expected


# --- what PyTorch refuses -------------------------------------------------------------------------


def changed_before_the_backward(f, place):
    tensors = leaves()
    out = f(*tensors)
    with torch.no_grad():
        tensors[place].add_(1)
    out.sum().backward()


def a_graph_used_twice(f):
    out = f(*leaves()).sum()
    out.backward()
    out.backward()


def an_inference_tensor(f, place):
    tensors = leaves()
    with torch.inference_mode():
        tensors[place] = tensors[place] * 1
    f(*tensors)


def a_gradient_of_another_shape(f):
    f(*leaves()).backward(torch.ones(1, dtype=torch.double))


def another_layout(f, place, convert):
    tensors = leaves(torch.float)
    tensors[place] = convert(tensors[place].detach()).requires_grad_()
    f(*tensors)


LAYOUTS = {
    "sparse": torch.Tensor.to_sparse,
    "mkldnn": torch.Tensor.to_mkldnn,
    "nested": lambda t: torch.nested.nested_tensor(list(t)),
}
REFUSED = {
    "input changed": lambda f: changed_before_the_backward(f, 0),
    "weight changed": lambda f: changed_before_the_backward(f, 1),
    "a graph used twice": a_graph_used_twice,
    "an inference tensor as input": lambda f: an_inference_tensor(f, 0),
    "an inference tensor as weight": lambda f: an_inference_tensor(f, 1),
    "a gradient of another shape": a_gradient_of_another_shape,
    **{
        f"{name} in place {place}": lambda f, p=place, c=convert: another_layout(f, p, c)
        for (name, convert), place in product(LAYOUTS.items(), range(3))
        if (name, place) not in (("mkldnn", 0), ("nested", 2))
    },
    **{
        f"{name}={size}": lambda f, n=name, s=size: f(*leaves(), **{n: s}).sum().backward()
        for name in ("stride", "padding", "dilation", "groups")
        for size in (2**64, -(2**64), 2**63 - 1)
        if (name, size) not in (("stride", 2**63 - 1), ("dilation", 2**63 - 1))
    },
}  # fmt: skip


@pytest.mark.parametrize("fault", REFUSED)
def test_what_pytorch_refuses_is_refused_in_its_words(fault):
    words = []
    for f in (tw.conv2d, F.conv2d):
        with pytest.raises((RuntimeError, TypeError, ValueError)) as raised:
            REFUSED[fault](f)
        words.append((raised.type, str(raised.value).partition(" - got")[0]))
    assert words[0] == words[1]


# --- the choice ---------------------------------------------------------------------------------


def asked(out):
    """Whether the gradient of the output is by the choice of this package."""
    return "Convolution" in out.grad_fn.name() and out.grad_fn.name() != "ConvolutionBackward0"


def test_without_records_it_is_pytorchs_function(store):
    with tw.use("aten"):
        assert not asked(tw.conv2d(*leaves()))
    assert asked(tw.conv2d(*leaves()))


def test_a_switched_off_package_leaves_it_to_pytorch():
    tw.disable()
    try:
        assert not asked(tw.conv2d(*leaves()))
    finally:
        tw.enable()


def test_a_default_device_takes_no_choice_away():
    with torch.device("cpu"):
        assert asked(tw.conv2d(*leaves()))


def test_what_is_asked_for_around_the_forward_holds_in_another_threads_backward():
    x, w, _ = leaves()
    with tw.use("conv2d_weight_grad_sm90", op="conv2d_weight_grad"):
        out = tw.conv2d(x, w).sum()
    raised = []

    def backward():
        with pytest.raises(tw.NoImplementation, match="wgmma") as error:
            out.backward()
        raised.append(error)

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    assert raised
