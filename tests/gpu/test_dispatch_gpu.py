"""Public operators on a GPU: host cost, graph capture, streams, threads, devices, huge tensors."""

import threading
import warnings

import pytest
import torch
from torch.nn import functional as F

import tilewright as tw
from host_cost import host_us, most_us, pytorchs_softmax
from tilewright.device import spec_of
from tilewright.dispatch import prepared
from tilewright.environment import environment
from tilewright.impl import IMPLS
from tilewright.op import OPS, Workload
from tilewright.record import Record
from tilewright.space import config_dict

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]

BIAS_LAYER_NORM = (
    "bias_layer_norm(x=f16[64,768], bias0=f16[768], bias1=f16[768], weight=f16[768], bias=f16[768])"
)
LAYER_NORM = "layer_norm(x=f16[64,768], weight=f16[768], bias=f16[768])"
TEXTS = [
    BIAS_LAYER_NORM,
    LAYER_NORM,
    "rms_norm(x=f16[64,768], weight=f16[768])",
    "softmax(x=f16[64,768])",
    "lerp(x=f32[64,768], end=f32[768], weight=0.3)",
]


def record(store, text):
    """A duel that the heuristic's config of `fused` won."""
    w, spec = Workload.parse(text), spec_of(0)
    assert IMPLS["fused"].unsupported(w, spec) is None
    config = config_dict(IMPLS["fused"].heuristic(w, spec))
    device, info, versions = environment(torch.device("cuda:0"))
    store.add(
        Record(str(w), w.op, name, chosen, "ok", device, us, device_info=info, versions=versions,
               final=True, duel=text)
        for name, chosen, us in (("fused", config, 10.0), ("aten", {}, 20.0))
    )  # fmt: skip
    tw.reload_records()
    assert tw.choose(w, "cuda:0").implementation == "fused"
    return w


def call_of(w):
    """The public function on this workload's tensors, and those tensors."""
    tensors = OPS[w.op].examples(w, "random", 0, "cuda")
    public = getattr(tw, w.op)
    return lambda *given: public(*w.call(given).values()), tensors


def assert_close(found, w, tensors):
    expected = OPS[w.op].reference(**w.call(tensors))
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.alone
@pytest.mark.parametrize("text", TEXTS)
def test_a_tuned_operator_costs_the_host_little(store, text):
    w = record(store, text)
    _, tensors = call_of(w)
    public, args = getattr(tw, w.op), list(w.call(tensors).values())
    with torch.no_grad():
        public(*args)
        own_us, pytorchs_us = host_us(lambda: public(*args), pytorchs_softmax())
    assert own_us <= most_us(pytorchs_us), f"PyTorch: {pytorchs_us}"


@pytest.mark.parametrize("text", TEXTS)
def test_a_captured_call_replays(store, text):
    w = record(store, text)
    run, tensors = call_of(w)
    run(*tensors)
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.cuda.graph(graph):
            out = run(*tensors)
    tensors[0].copy_(torch.randn_like(tensors[0]))
    graph.replay()
    assert_close(out, w, tensors)


def test_capture_before_the_first_call_takes_pytorchs_kernel_and_warns_once(store, monkeypatch):
    monkeypatch.setattr(prepared.state, "warned_of_capture", False)
    w = record(store, LAYER_NORM)
    run, tensors = call_of(w)
    F.layer_norm(tensors[0], (768,), *tensors[1:])
    graph = torch.cuda.CUDAGraph()
    with pytest.warns(RuntimeWarning, match="graph capture") as caught, torch.cuda.graph(graph):
        outs = [run(*tensors) for _ in range(3)]
    assert len(caught) == 1
    assert not prepared.state.built
    graph.replay()
    for out in outs:
        assert_close(out, w, tensors)
    run(*tensors)
    assert prepared.state.built


def test_a_call_runs_on_the_current_stream(store):
    w = record(store, LAYER_NORM)
    run, tensors = call_of(w)
    run(*tensors)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        tensors[0].copy_(torch.randn_like(tensors[0]))
        out = run(*tensors)
    side.synchronize()
    assert_close(out, w, tensors)


def test_threads_on_their_own_streams_get_their_results(store):
    w = record(store, LAYER_NORM)
    failures = []

    def work(seed):
        tensors = OPS[w.op].examples(w, "random", seed, "cuda")
        torch.cuda.current_stream().synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(200):
                out = tw.layer_norm(tensors[0], 768, *tensors[1:])
            torch.cuda.current_stream().synchronize()
        try:
            assert_close(out, w, tensors)
        except AssertionError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
@pytest.mark.parametrize("implementation", ["aten", "fused"])
def test_a_tensor_of_another_device_than_the_current_one(implementation):
    with torch.cuda.device(0), tw.use(implementation):
        x = torch.randn(64, 768, device="cuda:1")
        for _ in range(2):
            y = tw.softmax(x)
            assert y.device == x.device
            torch.testing.assert_close(y, F.softmax(x, -1))
        assert torch.cuda.current_device() == 0


def test_tensors_on_different_devices_are_refused():
    x = torch.randn(4, 8, device="cuda")
    with pytest.raises(tw.InvalidArgument, match="tensors are on cpu, cuda:0"):
        tw.layer_norm(x, 8, torch.randn(8))


