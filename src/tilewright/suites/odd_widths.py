"""Norms whose rows begin anywhere, and gradients, which sum those of weights over all rows."""

from tilewright.suite import suite


def layer_norm(width: int) -> str:
    rows = f"f16[8192,{width}]"
    statistics = "mean=f32[8192,1], rstd=f32[8192,1]"
    return f"layer_norm_backward(grad_output={rows}, x={rows}, {statistics}, weight=f16[{width}])"


def rms_norm(rows: int, width: int) -> str:
    like_x = f"bf16[{rows},{width}]"
    return (
        f"rms_norm_backward(grad_output={like_x}, x={like_x}, rstd=f32[{rows},1], "
        f"weight=bf16[{width}])"
    )


def forward(width: int) -> list[str]:
    rows, weight = f"bf16[8192,{width}]", f"bf16[{width}]"
    return [f"softmax(x={rows})", f"layer_norm(x={rows}, weight={weight}, bias={weight})"]


odd_widths = suite(
    "odd_widths",
    [
        *map(layer_norm, (769, 2049, 5141, 8193, 12289, 20481, 32769)),
        *(rms_norm(8192, width) for width in (1001, 5141, 12289)),
        rms_norm(2048, 50257),
        *(row for width in (2561, 5141, 8193, 16385, 32769, 50257) for row in forward(width)),
    ],
)
