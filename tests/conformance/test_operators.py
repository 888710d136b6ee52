"""Every operator gives PyTorch's result, through every implementation that supports the workload.

Values are held against the fp64 truth: at most twice PyTorch's own largest error and two ulps;
in fp64, where PyTorch's result is the truth, sixteen.
Shape, dtype, strides, NaN and infinities are PyTorch's exactly.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewright as tw
from tilewright.compile.cache import compiled
from tilewright.device import DEVICES, spec_of
from tilewright.impl import IMPLS
from tilewright.impls._vendor import call_reference
from tilewright.op import OPS, Workload
from tilewright.tensor_spec import same_layout

DTYPES = ("f32", "bf16", "f16", "f64")
SLOW_TO_BUILD = ("inductor", "inductor_max")
VENDORS = ("aten", *SLOW_TO_BUILD)
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]

on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])

NORMALISED_LAYOUTS = (
    "x={d}[6,40]{p}",
    "x={d}[2,3,40]{p}",
    "x={d}[1,40]{p}",
    "x={d}[6,1]{p1}",
    "x={d}[0,40]{p}",
    "x={d}[40]{p}",
    "x={d}[6,37]{p37}",
    "x={d}[6,40]@strides(41,1){p}",
    "x={d}[6,40]@strides(1,6){p}",
    "x={d}[6,40]@strides(0,1){p}",
    "x={d}[6,40]@align8{p}",
    "x={d}[6,37]@strides(38,1)@align8{p37}",
    "x={d}[2,3,4,40]@channels_last{p}",
    "x={d}[2,3,5,8], normalized_shape=[5,8]{p58}",
    "x={d}[2,6,40], normalized_shape=[2,6,40]",
    "x={d}[6,40]{p}, eps=0.0",
    "x={d}[6,5000]{p5000}",
)


def normalised(op, *parameters, half=""):
    """The layouts with the named parameters, of the dtype of x or of `half`'s companion."""
    texts = []
    for layout in NORMALISED_LAYOUTS:
        if "normalized_shape" in layout and op.startswith("bias_layer_norm"):
            continue
        shapes = {"p": "40", "p1": "1", "p37": "37", "p58": "5,8", "p5000": "5000"}
        filled = {
            key: "".join(f", {name}={half or '{d}'}[{shape}]" for name in parameters)
            for key, shape in shapes.items()
        }
        texts.append(f"{op}({layout.format(d='{d}', **filled)})")
    return texts


def convolutions():
    """x, grad_output and the geometry, in both layouts where both are likely."""
    texts = []
    for x, grad, rest in (
        ("2,16,9,9", "2,8,9,9", "kernel_size=[3,3], padding=[1,1]"),
        ("2,64,6,7", "2,128,6,7", "kernel_size=[1,1]"),
        ("2,64,7,6", "2,72,4,3", "kernel_size=[1,1], stride=[2,2]"),
        ("3,24,9,8", "3,40,4,3", "kernel_size=[3,2], stride=[2,3], padding=[1,0], dilation=[2,1]"),
        ("1,3,17,17", "1,8,7,7", "kernel_size=[7,7], stride=[2,2], padding=[1,1]"),
        ("2,5,6,6", "2,7,6,6", "kernel_size=[3,3], padding=[1,1]"),
        ("2,16,6,6", "2,32,6,6", "kernel_size=[3,3], padding=[1,1], groups=4"),
        ("2,16,6,6", "2,16,6,6", "kernel_size=[3,3], padding=[1,1], groups=16"),
        ("2,16,8,8", "2,32,4,4", "kernel_size=[5,5], stride=[2,2], padding=[2,2], groups=16"),
    ):
        for layout in ("@channels_last", ""):
            texts.append(
                f"conv2d_weight_grad(x={{d}}[{x}]{layout}, grad_output={{d}}[{grad}]{layout}, "
                f"{rest})"
            )
    like = "x={d}[2,8,5,5]{x}, grad_output={d}[2,8,5,5]{g}, kernel_size=[3,3], padding=[1,1]"
    for x, grad in (
        ("@channels_last", ""),
        ("", "@channels_last"),
        ("@channels_last", "@strides(0,0,0,0)"),
        ("@strides(300,1,60,10)", "@channels_last"),
        ("@channels_last@align8", "@channels_last"),
    ):
        texts.append(f"conv2d_weight_grad({like.replace('{x}', x).replace('{g}', grad)})")
    texts.append("conv2d_weight_grad(x={d}[4,1,1,1], grad_output={d}[4,8,1,1], kernel_size=[1,1])")
    rest = "kernel_size=[3,3], padding=[1,1]"
    for layout in ("@channels_last", ""):
        tensors = f"x={{d}}[2,16,9,9]{layout}, grad_output={{d}}[2,8,9,9]{layout}"
        texts += [
            f"conv2d_weight_grad({tensors}, {rest}, out_dtype={{w}})",
            f"conv2d_weight_grad({tensors}, {rest}, into={{w}}[8,16,3,3]{layout})",
            f"conv2d_weight_grad({tensors}, {rest}, into={{d}}[8,16,3,3])",
        ]
    return texts


