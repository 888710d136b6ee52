"""Infinities at the border of grad_output in every own weight gradient, on a GPU."""

import pytest
import torch

from compile_ahead import compile_ahead
from infinities import assert_infinities_stay, with_infinities
from tilewright.device import spec_of
from tilewright.impl import IMPLS
from tilewright.impls.weight_gradient import conv2d_weight_grad_sm80 as sm80
from tilewright.impls.weight_gradient import conv2d_weight_grad_sm90 as sm90
from tilewright.op import Workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]

HOPPER, PORTABLE = (IMPLS[f"conv2d_weight_grad_{name}"] for name in ("sm90", "sm80"))
MODES = [
    {}, {"split_k": 3, "combine": "grid"}, {"split_k": 4, "combine": "marked"},
    {"split_k": 5, "combine": "kernel"}, {"split_k": 2, "cluster": 2},
]  # fmt: skip


def layer(n, c, k, h, w, kernel, stride=1, padding=1, groups=1, dtype="f16", more=""):
    p, q = ((size + 2 * padding - kernel) // stride + 1 for size in (h, w))
    return Workload.parse(
        f"conv2d_weight_grad(x={dtype}[{n},{c},{h},{w}]@channels_last,"
        f" grad_output={dtype}[{n},{k},{p},{q}]@channels_last, kernel_size={kernel},"
        f" stride={stride}, padding={padding}, groups={groups}{more})"
    )


WIDE = [layer(3, 72, 136, 9, 13, 3), layer(2, 64, 72, 17, 10, 5, 2, 2, dtype="bf16")]
CASES = [
    *((HOPPER, w, sm90.Config(*tile, stages=4, **mode))
      for w in WIDE for tile in sm90.WARPGROUPS for mode in MODES),
    *((PORTABLE, w, sm80.Config(*tile, stages=2, split_k=3, combine="kernel"))
      for w in WIDE for tile in sm80.WARPS),
]  # fmt: skip
OTHERS = [
    ("narrow", layer(2, 3, 64, 32, 30, 7, 2, 3)),
    ("grouped", layer(2, 64, 64, 11, 13, 3, groups=4)),
    ("grouped", layer(2, 64, 64, 11, 13, 3, 2, groups=16, more=", out_dtype=f32")),
    ("depthwise", layer(2, 64, 64, 11, 13, 5, 2, 2, groups=64)),
    ("sm80", layer(2, 13, 24, 11, 9, 3, dtype="f32")),
    ("sm80", layer(2, 13, 24, 11, 9, 3, dtype="f64")),
]


def fits(impl, w, config):
    space = impl.space(w, spec_of(0)).restricted({"split_k": [config.split_k]})
    return impl.unsupported(w, spec_of(0)) is None and space.why_not(config) is None


@pytest.fixture(scope="module", autouse=True)
def compiled_ahead():
    for impl in (HOPPER, PORTABLE):
        compile_ahead(impl, [(w, c) for i, w, c in CASES if i is impl and fits(i, w, c)])


def check(impl, w, config):
    x, grad = with_infinities(w)
    found = impl.build(config, w, spec_of(0))(x.cuda(), grad.cuda())
    assert_infinities_stay(w, found.cpu(), x, grad)


@pytest.mark.parametrize(
    ("impl", "w", "config"), CASES, ids=lambda value: getattr(value, "name", str(value))
)
def test_they_do_not_meet_the_padding(impl, w, config):
    if not fits(impl, w, config):
        pytest.skip("it does not fit")
    check(impl, w, config)


@pytest.mark.parametrize(("name", "w"), OTHERS, ids=str)
def test_nor_in_kernels_for_few_channels_groups_and_wide_operands(name, w):
    impl = IMPLS[f"conv2d_weight_grad_{name}"]
    check(impl, w, impl.heuristic(w, spec_of(0)))
