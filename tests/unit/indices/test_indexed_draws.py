"""Every kernel for indices on many shapes, run on a CPU: ranks 1 to 6, any dim and distribution.

Of each kernel some meanings (operator, dtype, reduction) are compiled once, and hypothesis draws
shapes that the same binary serves: where a binary is for one shape, those that come down to it.
"""

import math
from dataclasses import dataclass

import pytest
import torch
from cuda_on_cpu import DEVICE, OnCpu, fault_reported
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tilewright.compile import cxx, nvrtc
from tilewright.device import spec_of
from tilewright.impl import IMPLS
from tilewright.indexed import DISTRIBUTIONS
from tilewright.measure.guard import POISONS, guarded
from tilewright.op import Workload
from tilewright.tensor_spec import DTYPES

pytestmark = pytest.mark.skipif(
    nvrtc.missing() is not None or cxx.missing() is not None, reason="a compiler is missing"
)
BAKED = (
    *("scatter_tiled", "scatter_winner", "scatter_buckets", "scatter_exchange"),
    *("bucket_sums", "bucket_integers", "bucket_products", "bucket_extremes"),
)
"""Whose binaries are for one shape."""
ALIKE = (*BAKED, "scatter_sorted", "scatter_strided", "integer_sums", "rows_unique")
"""Whose binaries depend on how many axes there are, or how wide rows are."""
BATCHES = ("rows_winner", "rows_sorted")
"""Which are given an index for each batch, too."""
STRIDED = ("scatter_serial", "scatter_sorted", "scatter_strided")
"""Which are given an expanded index of separate elements, too, one of a box as well."""
PARTIAL = ("scatter_serial", "scatter_strided", *BAKED)
"""Which are given indices of a box of x and src, too."""
SORTING = ("rows_sorted", "rows_sorted_torch", "rows_unique", "scatter_sorted")
"""Whose binaries are for numbers of places that take as many bits."""
SLOW = (
    *("scatter_buckets", "scatter_exchange", "scatter_sorted"),
    *("bucket_sums", "bucket_integers", "bucket_products", "bucket_extremes"),
)
"""Which take longest for a call here, mostly for memory that they share."""
FEW = (*BAKED, "integer_sums", "rows_unique", "rows_serial", "scatter_serial")
"""Which are not for thousands of indices, or have several blocks for less."""


@dataclass(frozen=True)
class Meaning:
    """What a binary computes. `more` is the end of a workload's arguments."""

    kernel: str
    op: str
    dtype: str
    index: str = "i64"
    more: str = ""
    in_place: bool = False

    def __str__(self):
        return f"{self.kernel} {self.op} {self.dtype}[{self.index}]{self.more}{self.flag}"

    @property
    def flag(self):
        return "!donate=x" if self.in_place else ""


