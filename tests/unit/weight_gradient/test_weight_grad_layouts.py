"""Weight gradients of tensors that are not channels_last: what converts them, and when."""

import math
from dataclasses import replace

import pytest
import torch
from convolutions import with_bias
from hypothesis import given, settings
from hypothesis import strategies as st
from tensor_cores_on_cpu import DEVICE, OnCpu, on_cpu, without_a_gpu

from tilewright.compile import cxx, nvrtc
from tilewright.device import DEVICES
from tilewright.impl import IMPLS
from tilewright.impls.weight_gradient import _launch
from tilewright.impls.weight_gradient._layout import Batch, Conversion, Converted, Transposition
from tilewright.impls.weight_gradient._problem import as_read
from tilewright.measure.verify import Verifier
from tilewright.op import Workload
from tilewright.tensor_spec import TensorSpec

needs_compilers = pytest.mark.skipif(
    nvrtc.missing() is not None or cxx.missing() is not None, reason="a compiler is missing"
)
CPU = torch.device("cpu")
FEW = replace(DEVICE, sms=2)


@pytest.fixture(autouse=True)
def counters(monkeypatch):
    return without_a_gpu(monkeypatch, _launch)


def guarded(spec, kind):
    """A tensor of this layout, and the memory around it."""
    itemsize, margin = spec.itemsize, 64
    memory = torch.full((spec.storage_elements + 2 * margin,), -7, dtype=spec.torch_dtype)
    offset = margin - memory.data_ptr() // itemsize % (16 // itemsize)
    t = memory.as_strided(spec.shape, spec.real_strides, offset + spec.align % 16 // itemsize)
    if kind == "numbers":
        t.copy_(torch.arange(t.numel()).view(t.shape) % 2039)
    return t, memory


def converted(*pairs):
    """Whether a conversion of the pairs is right and writes nothing else."""
    conversion = Conversion(pairs, DEVICE)
    assert not conversion.copied
    for _, transposition in conversion.launches:
        on_cpu(transposition)
    given = [guarded(spec, "numbers")[0] for spec, _ in pairs]
    made = [guarded(spec, "poison") for _, spec in pairs]
    conversion(list(zip(given, (t for t, _ in made), strict=True)))
    right = all(torch.equal(t, g) for (t, _), g in zip(made, given, strict=True))
    return right and all(
        int((memory != -7).sum()) <= t.numel() and int((t == -7).sum()) == 0 for t, memory in made
    )


@needs_compilers
@settings(max_examples=6)
@given(st.data())
def test_any_contiguous_tensors_become_channels_last_and_back(data):
    def draw(*values):
        return data.draw(st.sampled_from(values))

    dtypes, pairs = draw(("f16", "f16"), ("f32", "f16"), ("f64",)), []
    for dtype in dtypes:
        shape = (draw(1, 3), draw(2, 3, 24, 63, 136), draw(1, 7, 9), draw(2, 11, 16, 56))
        spec = TensorSpec(dtype, shape)
        pair = spec, as_read(spec)
        pairs.append(draw(pair, pair[::-1]))
    assert converted(*pairs)


@needs_compilers
@pytest.mark.parametrize("align", [2, 4, 8])
@pytest.mark.parametrize("shape", [(2, 64, 8, 8), (2, 3, 8, 8)])
def test_addresses_that_are_less_aligned_are_read_and_written(shape, align):
    spec = TensorSpec("f16", shape, None, align)
    assert converted((spec, as_read(spec)), (as_read(spec), spec))


WIDTHS = [
    Batch(8, 64, 3136, 2, 16, 16),
    Batch(8, 512, 49, 2, 16, 16),
    Batch(8, 63, 49, 2, 2, 2),
    Batch(8, 3, 50176, 2, 16, 16),
    Batch(64, 9, 511, 4, 16, 16),
    Batch(8, 64, 49, 8, 16, 16),
]


@pytest.mark.skipif(nvrtc.missing() is not None, reason="no NVRTC")
@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
@pytest.mark.parametrize("batch", WIDTHS, ids=str)
def test_conversions_compile_without_spills_and_without_a_stack(batch, device):
    resources = Transposition([batch, batch], DEVICES[device]).kernel.compiled.resources
    assert resources.spill_bytes == resources.stack_bytes == 0
    assert resources.registers <= 64


def test_accesses_are_as_wide_as_rows_and_addresses_allow():
    assert [(b.read_width, b.write_width, b.whole) for b in WIDTHS] == [
        (8, 8, 0), (1, 8, 0), (1, 1, 63), (8, 8, 3), (1, 1, 9), (1, 2, 0)
    ]  # fmt: skip


# --- with kernels -------------------------------------------------------------------------------


def workload(shapes, rest, x="", grad="", dtype="f16", op="weight_grad"):
    """`shapes`: those of x and grad_output; `x` and `grad`: their layouts."""
    first, second = shapes
    return Workload.parse(
        f"conv2d_{op}(x={dtype}[{first}]{x}, grad_output={dtype}[{second}]{grad}, {rest})"
    )


LAST = "@channels_last"
PLAIN = ("2,24,5,6", "2,40,5,6"), "kernel_size=3, padding=1"
STEM = ("2,3,12,10", "2,8,6,5"), "kernel_size=3, stride=2, padding=1"
GROUPS = ("2,16,6,7", "2,16,6,7"), "kernel_size=3, padding=1, groups=4"
DEPTHWISE = ("2,24,7,9", "2,24,7,9"), "kernel_size=3, padding=1, groups=24"
SM80 = "conv2d_weight_grad_sm80"
EXPANDED = "@strides(0,0,0,0)"
CASES = [
    (SM80, workload(*PLAIN)),
    (SM80, workload(*PLAIN, x=LAST)),
    (SM80, workload(*PLAIN, grad=LAST, dtype="bf16")),
    (SM80, workload(*PLAIN, grad=EXPANDED)),
    (SM80, workload(*PLAIN, x="@strides(1440,60,12,2)", grad="@align2")),
    (SM80, workload(PLAIN[0], PLAIN[1] + ", out_dtype=f32")),
    (SM80, workload(PLAIN[0], PLAIN[1] + ", into=f16[40,24,3,3]")),
    (SM80, workload(PLAIN[0], PLAIN[1] + ", into=f32[40,24,3,3]")),
    (SM80, workload(PLAIN[0], PLAIN[1] + f", into=f32[40,24,3,3]{LAST}")),
    (SM80, workload(*PLAIN, op="weight_bias_grad")),
    (SM80, workload(*PLAIN, dtype="f64")),
    (SM80, workload(("2,24,1,1", "2,40,1,1"), PLAIN[1])),
    (SM80, workload(("2,1,5,6", "2,1,5,6"), PLAIN[1])),
    ("conv2d_weight_grad_narrow", workload(*STEM)),
    ("conv2d_weight_grad_narrow", workload(*STEM, op="weight_bias_grad")),
    ("conv2d_weight_grad_grouped", workload(*GROUPS)),
    ("conv2d_weight_grad_grouped", workload(GROUPS[0], GROUPS[1] + ", into=f16[16,4,3,3]")),
    ("conv2d_weight_grad_depthwise", workload(*DEPTHWISE)),
    ("conv2d_weight_grad_depthwise", workload(*DEPTHWISE, op="weight_bias_grad")),
    (SM80, with_bias(workload(*PLAIN), "f32")),
    ("conv2d_weight_grad_grouped", with_bias(workload(*GROUPS), "f16")),
]


def donated(w):
    """Its in-place form."""
    return replace(w, flags=(f"donate={','.join(w.operator.writes)}",))


DONATED = [(name, donated(w)) for name, w in CASES if "into" in w.tensors]


@needs_compilers
@pytest.mark.parametrize(("name", "w"), CASES + DONATED, ids=str)
def test_every_layout_is_served_and_the_result_is_laid_out_as_pytorchs(name, w):
    impl = IMPLS[name]
    assert impl.unsupported(w, FEW) is None
    config = impl.heuristic(w, FEW)
    if name == SM80:
        config = replace(config, tile_m=64, tile_n=64, stages=2, split_k=2, combine="last")
    run = OnCpu(impl, config, w)
    verdict = Verifier(w, CPU).check(run)
    assert verdict.ok, verdict.message
    tensors = w.operator.examples(w, "integer", 0, "cpu")
    found = run(*tensors)
    found = found if isinstance(found, tuple) else (found,)
    assert TensorSpec.of(found[0]) == w.outputs[0]
    if w.donated:
        assert all(a is b for a, b in zip(found, tensors[2:], strict=True))


def built(name, w):
    impl = IMPLS[name]
    assert impl.unsupported(w, DEVICE) is None
    return impl.build(impl.heuristic(w, DEVICE), w, DEVICE)


@needs_compilers
@pytest.mark.parametrize("name", [SM80, "conv2d_weight_grad_sm90"])
def test_conversions_count_as_workspace(name):
    shapes = "2,64,8,8", "2,128,8,8"
    run, plain = (built(name, workload(shapes, PLAIN[1], x, x)) for x in ("", LAST))
    assert isinstance(run, Converted)
    assert not isinstance(plain, Converted)
    converted = [math.prod(s) * 2 for s in [(2, 64, 8, 8), (2, 128, 8, 8), (128, 64, 3, 3)]]
    assert run.workspace_bytes == run.kernel.workspace_bytes + sum(converted)


@needs_compilers
def test_x_and_grad_output_are_converted_in_one_launch_and_a_1x1_result_in_none():
    shapes = "2,64,8,8", "2,128,8,8"
    run = built("conv2d_weight_grad_sm90", workload(shapes, "kernel_size=1"))
    assert len(run.before.launches) == 1
    assert run.after.launches == run.before.copied == run.after.copied == []
