"""Rows that hold NaN or infinity, or do not vary, for every operator on rows: on any target."""

import math

import torch

from tilewright.op import Workload

ROWS, WIDTH = 40, 520
_ROWS = "{d}[{r},{h}]"
_SCALES = "weight={d}[{h}], bias={d}[{h}]"
_STATISTICS = "mean={s}[{r},1], rstd={s}[{r},1], weight={d}[{h}]"
ON_ROWS = {
    "softmax": f"x={_ROWS}",
    "layer_norm": f"x={_ROWS}, {_SCALES}",
    "rms_norm": f"x={_ROWS}, weight={{d}}[{{h}}]",
    "bias_layer_norm": f"x={_ROWS}, bias0={{d}}[{{h}}], bias1={{d}}[{{h}}], {_SCALES}",
    "add_layer_norm": f"x={_ROWS}, residual={_ROWS}, {_SCALES}",
    "add_rms_norm": f"x={_ROWS}, residual={_ROWS}, weight={{d}}[{{h}}]",
    "softmax_backward": f"grad_output={_ROWS}, output={_ROWS}",
    "layer_norm_backward": f"grad_output={_ROWS}, x={_ROWS}, {_STATISTICS}",
    "rms_norm_backward": f"grad_output={_ROWS}, x={_ROWS}, rstd={{s}}[{{r}},1], "
    "weight={d}[{h}]",
    "lerp": f"x={_ROWS}, end={_ROWS}, weight={{d}}[{{r}},1]",
    "lerp_backward": f"grad_output={_ROWS}, x={_ROWS}, end={_ROWS}, weight={{d}}[{{h}}]",
}
"""Arguments by operator; what varies over rows comes first."""
NORMS = [name for name in ON_ROWS if "norm" in name and "backward" not in name]
POISON = {3: math.nan, 8: math.inf, 21: -math.inf}
"""What one element of a row is."""
CONSTANTS = (0.0, 0.1, 7.0, 1000.1, -3000.0)


def workload(name, dtype, rows=ROWS, width=WIDTH):
    statistics = "f64" if dtype == "f64" else "f32"
    args = ON_ROWS[name].format(d=dtype, s=statistics, r=rows, h=width)
    return Workload.parse(f"{name}({args})")


def _results(run, tensors):
    out = run(*tensors)
    return out if isinstance(out, tuple) else (out,)


def assert_rows_stay_by_themselves(w, run, device):
    """Rows with NaN or infinity have those of the truth, others the bits that they have anyway.

    The truth is that of PyTorch's CPU kernels: its CUDA kernel of the RMS norm has NaN in all of a
    row that holds an infinity, where its decomposition and its CPU kernel have zeros beside one.
    """
    tensors = w.operator.examples(w, "random", 0, device)
    clean = _results(run, tensors)
    poisoned = [t.clone() for t in tensors]
    for row, value in POISON.items():
        poisoned[0][row, row] = value
    others = torch.ones(tensors[0].shape[0], dtype=torch.bool, device=device)
    others[list(POISON)] = False
    for mine, before, right in zip(
        _results(run, poisoned),
        clean,
        w.operator.truth(w, [t.cpu() for t in poisoned]),
        strict=True,
    ):
        right = right.to(mine)
        assert torch.equal(mine.isfinite(), right.isfinite())
        if "layer_norm_backward" not in w.op:  # whose kernel in PyTorch has other terms
            assert torch.equal(mine.isnan(), right.isnan())
            assert torch.equal(mine[mine.isinf()], right[right.isinf()])
        if mine.shape[:1] == others.shape:
            assert torch.equal(mine[others], before[others])


def assert_constant_rows_right(w, run, device):
    """No variance: of layer norms nothing is left but the bias. Other norms have results, which are
    rounded."""
    tensors = w.operator.examples(w, "random", 0, device)
    for constant in CONSTANTS:
        given = [t.clone() for t in tensors]
        for t in given:
            if t.shape == tensors[0].shape:
                t.fill_(constant)
            elif w.op == "bias_layer_norm" and t is not given[3]:
                t.zero_()
        (right,) = w.operator.truth(w, given)[:1]
        mine = _results(run, given)[0]
        eps = torch.finfo(torch.float64 if mine.dtype == torch.float64 else torch.float32).eps
        scale = max((t.abs().max().item() for t in given[1:]), default=1.0)
        left = 316 * math.sqrt(WIDTH) * eps * 2 * abs(constant) * scale
        near = torch.finfo(mine.dtype).eps * (right.abs() + 1) + left
        if "layer_norm" in w.op:
            near = right - right.to(mine.dtype).double()
        assert ((mine.double() - right).abs() <= near.abs()).all(), constant


def assert_least_probabilities_right(w, run, device):
    """Those that are no normal numbers in bf16, nor in fp32, and those below them."""
    (x,) = w.operator.examples(w, "random", 0, device)
    x = (x - 95).to(x.dtype)
    x[:, 7] = 0
    (right,) = w.operator.truth(w, [x])
    limits = torch.finfo(x.dtype)
    least = limits.smallest_normal * limits.eps
    assert ((right > least) & (right < limits.smallest_normal)).any()
    far = (run(x).double() - right).abs()
    assert (far <= limits.eps * right + least).all(), (far / right).max()
