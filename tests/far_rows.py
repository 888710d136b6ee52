"""Rows of fp32 numbers that are equal or nearly so, far from zero: emulated kernels and a GPU's."""

import math
from dataclasses import replace

import torch
from torch.nn import functional as F

from row_schedules import PERSISTENT
from tilewright.dispatch.functions.fuse import fuse
from tilewright.op import OPS, Workload
from tilewright.tensor_spec import TensorSpec

NORM = "layer_norm(x=f32[{r},{h}], weight=f32[{h}], bias=f32[{h}])"
EPS = torch.finfo(torch.float32).eps
EQUAL = (1000.1, 0.1, -3300.7, 123456.789)
CENTRE, SPREAD = 1e4, 1.0
ROUNDED = EPS * CENTRE / SPREAD
"""Of a deviation of spread numbers, by a mean that is rounded to fp32, at most."""
ALONE = replace(PERSISTENT, stages=0, parameters="reload")
SCHEDULES = [
    *(replace(PERSISTENT, moments=way) for way in ("two_pass", "merge", "lanes")),
    *(replace(ALONE, storage=kept) for kept in ("registers", "shared", "reread")),
    replace(PERSISTENT, bulk=True),
    replace(PERSISTENT, bulk=True, stages=3, moments="merge", in_turn=True),
    replace(PERSISTENT, rows_per_thread=2, in_turn=True),
    replace(PERSISTENT, cluster=2, stages=1),
    replace(PERSISTENT, cluster=2, rows_per_thread=2, bulk=True, moments="lanes"),
    replace(ALONE, cluster=2, moments="lanes"),
    replace(PERSISTENT, row_threads=32, rows_per_block=8, tail="predicated"),
]
"""Ways to walk rows of 520 elements."""
SHIFTED = [
    *(replace(ALONE, storage=kept, shifted=True) for kept in ("registers", "shared", "reread")),
    replace(ALONE, cluster=2, shifted=True, tail="predicated"),
    replace(ALONE, row_threads=32, rows_per_block=8, shifted=True),
]
"""Rows of 517 or 999 elements, which begin anywhere in memory."""


def deviations(axes):
    def standardised(x):
        return (x - x.mean(axes, keepdim=True)) * (x.var(axes, keepdim=True) + 1e-5).rsqrt()

    return standardised


def norm_beside_its_sum(x):
    y = x + 0.5
    return y, F.layer_norm(y, x.shape[-1:]), y.var(-1), y.mean(-1)


def sums_of_rows(x):
    """Of what is left of rows, beside the rows: in a row kernel that adds up columns."""
    y = deviations(-1)(x)
    return y, y.sum(0)


def sums_of_samples(x):
    y = deviations(-1)(x)
    return y, y.sum(1)


def halves_of_rows(x):
    a, b = deviations(-1)(x).chunk(2, -1)
    return torch.cat([a, a * b], -1)


FUNCTIONS = {
    "rows": (deviations(-1), (37, 520)),
    "one row": (deviations(-1), (1, 5140)),
    "one element": (lambda x: x - x.mean(-1, keepdim=True) + x.var(-1, correction=0), (7, 1)),
    "two elements": (lambda x: x - x.mean(-1, keepdim=True) + 0 * x.var(-1, keepdim=True), (40, 2)),
    "few rows": (deviations(-1), (2, 1 << 18)),
    "columns": (deviations(0), (1000, 64)),
    "columns in parts": (lambda x: (x.std(0), x - x.mean(0)), (1 << 14, 64)),
    "images": (deviations((0, 2, 3)), (8, 32, 7, 14)),
    "groups": (lambda x: F.group_norm(x, 4), (5, 16, 6, 8)),
    "rows and columns": (lambda x: (x.var(-1), x.std(0), x - x.mean(0)), (300, 500)),
    "rows and all": (lambda x: (x.var(-1), x.var(), x - x.mean(-1, keepdim=True)), (300, 500)),
    "rows and sums over them": (sums_of_rows, (300, 512)),
    "samples": (sums_of_samples, (3, 40, 256)),
    "rows and sets": (lambda x: deviations(-1)(x) + x.var((1, 2, 3), keepdim=True), (4, 8, 4, 64)),
    "rows put together": (lambda x: deviations(-1)(x.roll(3, -1)), (37, 519)),
    "columns put together": (
        lambda x: (x.roll(3, 0).std(0), deviations(0)(x.roll(1, 0))),
        (999, 7),
    ),
    "halves of rows": (halves_of_rows, (300, 128)),
}
"""What takes deviations from a mean, and of what shape."""


def workload(function, shape, strides=None):
    fuse(function, name="far")
    return OPS["far"].workload(x=TensorSpec("f32", shape, strides))


def results(found):
    return found if isinstance(found, tuple) else (found,)


def assert_equal_values_have_no_deviations(run, shape, device):
    for value in EQUAL:
        for found in results(run(torch.full(shape, value, device=device))):
            assert torch.equal(found, torch.zeros_like(found)), value


def nearly_equal(shape, device):
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(shape, generator=generator, device=device) * SPREAD + CENTRE


def assert_nearly_equal_values_right(run, function, shape, device):
    x = nearly_equal(shape, device)
    for found, truth in zip(results(run(x)), results(function(x.double())), strict=True):
        scale = truth.abs().max()
        assert ((found.double() - truth).abs() <= (64 * EPS + ROUNDED) * scale).all()


def assert_norms_right(run, rows, width, device):
    """Of equal values nothing is left but the bias, whatever the other rows hold."""
    x = nearly_equal((rows, width), device)
    weight, bias = torch.linspace(0.5, 2, width, device=device), torch.randn(width, device=device)
    x[::3] = torch.tensor(EQUAL, device=device).repeat(rows)[: len(x[::3]), None]
    found = run(x, weight, bias)
    assert torch.equal(found[::3], bias.expand_as(found[::3]))
    truth = F.layer_norm(x.double(), (width,), weight.double(), bias.double())
    inverse = (x.double().var(-1, correction=0, keepdim=True) + 1e-5).rsqrt()
    near = 32 * EPS * (truth.abs() + 1) + EPS * CENTRE * inverse * weight
    assert ((found.double() - truth).abs() <= near).all()


FIRSTS = (math.nan, math.inf, -math.inf, 3e38, -3e38, 1e30, 0.0, 1e6)
"""What the first element of a row may be."""


def extreme(width, device):
    """Rows that begin so, also with a second one alike, beside ordinary and far values; and rows of
    such values."""
    rows = []
    for first in FIRSTS:
        for rest in (torch.randn(width), torch.randn(width) + 1e5, torch.full((width,), first)):
            for count in (1, 2):
                row = rest.clone()
                row[:count] = first
                rows.append(row)
    ordinary = torch.randn(len(FIRSTS), width) + 1e5
    ordinary[range(len(FIRSTS)), range(3, 3 + len(FIRSTS))] = torch.tensor(FIRSTS)
    return torch.cat([torch.stack(rows), ordinary]).to(device)


def norm(rows, width):
    return Workload.parse(NORM.format(r=rows, h=width))
