"""Moments of rows that blocks share: each finds those of a part. For GPUs, emulated."""

from dataclasses import replace

import pytest
import torch

from emulated import Emulated
from moments_of_parts import (
    EQUAL_VALUES,
    FAR_COLUMNS,
    ROWS,
    assert_equal_values_right,
    assert_far_columns_right,
    assert_found_as_by_pytorch,
    deviations,
    extreme_columns,
    following_workloads,
    moments,
    normed_images,
    standardized,
    workload,
)
from tilewright.compile import cxx
from tilewright.compile.cache import compiled
from tilewright.compile.resources import parse_ptxas
from tilewright.device import DEVICES
from tilewright.dispatch.functions.operator import backward_operator
from tilewright.fusion.cuda import target
from tilewright.fusion.cuda.programs import program_of
from tilewright.fusion.cuda.tiles.area import Area
from tilewright.fusion.cuda.tiles.tiling import joining_schedule
from tilewright.fusion.split_moments import most_parts
from tilewright.impls.fused import graph_of
from tilewright.measure.verify import Verifier
from tilewright.tensor_spec import TensorSpec

H100, CPU = DEVICES["h100"], torch.device("cpu")
pytestmark = [
    pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing())),
    pytest.mark.usefixtures("forgets_functions"),
]


def variances_of_rows(x):
    return torch.var_mean(x, -1)


def beside_moments(x):
    return x.var(0), (x * x).sum(0), x.amax(0), x.amin(0), (1.0 + x * 1e-5).prod(0)


def moments_and_norms(x):
    return x.var(0), x.logsumexp(0)


def gradients(function, *tensors):
    op = backward_operator(workload(function, *tensors).operator)
    names = [n for n in op.parameters if n not in ("seed", "grads")]
    return op.workload(**dict(zip(names, [tensors[0], *tensors], strict=True)))


def in_parts(graph, device=H100):
    """The first of the schedules by which blocks find moments of parts, or sums, and other kernels
    go on."""
    found = target.promising(graph, device)
    return next(c for c in found if c.splits > 1 and c.combine == "kernel")


def emulated(w):
    graph = graph_of(w)
    return Emulated(graph, in_parts(graph), H100, w)


@pytest.mark.parametrize(("dtype", "centre", "spread"), FAR_COLUMNS)
def test_huge_means_cost_variances_nothing(dtype, centre, spread):
    w = workload(moments, TensorSpec(dtype, (ROWS, 40)))
    assert_far_columns_right(emulated(w), w, centre, spread, CPU)


@pytest.mark.parametrize("value", EQUAL_VALUES)
def test_deviations_of_equal_values_are_never_the_root_of_less_than_nothing(value):
    w = workload(deviations, TensorSpec("f32", (ROWS, 8)))
    assert_equal_values_right(emulated(w), value, CPU)


def test_infinities_and_squares_that_overflow_are_found_as_by_pytorch():
    x = extreme_columns()
    assert_found_as_by_pytorch(emulated(workload(moments, TensorSpec.of(x))), x, CPU)


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64"])
def test_what_follows_from_moments_of_parts_is_verified(dtype):
    for w in following_workloads(dtype):
        assert Verifier(w, CPU).check(emulated(w)).ok


@pytest.mark.parametrize("device", ["a100", "h100", "b200"])
def test_they_take_one_pass_and_what_follows_another(device):
    spec = DEVICES[device]
    images = TensorSpec("f16", (32, 256, 28, 28), (28 * 28 * 256, 1, 28 * 256, 256))
    for w in (
        workload(normed_images, images, TensorSpec("f32", (256,)), TensorSpec("f32", (256,))),
        workload(standardized, TensorSpec("f32", (16384, 1024))),
    ):
        graph = graph_of(w)
        config = in_parts(graph, spec)
        kernels = program_of(graph, config, spec).segments
        assert [len(k.graph.reduction_sets) for k in kernels] == [1, 1, 0]
        log = compiled(target.task(graph, config, spec)).log
        assert not any(parse_ptxas(log, e).spill_bytes for e in ("fused", "fused1", "fused2"))


