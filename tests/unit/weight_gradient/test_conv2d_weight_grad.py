"""The convolution weight gradient: its operator, floor and suites."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from convolutions import RESNET50, SIMPLE, fp32, weight_grad
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import tilewright as tw
from tilewright.device import DEVICES
from tilewright.dispatch.call import _asking_for_tf32
from tilewright.dispatch.pytorch import bind
from tilewright.errors import InvalidArgument
from tilewright.impl import implementations
from tilewright.measure.ceilings import Ceilings
from tilewright.op import OPS, Workload
from tilewright.ops._convolution import meets_padding_alone
from tilewright.suite import SUITES

H200 = DEVICES["h200"]
SUITES_OF_THIS = [name for name in SUITES if "wgrad" in name]


@settings(max_examples=60)
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


def test_one_number_stands_for_both_sizes_under_compile_too():
    x, grad = torch.randn(2, 4, 8, 8), torch.randn(2, 6, 4, 4)

    def run(x, grad):
        return tw.conv2d_weight_grad(x, grad, 3, stride=2, padding=1)

    found = torch.compile(run, backend="eager", fullgraph=True)(x, grad)
    torch.testing.assert_close(found, run(x, grad))


HALF_PAIR = [torch.randn(2, 4, 8, 8).half(), torch.randn(2, 6, 8, 8).half()]


@pytest.mark.parametrize("asked", [torch.float32, "f32"])
def test_halves_give_an_fp32_result_that_was_never_rounded(asked):
    x, grad = HALF_PAIR
    found = tw.conv2d_weight_grad(x, grad, 3, padding=1, out_dtype=asked)
    expected = torch.nn.grad.conv2d_weight(x.float(), (6, 4, 3, 3), grad.float(), padding=1)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("asked", [torch.float16, "f16"])
def test_halves_give_halves_where_those_are_asked_for_by_any_way(asked):
    def run(x):
        both = tw.conv2d_weight_bias_grad(x, grad, 3, padding=1, out_dtype=asked)
        return tw.conv2d_weight_grad(x, grad, 3, padding=1, out_dtype=asked), *both

    x, grad = HALF_PAIR
    ways = [run(x.clone().requires_grad_()), torch.func.vmap(run)(x[None])]
    ways.append(torch.compile(run, backend="eager", fullgraph=True)(x))
    assert {t.dtype for found in ways for t in found} == {torch.float16}


def test_autocast_changes_nothing_and_takes_no_choice_away():
    x, grad = HALF_PAIR
    expected = tw.conv2d_weight_grad(x, grad, 3, padding=1, out_dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = tw.conv2d_weight_grad(x, grad, 3, padding=1, out_dtype=torch.float32)
        with (
            tw.use("conv2d_weight_grad_sm90"),
            pytest.raises(tw.NoImplementation, match="conv2d_weight_grad_sm90: wgmma"),
        ):
            tw.conv2d_weight_grad(x, grad, 3, padding=1)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


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


def test_halves_are_not_rounded_before_they_are_added_to_fp32_in_place():
    x, grad = HALF_PAIR
    truth = tw.conv2d_weight_bias_grad(x.double(), grad.double(), 3, padding=1)
    into, into_bias = torch.zeros(6, 4, 3, 3), torch.zeros(6)
    tw.conv2d_weight_grad_(x, grad, 3, padding=1, into=into)
    torch.testing.assert_close(into.double(), truth[0], rtol=1e-6, atol=1e-5)
    tw.conv2d_weight_bias_grad_(x, grad, 3, padding=1, into=into.zero_(), into_bias=into_bias)
    for found, true in zip((into, into_bias), truth, strict=True):
        torch.testing.assert_close(found.double(), true, rtol=1e-6, atol=1e-5)


def test_the_bias_gradient_comes_with_the_weights():
    x, grad = (t.double() for t in HALF_PAIR)
    weight, bias = tw.conv2d_weight_bias_grad(x, grad, 3, padding=1)
    torch.testing.assert_close(weight, tw.conv2d_weight_grad(x, grad, 3, padding=1))
    torch.testing.assert_close(bias, grad.sum((0, 2, 3)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_both_gradients_are_added_to_others_in_place_only_where_asked(dtype):
    x, grad = HALF_PAIR
    into, into_bias = torch.randn(6, 4, 3, 3).to(dtype), torch.randn(6).to(dtype)
    wide = tw.conv2d_weight_bias_grad(x, grad, 3, padding=1, out_dtype=torch.float32)
    assert [t.dtype for t in wide] == [torch.float32] * 2
    truth = tw.conv2d_weight_bias_grad(x.double(), grad.double(), 3, padding=1)
    for found, true in zip(wide, truth, strict=True):
        torch.testing.assert_close(found, true.float(), rtol=1e-6, atol=1e-5)
    before = into.clone(), into_bias.clone()
    more = {"padding": 1, "into": into, "into_bias": into_bias}
    found = tw.conv2d_weight_bias_grad(x, grad, 3, **more)
    assert torch.equal(into, before[0])
    assert torch.equal(into_bias, before[1])
    written = tw.conv2d_weight_bias_grad_(x, grad, 3, **more)
    assert written[0] is into
    assert written[1] is into_bias
    for sums, own, b, t in zip(found, written, before, truth, strict=True):
        assert sums.dtype == dtype
        torch.testing.assert_close(sums.double(), b + t, rtol=2e-3, atol=2e-2)
        torch.testing.assert_close(own.double(), b + t, rtol=2e-3, atol=2e-2)


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        ("into=f32[6,4,1,1]", "into_bias is missing: both gradients are added to others, or none"),
        ("into_bias=f32[6]", "into is missing"),
        ("into=f16[6,4,1,1], into_bias=f32[6]", "into_bias is f32, but into is f16"),
        ("into=f32[6,4,1,1], into_bias=f32[4]", r"into_bias=f32\[4\] should be f16 or f32\[6\]"),
        ("into=f32[6,4,1,1], into_bias=f32[6], out_dtype=f16", "but into is f32"),
        ("out_dtype=f64", "out_dtype=f64 should be f16 or f32"),
    ],
)
def test_sums_of_both_gradients_that_do_not_fit_are_refused(rest, words):
    with pytest.raises(InvalidArgument, match=words):
        Workload.parse(
            "conv2d_weight_bias_grad(x=f16[2,4,8,8], grad_output=f16[2,6,8,8], kernel_size=1, "
            f"{rest})"
        )


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


def test_results_of_other_dtypes_are_refused_where_gradients_are_needed_too():
    x, grad = HALF_PAIR
    with pytest.raises(InvalidArgument, match="out_dtype=f64 should be f16 or f32"):
        tw.conv2d_weight_grad(
            x.clone().requires_grad_(), grad, 3, padding=1, out_dtype=torch.float64
        )


def test_in_place_needs_something_to_write_to():
    with pytest.raises(InvalidArgument, match="into is missing"):
        tw.conv2d_weight_grad_(*HALF_PAIR, 3, padding=1)
    with pytest.raises(InvalidArgument, match="into_bias is missing"):
        tw.conv2d_weight_bias_grad_(*HALF_PAIR, 3, padding=1, into=torch.zeros(6, 4, 3, 3))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_what_is_expanded_is_not_written_to(requires_grad):
    x, grad = HALF_PAIR[0].clone().requires_grad_(requires_grad), HALF_PAIR[1]
    weight, bias, one = torch.zeros(6, 4, 3, 3), torch.zeros(6), torch.zeros(())
    given = {"into": (one.expand(6, 4, 3, 3), bias), "into_bias": (weight, one.expand(6))}
    for name, into in given.items():
        with pytest.raises(InvalidArgument, match=f"{name}=.* is written to, but is expanded"):
            tw.conv2d_weight_bias_grad_(x, grad, 3, padding=1, into=into[0], into_bias=into[1])
    with pytest.raises(InvalidArgument, match=r"^conv2d_weight_grad_: into=.* is expanded"):
        tw.conv2d_weight_grad_(x, grad, 3, padding=1, into=one.expand(6, 4, 3, 3))
    assert not any(t.any() for t in (weight, bias, one))


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


BESIDE_PIXELS = """
import torch
import tilewright as tw

