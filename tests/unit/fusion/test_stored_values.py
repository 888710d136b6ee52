"""Values that are stored: slices of them would be computed anew in too many steps."""

import functools

import pytest
import torch
from torch.nn import functional as F

import tilewright as tw
from emulated import emulated
from random_graphs import gradients_of
from tilewright.compile import cxx
from tilewright.device import DEVICES, spec_of
from tilewright.dispatch.functions.fuse import fuse
from tilewright.fusion.frontend import lower
from tilewright.fusion.staged import Staged, graphs_of
from tilewright.impl import IMPLS, allocator
from tilewright.impls.fused import graph_of
from tilewright.measure.verify import Verifier
from tilewright.op import Workload

pytestmark = pytest.mark.usefixtures("forgets_functions")
needs_compiler = pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))
FUSED, CPU, H200 = IMPLS["fused"], torch.device("cpu"), DEVICES["h200"]


def sobel(x):
    p = F.pad(x, (1, 1, 1, 1))
    right = p[..., :-2, 2:] + 2 * p[..., 1:-1, 2:] + p[..., 2:, 2:]
    left = p[..., :-2, :-2] + 2 * p[..., 1:-1, :-2] + p[..., 2:, :-2]
    below = p[..., 2:, :-2] + 2 * p[..., 2:, 1:-1] + p[..., 2:, 2:]
    above = p[..., :-2, :-2] + 2 * p[..., :-2, 1:-1] + p[..., :-2, 2:]
    across, down = right - left, below - above
    return (across * across + down * down + 1e-2).sqrt()


def blurred(x):
    p, (h, w) = F.pad(x, (1, 1, 1, 1)), x.shape[-2:]
    return sum(p[..., i : i + h, j : j + w] for i in range(3) for j in range(3)) / 9


def blurred_thrice(x):
    return blurred(blurred(blurred(x)))


def with_transposes(x):
    """Each sum with its own transpose doubles the steps."""
    return functools.reduce(lambda a, _: (a + a.t() / 3).tanh(), range(6), x)


def blurred_softmax(x):
    """Rows of what is reduced, in slices that are sliced again."""
    y = x.softmax(-1)
    for _ in range(7):
        y = F.pad(y[..., 1:] - y[..., :-1] + y[..., :-1].exp(), (0, 1))
    return y


def masks_of_edges(x):
    """Booleans are stored, too: of what is greater than all around it."""
    found = sobel(x) > 1
    for _ in range(3):
        p = F.pad(found.float(), (1, 1, 1, 1))
        found = p[..., 2:, 1:-1] + p[..., :-2, 1:-1] + p[..., 1:-1, 2:] + p[..., 1:-1, :-2] > 1
    return found.float() * x


STENCILS = [
    (sobel, "x=f32[2,7,9]"),
    (sobel, "x=f16[5,12]"),
    (sobel, "x=bf16[2,6,8]@strides(100,1,7)"),
    (blurred_thrice, "x=f32[6,11]"),
    (with_transposes, "x=f32[9,9]"),
    (with_transposes, "x=f64[6,6]@strides(1,7)"),
]


def assert_right(w):
    verifier = Verifier(w, CPU)
    assert verifier.check(FUSED.build(FUSED.heuristic(w, CPU_SPEC), w, CPU_SPEC)).message == ""
    assert verifier.check(emulated(w, H200)).message == ""


CPU_SPEC = spec_of(None)
