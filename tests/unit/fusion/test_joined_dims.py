"""One kernel serves all sizes of dims that every tensor walks as one: x[B,S,H] beside y[S,H]."""

import dataclasses
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import tilewright as tw
from emulated import Emulated
from on_targets import H200, LENGTHS, TARGETS, emitted, executable, made, right, written
from tilewright.dispatch import selection
from tilewright.dispatch.evidence import OperatorRecords
from tilewright.fusion.cuda import target as cuda_target
from tilewright.fusion.cuda.pointwise.schedule import PointwiseSchedule
from tilewright.fusion.cuda.tiles.schedule import TileSchedule
from tilewright.impls.fused import graph_of
from tilewright.op import OPS
from tilewright.record import Record
from tilewright.space import lent

BATCHES = [(1 + 5 * n % 32, length) for n, length in enumerate(LENGTHS)]


def shifted(x, y):
    return x + y


def masked_norm(x, m, w, b):
    return F.layer_norm(x * m, x.shape[-1:], w, b)


def gated_norm(x, p, m, w, b):
    return F.layer_norm((x + p) * m, x.shape[-1:], w, b)


def scaled(x, g):
    return x * g


def modulated(x, scale, shift):
    return x * (1 + scale) + shift


def scaled_softmax(x, b):
    return torch.softmax(x * b, -1)


def softmax_over_rows(x):
    return torch.softmax(x, 1)


@pytest.fixture(scope="module", autouse=True)
def _fused():
    before = set(OPS)
    pointwise, normed = (shifted, scaled, modulated), (masked_norm, gated_norm)
    for function in (*pointwise, *normed, scaled_softmax, softmax_over_rows):
        tw.fuse(function)
    yield
    for name in set(OPS) - before:
        OPS.remove(name)


def positions(b, s):
    return written("shifted", x=(b, s, 64), y=(s, 64))


def positions_of_heads(b, s):
    return written("shifted", x=(b, 8, s, 64), y=(s, 64))


def mask_of_scores(b, s):
    return written("shifted", x=(b, 8, s, s), y=(s, s))


def gradients_of_positions(b, s):
    return written("shifted_backward", grad_output=(b, s, 64), x=(b, s, 64), y=(s, 64))


def gradients_of_gates(b, s):
    return written("scaled_backward", grad_output=(b, s, 768), x=(b, s, 768), g=(b, 1, 768))


def gradients_of_modulation(b, s):
    x, g = (b, s, 768), (b, 1, 768)
    return written("modulated_backward", grad_output=x, x=x, scale=g, shift=g)


def normed_positions(b, s):
    return written("masked_norm", x=(b, s, 768), m=(s, 768), w=(768,), b=(768,))


def normed_and_gated(b, s):
    return written("gated_norm", x=(b, s, 768), p=(s, 768), m=(b, 1, 768), w=(768,), b=(768,))


def gradients_of_normed_positions(b, s):
    x, p, w = (b, s, 768), (s, 768), (768,)
    return written("masked_norm_backward", grad_output=x, x=x, m=p, w=w, b=w)


def padded_softmax(b, s):
    return written("scaled_softmax", x=(b, 8, s, 128), b=(b, 1, 1, 128))


def masked_softmax(b, s):
    return written("scaled_softmax", x=(b, 8, s, 128), b=(s, 128))


def softmax_over_channels(b, s):
    return written("softmax_over_rows", x=(b, 21, s, 64))


MOST_OF_BATCHES = {
    positions: {"cuda": 2, "cpp": 2},
    positions_of_heads: {"cuda": 2, "cpp": 2},
    mask_of_scores: {"cuda": 4, "cpp": 2},
    gradients_of_positions: {"cuda": 11, "cpp": 3},
    gradients_of_gates: {"cuda": 11, "cpp": 7},
    gradients_of_modulation: {"cuda": 9, "cpp": 7},
    normed_positions: {"cuda": 9, "cpp": 3},
    normed_and_gated: {"cuda": 4, "cpp": 3},
    gradients_of_normed_positions: {"cuda": 8, "cpp": 4},
    padded_softmax: {"cuda": 2, "cpp": 3},
    masked_softmax: {"cuda": 2, "cpp": 2},
    softmax_over_channels: {"cuda": 6, "cpp": 4},
}


@pytest.mark.parametrize(
    ("workload", "target"),
    [(w, target) for w, most in MOST_OF_BATCHES.items() for target in most],
)
def test_many_batches_of_many_lengths_take_few_kernels(workload, target):
    sizes = BATCHES if workload in (positions, mask_of_scores, normed_positions) else BATCHES[::5]
    sources = {emitted(target, workload(b, s))[2].source for b, s in sizes}
    assert len(sources) <= MOST_OF_BATCHES[workload][target]


