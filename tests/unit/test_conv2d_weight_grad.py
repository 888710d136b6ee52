"""The convolution weight gradient: its operator, its layouts, and what its kernels refuse."""

import csv
import math
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import tilewright as tw
from tilewright.compile.cache import compiled
from tilewright.device import DEVICES
from tilewright.dispatch.call import _asking_for_tf32
from tilewright.dispatch.pytorch import bind
from tilewright.errors import InvalidArgument
from tilewright.impl import IMPLS
from tilewright.impls import conv2d_weight_grad_sm80 as sm80
from tilewright.impls import conv2d_weight_grad_sm90 as sm90
from tilewright.impls._weight_grad import problem_of
from tilewright.impls._weight_grad_model import COMBINES, predicted_us
from tilewright.measure.ceilings import Ceilings
from tilewright.op import OPS, Workload
from tilewright.suite import SUITES

H200 = DEVICES["h200"]
SM90 = IMPLS["conv2d_weight_grad_sm90"]
SM80 = IMPLS["conv2d_weight_grad_sm80"]
SUITES_OF_THIS = [name for name in SUITES if "wgrad" in name]


def weight_grad(x, grad, rest, layout="@channels_last", dtype="f16"):
    return Workload.parse(
        f"conv2d_weight_grad(x={dtype}[{x}]{layout}, grad_output={dtype}[{grad}]{layout}, {rest})"
    )


SIMPLE = weight_grad("8,64,56,56", "8,128,56,56", "kernel_size=3, padding=1")


# --- the operator --------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_it_is_the_gradient_that_autograd_finds(data):
    def draw(low, high):
        return data.draw(st.integers(low, high))

    groups = draw(1, 3)
    x = torch.randn(draw(1, 3), groups * draw(1, 3), draw(5, 9), draw(5, 9), dtype=torch.float64)
    weight = torch.randn(
        groups * draw(1, 3), x.shape[1] // groups, draw(1, 3), draw(1, 3), dtype=torch.float64
    ).requires_grad_()
    sizes = {
        "stride": (draw(1, 3), draw(1, 3)),
        "padding": (draw(0, 2), draw(0, 2)),
        "dilation": (draw(1, 2), draw(1, 2)),
    }
    out = torch.nn.functional.conv2d(x, weight, groups=groups, **sizes)
    grad = torch.randn_like(out)
    out.backward(grad)
    found = tw.conv2d_weight_grad(x, grad, weight.shape[2:], groups=groups, **sizes)
    torch.testing.assert_close(found, weight.grad)


def test_one_number_stands_for_both_sizes():
    x, grad = torch.randn(2, 4, 8, 8), torch.randn(2, 6, 4, 4)
    found = tw.conv2d_weight_grad(x, grad, 3, stride=2, padding=1)
    assert torch.equal(found, tw.conv2d_weight_grad(x, grad, [3, 3], (2, 2), (1, 1)))


HALF_PAIR = [torch.randn(2, 4, 8, 8).half(), torch.randn(2, 6, 8, 8).half()]


@pytest.mark.parametrize("asked", [torch.float32, "f32"])
def test_halves_give_an_fp32_result_that_was_never_rounded(asked):
    x, grad = HALF_PAIR
    found = tw.conv2d_weight_grad(x, grad, 3, padding=1, out_dtype=asked)
    expected = torch.nn.grad.conv2d_weight(x.float(), (6, 4, 3, 3), grad.float(), padding=1)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_gradient_is_added_to_another_in_place_only_where_asked(dtype):
    x, grad = HALF_PAIR
    into = torch.randn(6, 4, 3, 3).to(dtype)
    before = into.clone()
    expected = before + tw.conv2d_weight_grad(x, grad, 3, padding=1, out_dtype=torch.float32)
    found = tw.conv2d_weight_grad(x, grad, 3, padding=1, into=into)
    assert found.dtype == dtype
    assert torch.equal(into, before)
    torch.testing.assert_close(found.float(), expected.float(), rtol=2e-3, atol=2e-2)
    assert tw.conv2d_weight_grad_(x, grad, 3, padding=1, into=into) is into
    torch.testing.assert_close(into.float(), expected.float(), rtol=2e-3, atol=2e-2)


