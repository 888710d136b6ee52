"""Quack as a baseline. Its package is played by PyTorch: the real one runs on GPUs alone."""

import importlib.util
import sys
import types

import pytest
import torch
from torch.nn import functional as F

from tilewright.device import DEVICES, spec_of
from tilewright.errors import CompileError, CompilerMissing
from tilewright.impl import IMPLS
from tilewright.op import Workload
from tilewright.suite import SUITES

CPU, H200, A100 = spec_of(None), DEVICES["h200"], DEVICES["a100"]
QUACK = IMPLS["quack"]


@pytest.fixture
def installed(monkeypatch):
    """Quack's functions as its package documents them; the shapes of x they were called with."""
    seen = []

    def forward(run, rank=2):
        def call(x, weight=None, bias=None, eps=1e-6):
            assert x.dim() == rank, "Input must be 2D"
            seen.append(tuple(x.shape))
            return run(x, weight, bias, eps)

        return call

    softmax = types.ModuleType("quack.softmax")
    softmax.softmax_fwd = forward(lambda x, weight, bias, eps: F.softmax(x, -1))
    norms = types.ModuleType("quack.rmsnorm")
    norms.rmsnorm_fwd = forward(
        lambda x, weight, bias, eps: (F.rms_norm(x, x.shape[-1:], weight, eps), x, None)
    )
    norms.layernorm_fwd = forward(
        lambda x, weight, bias, eps: F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    )
    for module in (types.ModuleType("quack"), softmax, norms):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    return seen


def refusal(text, device=H200):
    return QUACK.unsupported(Workload.parse(text), device)


@pytest.mark.parametrize(
    "text",
    [
        "softmax(x=f32[2,3,16])",
        "softmax(x=f32[16])",
        "rms_norm(x=f32[4,16], eps=0.5)",
        "rms_norm(x=f32[4,16], weight=f32[16])",
        "layer_norm(x=f32[2,3,16], weight=f32[16], eps=0.25)",
        "layer_norm(x=f32[4,16], weight=f32[16], bias=f32[16])",
    ],
)
def test_every_argument_reaches_quack_and_rows_are_flattened(installed, text):
    w = Workload.parse(text)
    tensors = w.operator.examples(w)
    executable = QUACK.build(QUACK.heuristic(w, CPU), w, CPU)
    found = executable(*tensors)
    expected = w.operator.reference(**w.call(tensors))
    torch.testing.assert_close(found, expected)
    assert installed[-1] == (w["x"].numel // 16, 16)


def test_building_compiles_on_a_single_row(installed):
    w = Workload.parse("softmax(x=f32[2,3,16])")
    QUACK.build(QUACK.heuristic(w, CPU), w, CPU)
    assert installed == [(1, 16)]


def test_parameters_that_require_gradients_are_taken_as_they_are(installed):
    w = Workload.parse("softmax(x=f32[4,16])")
    executable = QUACK.build(QUACK.heuristic(w, CPU), w, CPU)
    assert not executable(torch.nn.Parameter(torch.randn(4, 16))).requires_grad


def test_what_is_missing_is_a_reason_with_a_remedy(monkeypatch):
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "cutlass" else object()
    )
    reason = refusal("softmax(x=f32[4,16])")
    assert "without cutlass" in reason
    assert "pip install" in reason


def test_a_package_that_fails_to_import_is_a_compile_error(installed, monkeypatch):
    monkeypatch.delattr(sys.modules["quack.softmax"], "softmax_fwd")
    w = Workload.parse("softmax(x=f32[4,16])")
    with pytest.raises(CompilerMissing, match="pip install"):
        QUACK.build(QUACK.heuristic(w, CPU), w, CPU)


def test_what_quack_asserts_is_a_compile_error(installed, monkeypatch):
    def refuse(x):
        raise AssertionError("not divisible")

    monkeypatch.setattr(sys.modules["quack.softmax"], "softmax_fwd", refuse)
    w = Workload.parse("softmax(x=f32[4,16])")
    with pytest.raises(CompileError, match="not divisible"):
        QUACK.build(QUACK.heuristic(w, CPU), w, CPU)


@pytest.mark.parametrize(
    ("text", "device", "reason"),
    [
        ("softmax(x=f32[4,16])", CPU, "run on NVIDIA GPUs"),
        ("softmax(x=f64[4,16])", H200, "x is f64"),
        ("softmax(x=f32[4,16], dim=0)", H200, "last dim alone"),
        ("softmax(x=f32[0,16])", H200, "no row"),
        ("softmax(x=f16[4,5140])", H200, "16-byte vectors"),
        ("softmax(x=f32[4,16]@strides(20,1))", H200, "not contiguous"),
        ("softmax(x=f32[4,16]@align8)", H200, "multiple of 16 bytes"),
        ("softmax(x=f32[4,131072])", A100, "that 1 blocks hold"),
        ("softmax(x=f32[4,1048576])", H200, "that 16 blocks hold"),
        ("softmax(x=f16[2147483648,8])", H200, "rows exceed"),
        ("rms_norm(x=f32[4,2,8], normalized_shape=[2,8])", H200, "last dim alone"),
        ("layer_norm(x=f16[4,16])", H200, "needs a weight"),
        ("layer_norm(x=f16[4,16], weight=f16[16])", H200, "parameters in f32"),
        ("layer_norm(x=f32[4,16], weight=f32[16], bias=f32[16])", H200, None),
        ("layer_norm(x=f16[4,16], weight=f32[16])", H200, None),
        ("rms_norm(x=f16[4,5140], weight=f32[5140])", H200, None),
        ("softmax(x=f32[4,65536])", H200, None),
        ("rms_norm(x=f16[6,37], weight=f16[37])", H200, "no whole number of 4-byte copies"),
        ("rms_norm(x=f16[6,38], weight=f16[38])", H200, None),
    ],
)
def test_what_quack_does_not_take_is_refused_in_words(installed, text, device, reason):
    found = refusal(text, device)
    assert found is None if reason is None else reason in found


def test_it_serves_the_sweep_but_for_layer_norms_in_halves_and_the_odd_width(installed):
    refused = {
        (w.op, w["x"].dtype in ("f16", "bf16"), w["x"].shape[-1])
        for w in SUITES["norms_sweep"].workloads()
        if QUACK.unsupported(w, H200)
    }
    widths = {w["x"].shape[-1] for w in SUITES["norms_sweep"].workloads()}
    assert refused == {("layer_norm", True, h) for h in widths} | {("softmax", True, 5140)}