def with_bias():
    plain = [t for t in convolutions() if "out_dtype" not in t and "into" not in t]
    texts = [t.replace("conv2d_weight_grad(", "conv2d_weight_bias_grad(") for t in plain[::2]]
    for layout in ("@channels_last", ""):
        call = (
            f"conv2d_weight_bias_grad(x={{d}}[2,16,9,9]{layout}, "
            f"grad_output={{d}}[2,8,9,9]{layout}, kernel_size=[3,3], padding=[1,1], "
        )
        texts += [
            f"{call}out_dtype={{w}})",
            f"{call}into={{w}}[8,16,3,3]{layout}, into_bias={{w}}[8])",
            f"{call}into={{d}}[8,16,3,3], into_bias={{d}}[8]@strides(2))",
        ]
    return texts


CASES = {
    "layer_norm": [
        *normalised("layer_norm", "weight", "bias"),
        *normalised("layer_norm")[:2],
        *normalised("layer_norm", "weight")[:1],
        *normalised("layer_norm", "bias")[:1],
        "layer_norm(x={d}[6,40], weight={d}[40]@strides(2), bias={d}[40]@strides(0))",
    ],
    "rms_norm": [*normalised("rms_norm", "weight"), *normalised("rms_norm")[:2]],
    "bias_layer_norm": normalised("bias_layer_norm", "bias0", "bias1", "weight", "bias"),
    "softmax": [
        "softmax(x={d}[6,40])",
        "softmax(x={d}[6,40], dim=0)",
        *(f"softmax(x={{d}}[2,3,4,5], dim={dim})" for dim in (-1, -2, -3, -4)),
        *(f"softmax(x={{d}}[2,3,4,5]@channels_last, dim={dim})" for dim in (-1, -3)),
        "softmax(x={d}[])",
        "softmax(x={d}[1])",
        "softmax(x={d}[1,40])",
        "softmax(x={d}[6,1])",
        "softmax(x={d}[0,40])",
        "softmax(x={d}[6,0])",
        "softmax(x={d}[6,37]@strides(38,1)@align8)",
        "softmax(x={d}[6,40]@strides(1,6))",
        "softmax(x={d}[6,40]@strides(0,1))",
        "softmax(x={d}[6,40]@strides(1,0))",
        "softmax(x={d}[6,5003])",
    ],
    "scatter": [
        "scatter(x={d}[6,40], dim=0, index=i64[9,40], src={d}[9,40])",
        "scatter(x={d}[6,40], dim=1, index=i32[5,60], src={d}[6,70])",
        "scatter(x={d}[6,40], dim=-1, index=i64[6,3], src=2.5)",
        "scatter(x={d}[2,3,4,5], dim=1, index=i64[2,7,4,5], src={d}[2,7,4,5])!indices=constant",
        "scatter(x={d}[6,40]@strides(1,6), dim=0, index=i64[9,40]@strides(1,0), src={d}[9,40])",
        "scatter(x={d}[], dim=0, index=i64[], src={d}[])",
        "scatter(x={d}[6,40], dim=0, index=i64[0,40], src={d}[9,40])",
        "scatter(x={d}[50000], dim=0, index=i64[70000], src={d}[70000])",
    ],
    "scatter_add": [
        "scatter_add(x={d}[6,40], dim=0, index=i64[9,40], src={d}[9,40])",
        "scatter_add(x={d}[6,40], dim=1, index=i32[5,60], src={d}[6,70])",
        "scatter_add(x={d}[6,40], dim=0, index=i64[300,40]@strides(1,0), src={d}[300,40])",
        "scatter_add(x={d}[2,3,4,5], dim=2, index=i64[2,3,9,5], src={d}[2,3,9,5])!indices=sorted",
        "scatter_add(x={d}[], dim=0, index=i64[], src={d}[])",
    ],
    "scatter_reduce": [
        f"scatter_reduce(x={{d}}[6,40], dim={dim}, index=i64[5,40], src={{d}}[9,40], "
        f"reduce={reduce}, include_self={own})"
        for dim in (0, 1)
        for reduce in ("sum", "prod", "mean", "amax", "amin")
        for own in (True, False)
    ],
    "gather": [
        "gather(x={d}[6,40], dim=0, index=i64[9,40])",
        "gather(x={d}[6,40], dim=-1, index=i32[5,60])!indices=zipf",
        "gather(x={d}[6,40], dim=0, index=i64[9,40]@strides(1,0))",
        "gather(x={d}[6,37]@strides(40,1)@align8, dim=0, index=i64[9,37]@strides(1,0))",
        "gather(x={d}[6,40]@strides(1,6), dim=-1, index=i64[6,70])",
        "gather(x={d}[2,3,4,5,6,7], dim=-5, index=i64[2,8,4,5,6,6])",
        "gather(x={d}[], dim=0, index=i64[])",
    ],
    "index_add": [
        "index_add(x={d}[6,40], dim=0, index=i64[90], source={d}[90,40])",
        "index_add(x={d}[6,40], dim=-1, index=i32[90], source={d}[6,90])",
        "index_add(x={d}[6,5,8], dim=1, index=i64[20], source={d}[6,20,8], alpha=-2.0)",
        "index_add(x={d}[6,37]@align8, dim=0, index=i64[90], source={d}[90,37])!indices=zipf",
        "index_add(x={d}[6,40]@strides(1,6), dim=0, index=i64[90], source={d}[90,40])",
        "index_add(x={d}[50], dim=0, index=i64[90], source={d}[90])!indices=few_bins",
        "index_add(x={d}[6,40], dim=0, index=i64[0], source={d}[0,40])",
    ],
    "index_reduce": [
        f"index_reduce(x={{d}}[6,40], dim={dim}, index=i64[9], source={{d}}[{shape}], "
        f"reduce={reduce}, include_self={own})"
        for dim, shape in ((0, "9,40"), (1, "6,9"))
        for reduce in ("prod", "mean", "amax", "amin")
        for own in (True, False)
    ],
    "embedding_backward": [
        "embedding_backward(grad={d}[90,40], index=i64[90], num_weights=7)",
        "embedding_backward(grad={d}[9,10,40], index=i32[9,10], num_weights=500)!indices=zipf",
        "embedding_backward(grad={d}[90,40], index=i64[90], num_weights=7, padding_idx=2)",
        "embedding_backward(grad={d}[90,37], index=i64[90], num_weights=7, "
        "scale_grad_by_freq=True)",
    ],
    "lerp": [
        "lerp(x={d}[6,40], end={d}[6,40], weight=0.3)",
        "lerp(x={d}[6,40], end={d}[6,40], weight=0.5)",
        "lerp(x={d}[6,40], end={d}[6,40], weight=-1.5)",
        "lerp(x={d}[6,40], end={d}[6,40], weight={d}[6,40])",
        "lerp(x={d}[4,1,1,1], end={d}[4,3,5,7], weight={d}[3,1,7])",
        "lerp(x={d}[6,1], end={d}[40], weight={d}[])",
        "lerp(x={d}[], end={d}[], weight=0.25)",
        "lerp(x={d}[40], end={d}[6,40], weight=0.7)",
        "lerp(x={d}[0,40], end={d}[40], weight=0.7)",
        "lerp(x={d}[1], end={d}[1], weight=0.7)",
        "lerp(x={d}[6,40]@strides(1,6), end={d}[6,40], weight=0.7)",
        "lerp(x={d}[6,40]@strides(1,6), end={d}[6,40]@strides(1,6), weight=0.7)",
        "lerp(x={d}[6,40]@strides(0,1), end={d}[6,40]@strides(80,2), weight={d}[6,1])",
        "lerp(x={d}[6,37]@align8, end={d}[6,37]@strides(38,1)@align8, weight=0.7)",
        "lerp(x={d}[2,3,4,5]@channels_last, end={d}[2,3,4,5]@channels_last, weight={d}[3,1,1])",
    ],
    "conv2d_weight_grad": convolutions(),
    "conv2d_weight_bias_grad": with_bias(),
    "layer_norm_forward": normalised("layer_norm_forward", "weight", "bias"),
    "rms_norm_forward": normalised("rms_norm_forward", "weight"),
    "bias_layer_norm_forward": normalised(
        "bias_layer_norm_forward", "bias0", "bias1", "weight", "bias"
    ),
    "layer_norm_backward": [
        f"layer_norm_backward({args})"
        for args in (
            *(
                f"grad_output={{d}}[6,{n}], x={{d}}[6,{n}], mean={{w}}[6,1], rstd={{w}}[6,1]{rest}"
                for n, rest in (
                    (40, ", weight={d}[40]"),
                    (37, ", weight={d}[37], grads=[x]"),
                    (40, ", weight={d}[40], grads=[weight]"),
                    (40, ", weight={d}[40], grads=[weight,bias]"),
                    (40, ", weight={d}[40], grads=[bias]"),
                    (40, ""),
                    (1, ", weight={d}[1]"),
                    (5000, ", weight={d}[5000]"),
                )
            ),
            "grad_output={d}[2,3,5,8], x={d}[2,3,5,8], mean={w}[2,3,1,1], rstd={w}[2,3,1,1],"
            " normalized_shape=[5,8], weight={d}[5,8]",
            "grad_output={d}[6,40]@strides(41,1), x={d}[6,40]@strides(1,6), mean={w}[6,1],"
            " rstd={w}[6,1], weight={d}[40]",
            "grad_output={d}[0,40], x={d}[0,40], mean={w}[0,1], rstd={w}[0,1], weight={d}[40]",
            "grad_output={d}[40], x={d}[40], mean={w}[1], rstd={w}[1], weight={d}[40]",
        )
    ],
    "rms_norm_backward": [
        f"rms_norm_backward(grad_output={{d}}[6,{n}], x={{d}}[6,{n}], rstd={{w}}[6,1]{rest})"
        for n, rest in (
            (40, ", weight={d}[40]"),
            (37, ", weight={d}[37], grads=[x]"),
            (40, ", weight={d}[40], grads=[weight]"),
            (40, ""),
            (1, ", weight={d}[1]"),
        )
    ],
    "bias_layer_norm_backward": [
        f"bias_layer_norm_backward(grad_output={{d}}[6,{n}], x={{d}}[6,{n}], bias0={{d}}[{n}],"
        f" bias1={{d}}[{n}], mean={{w}}[6,1], rstd={{w}}[6,1], weight={{d}}[{n}]{rest})"
        for n, rest in (
            (40, ""),
            (37, ", grads=[x]"),
            (40, ", grads=[bias0,bias]"),
            (40, ", grads=[x,bias1,weight]"),
        )
    ],
    **{
        f"add_{kind}{form}": [
            f"add_{kind}{form}(x={{d}}[6,{n}]{layout}, residual={{d}}[6,{n}]{rest})"
            for n, layout, rest in (
                (40, "", "".join(f", {name}={{d}}[40]" for name in parameters)),
                (37, "@strides(38,1)@align8", ", weight={d}[37]"),
                (40, "@strides(0,1)", ", eps=0.0"),
            )
        ]
        for kind, parameters in (("layer_norm", ("weight", "bias")), ("rms_norm", ("weight",)))
        for form in ("", "_forward")
    },
    **{
        f"add_{kind}_backward": [
            f"add_{kind}_backward(grad_output={{d}}[6,{n}], grad_output_total={{d}}[6,{n}],"
            f" total={{d}}[6,{n}], {statistics}{rest})"
            for n, rest in (
                (40, ", weight={d}[40]"),
                (37, ", weight={d}[37], grads=[x]"),
                (40, ", weight={d}[40], grads=[weight]"),
                (40, ""),
            )
        ]
        for kind, statistics in (
            ("layer_norm", "mean={w}[6,1], rstd={w}[6,1]"),
            ("rms_norm", "rstd={w}[6,1]"),
        )
    },
    "softmax_backward": [
        "softmax_backward(grad_output={d}[6,40], output={d}[6,40])",
        "softmax_backward(grad_output={d}[6,40], output={d}[6,40], dim=0)",
        "softmax_backward(grad_output={d}[2,3,4,5], output={d}[2,3,4,5], dim=1)",
        "softmax_backward(grad_output={d}[6,40]@strides(1,6), output={d}[6,40])",
        "softmax_backward(grad_output={d}[6,1], output={d}[6,1])",
    ],
    "lerp_backward": [
        "lerp_backward(grad_output={d}[6,40], x={d}[6,40], end={d}[6,40], weight=0.3)",
        "lerp_backward(grad_output={d}[6,40], x={d}[6,40], end={d}[6,40], weight={d}[6,40])",
        "lerp_backward(grad_output={d}[6,40], x={d}[40], end={d}[6,40], weight=0.3)",
        "lerp_backward(grad_output={d}[6,40], x={d}[6,40], end={d}[6,1], weight=0.3)",
        "lerp_backward(grad_output={d}[2,2,3,4], x={d}[2,3,4], end={d}[2,2,3,4], weight=0.3)",
        "lerp_backward(grad_output={d}[4,3,5,7], x={d}[4,1,1,1], end={d}[4,3,5,7],"
        " weight={d}[3,1,7])",
        "lerp_backward(grad_output={d}[4,3,5,7], x={d}[4,1,1,1], end={d}[4,3,5,7],"
        " weight={d}[3,1,7], grads=[weight])",
        "lerp_backward(grad_output={d}[6,40], x={d}[], end={d}[6,40], weight={d}[])",
        "lerp_backward(grad_output={d}[], x={d}[], end={d}[], weight=0.25)",
    ],
    "layer_norm_training": [
        "layer_norm_training(x={d}[6,40], grad_output={d}[6,40], weight={d}[40], bias={d}[40])",
        "layer_norm_training(x={d}[6,37], grad_output={d}[6,37], weight={d}[37], grads=[x])",
    ],
    "rms_norm_training": [
        "rms_norm_training(x={d}[6,40], grad_output={d}[6,40], weight={d}[40])",
        "rms_norm_training(x={d}[6,37], grad_output={d}[6,37], weight={d}[37], grads=[weight])",
        "rms_norm_training(x={d}[6,37], grad_output={d}[6,37])",
    ],
    "softmax_training": [
        "softmax_training(x={d}[6,40], grad_output={d}[6,40])",
        "softmax_training(x={d}[2,3,4,5], grad_output={d}[2,3,4,5], dim=1)",
    ],
    "bias_layer_norm_training": [
        "bias_layer_norm_training(x={d}[6,40], grad_output={d}[6,40], bias0={d}[40],"
        " bias1={d}[40], weight={d}[40], bias={d}[40])",
        "bias_layer_norm_training(x={d}[6,37], grad_output={d}[6,37], bias0={d}[37],"
        " bias1={d}[37], weight={d}[37], bias={d}[37], grads=[bias0])",
    ],
    "lerp_training": [
        "lerp_training(x={d}[6,40], end={d}[6,40], grad_output={d}[6,40], weight=0.3)",
        "lerp_training(x={d}[4,1,1,1], end={d}[4,3,5,7], grad_output={d}[4,3,5,7],"
        " weight={d}[3,1,7])",
    ],
}
MIXED = [
    text
    for name, parameters in (
        ("layer_norm", ("weight", "bias")),
        ("rms_norm", ("weight",)),
        ("bias_layer_norm", ("bias0", "bias1", "weight", "bias")),
    )
    for text in normalised(name, *parameters, half="f32")[:2]
] + ["add_rms_norm(x={d}[6,40], residual={d}[6,40], weight=f32[40])"]