MEANINGS = [
    Meaning("rows_cpp", "index_add", "f32", "i64", ", alpha=-2.0"),
    Meaning("rows_cpp", "index_add", "bf16", "i32", in_place=True),
    Meaning("rows_cpp", "index_add", "i64"),
    Meaning("rows_cpp", "index_reduce", "f64", "i64", ", reduce=prod", in_place=True),
    Meaning("rows_cpp", "index_reduce", "i32", "i32", ", reduce=mean, include_self=False"),
    Meaning("rows_cpp", "index_reduce", "f16", "i64", ", reduce=amax", in_place=True),
    Meaning("rows_cpp", "index_reduce", "f32", "i64", ", reduce=amin, include_self=False"),
    Meaning("rows_cpp", "embedding_backward", "f16", "i64", ", scale_grad_by_freq=True"),
    Meaning("rows_serial", "index_add", "f16", "i32", ", alpha=-2.0", in_place=True),
    Meaning("rows_serial", "index_reduce", "f64", "i64", ", reduce=prod, include_self=False"),
    Meaning("rows_serial", "index_reduce", "i32", "i64", ", reduce=mean"),
    Meaning("rows_serial", "embedding_backward", "bf16", "i64", ", padding_idx=2"),
    Meaning("rows_balanced", "index_add", "f32", "i64", ", alpha=-2.0"),
    Meaning("rows_balanced", "index_reduce", "i64", "i32", ", reduce=prod", in_place=True),
    Meaning("rows_balanced", "index_reduce", "f16", "i64", ", reduce=amax", in_place=True),
    Meaning("rows_balanced", "embedding_backward", "bf16", "i32", ", padding_idx=2"),
    Meaning("rows_dealt", "index_add", "f32", "i64", ", alpha=-2.0"),
    Meaning("rows_dealt", "index_reduce", "i64", "i32", ", reduce=mean, include_self=False"),
    Meaning("rows_dealt", "index_reduce", "f16", "i64", ", reduce=amax", in_place=True),
    Meaning("rows_dealt", "embedding_backward", "bf16", "i32", ", padding_idx=2"),
    Meaning("rows_sorted", "index_add", "bf16", "i64"),
    Meaning("rows_sorted", "index_add", "i64", "i32", in_place=True),
    Meaning("rows_sorted", "index_reduce", "f32", "i64", ", reduce=mean, include_self=False"),
    Meaning("rows_sorted", "index_reduce", "f64", "i64", ", reduce=prod", in_place=True),
    Meaning("rows_sorted", "index_reduce", "f16", "i32", ", reduce=amin"),
    Meaning("rows_sorted", "embedding_backward", "f32", "i64", ", scale_grad_by_freq=True"),
    Meaning("rows_sorted_torch", "index_add", "f64", "i64", ", alpha=-2.0"),
    Meaning("rows_bins", "index_add", "f32", "i64"),
    Meaning("rows_bins", "index_reduce", "bf16", "i32", ", reduce=amax", in_place=True),
    Meaning("rows_bins", "embedding_backward", "f16", "i64", ", padding_idx=2"),
    Meaning("rows_unique", "index_add", "f32", "i64", in_place=True),
    Meaning("rows_atomic", "index_add", "i32", "i64"),
    Meaning("integer_sums", "index_add", "bf16", "i32"),
    Meaning("integer_sums", "scatter_add", "f16", "i64", in_place=True),
    Meaning("integer_sums", "scatter_add", "f64", "i32"),
    Meaning("bucket_sums", "scatter_add", "bf16", "i64", in_place=True),
    Meaning("bucket_sums", "scatter_add", "f64", "i32"),
    Meaning("bucket_extremes", "scatter_reduce", "f64", "i32", ", reduce=amin, include_self=False"),
    Meaning("bucket_extremes", "scatter_reduce", "f16", "i64", ", reduce=amax", in_place=True),
    Meaning("bucket_integers", "scatter_add", "i64", "i32", in_place=True),
    Meaning("bucket_integers", "scatter_reduce", "i32", "i64", ", reduce=sum, include_self=False"),
    Meaning("bucket_products", "scatter_reduce", "f32", "i32", ", reduce=prod"),
    Meaning(
        "bucket_products",
        "scatter_reduce",
        "bf16",
        "i64",
        ", reduce=prod, include_self=False",
        in_place=True,
    ),
    Meaning("scatter_serial", "scatter_add", "f64", "i32"),
    Meaning("scatter_serial", "scatter_reduce", "i64", "i64", ", reduce=prod", in_place=True),
    Meaning("scatter_serial", "scatter_reduce", "f32", "i64", ", reduce=amin, include_self=False"),
    Meaning("scatter_sorted", "scatter_add", "i32", "i64"),
    Meaning("scatter_sorted", "scatter_reduce", "f16", "i32", ", reduce=mean", in_place=True),
    Meaning("scatter_sorted", "scatter_reduce", "f32", "i64", ", reduce=prod, include_self=False"),
    Meaning("scatter_sorted", "scatter_reduce", "bf16", "i64", ", reduce=amax", in_place=True),
    Meaning("scatter_tiled", "scatter_add", "bf16", "i64", in_place=True),
    Meaning("scatter_tiled", "scatter_reduce", "f32", "i32", ", reduce=sum, include_self=False"),
    Meaning("scatter_tiled", "scatter_reduce", "f64", "i64", ", reduce=amin"),
    Meaning("scatter_tiled", "scatter", "i64", "i32", in_place=True),
    Meaning("scatter_winner", "scatter", "f32", "i64", in_place=True),
    Meaning("scatter_strided", "scatter", "f16", "i32"),
    Meaning("scatter_strided", "scatter", "i64", "i64", in_place=True),
    Meaning("scatter_buckets", "scatter", "f16", "i64"),
    Meaning("scatter_exchange", "scatter", "f64", "i32"),
    Meaning("rows_winner", "scatter", "bf16", "i64"),
    Meaning("rows_sorted", "scatter_reduce", "i32", "i64", ", reduce=mean"),
]


