"""torch.compile as an implementation. Most tests stop at Dynamo, since g++ takes seconds."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn import functional as F

from tilewright.compile import cxx
from tilewright.device import DEVICES, spec_of
from tilewright.errors import CompileError
from tilewright.fakes import tracing_lock
from tilewright.impl import IMPLS
from tilewright.impls import _vendor, inductor
from tilewright.op import OPS, Workload

CPU = spec_of(None)
SOFTMAX = Workload.parse("softmax(x=f32[4,16])")


@pytest.fixture
def graphs(monkeypatch):
    """Graphs that Dynamo captured; they run eagerly."""
    captured = []

    def backend(gm, inputs):
        captured.append(gm)
        return gm

    def compile_(run, mode=None, **options):
        return original(run, backend=backend, **options)

    original = torch.compile
    monkeypatch.setattr(torch, "compile", compile_)
    return captured


def build(w, name="inductor"):
    impl = IMPLS[name]
    return impl.build(impl.heuristic(w, CPU), w, CPU)


@pytest.mark.skipif(cxx.missing() is not None, reason="no C++ compiler")
def test_it_compiles_and_computes_the_reference():
    x = torch.randn(4, 16)
    torch.testing.assert_close(build(SOFTMAX)(x), F.softmax(x, -1))


def test_every_workload_is_compiled_beyond_the_recompile_limit(graphs):
    count = torch._dynamo.config.recompile_limit + 3
    executables = [build(Workload.parse(f"softmax(x=f32[4,{n}])")) for n in range(2, count + 2)]
    assert len(graphs) == count
    for n, executable in enumerate(executables, 2):
        x = torch.randn(4, n)
        assert torch.equal(executable(x), F.softmax(x, -1))
    assert len(graphs) == count


def test_grad_mode_and_parameters_do_not_compile_again(graphs):
    executable = build(SOFTMAX)
    x = torch.nn.Parameter(torch.randn(4, 16))
    for _ in range(2):
        assert not executable(x).requires_grad
    with torch.no_grad():
        executable(x.detach())
    assert len(graphs) == 1


@pytest.mark.parametrize(
    "text",
    [
        "bias_layer_norm(x=f16[4,8], bias0=f16[8], bias1=f16[8], weight=f16[8], bias=f16[8])",
        "bias_layer_norm(x=f16[4,8], bias0=f32[8], bias1=f32[8], weight=f32[8], bias=f32[8])",
        "layer_norm(x=bf16[4,8], weight=f32[8])",
        "rms_norm(x=f32[4,8])",
        "lerp(x=f32[4,1], end=f32[1,8], weight=0.25)",
        "lerp(x=f32[4,1], end=f32[1,8], weight=f32[8])",
    ],
)
def test_every_reference_is_captured_whole(graphs, text):
    w = Workload.parse(text)
    tensors = OPS[w.op].examples(w)
    found, expected = build(w)(*tensors), _vendor.vendor(w)(*tensors)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert len(graphs) == 1


def test_what_dynamo_refuses_is_a_compile_error(graphs, monkeypatch):
    def breaking(w):
        def run(x):
            print("a graph break")
            return x

        return run

    monkeypatch.setattr(inductor, "vendor", breaking)
    with pytest.raises(CompileError, match="inductor: softmax"):
        build(SOFTMAX)


def test_a_call_waits_while_another_thread_traces(graphs):
    from torch.fx.experimental.proxy_tensor import make_fx

    executable, x = build(SOFTMAX), torch.randn(4, 16)
    begun, go_on = threading.Event(), threading.Event()

    def traced(x):
        begun.set()
        assert go_on.wait(30)
        return x + 1

    def trace():
        with tracing_lock():
            make_fx(traced)(x)

    with ThreadPoolExecutor(2) as pool:
        tracing = pool.submit(trace)
        assert begun.wait(30)
        try:
            with pytest.raises(RuntimeError, match="symbolically trace"):
                executable.compiled(x)
            call = pool.submit(executable, x)
            assert not call.done()
        finally:
            go_on.set()
        assert torch.equal(call.result(30), F.softmax(x, -1))
        tracing.result(30)
    assert len(graphs) == 1


def test_max_autotune_is_for_gpus():
    assert "GPU" in IMPLS["inductor_max"].unsupported(SOFTMAX, CPU)


def test_a_missing_compiler_is_a_reason_with_a_remedy(monkeypatch):
    monkeypatch.setattr(inductor.cxx, "missing", lambda: "no C++ compiler: apt install g++")
    assert "apt install" in IMPLS["inductor"].unsupported(SOFTMAX, CPU)


@pytest.mark.parametrize("name", ["inductor", "inductor_max"])
def test_a_gpu_that_is_not_here_is_a_reason(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch sees none" in IMPLS[name].unsupported(SOFTMAX, DEVICES["h200"])


def test_a_missing_triton_is_a_reason_with_a_remedy(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(inductor.importlib.util, "find_spec", lambda name: None)
    assert "pip install triton" in IMPLS["inductor"].unsupported(SOFTMAX, DEVICES["h200"])


def test_modes_reach_torch_compile(monkeypatch):
    seen = []

    def compile_(run, **options):
        seen.append(options["mode"])
        return run

    monkeypatch.setattr(torch, "compile", compile_)
    for name in ("inductor", "inductor_max"):
        build(SOFTMAX, name)
    assert seen == [None, "max-autotune-no-cudagraphs"]