def workloads(implementation):
    """Every case in every dtype for aten; one dtype each, in turn, where building costs time."""
    texts = []
    for cases in CASES.values():
        for i, case in enumerate(cases):
            every = implementation == "aten" or i == 0
            dtypes = DTYPES if every else (DTYPES[i % len(DTYPES)],)
            if implementation in SLOW_TO_BUILD:
                dtypes = DTYPES[:1] if i == 0 else ()
            texts += [case.format(d=d, w="f64" if d == "f64" else "f32") for d in dtypes]
    if implementation not in SLOW_TO_BUILD:
        texts += [case.format(d=d) for case in MIXED for d in ("f16", "bf16")]
    return texts


def pairs():
    return [
        (name, text)
        for name in IMPLS
        for text in workloads(name)
        if IMPLS[name].serves(text.partition("(")[0])
    ]


def own_and_vendor():
    """Those that serve any operator, and are quick to build."""
    return [name for name in IMPLS if name not in SLOW_TO_BUILD and IMPLS[name].op is None]


def refusal(implementation, w, device):
    impl, indexed = IMPLS[implementation], w.operator.indexed
    if device == "cuda" and implementation in VENDORS and indexed and indexed.last_wins:
        return "PyTorch's kernels race for the last write on a GPU"
    spec = spec_of(0 if device == "cuda" else None)
    return impl.unsupported(w, spec) if impl.serves(w.op) else f"it serves {impl.op}"