@st.composite
def factors(draw, product, dims):
    """So many sizes of that product."""
    sizes = [1] * dims
    while product > 1:
        prime = next(n for n in range(2, product + 1) if product % n == 0)
        sizes[draw(st.integers(0, dims - 1))] *= prime
        product //= prime
    return sizes


@st.composite
def workloads(draw, meaning):
    """Of ranks 1 to 6, with x of as many dims before the indexed one as behind it or not."""
    spread, kernel = draw(st.sampled_from(DISTRIBUTIONS)), meaning.kernel
    least = int(kernel in ALIKE)
    before = draw(st.integers(least, 5 - least))
    behind = draw(st.integers(least, 5 - before))
    if kernel in ALIKE:
        outer, inner = 4, 6
    else:
        outer = draw(st.sampled_from([1, 2, 3, 4])) if before else 1
        inner = draw(st.sampled_from([1, 2, 6, 9])) if behind else 1
    places = draw(st.integers(22, 31) if kernel in SORTING else st.integers(1, 40))
    few, many = st.integers(1, 90), st.integers(1025, 2000)
    length = draw(few if kernel in FEW else st.one_of(few, few, few, many))
    if kernel in BAKED:
        places, length = 7, 30
    if kernel == "rows_unique":
        length = min(length, places)
    d, i = meaning.dtype, meaning.index
    more = f"{meaning.more}){meaning.flag}!indices={spread}"
    if meaning.op == "embedding_backward":
        shape = draw(factors(length, 1 + min(before, 4)))
        text = f"grad={d}{[*shape, inner]}, index={i}{shape}, num_weights={places}{more}"
        return Workload.parse(f"embedding_backward({text}")
    sizes = *draw(factors(outer, before)), *draw(factors(inner, behind))
    x, index = ([*sizes[:before], n, *sizes[before:]] for n in (places, length))
    dim = before - draw(st.sampled_from([0, len(x)]))
    if not meaning.op.startswith("scatter"):
        text = f"index={i}[{length}], source={d}{index}{more}"
        return Workload.parse(f"{meaning.op}(x={d}{x}, dim={dim}, {text}")
    source = index
    if kernel in BAKED and draw(st.booleans()):  # of one axis each, which come down to one shape
        sizes = [draw(st.permutations([n, *[1] * (k - 1)])) for n, k in ((4, before), (6, behind))]
        index = [*sizes[0], length, *sizes[1]]
        x = [n + 2 * (n > 1) for n in index]
        x[before], source = places, [n + (n > 1) for n in index]
    elif kernel in PARTIAL and draw(st.booleans()):
        source = [n + draw(st.integers(0, 1)) for n in index]
        index = [draw(st.integers(max(1, n - 1), n)) for n in index]
    expanded = ",".join("1" if k == before else "0" for k in range(len(x)))
    if kernel in BATCHES and draw(st.booleans()):  # of which the next begins behind a gap or not
        apart = length + draw(st.integers(0, 3))
        of_batches = [apart * math.prod(sizes[k + 1 : before]) for k in range(before)]
        expanded = ",".join(map(str, [*of_batches, 1] + [0] * (len(x) - before - 1)))
    strided = kernel.startswith("rows") or (kernel in STRIDED and draw(st.booleans()))
    strides = f"@strides({expanded})" if strided else ""
    text = f"index={i}{index}{strides}, src={d}{source}{more}"
    return Workload.parse(f"{meaning.op}(x={d}{x}, dim={dim}, {text}")


