"""The vendor: PyTorch's own result, also where its kernels refuse a mix of dtypes."""

import pytest
import torch
from torch.nn import functional as F

from tilewright.device import DEVICES, spec_of
from tilewright.impl import IMPLS
from tilewright.impls import aten_deterministic
from tilewright.impls._vendor import vendor
from tilewright.op import OPS, Workload
from tilewright.suite import SUITES


def run(text, *tensors):
    w = Workload.parse(text)
    aten = IMPLS["aten"]
    return aten.build(aten.heuristic(w, spec_of(None)), w, spec_of(None))(*tensors)


@pytest.mark.parametrize("suite", list(SUITES))
@pytest.mark.parametrize("device", list(DEVICES))
def test_the_vendor_supports_every_workload_on_every_device(suite, device):
    for w in SUITES[suite].workloads():
        assert IMPLS["aten"].unsupported(w, DEVICES[device]) is None


def test_absent_and_constant_arguments_keep_their_places():
    x, b = torch.randn(4, 2, 8), torch.randn(2, 8)
    y = run("layer_norm(x=f32[4,2,8], normalized_shape=[2,8], bias=f32[2,8], eps=0.5)", x, b)
    assert torch.equal(y, F.layer_norm(x, (2, 8), None, b, 0.5))


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_halves_beside_fp32_parameters_are_computed_in_fp32(dtype):
    w = Workload.parse(f"layer_norm(x={dtype}[4,64], weight=f32[64], bias=f32[64])")
    x, a, b = OPS["layer_norm"].examples(w)
    y = run(str(w), x, a, b)
    assert y.dtype == x.dtype == w.outputs[0].torch_dtype
    assert torch.equal(y, F.layer_norm(x.float(), (64,), a, b).to(x.dtype))


@pytest.mark.parametrize(
    ("text", "dropped"),
    [
        (
            "lerp_backward(grad_output=f32[4,8], x=f32[4,8], end=f32[4,8], weight=f32[8],"
            " grads=[end])",
            {"lerp", "rsub", "sub", "neg"},
        ),
        (
            "bias_layer_norm_backward(grad_output=f32[4,64], x=f32[4,64], bias0=f32[64],"
            " bias1=f32[64], mean=f32[4,1], rstd=f32[4,1], weight=f32[64], grads=[x])",
            {"sum"},
        ),
    ],
)
def test_pytorch_takes_no_step_that_the_wanted_gradients_do_not_need(text, dropped):
    w = Workload.parse(text)
    steps = vendor(w).graph(w.operator.examples(w, "random", 0, "cpu")).graph.nodes
    calls = [n for n in steps if n.op == "call_function"]
    assert calls
    assert all(n.users for n in calls)
    assert not dropped & {n.target.__name__.split(".")[0] for n in calls}


def test_written_roundings_stay_where_parameters_are_wider():
    w = Workload.parse(
        "bias_layer_norm(x=f16[4,64], bias0=f32[64], bias1=f32[64], weight=f32[64], bias=f32[64])"
    )
    x, b0, b1, a, b = OPS["bias_layer_norm"].examples(w)
    h = ((x + b0).half() + b1).half()
    assert torch.equal(run(str(w), x, b0, b1, a, b), F.layer_norm(h.float(), (64,), a, b).half())


def test_mixed_dtypes_are_differentiable():
    from tilewright.impls._vendor import call_reference

    x, a = torch.randn(4, 8).half().requires_grad_(), torch.randn(8, requires_grad=True)
    args = {"x": x, "normalized_shape": (8,), "weight": a, "eps": 1e-6}
    call_reference(OPS["rms_norm"], args).sum().backward()
    assert (x.grad.dtype, a.grad.dtype) == (torch.float16, torch.float32)


LAYER = "conv2d_weight_grad(x=f32[2,3,9,9], grad_output=f32[2,5,7,7], kernel_size=3)"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "index_reduce(x=f32[6,40], dim=0, index=i64[9], source=f32[9,40], reduce=amax)",
            "refuses",
        ),
        ("scatter_reduce(x=f32[9], dim=0, index=i64[9], src=f32[9], reduce=prod)", "refuses"),
        ("scatter(x=f32[], dim=0, index=i64[], src=f32[])", "without dims"),
        ("scatter_reduce(x=f32[9], dim=0, index=i64[9], src=f32[9], reduce=sum)", None),
        ("scatter(x=f32[9], dim=0, index=i64[9], src=f32[9])", None),
        (LAYER, None),
        (LAYER.replace("weight", "weight_bias"), None),
        (f"{LAYER[:-1]}, into=f32[5,3,3,3])", None),
        ("layer_norm(x=f32[4,64])", "do not race"),
    ],
)
def test_the_deterministic_vendor_leaves_what_pytorch_cannot_do_in_that_mode(text, reason):
    found = IMPLS["aten_deterministic"].unsupported(Workload.parse(text), DEVICES["h200"])
    assert found is None if reason is None else reason in found


def modes():
    return torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic


@pytest.mark.parametrize(
    ("text", "during"),
    [
        (LAYER, (False, True)),
        (LAYER.replace("weight", "weight_bias"), (False, True)),
        ("index_add(x=f32[5,8], dim=0, index=i64[9], source=f32[9,8])", (True, False)),
    ],
)
def test_the_deterministic_vendor_sets_a_mode_for_its_call_alone(text, during, monkeypatch):
    seen = []

    def run(*tensors):
        seen.append(modes())
        raise RuntimeError("no memory")

    monkeypatch.setattr(aten_deterministic, "vendor", lambda w: run)
    w = Workload.parse(text)
    executable = IMPLS["aten_deterministic"].build(None, w, DEVICES["h200"])
    before = modes()
    with pytest.raises(RuntimeError, match="no memory"):
        executable()
    assert seen == [during]
    assert modes() == before


def test_the_deterministic_vendors_gradient_is_that_of_autograd():
    w = Workload.parse(LAYER)
    x, grad = w.operator.examples(w)
    executable = IMPLS["aten_deterministic"].build(None, w, spec_of(None))
    truth = torch.nn.grad.conv2d_weight(x, w.outputs[0].shape, grad)
    torch.testing.assert_close(executable(x, grad), truth)