def skip_unless_supported(implementation, w, device):
    if reason := refusal(implementation, w, device):
        pytest.skip(reason)


def through(implementation, w, tensors):
    """The public function's result and PyTorch's."""
    args = w.call(tensors)
    with tw.use(implementation):
        found = getattr(tw, w.op)(**args)
    return found, call_reference(w.operator, args)


def assert_are_pytorchs(found, expected, truths):
    pairs = (v if isinstance(v, (tuple, list)) else (v,) for v in (found, expected))
    for own, right, truth in zip(*pairs, truths, strict=True):
        assert_is_pytorchs(own, right, truth)


def assert_is_pytorchs(found, expected, truth):
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    if found.numel() == 0:
        return
    assert same_layout(found.shape, found.stride(), expected.stride())
    finite = expected.isfinite()
    assert torch.equal(found.isnan(), expected.isnan())
    special = ~finite & ~expected.isnan()
    assert torch.equal(found[special], expected[special])
    if not finite.any():
        return
    dtype = expected.dtype
    found, expected, truth = (t[finite].double() for t in (found, expected, truth))
    pytorchs = (expected - truth).abs().max()
    ulp = torch.finfo(dtype).eps * truth.abs().clamp_min(truth.abs().mean())
    worst = ((found - truth).abs() - (16 if dtype == torch.float64 else 2) * ulp).max()
    assert worst <= 2 * pytorchs, f"off by {worst}, PyTorch by {pytorchs}"