def served(impl, w, device, kept):
    """The first config that was taken for such tensors, or what is good where it does not fit."""
    space = impl.space(w, device)
    for config in kept:
        if space.why_not(config) is None:
            return config
    kept.append(impl.heuristic(w, device))
    return kept[-1]


def assert_exact_or_rounded(found, w, tensors):
    """To once, and within what the additions of the arithmetic's type may have cost."""
    terms = w.operator.indexed.terms(w, tensors)
    value, dtype = terms.value, found.dtype
    if not dtype.is_floating_point or w.operator.indexed.exact(w):
        torch.testing.assert_close(found.to(value.dtype), value, rtol=0, atol=0, equal_nan=True)
        return
    eps, of_sums = (torch.finfo(t).eps for t in (dtype, DTYPES[w.arithmetic]))
    rounding = value.abs() * eps + torch.finfo(dtype).smallest_normal
    far = (found.double() - value).abs() - rounding - 2 * terms.count * of_sums * terms.magnitude
    assert ((far <= 0) | (found == value.to(dtype))).all(), w


@pytest.mark.parametrize("meaning", MEANINGS, ids=str)
def test_kernels_are_right_in_every_shape_that_they_serve(meaning):
    impl = IMPLS[meaning.kernel]
    on_cpu, kept = impl.backend == "cpp", []
    device = spec_of(None) if on_cpu else DEVICE
    ranks = set()

    @settings(max_examples=10 if impl.name in SLOW else 30)
    @given(workloads(meaning), st.integers(0, 9))
    def check(w, seed):
        assume(impl.unsupported(w, device) is None)
        config = served(impl, w, device, kept)
        run = impl.build(config, w, device) if on_cpu else OnCpu(impl, config, w)
        tensors = w.operator.examples(w, "random", seed, "cpu")
        if w.main.torch_dtype.is_floating_point and "reduce=am" in meaning.more and seed % 3:
            x, src = (t.view(-1) for t in (tensors[0], tensors[-1]))
            x[::7], src[::19], src[::23] = math.nan, math.nan, -math.inf
        with guarded(POISONS[seed % 2]) as memory:
            found = run(tensors[0].clone(), *tensors[1:])
            damage = memory.damage()
        assert not damage, f"{w}: {damage}"
        assert_exact_or_rounded(found, w, tensors)
        assert not fault_reported()
        ranks.add(w.main.rank)

    check()
    assert len(ranks) > 2 or meaning.op == "embedding_backward"


FLOATING = [m for m in MEANINGS if "reduce=am" in m.more and not m.dtype.startswith("i")]


@pytest.mark.parametrize("meaning", FLOATING, ids=str)
def test_the_greatest_and_the_least_of_minus_zeros_is_minus_zero(meaning):
    impl, places = IMPLS[meaning.kernel], 7 if meaning.kernel in BAKED else 24
    index, name = ("[4,30,6]", "src") if meaning.op.startswith("scatter") else ("[30]", "source")
    w = Workload.parse(
        f"{meaning.op}(x={meaning.dtype}[4,{places},6], dim=1, index={meaning.index}{index}, "
        f"{name}={meaning.dtype}[4,30,6]{meaning.more}){meaning.flag}"
    )
    on_cpu = impl.backend == "cpp"
    device = spec_of(None) if on_cpu else DEVICE
    config = impl.heuristic(w, device)
    run = impl.build(config, w, device) if on_cpu else OnCpu(impl, config, w)
    x, index, src = w.operator.examples(w, "random", 0, "cpu")
    found = run(x.fill_(-0.0), index, src.fill_(-0.0))
    assert not found.any()
    assert found.signbit().all()
