"""Moments of rows that blocks share: each finds those of a part. For GPUs, emulated."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from emulated import Emulated
from row_schedules import FAR
from tilewright.compile import cxx
from tilewright.compile.cache import compiled
from tilewright.compile.resources import parse_ptxas
from tilewright.device import DEVICES
from tilewright.dispatch.functions.fuse import fuse
from tilewright.fusion.cuda import target
from tilewright.fusion.cuda.programs import program_of
from tilewright.fusion.split_moments import most_parts
from tilewright.impls.fused import graph_of
from tilewright.measure.verify import Verifier
from tilewright.op import OPS
from tilewright.tensor_spec import TensorSpec

H100 = DEVICES["h100"]
ROUNDINGS = 5
"""Of fp32, relative: sums over parts are short."""
pytestmark = [
    pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing())),
    pytest.mark.usefixtures("forgets_functions"),
]


def wide(x):
    return x if x.dtype == torch.float64 else x.float()


def moments(x):
    return torch.var_mean(wide(x), 0)


def standardized(x):
    return (x - x.mean(0)) / (x.std(0) + 1e-6)


def normed_images(x, weight, bias):
    return F.relu(F.batch_norm(x, None, None, weight, bias, training=True))


def workload(function, *specs):
    name = function.__name__.strip("<>")
    fuse(function, name=f"{name}_in_parts")
    op = OPS[f"{name}_in_parts"]
    return op.workload(**dict(zip(op.parameters, specs, strict=False)))


def emulated(w):
    graph = graph_of(w)
    config = target.heuristic(graph, H100)
    assert config.splits > 1
    return Emulated(graph, config, H100, w)


@pytest.mark.parametrize(("dtype", "centre", "spread"), [*FAR, ("f32", 1e5, 1.0)])
def test_huge_means_cost_variances_nothing(dtype, centre, spread):
    w = workload(moments, TensorSpec(dtype, (9 * 1024, 40)))
    (x,) = w.operator.examples(w, "random", 0, torch.device("cpu"))
    x = (x.float() * spread + centre).to(x.dtype)
    eps = torch.finfo(torch.float32).eps
    for own, true, scale in zip(emulated(w)(x), moments(x.double()), (None, centre), strict=True):
        assert ((own - true).abs() <= ROUNDINGS * eps * (true if scale is None else scale)).all()


@pytest.mark.parametrize("value", [0.0, 0.1, -7.3, 1e6, 3e38, float("inf"), float("nan")])
def test_deviations_of_equal_values_are_never_the_root_of_less_than_nothing(value):
    w = workload(lambda x: x.std(0), TensorSpec("f32", (9 * 1024, 8)))
    found = emulated(w)(torch.full((9 * 1024, 8), value))
    if abs(value) <= 1e6:
        assert (found >= 0).all()
        assert (found <= 1e-6 * abs(value)).all()
    else:
        assert not (found < torch.inf).any()


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64"])
def test_what_follows_from_moments_of_parts_is_verified(dtype):
    number = dtype if dtype == "f64" else "f32"
    images = TensorSpec(dtype, (16, 24, 32, 18), (32 * 18 * 24, 1, 18 * 24, 24))
    for w in (
        workload(normed_images, images, TensorSpec(number, (24,)), TensorSpec(number, (24,))),
        workload(standardized, TensorSpec(dtype, (9 * 1024, 40))),
    ):
        assert Verifier(w, torch.device("cpu")).check(emulated(w)).ok


@pytest.mark.parametrize("device", ["a100", "h100", "b200"])
def test_they_take_one_pass_and_what_follows_another(device):
    spec = DEVICES[device]
    images = TensorSpec("f16", (32, 256, 28, 28), (28 * 28 * 256, 1, 28 * 256, 256))
    for w in (
        workload(normed_images, images, TensorSpec("f32", (256,)), TensorSpec("f32", (256,))),
        workload(standardized, TensorSpec("f32", (16384, 1024))),
    ):
        graph = graph_of(w)
        config = target.heuristic(graph, spec)
        kernels = program_of(graph, config, spec).segments
        assert [len(k.graph.reduction_sets) for k in kernels] == [1, 1, 0]
        log = compiled(target.task(graph, config, spec)).log
        assert not any(parse_ptxas(log, e).spill_bytes for e in ("fused", "fused1", "fused2"))


def test_moments_alone_take_one_pass_and_what_joins_them():
    graph = graph_of(workload(moments, TensorSpec("f32", (16384, 64))))
    assert len(program_of(graph, target.heuristic(graph, H100), H100).segments) == 2


def test_a_search_tries_other_numbers_of_equal_parts_and_one_kernel_for_all():
    graph = graph_of(workload(standardized, TensorSpec("f32", (25088, 256))))
    found = target.promising(graph, H100)
    assert {2**k for k in range(10)} == {c.splits for c in found}
    untuned, space = target.heuristic(graph, H100), target.space(graph, H100)
    assert untuned in space
    assert "no 1024 equal parts" in space.why_not(replace(untuned, splits=1024))


def test_rows_that_have_few_equal_parts_are_divided_as_sums_are():
    graphs = [graph_of(workload(standardized, TensorSpec("f32", (n, 64)))) for n in (90001, 90000)]
    assert [most_parts(g) for g in graphs] == [1, 1]
    config = target.heuristic(graphs[0], H100)
    assert len(program_of(graphs[0], config, H100).segments) == 5


def test_a_search_for_rows_too_few_and_long_begins_as_ever():
    graph = graph_of(workload(lambda x: torch.var_mean(x, -1), TensorSpec("f32", (2, 1 << 22))))
    assert most_parts(graph) > 1
    assert target.heuristic(graph, H100) in target.promising(graph, H100)


def test_sums_beside_moments_are_no_moments():
    graph = graph_of(workload(lambda x: (x.var(0), x.exp().sum(0)), TensorSpec("f32", (9216, 64))))
    assert most_parts(graph) == 1
