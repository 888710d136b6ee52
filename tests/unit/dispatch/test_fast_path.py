"""What makes a call leave the fast path, and how operators look below torch.compile."""

import pytest
import torch
from dispatching import SOFTMAX, record
from torch.nn import functional as F

import tilewright as tw
from tilewright.dispatch import prepared
from tilewright.dispatch.recent import MISSED
from tilewright.errors import InvalidArgument
from tilewright.op import Workload

# --- leaving the fast path -----------------------------------------------------------------------


@pytest.fixture
def always_probe(probe):
    with tw.use("probe"):
        yield probe


def test_fake_tensors_get_fake_results(always_probe):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.randn(8, 16))
        y = tw.layer_norm(x)
    assert type(y) is type(x)
    assert y.shape == (8, 16)
    assert always_probe.runs == 0


def test_meta_tensors_get_meta_results():
    y = tw.softmax(torch.empty(8, 16, device="meta"))
    assert (y.device.type, y.shape) == ("meta", (8, 16))


def test_a_tensor_subclass_sees_pytorchs_function(always_probe):
    class Named(torch.Tensor):
        pass

    y = tw.softmax(torch.randn(8, 16).as_subclass(Named))
    assert type(y) is Named
    assert always_probe.runs == 0


def test_vmap_maps(always_probe):
    x, w = torch.randn(3, 8, 16), torch.randn(3, 16)
    y = torch.vmap(lambda x, w: tw.rms_norm(x, (16,), w))(x, w)
    torch.testing.assert_close(y, torch.stack([F.rms_norm(a, (16,), b) for a, b in zip(x, w)]))  # noqa: B905
    assert always_probe.runs == 0


def test_functional_gradients(always_probe):
    x = torch.randn(8, 16, dtype=torch.float64)
    found = torch.func.grad(lambda x: tw.softmax(x).square().sum())(x)
    expected = torch.func.grad(lambda x: F.softmax(x, -1).square().sum())(x)
    torch.testing.assert_close(found, expected)


def test_forward_mode_gradients_are_kept(always_probe):
    x, t = torch.randn(8, 16), torch.randn(8, 16)
    with torch.autograd.forward_ad.dual_level():
        y = tw.softmax(torch.autograd.forward_ad.make_dual(x, t))
        tangent = torch.autograd.forward_ad.unpack_dual(y).tangent
    _, expected = torch.func.jvp(lambda x: F.softmax(x, -1), (x,), (t,))
    torch.testing.assert_close(tangent, expected)


def test_autocast_has_the_dtypes_that_pytorch_gives(always_probe):
    x = torch.randn(8, 16, dtype=torch.bfloat16)
    v = torch.randn(16)
    with torch.autocast("cpu", torch.bfloat16):
        assert tw.softmax(x).dtype == F.softmax(x, -1).dtype
        assert tw.layer_norm(x, 16, v, v).dtype == F.layer_norm(x, (16,), v, v).dtype
    assert always_probe.runs == 0


def test_autocast_below_torch_compile_has_the_dtypes_that_pytorch_gives(store, probe):
    record(store, "softmax(x=bf16[8,16])")

    def run(x):
        with torch.autocast("cpu", torch.bfloat16):
            return tw.softmax(x)

    x = torch.randn(8, 16, dtype=torch.bfloat16)
    y, targets = graph_of(run, x)
    assert y.dtype == run(x).dtype
    assert not any("tilewright" in target for target in targets)


def test_a_dispatch_mode_sees_pytorchs_operators(always_probe):
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Spy():
        tw.softmax(torch.randn(8, 16))
    assert "aten._softmax.default" in seen


