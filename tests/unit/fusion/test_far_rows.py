"""Rows far from zero, whose means are corrected: the pass, and kernels emulated."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from emulated import Emulated
from far_rows import (
    ALONE,
    EPS,
    FUNCTIONS,
    SCHEDULES,
    SHIFTED,
    assert_equal_values_have_no_deviations,
    assert_nearly_equal_values_right,
    assert_norms_right,
    extreme,
    norm,
    norm_beside_its_sum,
    workload,
)
from random_graphs import gradients_of
from row_schedules import PERSISTENT
from tilewright.compile import cxx
from tilewright.device import DEVICES
from tilewright.fusion.cuda import target
from tilewright.fusion.cuda.rows import kernel as row_kernel
from tilewright.impls.fused import graph_of

pytestmark = pytest.mark.usefixtures("forgets_functions")
emulates = pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))
H200 = DEVICES["h200"]
CPU = torch.device("cpu")


# ---- kernels -------------------------------------------------------------------------------------


def check_norm(rows, width, config):
    w = norm(rows, width)
    graph = graph_of(w)
    assert target.space(graph, H200).why_not(config) is None
    assert_norms_right(Emulated(graph, config, H200, w), rows, width, CPU)


@emulates
@pytest.mark.parametrize("rows", [2, 31])
@pytest.mark.parametrize("config", SCHEDULES, ids=str)
def test_rows_of_equal_numbers_leave_nothing_and_nearly_equal_ones_what_they_should(config, rows):
    check_norm(rows, 520, config)


@emulates
@pytest.mark.parametrize("config", SHIFTED, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 517), (13, 517), (30, 999)])
def test_so_do_rows_that_begin_anywhere(config, rows, width):
    check_norm(rows, width, config)


@emulates
@pytest.mark.parametrize("width", [1, 2, 3, 7, 64, 999, 5140])
def test_so_do_rows_of_any_width_untuned(width):
    config = target.heuristic(graph_of(norm(19, width)), H200)
    if width > 1:
        check_norm(19, width, config)
    else:  # which has no moments
        w = norm(19, width)
        x, bias = torch.full((19, 1), 1000.1), torch.randn(1)
        found = Emulated(graph_of(w), config, H200, w)(x, torch.ones(1), bias)
        assert torch.equal(found, bias.expand_as(found))


@emulates
@pytest.mark.parametrize("name", FUNCTIONS)
def test_so_does_whatever_takes_deviations(name):
    function, shape = FUNCTIONS[name]
    w = workload(function, shape)
    graph = graph_of(w)
    run = Emulated(graph, target.heuristic(graph, H200), H200, w)
    assert_equal_values_have_no_deviations(run, shape, CPU)
    assert_nearly_equal_values_right(run, function, shape, CPU)


@emulates
@pytest.mark.parametrize(
    ("shape", "strides"),
    [((30, 500), (1, 30)), ((30, 500), (1000, 2)), ((30, 7, 100), (1000, 101, 1))],
)
def test_so_do_rows_whose_elements_are_apart(shape, strides):
    def function(x):
        axes = tuple(range(1, x.ndim))
        apart = x - x.mean(axes, keepdim=True)
        return apart * (x.var(axes, keepdim=True) + 1e-5).rsqrt()

    w = workload(function, shape, strides)
    graph = graph_of(w)
    run = Emulated(graph, target.heuristic(graph, H200), H200, w)

    def laid(x):
        return run(torch.empty_strided(shape, strides).copy_(x))

    assert_equal_values_have_no_deviations(laid, shape, CPU)
    assert_nearly_equal_values_right(laid, function, shape, CPU)


@emulates
def test_sums_that_are_normed_are_stored_as_they_are():
    w = workload(norm_beside_its_sum, (30, 500))
    graph = graph_of(w)
    run = Emulated(graph, target.heuristic(graph, H200), H200, w)
    x = torch.full((30, 500), 1000.1)
    total, normed, variance, mean = run(x)
    assert torch.equal(total, x + 0.5)
    assert torch.equal(mean, total[:, 0])
    assert not normed.any()
    assert (variance <= (EPS * 1000.1) ** 2).all()  # what warps find is about means of their own


@emulates
def test_deviations_of_equal_numbers_have_no_gradient():
    w = gradients_of(workload(lambda x: x.std(-1), (20, 999)))
    graph = graph_of(w)
    run = Emulated(graph, target.heuristic(graph, H200), H200, w)
    assert not run(torch.ones(20), torch.full((20, 999), 1000.1)).any()


@emulates
@pytest.mark.parametrize("moments", ["two_pass", "merge", "lanes"])
def test_rows_of_extremes_are_what_they_are_uncorrected(moments, monkeypatch):
    width = 520
    x = extreme(width, CPU)
    w, config = norm(len(x), width), replace(PERSISTENT, moments=moments)
    weight, bias = torch.randn(width), torch.randn(width)
    found = Emulated(graph_of(w), config, H200, w)(x, weight, bias)
    with monkeypatch.context() as m:
        m.setattr(row_kernel, "corrected_far_means", lambda graph: graph)
        plain = Emulated(graph_of(w), config, H200, w)(x, weight, bias)
    assert torch.equal(found.isnan(), plain.isnan())
    assert torch.equal(found.isinf(), plain.isinf())
    truth = F.layer_norm(x.double(), (width,), weight.double(), bias.double())
    off, off_plain = (torch.nan_to_num(f.double() - truth).abs().amax(1) for f in (found, plain))
    assert (off <= 2 * off_plain + 1e-4).all()


@emulates
def test_ordinary_rows_are_as_exact_as_uncorrected(monkeypatch):
    width = 768
    w, config = norm(2000, width), PERSISTENT
    x = torch.randn(2000, width)
    weight, bias = torch.ones(width), torch.zeros(width)
    found = Emulated(graph_of(w), config, H200, w)(x, weight, bias)
    with monkeypatch.context() as m:
        m.setattr(row_kernel, "corrected_far_means", lambda graph: graph)
        plain = Emulated(graph_of(w), config, H200, w)(x, weight, bias)
    truth = F.layer_norm(x.double(), (width,))
    off, off_plain = ((f.double() - truth).abs().max() for f in (found, plain))
    assert off <= 1.5 * off_plain


@emulates
def test_moments_of_what_follows_from_moments_are_corrected_in_turn():
    def twice(x):
        y = F.layer_norm(x, x.shape[-1:]) + 5e4
        return F.layer_norm(y, x.shape[-1:])

    w = workload(twice, (20, 999))
    graph = graph_of(w)
    run = Emulated(graph, target.heuristic(graph, H200), H200, w)
    assert_equal_values_have_no_deviations(run, (20, 999), CPU)


WHOLE = [(1e7, 2.0), (1e7, 1.0), (1.6e7, 2.0), (1e6, 0.125)]
"""Means, and what numbers beside them are multiples of: a few of their ulp."""


@emulates
@pytest.mark.parametrize("moments", ["two_pass", "merge", "lanes"])
def test_the_variance_of_a_few_ulp_is_no_rounding(moments):
    """Else layer norm takes such deviations by the root of 1 / eps."""
    generator = torch.Generator().manual_seed(0)
    steps = torch.randint(-1, 2, (len(WHOLE), 1024), generator=generator)
    x = torch.stack([mean + step * row for (mean, step), row in zip(WHOLE, steps, strict=True)])
    w = norm(len(WHOLE), 1024)
    graph = graph_of(w)
    config = replace(ALONE, row_threads=256, rows_per_block=1, moments=moments)
    assert target.space(graph, H200).why_not(config) is None
    found = Emulated(graph, config, H200, w)(x, torch.ones(1024), torch.zeros(1024))
    truth = F.layer_norm(x.double(), (1024,))
    assert found.abs().max() < 2 * truth.abs().max()
    near = 0.6  # half an ulp of a mean, beside deviations of one or two
    assert (found.double() - truth).abs().max() < near


@emulates
@pytest.mark.parametrize(
    "changes",
    [
        {"cluster": 2, "stages": 1},
        {"cluster": 2, "moments": "merge"},
        {"in_turn": True},
        {"rows_per_thread": 2, "moments": "merge"},
    ],
    ids=str,
)
def test_each_of_two_corrections_has_barriers_of_its_own(changes):
    """Some rows want both, some one, some none."""

    def twice(x):
        return F.layer_norm(F.layer_norm(x, x.shape[-1:]) + 1e5, x.shape[-1:])

    w = workload(twice, (31, 520))
    graph = graph_of(w)
    config = replace(PERSISTENT, parameters="reload", **changes)
    assert target.space(graph, H200).why_not(config) is None
    x = torch.randn(31, 520)
    x[::2] += 1e5
    x[::3] = 1000.1
    run = Emulated(graph, config, H200, w)
    found = run(x)
    assert torch.equal(found, run(x))  # in whichever order threads run
    assert not found[::3].any()
    assert (found.double() - twice(x.double())).abs().max() <= 2 * EPS * 1e5


def test_rows_that_are_kept_to_be_corrected_fit_shared_memory():
    graph = graph_of(workload(lambda x: x.var(-1), (8192, 65536)))
    space = target.space(graph, H200)
    config = replace(ALONE, storage="shared", moments="merge", row_threads=32, rows_per_block=1)
    assert "shared memory" in space.why_not(config)