@pytest.mark.parametrize("implementation", ["aten", "fused"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lerps_weight_of_no_dims_may_lie_on_the_cpu(implementation, device, dtype):
    x, end = (torch.randn(64, 768, device="cuda") for _ in range(2))
    weight = torch.tensor(0.25, device=device, dtype=dtype)
    with tw.use(implementation):
        y = tw.lerp(x, end, weight)
        z = tw.lerp(x.requires_grad_(), end, weight.requires_grad_())
    torch.testing.assert_close(y, torch.lerp(x, end, weight))
    assert torch.equal(y, z)
    z.sum().backward()
    assert (weight.grad.device, weight.grad.dtype) == (weight.device, dtype)
    assert torch.equal(x.grad, torch.full_like(x, 0.75))


@pytest.mark.parametrize("implementation", ["aten", "fused"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_beside_fp32_parameters(implementation, dtype):
    x = torch.randn(64, 768, device="cuda", dtype=dtype)
    a, b = (torch.randn(768, device="cuda") for _ in range(2))
    with tw.use(implementation):
        y = tw.layer_norm(x, 768, a, b)
    assert y.dtype == dtype
    torch.testing.assert_close(y, F.layer_norm(x.float(), (768,), a, b).to(dtype))


@pytest.mark.parametrize("implementation", ["aten", "fused"])
def test_more_than_two_to_the_31_elements(implementation):
    rows, columns = 2**21 + 3, 1024
    x = torch.empty(rows, columns, device="cuda", dtype=torch.float16)
    x[: 2**20].normal_()
    x[2**20 :].normal_()
    with tw.use(implementation):
        found = tw.softmax(x)
    for start in range(0, rows, 2**18):
        part = slice(start, start + 2**18)
        torch.testing.assert_close(found[part], F.softmax(x[part], -1))
    del found
    with tw.use(implementation):
        found = tw.lerp(x, x[:1], 0.25)
    for start in range(0, rows, 2**18):
        part = slice(start, start + 2**18)
        torch.testing.assert_close(found[part], torch.lerp(x[part], x[:1], 0.25))


def assert_lerps_gradients(executable, shape, device, chunk=1 << 26):
    """Of an x of the last dim's size, or of one number, against fp64, by and by."""
    along = shape[-1] if len(shape) > 1 else 1
    x = torch.randn(along, device=device).half()
    grad, end, weight = (torch.empty(shape, dtype=torch.float16, device=device) for _ in range(3))
    for tensor, spread in ((grad, 1 / 64), (end, 1.0), (weight, 1.0)):
        for part in tensor.view(-1).split(chunk):
            part.normal_(0, spread)
    dx, *others = executable(grad, x, end, weight)
    right, size = (torch.zeros(along, dtype=torch.float64, device=device) for _ in range(2))
    rows = [t.view(-1, along).split(chunk // along) for t in (grad, end, weight, *others)]
    for parts in zip(*rows, strict=True):
        g, e, by, dend, dweight = (p.double() for p in parts)
        torch.testing.assert_close(dend, g * by, rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(dweight, g * (e - x), rtol=1e-3, atol=1e-6)
        right += (g * (1 - by)).sum(0)
        size += (g * (1 - by)).abs().sum(0)
    assert ((dx.double() - right).abs() <= 1e-3 * right.abs() + 1e-6 * size).all()


def lerps_gradients(shape):
    full, along = ",".join(map(str, shape)), shape[-1] if len(shape) > 1 else 1
    return Workload.parse(
        f"lerp_backward(grad_output=f16[{full}], x=f16[{along}], end=f16[{full}], "
        f"weight=f16[{full}])"
    )


HUGE, HUGE_BYTES = 2**31 + 8, 30e9
"""Elements, and memory that their five tensors take beside what is compared at once."""


@pytest.mark.alone
@pytest.mark.parametrize("shape", [(HUGE,), (HUGE // 8, 8)], ids=["of a number", "of columns"])
def test_lerps_gradients_of_more_than_two_to_the_31_elements(shape, needs_memory):
    needs_memory(HUGE_BYTES)
    w, spec, fused = lerps_gradients(shape), spec_of(0), IMPLS["fused"]
    executable = fused.build(fused.heuristic(w, spec), w, spec)
    assert_lerps_gradients(executable, shape, "cuda")


@pytest.mark.parametrize("forced", [None, "fused"])
def test_gradients_are_correct(forced):
    x, a, b = (
        torch.randn(*shape, device="cuda", dtype=torch.float64, requires_grad=True)
        for shape in ((4, 8), (8,), (8,))
    )
    with tw.use(forced or "aten"):
        assert torch.autograd.gradcheck(lambda *t: tw.layer_norm(t[0], 8, *t[1:]), (x, a, b))


def test_a_tuned_operator_runs_inside_a_compiled_function(store):
    w = record(store, LAYER_NORM)
    _, (x, a, b) = call_of(w)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, a, b: tw.layer_norm(x, 768, a, b) * 2, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(
            compiled(x, a, b), F.layer_norm(x, (768,), a, b) * 2, rtol=1e-2, atol=1e-2
        )
    assert prepared.state.built


@pytest.mark.parametrize("name", ["inductor", "inductor_max"])
def test_inductor_supports_this_gpu_and_captures(name):
    w = Workload.parse(LAYER_NORM)
    assert IMPLS[name].unsupported(w, spec_of(0)) is None
    run, tensors = call_of(w)
    with tw.use(name):
        run(*tensors)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(*tensors)
    graph.replay()
    assert_close(out, w, tensors)