def test_moments_alone_take_one_pass_and_what_joins_them():
    graph = graph_of(workload(moments, TensorSpec("f32", (16384, 64))))
    assert target.heuristic(graph, H100) == in_parts(graph)
    assert len(program_of(graph, in_parts(graph), H100).segments) == 2


def test_a_search_tries_other_numbers_of_equal_parts_and_one_kernel_for_all():
    graph = graph_of(workload(standardized, TensorSpec("f32", (25088, 256))))
    found = target.promising(graph, H100)
    assert {2**k for k in range(10)} == {c.splits for c in found}
    config, space = in_parts(graph), target.space(graph, H100)
    assert config in space
    assert "no 1024 equal parts" in space.why_not(replace(config, splits=1024))


def test_rows_that_have_few_equal_parts_are_divided_as_sums_are():
    graphs = [graph_of(workload(standardized, TensorSpec("f32", (n, 64)))) for n in (90001, 90000)]
    assert [most_parts(g) for g in graphs] == [1, 1]
    assert len(program_of(graphs[0], in_parts(graphs[0]), H100).segments) == 5


def test_a_search_for_rows_too_few_and_long_begins_as_ever():
    graph = graph_of(workload(variances_of_rows, TensorSpec("f32", (2, 1 << 22))))
    assert most_parts(graph) > 1
    assert target.heuristic(graph, H100) in target.promising(graph, H100)


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_what_is_summed_beside_moments_takes_no_pass_of_its_own(dtype):
    w = workload(beside_moments, TensorSpec(dtype, (ROWS, 40)))
    assert program_of(graph_of(w), target.heuristic(graph_of(w), H100), H100).large() == 1
    assert Verifier(w, CPU).check(emulated(w)).ok


@pytest.mark.parametrize("device", ["a100", "h100", "b200"])
@pytest.mark.parametrize("width", [64, 256])
def test_gradients_of_normed_columns_take_a_pass_for_moments_one_for_sums_and_one(device, width):
    spec = DEVICES[device]
    images = TensorSpec("f16", (32, width, 28, 28), (784 * width, 1, 28 * width, width))
    numbers = TensorSpec("f32", (width,))
    w = gradients(normed_images, images, numbers, numbers)
    graph = graph_of(w)
    config = in_parts(graph, spec)
    program = program_of(graph, config, spec)
    assert (program.large(), len(program.segments)) == (3, 5)
    log = compiled(target.task(graph, config, spec)).log
    entries = ("fused", *(f"fused{n}" for n in range(1, 5)))
    assert not any(parse_ptxas(log, e).spill_bytes for e in entries)


@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_gradients_that_moments_of_parts_are_needed_for_are_right(dtype):
    images = TensorSpec(dtype, (8, 24, 24, 16), (9216, 1, 384, 24))
    w = gradients(normed_images, images, *2 * [TensorSpec("f32", (24,))])
    assert Verifier(w, CPU).check(emulated(w)).ok


def test_a_sum_that_awaits_an_extreme_takes_a_pass_after_it():
    w = workload(moments_and_norms, TensorSpec("f32", (ROWS, 40)))
    assert program_of(graph_of(w), in_parts(graph_of(w)), H100).large() == 2
    assert Verifier(w, CPU).check(emulated(w)).ok


def test_parts_are_so_few_that_joining_them_is_little_and_are_read_once():
    images = TensorSpec("f16", (32, 256, 28, 28), (28 * 28 * 256, 1, 28 * 256, 256))
    numbers = TensorSpec("f32", (256,))
    graph = graph_of(workload(normed_images, images, numbers, numbers))
    config = in_parts(graph)
    assert config.splits == 64
    joined = Area(program_of(graph, config, H100).segments[1])
    for parts in (32, 64, 512):
        assert joining_schedule(joined, parts).storage == "registers"