def test_every_operator_has_cases():
    assert set(CASES) == {name for name in OPS if not OPS[name].fused}


@on_each_device
@pytest.mark.parametrize(("implementation", "text"), pairs(), ids=lambda value: str(value))
def test_the_result_is_pytorchs(implementation, text, device):
    w = Workload.parse(text)
    skip_unless_supported(implementation, w, device)
    tensors = w.operator.examples(w, "random", 0, device)
    found, expected = through(implementation, w, tensors)
    truths = w.operator.truth(w, tensors)
    if w.operator.indexed and w.operator.indexed.exact(w):
        expected.copy_(truths[0])  # see refusal
    assert_are_pytorchs(found, expected, truths)


@pytest.mark.parametrize("op", CASES)
def test_what_an_untuned_gpu_would_run_fits_and_is_emitted(op):
    """Whatever machine this is; one case compiles, too."""
    h200, tasks = DEVICES["h200"], []
    for implementation, text in pairs():
        w, impl = Workload.parse(text), IMPLS[implementation]
        if w.op != op or implementation in VENDORS or impl.unsupported(w, h200):
            continue
        config = impl.heuristic(w, h200)
        assert config in impl.space(w, h200), (implementation, text)
        tasks.append(impl.task(config, w, h200))
    for task in [task for task in tasks if task][-1:]:
        assert compiled(task).resources.spill_bytes == 0