JOINED = {
    "positions": lambda b, h, s: written("shifted", x=(b, h, s, 8), y=(h, s, 8)),
    "narrow positions": lambda b, h, s: written("shifted", x=(b, h, s), y=(h, s)),
    "batches": lambda b, h, s: written("shifted", x=(b, h, s, 8), y=(b, 1, 1, 1)),
    "their gradients": lambda b, h, s: written(
        "shifted_backward", grad_output=(b, h, s), x=(b, h, s), y=(h, s)
    ),
    "gated norm": lambda b, h, s: written(
        "gated_norm", x=(b, h, s, 24), p=(h, s, 24), m=(b, 1, 1, 24), w=(24,), b=(24,)
    ),
    "softmax": lambda b, h, s: written("softmax_over_rows", x=(b, h, s, 5)),
}
"""What takes several dims as one: by name, a workload of such sizes."""


def check(w, seed, tolerance):
    for target in TARGETS:
        tensors = made(w, seed)
        found, expected = executable(target, w)(*tensors), right(w, tensors)
        pairs = (found, expected) if isinstance(found, tuple) else ([found], [expected])
        for own, exact in zip(*pairs, strict=True):
            torch.testing.assert_close(own.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", JOINED)
@settings(max_examples=6)
@given(sizes=st.tuples(*[st.integers(1, n) for n in (5, 7, 33)]), seed=st.integers(0, 99))
def test_several_dims_that_are_walked_as_one_are_of_any_size(name, sizes, seed):
    check(JOINED[name](*sizes), seed, 1e-5)


@pytest.mark.parametrize("name", ["positions", "narrow positions", "their gradients"])
def test_one_kernel_is_right_for_several_sizes_of_dims_that_are_walked_as_one(name):
    sources = set()
    for sizes in ((2, 31, 33), (2, 29, 37), (2, 41, 31), (2, 3, 331)):
        w = JOINED[name](*sizes)
        sources.add(emitted("cuda", w)[2].source)
        check(w, sum(sizes), 1e-5)
    assert len(sources) == 1


def test_sizes_may_be_compiled_into_kernels_without_reductions():
    for w in (
        positions(3, 5),
        written("shifted", x=(4, 8, 3, 64), y=(4, 1, 3, 1)),
        positions_of_heads(2, 7),
    ):
        graph = graph_of(w)
        given = cuda_target.heuristic(graph, H200)
        config = dataclasses.replace(given, sizes="compiled")
        assert config in cuda_target.space(graph, H200)
        assert cuda_target.promising(graph, H200)[:2] == [given, config]
        source = cuda_target.task(graph, config, H200).source
        assert "n1" not in re.findall(r"\w+", source[source.index("void fused_step(") :])
        tensors = made(w, 0)
        torch.testing.assert_close(Emulated(graph, config, H200, w)(*tensors), sum(tensors))


def test_a_width_that_is_one_dim_is_compiled_in():
    """As it was: a constant takes fewer instructions and registers."""
    w = written("shifted", x=(8192, 768), y=(768,))
    source = emitted("cuda", w)[2].source
    assert "% 768" in source
    assert {"sizes": ("given",)}.items() <= cuda_target.space(graph_of(w), H200).values.items()


def test_many_elements_are_divided_by_64_bits():
    source = emitted("cuda", written("shifted", x=(4096, 1024, 768), y=(1024, 768)))[2].source
    kernel = source[source.index("void fused_step(") :]
    assert "u64 n1_factor" in kernel
    assert " % " not in kernel


def test_a_record_with_sizes_compiled_in_lends_other_sizes_a_kernel_that_counts_them():
    for schedule in (PointwiseSchedule(4, 128), TileSchedule(2, 64)):
        assert lent(dataclasses.replace(schedule, sizes="compiled")) == schedule


def test_the_record_of_one_length_speaks_for_others():
    tuned = {"vector": 4, "block_threads": 128, "sizes": "compiled"}
    known = positions(8, 100)
    versions = {"program": known.program}
    records = OperatorRecords(
        [Record(str(known), "shifted", "fused", tuned, "ok", H200.name, versions=versions)]
    )

    def choice(w):
        found = (find(w, H200, records) for find in selection._BY_RECORDS)
        return next((c for c in found if c), None)

    choices = [choice(positions(8, s)) for s in (100, 101, 399, 401)]
    assert [c and c.source for c in choices] == ["record", "nearest", "nearest", None]
    assert [c.config.sizes for c in choices[:3]] == ["compiled", "given", "given"]
    assert {c.config.block_threads for c in choices[:3]} == {128}