def gradients(x, grad, how):
    return tw.conv2d_weight_bias_grad(x, grad, 3, stride=(1, 3), padding=1, **how)

x, grad = torch.ones(3, 1, 1, 1), torch.ones(3, 2, 1, 1)
expected = gradients(x, grad, {})
x, grad = x.bfloat16(), grad.bfloat16()
into = {"into": torch.zeros_like(expected[0]), "into_bias": torch.zeros_like(expected[1])}
halves = {name: t.bfloat16() for name, t in into.items()}
compiled = torch.compile(gradients, backend="aot_eager")
mapped = torch.func.vmap(gradients, (0, 0, None))
stacked = torch.stack([x, x]), torch.stack([grad, grad])
leaf = x.clone().requires_grad_()
ways = {}, {"out_dtype": torch.float32}, into, halves
found = {
    **{str(how): gradients(x, grad, how) for how in ways},
    "compiled": compiled(x, grad, {}),
    "mapped": [t[1] for t in mapped(*stacked, {})],
    "differentiable": gradients(leaf, grad, {}),
    "in place": tw.conv2d_weight_bias_grad_(x, grad, 3, (1, 3), 1, **halves),
}
for name in ("contiguous", "channels_last", "f32"):
    with tw.use(f"conv2d_weight_grad_{name}"):
        found[name] = gradients(x, grad, {})