@on_each_device
@pytest.mark.parametrize("implementation", own_and_vendor())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [-1, -2])
def test_softmax_of_infinite_rows_is_pytorchs(implementation, dtype, dim, device):
    w = Workload.parse(f"softmax(x={dtype}[5,12], dim={dim})")
    skip_unless_supported(implementation, w, device)
    (x,) = w.operator.examples(w, "random", 0, device)
    inf = float("inf")
    x[0], x[1, 3], x[2, 4], x[3, 5], x[:, 7] = -inf, -inf, inf, float("nan"), -inf
    found, expected = through(implementation, w, [x])
    assert_is_pytorchs(found, expected, w.operator.truth(w, [x])[0])


@on_each_device
@pytest.mark.parametrize("implementation", own_and_vendor())
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_a_constant_row_without_eps_is_pytorchs(implementation, name, device):
    w = Workload.parse(f"{name}(x=f32[4,16], eps=0.0)")
    skip_unless_supported(implementation, w, device)
    x = torch.randn(4, 16, device=device)
    x[0], x[1] = 0.0, 3.0
    x[2, 5] = float("nan")
    found, expected = through(implementation, w, [x])
    assert_is_pytorchs(found, expected, w.operator.truth(w, [x])[0])


@on_each_device
@pytest.mark.parametrize("implementation", own_and_vendor())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight", [0.0, 0.25, 0.5, 1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_lerp_at_the_edges_is_pytorchs(implementation, dtype, weight, as_tensor, device):
    """At weight 0 an infinite end gives NaN, and weight 1 gives end: as the formula has it."""
    given = f"{dtype}[9]" if as_tensor else 0.25
    w = Workload.parse(f"lerp(x={dtype}[9], end={dtype}[9], weight={given})")
    skip_unless_supported(implementation, w, device)
    like = {"dtype": w.main.torch_dtype, "device": device}
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([1.0, 1.0, inf, inf, 0.0, -0.0, nan, 3.5, 2.0], **like)
    end = torch.tensor([inf, -inf, inf, 1.0, 0.0, 0.0, 1.0, nan, 7.25], **like)
    by = torch.full((9,), weight, **like) if as_tensor else weight
    with tw.use(implementation):
        found = tw.lerp(x, end, by)
    wide = by.double() if as_tensor else by
    assert_is_pytorchs(found, torch.lerp(x, end, by), torch.lerp(x.double(), end.double(), wide))