def test_a_function_mode_sees_pytorchs_functions(always_probe):
    from torch.overrides import TorchFunctionMode

    seen = []

    class Spy(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.randn(8, 16)
    with Spy():
        tw.softmax(x)
    assert F.softmax in seen


def _spying(base):
    class Spy(base):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

        __torch_function__ = __torch_dispatch__

    return Spy()


def _under_modes(call):
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    for mode in (
        _spying(TorchDispatchMode),
        _spying(TorchFunctionMode),
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.autograd.forward_ad.dual_level(),
        torch.autocast("cpu", torch.bfloat16),
        tw.use("aten"),
    ):
        with mode:
            yield call()


def _under_transforms(call):
    v = torch.randn(3)
    yield torch.vmap(lambda v: call() + v)(v)
    yield torch.func.grad(lambda v: (call() * v.sum()).sum())(v)
    yield torch.func.jvp(lambda v: call() * v.sum(), (v,), (v,))
    yield torch.func.functionalize(lambda v: call() + v[0])(v)


@pytest.mark.parametrize("around", [_under_modes, _under_transforms])
def test_a_call_that_came_before_leaves_the_fast_path_under_modes(store, probe, around):
    record(store, SOFTMAX)
    x = Workload.parse(SOFTMAX).operator.examples(Workload.parse(SOFTMAX), "random", 0, "cpu")[0]
    for _ in range(5):
        tw.softmax(x)
    assert prepared.state.recent["softmax"].last((x,), True) is not MISSED
    runs = probe.runs
    for _ in around(lambda: tw.softmax(x)):
        assert probe.runs == runs
    tw.softmax(x)
    assert probe.runs == runs + 1


def test_a_default_device_does_not_leave_the_fast_path(always_probe):
    x = torch.randn(8, 16)
    with torch.device("cpu"):
        tw.softmax(x)
    assert always_probe.runs == 1


def test_parameters_without_a_need_for_gradients_stay_on_the_fast_path(always_probe):
    x, w = torch.randn(8, 16), torch.nn.Parameter(torch.randn(16))
    with torch.no_grad():
        y = tw.rms_norm(x, (16,), w)
        torch.testing.assert_close(y, F.rms_norm(x, (16,), w))
    with torch.inference_mode():
        tw.rms_norm(x, (16,), w)
    assert always_probe.runs == 2
    assert not y.requires_grad


# --- torch.compile -------------------------------------------------------------------------------


def graph_of(function, *inputs, **options):
    """The aten-level target of every call that Dynamo captured, without graph breaks."""
    graphs = []

    def backend(gm, _):
        graphs.append(gm)
        return gm

    torch._dynamo.reset()
    out = torch.compile(function, backend=backend, fullgraph=True, **options)(*inputs)
    targets = [str(n.target) for gm in graphs for n in gm.graph.nodes if n.op == "call_function"]
    return out, targets


def test_a_tuned_operator_is_one_node_below_torch_compile(store, probe):
    record(store, SOFTMAX)
    x = torch.randn(8, 16)
    y, targets = graph_of(lambda x: tw.softmax(x, dim=-1) + 1, x)
    assert targets[0] == "tilewright.softmax"
    assert probe.runs == 1
    torch.testing.assert_close(y, F.softmax(x, -1) + 1)


def test_a_tuned_operator_survives_ahead_of_time_autograd(store, probe):
    record(store, SOFTMAX)
    x, w = torch.randn(8, 16), torch.randn(16, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: tw.softmax(x) * w, backend="aot_eager", fullgraph=True)
    compiled(x, w).sum().backward()
    assert probe.runs == 1
    torch.testing.assert_close(w.grad, F.softmax(x, -1).sum(0))


def test_an_untuned_operator_is_pytorchs_own_below_torch_compile(store, probe):
    x = torch.randn(8, 16)
    y, targets = graph_of(lambda x: tw.layer_norm(x) + 1, x)
    assert "layer_norm" in targets[0]
    assert "tilewright" not in targets[0]
    torch.testing.assert_close(y, F.layer_norm(x, (16,)) + 1)


def test_a_tuned_operator_that_needs_gradients_is_pytorchs_own_below_torch_compile(store, probe):
    record(store, SOFTMAX)
    x = torch.randn(8, 16, requires_grad=True)
    y, targets = graph_of(lambda x: tw.softmax(x), x)
    assert not any("tilewright" in target for target in targets)
    y.square().sum().backward()
    assert x.grad is not None


def test_symbolic_shapes_trace_without_a_break(store, probe):
    record(store, SOFTMAX)
    x = torch.randn(8, 16)
    y, _ = graph_of(lambda x, s: tw.lerp(tw.softmax(x), x, s), x, 0.3, dynamic=True)
    torch.testing.assert_close(y, torch.lerp(F.softmax(x, -1), x, 0.3))


def test_what_one_operator_refuses_under_torch_compile_leaves_the_others_in_one_graph(
    forgets_functions,
):
    torch._dynamo.reset()
    x = torch.randn(2, 4, 8, 8)
    with pytest.raises(InvalidArgument, match="gives"):
        torch.compile(tw.conv2d_weight_grad, backend="eager")(x.requires_grad_(), x, 3)
    doubled = tw.fuse(lambda x: x * 2, name="doubled")
    found = torch.compile(doubled, backend="eager", fullgraph=True)(x.detach())
    assert torch.equal(found, x * 2)
