"""Schedules and rows that tests of row kernels share, emulated ones and those on a GPU."""

import torch

from tilewright.fusion.cuda.rows.schedule import RowSchedule

PERSISTENT = RowSchedule(4, 64, 4, 1, "registers", "two_pass", 1, 1, stages=2, parameters="shared")
MIXED = "layer_norm(x={half}[{rows},520], weight=f32[520], bias={half}[520])"
MIXED_SCHEDULES = [
    *({"parameters": held, "stages": n} for held in ("registers", "shared") for n in (0, 1, 3)),
    *({"parameters": held, "bulk": True} for held in ("registers", "shared")),
    {"widened": True, "rows_per_thread": 2, "rows_per_block": 2, "row_threads": 128},
    {"parameters": "registers", "widened": True, "bulk": True, "in_turn": True},
]
"""Persistent ones for rows of halves beside a weight in fp32 and a bias in halves."""

FAR = [
    *(("f16", centre, spread) for centre, spread in ((1e4, 100.0), (3e4, 20.0), (6e4, 300.0))),
    ("bf16", 6e4, 3000.0),
    ("f32", 1e6, 1.0),
]
"""Dtypes of rows, how far from zero their mean is, and their deviation."""
NORM = "layer_norm(x={d}[9,{h}], weight={d}[{h}], bias={d}[{h}])"


def assert_far_means_right(w, executable, centre, spread, device):
    """What fp32 rounds of the mean is all that the distance from zero may cost, besides the
    rounding of the result."""
    x, weight, bias = w.operator.examples(w, "random", 0, device)
    tensors = [(x.float() * spread + centre).to(x.dtype), weight, bias]
    (truth,) = w.operator.truth(w, tensors)
    spreads = tensors[0].double().std(-1, keepdim=True)
    eps = torch.finfo(x.dtype).eps
    rounding = 2 * centre / spreads * torch.finfo(torch.float32).eps * weight.double().abs()
    far = (executable(*tensors).double() - truth).abs()
    assert (far <= rounding + eps * (truth.abs() + bias.double().abs()) + 1e-5).all(), far.max()


STRIDED = [
    *(
        f"layer_norm_backward(grad_output={d}[300,256]{g}, x={d}[300,256]{x}, mean=f32[300,1], "
        f"rstd=f32[300,1], weight={d}[256])"
        for d, g, x in (
            ("f16", "", "@strides(512,2)"),
            ("f32", "@strides(512,2)", ""),
            ("f32", "@strides(1,300)", "@strides(1,300)"),
        )
    ),
    "rms_norm_backward(grad_output=f16[300,256], x=f16[300,256]@strides(512,2), rstd=f32[300,1], "
    "weight=f16[256])",
    "layer_norm(x=f16[600,16384]@strides(32768,2), weight=f16[16384], bias=f16[16384])",
    "softmax(x=f32[40,4096]@strides(8192,2))",
]
"""Rows whose elements are apart in memory."""