@st.composite
def broadcast_shapes(draw):
    """Three shapes that broadcast together, and their dtype."""
    full = draw(st.lists(st.sampled_from([1, 2, 3, 5]), max_size=4))
    shapes = []
    for _ in range(3):
        ones = draw(st.lists(st.booleans(), min_size=len(full), max_size=len(full)))
        drop = draw(st.integers(0, len(full)))
        shapes.append([1 if one else n for n, one in zip(full, ones, strict=True)][drop:])
    return shapes, draw(st.booleans()), draw(st.sampled_from(DTYPES))


@on_each_device
@pytest.mark.parametrize("implementation", own_and_vendor())
def test_lerp_broadcasts_as_pytorch_does(implementation, device):
    @settings(max_examples=60 if implementation == "aten" else 12)
    @given(broadcast_shapes())
    def check(drawn):
        (x, end, weight), scalar, dtype = drawn
        by = 0.3 if scalar else f"{dtype}{weight}".replace(" ", "")
        w = Workload.parse(f"lerp(x={dtype}{x}, end={dtype}{end}, weight={by})")
        if refusal(implementation, w, device):
            return
        tensors = w.operator.examples(w, "random", 0, device)
        found, expected = through(implementation, w, tensors)
        assert_is_pytorchs(found, expected, w.operator.truth(w, tensors)[0])

    simplest = Workload.parse("lerp(x=f32[3], end=f32[3], weight=0.5)")
    skip_unless_supported(implementation, simplest, device)
    check()


@on_each_device
@pytest.mark.parametrize("implementation", own_and_vendor())
def test_an_implementation_that_supports_the_simplest_case_supports_most(implementation, device):
    """So that no test above passes by being skipped."""
    simplest = [Workload.parse(cases[0].format(d="f32", w="f32")) for cases in CASES.values()]
    if IMPLS[implementation].op or all(refusal(implementation, w, device) for w in simplest):
        pytest.skip("it is for one operator, or for another machine")
    served = {w.op for w in simplest if not refusal(implementation, w, device)}
    tried = [Workload.parse(t) for t in workloads(implementation)]
    refused = [refusal(implementation, w, device) for w in tried if w.op in served]
    assert refused.count(None) > 0.8 * len(refused)
