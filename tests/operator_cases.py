"""Small calls of every operator, as workloads: {d} is the dtype, {w} that of wide sums."""

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
        "lerp(x={d}[6,40], end={d}[6,40], weight=0.9999)",
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
        "lerp_backward(grad_output={d}[6,40], x={d}[6,40], end={d}[6,40], weight=0.9999)",
        "lerp_backward(grad_output={d}[6,40], x={d}[40], end={d}[6,40], weight=0.999999999)",
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
    **{
        f"add_{kind}_training": [
            f"add_{kind}_training(x={{d}}[6,{n}], residual={{d}}[6,{n}], grad_output={{d}}[6,{n}],"
            f" grad_output_total={{d}}[6,{n}]{rest})"
            for n, rest in (
                (40, "".join(f", {name}={{d}}[40]" for name in parameters)),
                (37, ", weight={d}[37], grads=[x]"),
                (37, ", weight={d}[37], grads=[weight]"),
                (37, ""),
            )
        ]
        for kind, parameters in (("layer_norm", ("weight", "bias")), ("rms_norm", ("weight",)))
    },
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