def test_the_bias_gradient_comes_with_the_weights():
    x, grad = (t.double() for t in HALF_PAIR)
    weight, bias = tw.conv2d_weight_bias_grad(x, grad, 3, padding=1)
    torch.testing.assert_close(weight, tw.conv2d_weight_grad(x, grad, 3, padding=1))
    torch.testing.assert_close(bias, grad.sum((0, 2, 3)))


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        ("kernel_size=1, out_dtype=f64", "out_dtype=f64 should be f16 or f32"),
        ("kernel_size=1, into=f64[6,4,1,1]", r"into=f64\[6,4,1,1\] should be f16 or f32"),
        ("kernel_size=1, into=f32[6,4,3,3]", r"should be f16 or f32\[6, 4, 1, 1\]"),
        ("kernel_size=1, into=f16[6,4,1,1], out_dtype=f32", "but into is f16"),
    ],
)
def test_results_of_other_dtypes_and_shapes_are_refused(rest, words):
    with pytest.raises(InvalidArgument, match=words):
        weight_grad("2,4,8,8", "2,6,8,8", rest)


def test_in_place_needs_something_to_write_to():
    with pytest.raises(InvalidArgument, match="into is missing"):
        tw.conv2d_weight_grad_(*HALF_PAIR, 3, padding=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize(
    "name", ["aten", "conv2d_weight_grad_channels_last", "conv2d_weight_grad_per_image"]
)
def test_an_infinity_at_the_border_reaches_the_taps_that_meet_it(name, dtype):
    """What lies in the padding may be left out, or 0 times infinity, as in PyTorch's kernels."""
    x, grad = (t.to(dtype, memory_format=torch.channels_last) for t in HALF_PAIR)
    grad[0, 2, 0, 0] = torch.inf
    if name.endswith("image") and dtype == torch.float16:
        pytest.skip("it sums in the dtype of x")
    with tw.use(name):
        found = tw.conv2d_weight_grad(x, grad, 3, padding=1)
    assert found[[0, 1, 3, 4, 5]].isfinite().all()
    assert found[2, :, 1:, 1:].isinf().all()
    assert not (found[2, :, 0].isinf() | found[2, :, :, 0].isinf()).any()


@pytest.mark.parametrize(("allowed", "expected"), [(True, True), (False, None)])
def test_fp32_tensors_on_a_gpu_are_told_what_torchs_flag_allows(allowed, expected):
    op, before = OPS["conv2d_weight_grad"], torch.backends.cudnn.allow_tf32
    calls = []
    asking = _asking_for_tf32(op, lambda *args, **kwargs: calls.append(bind(op, args, kwargs)))
    with FakeTensorMode():
        x, half = (torch.empty(2, 4, 8, 8, device="cuda", dtype=d) for d in (None, torch.half))
    torch.backends.cudnn.allow_tf32 = allowed
    try:
        asking(x, x, 3)
        asking(x, x, kernel_size=3)
        asking(half, half, 3)
        asking(torch.empty(2, 4, 8, 8), x, 3)
    finally:
        torch.backends.cudnn.allow_tf32 = before
    assert [call.get("allow_tf32") for call in calls] == [expected, expected, None, None]


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_the_result_has_the_layout_of_the_inputs(layout):
    x, grad = (torch.randn(2, 4, 8, 8).to(memory_format=layout) for _ in range(2))
    found = tw.conv2d_weight_grad(x, grad, 3, padding=1)
    assert found.is_contiguous(memory_format=layout)


@pytest.mark.parametrize(
    ("x", "grad", "rest", "words"),
    [
        ("2,8,9,9", "2,8,9,9", "kernel_size=3", r"grad_output has shape .* gives \[2, 8, 7, 7\]"),
        ("2,8,9,9", "3,8,7,7", "kernel_size=3", r"gives \[2, 8, 7, 7\]"),
        ("2,8,9,9", "2,8,7,7", "kernel_size=3, groups=3", "8 channels, which groups=3"),
        ("2,8,9,9", "2,8,7,7", "kernel_size=3, groups=0", "groups=0 should be at least 1"),
        ("2,8,9,9", "2,8,7,7", "kernel_size=[3,3,3]", "kernel_size=.*one or two whole numbers"),
        ("2,8,9,9", "2,8,7,7", "kernel_size=3, stride=0", "stride=0 .*at least 1"),
        ("2,8,9,9", "2,8,7,7", "kernel_size=3, padding=[0,-1]", "padding=.*at least 0"),
        ("2,8,2,2", "2,8,1,1", "kernel_size=5", "grad_output has shape"),
    ],
)
def test_arguments_that_belong_to_no_convolution_are_refused(x, grad, rest, words):
    with pytest.raises(InvalidArgument, match=words):
        weight_grad(x, grad, rest)


def test_ranks_and_dtypes_are_held_together():
    with pytest.raises(InvalidArgument, match="x has rank 3, expected 4"):
        weight_grad("2,8,9", "2,8,7,7", "kernel_size=3", layout="")
    with pytest.raises(InvalidArgument, match="grad_output is f32, but x is f16"):
        Workload.parse(
            "conv2d_weight_grad(x=f16[2,8,9,9], grad_output=f32[2,8,7,7], kernel_size=3)"
        )


def test_a_strided_1x1_reads_a_quarter_of_x():
    w = weight_grad("8,256,56,56", "8,512,28,28", "kernel_size=1, stride=2")
    assert w.bytes[0] == 2 * (8 * 256 * 28 * 28 + 8 * 512 * 28 * 28)
    whole = weight_grad("8,128,56,56", "8,128,28,28", "kernel_size=3, stride=2, padding=1")
    assert whole.bytes[0] == 2 * (8 * 128 * 56 * 56 + 8 * 128 * 28 * 28)


def test_the_floor_counts_tensor_cores_but_for_depthwise():
    curve = ((4096, 1.0), (1 << 30, 500.0))
    rates = {"f16": 800e12, "f32": 50e12, "tf32": 400e12}
    ceilings = Ceilings("graph", curve, curve, curve, 1.0, 4e12, rates)
    assert ceilings.arithmetic_us(SIMPLE, H200) == pytest.approx(SIMPLE.flops / 800e6)
    assert ceilings.arithmetic_us(fp32(None), H200) == pytest.approx(SIMPLE.flops / 50e6)
    assert ceilings.arithmetic_us(fp32(True), H200) == pytest.approx(SIMPLE.flops / 400e6)
    depthwise = weight_grad("8,96,56,56", "8,96,56,56", "kernel_size=7, padding=3, groups=96")
    assert ceilings.arithmetic_us(depthwise, H200) == pytest.approx(
        depthwise.flops / H200.flops["f32"] * 1e6
    )


@pytest.mark.parametrize("name", SUITES_OF_THIS)
def test_every_suite_names_real_convolutions(name):
    workloads = SUITES[name].workloads()
    assert SUITES[name].method == "graph"
    assert len(set(workloads)) == len(workloads)


def test_resnet50_has_22_layers_besides_the_stem_at_three_batches():
    assert len(SUITES["resnet50_v15_wgrad"].texts) == 66
    assert len(SUITES["resnet50_v1_wgrad"].texts) == 38


# --- under autograd ------------------------------------------------------------------------------


def gradients(convolve, x, weight, bias, **geometry):
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    out = convolve(*leaves, **geometry)
    out.backward(torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out))
    return [out.detach(), *(t.grad for t in leaves)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "geometry",
    [{}, {"stride": 2, "padding": 1}, {"dilation": (1, 2), "groups": 2}, {"padding": "same"}],
)
def test_conv2d_is_pytorchs_with_all_its_gradients(geometry, dtype):
    groups = geometry.get("groups", 1)
    x, weight = torch.randn(2, 4, 9, 8, dtype=dtype), torch.randn(6, 4 // groups, 3, 3, dtype=dtype)
    bias = torch.randn(6, dtype=dtype)
    found = gradients(tw.conv2d, x, weight, bias, **geometry)
    expected = gradients(torch.nn.functional.conv2d, x, weight, bias, **geometry)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_conv2ds_weight_gradient_is_the_implementation_that_was_asked_for():
    x, weight = torch.randn(2, 4, 9, 8), torch.randn(6, 4, 3, 3, requires_grad=True)
    with (
        tw.use("conv2d_weight_grad_sm90", op="conv2d_weight_grad"),
        pytest.raises(tw.NoImplementation, match="conv2d_weight_grad_sm90: wgmma"),
    ):
        tw.conv2d(x, weight).sum().backward()
    with tw.use("conv2d_weight_grad_per_image", op="conv2d_weight_grad"):
        tw.conv2d(x, weight).sum().backward()
    expected = torch.nn.grad.conv2d_weight(x, weight.shape, torch.ones(2, 6, 7, 6))
    torch.testing.assert_close(weight.grad, expected)


def test_conv2d_takes_both_gradients_from_one_pass_where_that_was_asked_for():
    x, weight = torch.randn(2, 4, 9, 8), torch.randn(6, 4, 3, 3)
    bias, calls = torch.randn(6), []
    build = IMPLS["conv2d_weight_grad_per_image"].build

    def spied(config, w, device):
        calls.append(w.op)
        return build(config, w, device)

    with (
        pytest.MonkeyPatch.context() as patch,
        tw.use("conv2d_weight_grad_per_image", op="conv2d_weight_bias_grad"),
    ):
        patch.setattr(IMPLS["conv2d_weight_grad_per_image"], "build", spied)
        found = gradients(tw.conv2d, x, weight, bias, padding=1)
    assert calls == ["conv2d_weight_bias_grad"]
    for a, b in zip(
        found, gradients(torch.nn.functional.conv2d, x, weight, bias, padding=1), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_conv2d_can_be_differentiated_twice():
    x, weight = (
        torch.randn(size, dtype=torch.float64, requires_grad=True)
        for size in ((1, 2, 4, 4), (2, 2, 3, 3))
    )
    assert torch.autograd.gradgradcheck(lambda x, w: tw.conv2d(x, w, padding=1), (x, weight))


@pytest.mark.parametrize("compiled_first", [False, True])
def test_conv2d_under_compile_and_autocast_is_pytorchs(compiled_first):
    x, weight = torch.randn(2, 4, 6, 6), torch.randn(3, 4, 3, 3, requires_grad=True)
    convolve = torch.compile(tw.conv2d, backend="eager") if compiled_first else tw.conv2d
    with torch.autocast("cpu", enabled=not compiled_first):
        expected = torch.nn.functional.conv2d(x, weight)
        assert torch.equal(convolve(x, weight), expected)


# --- the Hopper kernel ---------------------------------------------------------------------------

LAYERS = SUITES["resnet50_v15_wgrad"].workloads()[::2] + SUITES["unet_wgrad"].workloads()[::3]


@pytest.mark.parametrize("w", LAYERS, ids=str)
def test_the_heuristics_config_is_in_the_space_and_does_not_spill(w):
    assert SM90.unsupported(w, H200) is None
    config = SM90.heuristic(w, H200)
    assert SM90.space(w, H200).why_not(config) is None
    assert compiled(SM90.task(config, w, H200)).resources.spill_bytes == 0


@pytest.mark.parametrize(
    ("tile", "more"),
    [
        *((tile, {"combine": "grid"}) for tile in sm90.WARPGROUPS),
        *(((64, 64), {"combine": combine}) for combine in COMBINES),
        *(((128, 256), {"cluster": size, "stages": 4}) for size in sm90.CLUSTERS),
        *(((128, 256), {"fetch": fetch}) for fetch in sm90.FETCHES),
    ],
)
def test_every_tile_compiles_without_spills_or_serialised_products(tile, more):
    config = sm90.Config(*tile, **{"stages": 2, "split_k": 24, **more})
    built = compiled(SM90.task(config, SIMPLE, H200))
    assert built.resources.spill_bytes == built.resources.stack_bytes == 0
    assert "serialized" not in built.log


@pytest.mark.parametrize("split_k", [1, 3])
@pytest.mark.parametrize("more", ["out_dtype=f32", "into=f16[128,64,3,3]", "into=f32[128,64,3,3]"])
@pytest.mark.parametrize("impl", [SM80, SM90])
def test_fp32_results_and_added_ones_compile_without_spills(impl, more, split_k):
    layout = "@channels_last" if "into" in more else ""
    rest = f"kernel_size=3, padding=1, {more}{layout}"
    w = weight_grad("8,64,56,56", "8,128,56,56", rest)
    assert impl.unsupported(w, H200) is None
    config = replace(impl.heuristic(w, H200), split_k=split_k, combine="last")
    if impl is SM90:
        config = replace(config, cluster=1)
    assert impl.space(w, H200).restricted({"split_k": [split_k]}).why_not(config) is None
    assert compiled(impl.task(config, w, H200)).resources.spill_bytes == 0
    assert impl.compile_key(config, w) != impl.compile_key(config, SIMPLE)


def test_what_a_gradient_is_added_to_must_be_aligned_unless_it_is_converted():
    rest = "kernel_size=3, padding=1, into=f32[64,64,3,3]"
    w = weight_grad("8,64,8,8", "8,64,8,8", rest + "@channels_last@align8")
    assert "is not aligned to 16 bytes" in SM90.unsupported(w, H200)
    assert SM90.unsupported(weight_grad("8,64,8,8", "8,64,8,8", rest + "@align8"), H200) is None


def bias_too(dtype="f16", more=""):
    text = str(weight_grad("8,64,56,56", "8,128,56,56", "kernel_size=3, padding=1", dtype=dtype))
    text = text.replace("conv2d_weight_grad", "conv2d_weight_bias_grad").replace("])", f"]{more})")
    return Workload.parse(text)


@pytest.mark.parametrize("tile", sm90.WARPGROUPS)
@pytest.mark.parametrize("more", [{"combine": "grid"}, {"cluster": 4, "stages": 4}])
def test_every_tile_sums_the_bias_without_spills_or_serialised_products(tile, more):
    config = sm90.Config(*tile, **{"stages": 2, "split_k": 24, **more})
    built = compiled(SM90.task(config, bias_too(), H200))
    assert built.resources.spill_bytes == built.resources.stack_bytes == 0
    assert "serialized" not in built.log


@pytest.mark.parametrize(
    "w",
    [bias_too(), bias_too("f32"), bias_too("f32", ", allow_tf32=True"), bias_too("f64")],
    ids=str,
)
@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
def test_every_portable_tile_sums_the_bias_without_spills(w, device):
    step = sm80.STEPS[w.main.itemsize]
    assert SM80.unsupported(w, DEVICES[device]) is None
    for tile in sm80.WARPS:
        config = sm80.Config(*tile, step, stages=3, split_k=2, combine="kernel")
        if config.sums <= sm80.LARGEST[step]:
            assert compiled(SM80.task(config, w, DEVICES[device])).resources.spill_bytes == 0


@pytest.mark.parametrize("impl", [SM80, SM90])
def test_sums_of_the_bias_lie_behind_those_of_their_tile(impl):
    plain, both = SIMPLE, bias_too()
    config = replace(impl.heuristic(plain, H200), tile_m=64, split_k=4, combine="kernel")
    built = [impl.build(config, w, H200) for w in (plain, both)]
    rows = built[0].grid[0] * built[0].grid[1] * 4 * 64
    assert built[1].workspace_bytes - built[0].workspace_bytes == 4 * rows


@pytest.mark.parametrize("tile", sm80.WARPS)
def test_every_portable_tile_compiles_without_spills(tile):
    config = sm80.Config(*tile, stages=3, split_k=2, combine="kernel")
    assert compiled(SM80.task(config, SIMPLE, DEVICES["a100"])).resources.spill_bytes == 0


def fp32(allow_tf32, channels=64, dtype="f32"):
    return weight_grad(
        f"8,{channels},56,56", "8,128,56,56",
        f"kernel_size=3, padding=1, allow_tf32={allow_tf32}", dtype=dtype,
    )  # fmt: skip


@pytest.mark.parametrize("w", [fp32(True), fp32(None), fp32(None, dtype="f64")], ids=str)
def test_every_tile_of_wide_operands_compiles_without_spills(w):
    step = sm80.STEPS[w.main.itemsize]
    for tile in sm80.WARPS:
        config = sm80.Config(*tile, step, stages=3, split_k=2, combine="kernel")
        if config.sums <= sm80.LARGEST[step]:
            assert compiled(SM80.task(config, w, H200)).resources.spill_bytes == 0


@pytest.mark.parametrize("allow_tf32", [True, None])
def test_fp32_of_any_channel_count_compiles_without_spills(allow_tf32):
    w = fp32(allow_tf32, channels=3)
    assert SM80.unsupported(w, H200) is None
    config = SM80.heuristic(w, H200)
    assert SM80.space(w, H200).why_not(config) is None
    assert compiled(SM80.task(config, w, H200)).resources.spill_bytes == 0


def test_tf32_is_part_of_the_workload_and_of_what_is_compiled():
    exact, rounded = fp32(None), fp32(True)
    assert str(rounded).endswith("allow_tf32=True)")
    assert "tf32" not in str(exact)
    config = SM80.heuristic(exact, H200)
    assert SM80.compile_key(config, exact) != SM80.compile_key(config, rounded)
    assert SM80.task(config, exact, H200) != SM80.task(config, rounded, H200)
    halves = weight_grad("8,64,8,8", "8,64,8,8", "kernel_size=1, allow_tf32=True")
    assert "tf32" not in str(halves)
    with pytest.raises(InvalidArgument, match="fp32_precision"):
        fp32(False)


def test_tiles_and_steps_of_halves_and_of_fp32_differ():
    space = SM80.space(fp32(True), H200)
    assert "too few registers" in space.why_not(sm80.Config(256, 128, 16, stages=2))
    assert space.why_not(sm80.Config(128, 128, 16, stages=2)) is None
    assert space.why_not(sm80.Config(128, 128, 32, stages=2)) is not None
    assert SM80.space(SIMPLE, H200).why_not(sm80.Config(128, 128, 16, stages=2)) is not None


@pytest.mark.parametrize("w", SUITES["resnet50_v15_stem_wgrad"].workloads()[::2], ids=str)
@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
def test_the_portable_heuristics_config_fits_and_does_not_spill(w, device):
    spec = DEVICES[device]
    assert SM80.unsupported(w, spec) is None
    config = SM80.heuristic(w, spec)
    assert SM80.space(w, spec).why_not(config) is None
    assert compiled(SM80.task(config, w, spec)).resources.spill_bytes == 0


@pytest.mark.parametrize("w", SUITES["depthwise_wgrad_n32"].workloads(), ids=str)
def test_depthwise_filters_compile_without_spills(w):
    impl = IMPLS["conv2d_weight_grad_depthwise"]
    assert impl.unsupported(w, H200) is None
    config = impl.heuristic(w, H200)
    assert config in impl.space(w, H200)
    assert compiled(impl.task(config, w, H200)).resources.spill_bytes == 0


@pytest.mark.parametrize("more", [", out_dtype=f32", ", into=f16[96,1,7,7]", None])
def test_depthwise_filters_give_fp32_add_to_others_and_sum_the_bias(more):
    impl = IMPLS["conv2d_weight_grad_depthwise"]
    text = (
        "(x=f16[8,96,56,56]@channels_last, grad_output=f16[8,96,56,56]@channels_last,"
        f" kernel_size=7, padding=3, groups=96{more or ''})"
    )
    w = Workload.parse(f"conv2d_weight_{'' if more else 'bias_'}grad{text}")
    assert impl.unsupported(w, H200) is None
    assert impl.build(impl.heuristic(w, H200), w, H200).resources.spill_bytes == 0


@pytest.mark.parametrize(
    ("w", "words"),
    [
        (SIMPLE, "not one filter for each channel"),
        (
            weight_grad("8,64,9,9", "8,64,9,9", "kernel_size=9, padding=4, groups=64"),
            "more than 49 taps",
        ),
        (
            weight_grad("8,63,9,9", "8,63,9,9", "kernel_size=3, padding=1, groups=63"),
            "in pairs",
        ),
        (
            weight_grad("8,64,9,9", "8,64,5,5", "kernel_size=3, dilation=2, groups=64"),
            "without gaps",
        ),
    ],
)
def test_what_the_depthwise_kernel_does_not_walk_is_refused_in_words(w, words):
    assert words in IMPLS["conv2d_weight_grad_depthwise"].unsupported(w, H200)


def test_bf16_compiles():
    w = weight_grad("8,64,8,8", "8,64,8,8", "kernel_size=1", dtype="bf16")
    assert compiled(SM90.task(sm90.Config(), w, H200)).resources.spill_bytes == 0


def test_one_binary_serves_every_shape_and_slice_count():
    first, second = LAYERS[0], LAYERS[20]
    one, other = sm90.Config(split_k=2), sm90.Config(split_k=16)
    assert SM90.task(one, first, H200) == SM90.task(other, second, H200)
    assert SM90.compile_key(one, first) == SM90.compile_key(other, second)


@pytest.mark.parametrize(
    ("w", "words"),
    [
        (weight_grad("8,64,8,8", "8,64,8,8", "kernel_size=1", dtype="f32"), "x is f32"),
        (weight_grad("8,60,8,8", "8,64,8,8", "kernel_size=1"), "aligned to 16 bytes"),
        (weight_grad("8,64,8,8", "8,62,8,8", "kernel_size=1"), "aligned to 16 bytes"),
        (weight_grad("8,64,8,8", "8,64,8,8", "kernel_size=1, groups=2"), "groups=2"),
        (weight_grad("8,64,30,30", "8,64,3,3", "kernel_size=1, stride=10"), "strides up to 8"),
        (
            weight_grad("8,64,8,8", "8,64,8,8", "kernel_size=1", "@channels_last@align8"),
            "aligned to 16 bytes",
        ),
    ],
)
def test_what_the_copy_engine_cannot_walk_is_refused_in_words(w, words):
    assert words in SM90.unsupported(w, H200)


def test_other_architectures_are_refused():
    assert "sm_80" in SM90.unsupported(SIMPLE, DEVICES["a100"])


def test_the_space_says_why_a_config_does_not_fit():
    space = SM90.space(SIMPLE, H200)
    assert "needs no combining" in space.why_not(sm90.Config(split_k=1, combine="grid"))
    assert "shared memory" in space.why_not(sm90.Config(tile_m=128, tile_n=256, stages=8))
    assert "cannot run at once" in space.why_not(
        sm90.Config(tile_m=128, tile_n=256, stages=4, split_k=64, combine="grid")
    )
    assert "no arrangement" in space.why_not(sm90.Config(tile_m=256, tile_n=576, stages=2))
    assert "chip to chip" in space.why_not(sm90.Config(split_k=6, cluster=3, combine="grid"))
    assert "do not fill clusters" in space.why_not(sm90.Config(split_k=4, cluster=3))
    assert "a cluster adds all" in space.why_not(sm90.Config(split_k=4, cluster=4, combine="grid"))
    assert "is no matrix" in space.why_not(sm90.Config(tile_n=128, fetch="shared"))


def test_blocks_that_share_boxes_come_in_pairs():
    space = SM90.space(weight_grad("8,128,56,56", "8,192,56,56", "kernel_size=1"), H200)
    assert space.why_not(sm90.Config(tile_n=128, fetch="matrix")) is None
    assert space.why_not(sm90.Config(tile_n=128, fetch="shared")) == (
        "2 blocks cannot share tiles of 64 x 128 evenly"
    )
    assert "add slices together" in space.why_not(
        sm90.Config(tile_n=128, split_k=2, cluster=2, fetch="shared")
    )


@pytest.mark.parametrize("w", LAYERS[:4], ids=str)
def test_promising_configs_are_in_the_space_and_best_first(w):
    configs, space = SM90.promising(w, H200), SM90.space(w, H200)
    assert len(configs) == len(set(configs)) > 16
    assert configs[0] == SM90.heuristic(w, H200)
    assert all(space.why_not(c) is None for c in configs)
    walks = [c for c in configs if c.fetch == "walk"]
    expected = [SM90.forecast(c, w, H200)["predicted_us"] for c in walks]
    assert expected == sorted(expected)


def test_the_models_first_choice_is_near_the_fastest_that_was_measured():
    """Timings of an H200, 2026-11-21: CUDA graphs over rotating inputs, three samples of each."""
    workloads = SUITES["resnet50_v15_wgrad"].workloads()
    timed = {}
    with (Path(__file__).parent / "weight_grad_h200.csv").open() as lines:
        for row in csv.DictReader(lines):
            layer, combine, us = int(row.pop("layer")), row.pop("combine"), float(row.pop("us"))
            config = sm90.Config(**{k: int(v) for k, v in row.items()}, combine=combine)
            timed.setdefault(workloads[layer], {})[config] = us
    assert list(timed) == workloads
    logs = []
    for w, times in timed.items():
        first = min(times, key=lambda c: predicted_us(problem_of(w), H200, c))
        logs.append(math.log(times[first] / min(times.values())))
    assert math.exp(sum(logs) / len(logs)) < 1.03
    assert math.exp(max(logs)) < 1.25


def test_a_forecast_says_how_blocks_fill_the_device():
    config = sm90.Config(128, 128, 64, 4, split_k=4, cluster=4)
    found = SM90.forecast(config, SIMPLE, H200)
    assert (found["tile"], found["tiles"], found["slices"]) == ("128x128x64", 5, 4)
    assert found["waves"] == pytest.approx(20 / H200.cluster_sms[4], abs=0.01)
    assert found["tail"] == pytest.approx(1 - 20 / 120, abs=0.01)
    assert found["workspace_bytes"] == 0


def test_the_problem_is_packed_as_the_kernel_reads_it():
    w = weight_grad(
        "3,72,20,17", "3,40,10,5", "kernel_size=[3,5], stride=[2,3], padding=[1,1], dilation=[1,1]"
    )
    found = struct.unpack_from("24i", problem_of(w).packed(64, 32, 3))
    taps, panels_per_tap = 15, 2
    assert found == (
        40, 72, taps * panels_per_tap, panels_per_tap, taps * 72, 5,
        1, 3, 1, 2,
        150, 10, 5, 0, 6, 2, 20, 17,
        2, 3, 1, 1, 1, 1,
    )  # fmt: skip


def test_fewer_blocks_than_the_device_has_are_predicted_slower():
    problem = problem_of(weight_grad("256,64,56,56", "256,64,56,56", "kernel_size=1"))
    alone = sm90.Config(64, 64, stages=4)
    full = sm90.Config(64, 64, stages=4, split_k=132, combine="grid")
    assert predicted_us(problem, H200, full) < 0.1 * predicted_us(problem, H200, alone)