tw.disable()
found["disabled"] = gradients(x, grad, {})
for how, both in found.items():
    if not all(torch.equal(t.float(), e) for t, e in zip(both, expected, strict=True)):
        print(how, both)
"""


def test_taps_that_meet_padding_alone_have_no_gradient():
    """oneDNN leaves some of them unwritten, in memory that the environment has malloc fill."""
    env = {**os.environ, "MALLOC_PERTURB_": "128"}
    given = {"capture_output": True, "text": True, "check": True, "env": env}
    out = subprocess.run([sys.executable, "-c", BESIDE_PIXELS], **given)
    assert out.stdout == ""


@given(*(st.integers(least, 6) for least in (0, 1, 1, 1, 0, 1)))
def test_a_tap_meets_pixels_or_padding_alone(n, outputs, taps, stride, padding, dilation):
    met = [
        {i * stride - padding + tap * dilation for i in range(outputs)} & set(range(n))
        for tap in range(taps)
    ]
    found = meets_padding_alone(n, outputs, taps, stride, padding, dilation)
    assert found == (not all(met))


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
        asking(input=x, grad_output=x, kernel_size=3)
        asking(half, half, 3)
        asking(torch.empty(2, 4, 8, 8), x, 3)
    finally:
        torch.backends.cudnn.allow_tf32 = before
    assert [call.get("allow_tf32") for call in calls] == [*[expected] * 3, None, None]


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
        ("2,8,9,9", "2,8,7,7", "kernel_size=3, padding=same", "padding=same should be tuple"),
        ("2,8,9,9", "2,8,7,7", "kernel_size=3, padding=[0,-1]", "padding=.*at least 0"),
        (
            "2,8,2,2",
            "2,8,1,1",
            "kernel_size=5",
            r"kernel_size=\[5, 5\].* is larger than x \[2, 8, 2",
        ),
        ("2,8,9,9", "2,8,1,1", "kernel_size=3, dilation=5", r"dilation=\[5, 5\] is larger than"),
        ("2,8,9,9", "2,0,7,7", "kernel_size=3", "grad_output has no channels, expected 1 or more"),
    ],
)
def test_arguments_that_belong_to_no_convolution_are_refused(x, grad, rest, words):
    with pytest.raises(InvalidArgument, match=words):
        weight_grad(x, grad, rest)


def test_sizes_are_whole_numbers():
    with pytest.raises(InvalidArgument, match=r"stride=\[1.0,1.0\] should be tuple\[int"):
        tw.conv2d_weight_grad(*HALF_PAIR, 3, stride=(1.0, 1.0), padding=1)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_sizes_may_be_numbers_of_numpy(requires_grad):
    x, grad = torch.randn(2, 4, 8, 8), torch.randn(2, 6, 8, 8)
    expected = tw.conv2d_weight_grad(x, grad, 3, padding=1)
    x.requires_grad_(requires_grad)
    for three, one in ((np.int64(3), np.int8(1)), ((3, np.int64(3)), [np.int32(1)])):
        found = tw.conv2d_weight_grad(x, grad, three, padding=one, groups=np.int64(1))
        torch.testing.assert_close(found.detach(), expected)


PADDING = np.int64(1)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_numbers_of_numpy_are_taken_under_compile_too(requires_grad, backend):
    """Those of the function itself within one graph; a value from outside a trace does not know."""
    x, grad = torch.randn(2, 4, 8, 8, requires_grad=requires_grad), torch.randn(2, 6, 8, 8)
    own = [np.int64(3), (np.int64(1), 1)]
    functions = [
        lambda x, g: tw.conv2d_weight_grad(x, g, np.int64(3), padding=(np.int64(1), 1)),
        lambda x, g: tw.conv2d_weight_grad(x, g, 3, padding=PADDING),
        lambda x, g: tw.conv2d_weight_grad(x, g, own[0], padding=own[1]),
    ]
    for i, function in enumerate(functions):
        found = torch.compile(function, backend=backend, fullgraph=i == 0)(x, grad)
        torch.testing.assert_close(found, function(x, grad))
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match=r"a number of numpy.* make it one of Python"):
        torch.compile(functions[1], backend=backend, fullgraph=True)(x, grad)


@pytest.mark.parametrize(
    ("dynamic", "requires_grad"), [(False, False), (False, True), (True, True)]
)
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"x": torch.half}, "grad_output is f32, but x is f16; convert one of them"),
        ({"grad_output": torch.half}, "grad_output is f16, but x is f32; convert one of them"),
        ({"out_dtype": torch.float64}, "out_dtype=f64 should be f32 beside x of f32"),
        ({"into": torch.float64}, "into.* f32"),
        ({"padding": 1, "stride": 0}, "stride=0 should be one or two whole numbers"),
        ({"padding": True}, r"padding=True should be tuple\[int"),
    ],
    ids=str,
)
def test_what_is_refused_is_refused_under_compile_too(given, words, dynamic, requires_grad):
    if dynamic and not {"x", "grad_output", "out_dtype", "into"} & {*given}:
        pytest.skip("PyTorch's own words")

    def run(x, grad_output, into):
        more = {n: v for n, v in given.items() if n not in ("x", "grad_output", "into")}
        x, grad_output = x.to(given.get("x")), grad_output.to(given.get("grad_output"))
        more["into"] = into.to(given["into"]) if "into" in given else None
        return tw.conv2d_weight_grad(x, grad_output, 3, **{"padding": 1, **more})

    tensors = (
        torch.randn(2, 4, 8, 8, requires_grad=requires_grad),
        torch.randn(2, 6, 8, 8),
        torch.randn(6, 4, 3, 3),
    )
    with pytest.raises(InvalidArgument, match=words):
        run(*tensors)
    with pytest.raises(InvalidArgument, match=words):
        torch.compile(run, backend="aot_eager", dynamic=dynamic)(*tensors)
    torch._dynamo.reset()
    compiled = torch.compile(run, backend="eager", dynamic=dynamic, fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="InvalidArgument"):
        compiled(*tensors)


@pytest.mark.parametrize("given", [{"x": torch.half}, {"out_dtype": torch.float64}], ids=str)
def test_dtypes_that_do_not_fit_are_refused_under_transforms_too(given):
    def run(x, grad):
        more = {n: v for n, v in given.items() if n != "x"}
        return tw.conv2d_weight_grad(x.to(given.get("x")), grad, 3, padding=1, **more)

    with pytest.raises(InvalidArgument, match=r"f16; convert one of them|out_dtype=f64 should be"):
        torch.func.vmap(run)(torch.randn(5, 2, 4, 8, 8), torch.randn(5, 2, 6, 8, 8))


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("argument", ["x", "grad_output", "into"])
@pytest.mark.parametrize(
    ("convert", "kind"),
    [
        (torch.Tensor.to_sparse, r"torch\.sparse_coo"),
        (lambda t: t.to_mkldnn(), r"torch\._mkldnn"),
        (lambda t: torch.nested.nested_tensor(list(t)), "nested"),
        (lambda t: torch.nested.nested_tensor(list(t), layout=torch.jagged), "nested"),
    ],
    ids=["sparse", "mkldnn", "nested", "jagged"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_without_strides_are_refused(convert, kind, argument, requires_grad):
    given = {
        "x": torch.randn(2, 4, 8, 8),
        "grad_output": torch.randn(2, 6, 8, 8),
        "into": torch.randn(6, 4, 3, 3),
    }
    if argument == "grad_output" and kind.endswith("mkldnn"):
        pytest.skip("PyTorch's kernel takes it")
    given[argument] = convert(given[argument])
    other = "grad_output" if argument == "x" else "x"
    given[other].requires_grad_(requires_grad)
    with pytest.raises(InvalidArgument, match=f"{argument} is {kind}, expected a strided tensor"):
        tw.conv2d_weight_grad(**given, kernel_size=3, padding=1)


@pytest.mark.parametrize("name", ["kernel_size", "stride", "padding", "dilation"])
def test_sizes_of_more_than_64_bits_are_refused(name):
    sizes = {"kernel_size": 1, "stride": 8, name: 2**63}
    with pytest.raises(InvalidArgument, match=f"{name}=9223372036854775808 should be below 2\\^63"):
        tw.conv2d_weight_grad(torch.randn(2, 4, 8, 8), torch.randn(2, 6, 1, 1), **sizes)


def test_kernels_have_sizes_in_32_bits_and_others_in_64():
    x, grad = torch.randn(2, 4, 8, 8), torch.randn(2, 6, 1, 1)
    expected = tw.conv2d_weight_grad(x, grad, 3, stride=8)
    torch.testing.assert_close(tw.conv2d_weight_grad(x, grad, 3, stride=2**33), expected)
    for channels, groups in ((64, 1), (64, 64), (64, 2), (3, 1)):
        w = Workload.parse(
            f"conv2d_weight_grad(x=f16[2,{channels},8,8]@channels_last, grad_output=f16[2,64,1,1], "
            f"kernel_size=[3,3], stride=[8589934592,8], groups={groups})"
        )
        for i in implementations(w):
            assert i.backend not in ("cuda", "cutlass") or i.unsupported(w, H200), i.name


@pytest.mark.parametrize("shape", [(2, 0, 8, 8), (0, 4, 8, 8)])
@pytest.mark.parametrize("add", [False, True])
def test_the_bias_gradient_is_that_of_grad_output_whatever_x_has(shape, add):
    grad = torch.randn(shape[0], 6, shape[2] + 2, 10)
    into = {"into": torch.ones(6, shape[1], 3, 3), "into_bias": torch.ones(6)} if add else {}
    weight, bias = tw.conv2d_weight_bias_grad(torch.randn(shape), grad, 3, padding=2, **into)
    torch.testing.assert_close(bias, grad.sum((0, 2, 3)) + add)
    assert torch.equal(weight, torch.full((6, shape[1], 3, 3), float(add)))


@pytest.mark.parametrize(
    ("kernel_size", "into", "words"),
    [(3, (6, 4, 3, 3), r"gives \[2, 6, 6, 6\]"), (1, (1,), r"\[6, 4, 1, 1\]")],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_what_does_not_fit_is_refused_under_transforms_and_compile(
    compiled, kernel_size, into, words
):
    def run(x, grad, into):
        return tw.conv2d_weight_grad(x, grad, kernel_size, into=into)

    x, grad, into = torch.randn(2, 4, 8, 8), torch.randn(2, 6, 8, 8), torch.zeros(into)
    given = (x.requires_grad_(), grad, into) if compiled else (x[None], grad[None], into[None])
    run = torch.compile(run, backend="eager") if compiled else torch.func.vmap(run)
    with pytest.raises(InvalidArgument, match=words):
        run(*given)


def test_a_refusal_under_transforms_names_the_operator():
    x, grad = torch.randn(1, 2, 4, 8, 8), torch.randn(1, 2, 6, 8, 8)
    for name in ("conv2d_weight_grad", "conv2d_weight_bias_grad"):
        with pytest.raises(InvalidArgument, match=f"^{name}: grad_output has shape"):
            torch.func.vmap(lambda x, grad: getattr(tw, name)(x, grad, 3))(x, grad)  # noqa: B023


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


def test_resnet50_has_53_convolutions_at_each_batch():
    assert sum(SUITES["resnet50_v15_wgrad_n8"].count_of().values()) == 53
    assert sum(SUITES["resnet50_v15_wgrad"].count_of().values()) == 3 * 53
    assert SUITES["depthwise_wgrad"].count_of() == {}


@pytest.mark.parametrize("name", SUITES_OF_THIS)
def test_every_suite_names_real_convolutions(name):
    workloads = SUITES[name].workloads()
    assert SUITES[name].method == "graph"
    assert len(set(workloads)) == len(workloads)


def test_differences_to_cudnn_are_told_of_the_layers_of_a_suite_in_its_order():
    page = (Path(__file__).parents[3] / "docs" / "weight_gradient.md").read_text()
    (table,) = re.findall(r"^\| layer \| pixels \|.*?\n\n", page, re.M | re.S)
    told = [(int(batch), int(pixels)) for batch, pixels in
            re.findall(r"batch (\d+) \| (\d+) \|", table)]  # fmt: skip
    grads = [w["grad_output"] for w in SUITES["wgrad_accuracy"].workloads()]
    assert told == [(g.shape[0], g.numel // g.shape[1]) for g in grads]


def test_resnet50_has_22_layers_besides_the_stem_at_three_batches():
    stem = SUITES["resnet50_v15_stem_wgrad"].workloads()
    assert len(RESNET50) == 66
    assert set(SUITES["resnet50_v15_wgrad"].workloads()) - set(RESNET50) == set(stem)
    assert len(stem) == 3
    assert len(SUITES["resnet50_v1_wgrad"].texts) == 38


def test_held_out_layers_are_none_that_the_model_was_fitted_to():
    fitted = set(map(str, SUITES["resnet50_v15_wgrad"].workloads()))
    assert not fitted & set(map(str, SUITES["held_out_wgrad"].workloads()))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("bf16", "x=bf16["),
        ("f32_out", "out_dtype=f32"),
        ("f32", "x=f32["),
        ("tf32", "allow_tf32=True"),
        ("f64", "x=f64["),
    ],
)
def test_resnet50s_layers_are_there_in_other_dtypes_too(name, told):
    workloads = SUITES[f"resnet50_v15_wgrad_{name}"].workloads()
    assert len(workloads) % 23 == 0
    assert all(told in str(w) for w in workloads)
