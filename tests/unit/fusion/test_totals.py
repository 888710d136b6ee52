"""Reductions over rows and columns together, beside those along rows, on the GPU target: row
kernels leave a partial for each row, and read nothing twice for them."""

import math
import random
import re

import pytest
import torch
from fused_on_cpu import assert_verified

from emulated import Emulated
from program_graphs import WITH_TOTALS, mixed
from random_graphs import forget
from tilewright.compile import cxx
from tilewright.compile.cache import compiled
from tilewright.device import DEVICES
from tilewright.dispatch.functions.fuse import fuse
from tilewright.dispatch.functions.operator import backward_operator
from tilewright.fusion.cuda import program_source, target
from tilewright.fusion.cuda.tiles.capabilities import TileKernels
from tilewright.impls.fused import graph_of
from tilewright.measure.verify import Verifier
from tilewright.op import OPS, Workload
from tilewright.tensor_spec import TensorSpec

H200 = DEVICES["h200"]
LARGE = ("f16", (8193, 4096))
emulation = pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))


LAUNCHES = {
    **dict.fromkeys(WITH_TOTALS, "large join"),
    "columns, too": "large finish join",
    "three of columns": "large finish join",
    "columns of columns": "large finish join row",
    "divided by its peak": "large join large",
    "variance": "large join large join",
    "twice": "large finish join large join",
}
"""By function: those that walk all of x, and the others. A variance, or a step that asks for a
total, takes x once more."""


@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
@pytest.mark.parametrize("name", WITH_TOTALS)
def test_totals_beside_rows_take_no_pass_of_their_own(graph_of_mixed, name, device):
    graph, spec = graph_of_mixed(name, *LARGE), DEVICES[device]
    config = target.heuristic(graph, spec)
    assert config in target.space(graph, spec)
    _, program, stages = program_source.emit(graph, config, spec)
    kinds = []
    for stage in stages:
        tile = "finish" if stage.finishes else "join"
        kinds.append("large" if stage.count >= 8193 else "row" if stage.launch else tile)
    assert " ".join(kinds) == LAUNCHES[name], program.describe()
    walked = [s for s in program.segments if math.prod(s.graph.space) >= 8193 * 4096]
    assert len(walked) == program.large() == kinds.count("large")


def test_it_is_said_that_partials_of_rows_are_put_together(graph_of_mixed):
    graph = graph_of_mixed("columns, too", *LARGE)
    rows, total = target.describe(graph, target.heuristic(graph, H200), H200)
    assert rows == (
        "kernel 0: space [8193, 4096], reduces axes [1], [0]"
        " (and a launch that joins what its blocks summed over rows)"
    )
    assert total.startswith(
        "kernel 1: space [8193], reduces axes [0]; cut: the partials of a result"
    )
    graph = graph_of_mixed("divided by its peak", *LARGE)
    *_, last = target.describe(graph, target.heuristic(graph, H200), H200)
    assert "cut: a step needs a result of all rows (" in last


@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
@pytest.mark.parametrize("name", WITH_TOTALS)
def test_kernels_that_leave_partials_of_rows_compile_without_spilling(graph_of_mixed, name, device):
    graph, spec = graph_of_mixed(name, *LARGE), DEVICES[device]
    log = compiled(target.task(graph, target.heuristic(graph, spec), spec)).log
    assert set(re.findall(r"(\d+) bytes spill stores", log)) == {"0"}


def test_few_binaries_serve_all_numbers_of_rows(graph_of_mixed):
    """Of what joins the partials, one for each count of up to four rounds, and one for more."""
    counts = range(6000, 60000, 900)
    graphs = [graph_of_mixed("softmax and total", "f16", (n, 512)) for n in counts]
    sources = {target.task(g, target.heuristic(g, H200), H200).source for g in graphs}
    assert len(sources) <= 5


@emulation
@pytest.mark.parametrize(
    ("dtype", "shape"), [("f32", (36, 67)), ("bf16", (33, 70)), ("f16", (129, 24))]
)
@pytest.mark.parametrize("name", WITH_TOTALS)
def test_totals_are_what_fp64_gives_on_both_targets(name, dtype, shape):
    try:
        assert_verified(mixed(name, dtype, shape), lucky=True)
    finally:
        forget()


@emulation
@pytest.mark.parametrize("name", ["loss", "columns, too", "over two of three", "products"])
def test_other_schedules_give_the_same(name):
    try:
        w = mixed(name, "f16", (36, 96))
        graph = graph_of(w)
        space = target.space(graph, H200)
        for config in space.sample(random.Random(name), 3):
            assert_emulated(graph, config, w)
    finally:
        forget()


@emulation
@pytest.mark.parametrize("name", ["norm and peak", "columns, too", "divided by its peak"])
def test_blocks_share_the_partials_of_many_rows(monkeypatch, name):
    monkeypatch.setattr(TileKernels, "most_joined", 64)
    try:
        w = mixed(name, "f16", (1100, 256))
        graph = graph_of(w)
        config = target.heuristic(graph, H200)
        lines = target.describe(graph, config, H200)
        (shared,) = (line for line in lines if "blocks share the partials of a result" in line)
        assert "space [1100], reduces axes [0], 2 partials" in shared
        assert_emulated(graph, config, w)
    finally:
        forget()


@emulation
def loss_and_gradients(x, t):
    x = x.log_softmax(-1)
    d = x.exp() - t
    return -(t * x).sum(-1).mean(), d, d.sum(0)


def router(x, t):
    p = (x + t).softmax(-1)
    return p, p.mean(0), x.logsumexp(-1).square().mean()


@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
@pytest.mark.parametrize("function", [loss_and_gradients, router])
def test_a_mean_of_one_number_of_each_row_takes_no_pass_beside_sums_over_rows(
    function, device, forgets_functions
):
    fuse(function)
    spec = DEVICES[device]
    graph = graph_of(Workload.parse(f"{function.__name__}(x=bf16[8192,4096], t=bf16[8192,4096])"))
    lines = target.describe(graph, target.heuristic(graph, spec), spec)
    assert lines[0].startswith("kernel 0: space [8192, 4096], reduces axes [1], [0] (and a launch")
    assert [line.partition(",")[0] for line in lines[1:]] == ["kernel 1: space [8192]"]


@pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))
@pytest.mark.parametrize("function", [loss_and_gradients, router])
def test_means_of_numbers_of_rows_beside_sums_over_rows_are_right(function, forgets_functions):
    fuse(function)
    w = Workload.parse(f"{function.__name__}(x=f32[37,264], t=f32[37,264])")
    graph = graph_of(w)
    config = target.heuristic(graph, DEVICES["h200"])
    assert len(target.describe(graph, config, DEVICES["h200"])) == 2
    found = Verifier(w, torch.device("cpu")).check(Emulated(graph, config, DEVICES["h200"], w))
    assert found.message == ""


def test_a_total_in_fp64_beside_columns():
    def function(x):
        return torch.softmax(x, -1), x.sum(dtype=torch.float64), x.sum(0)

    fuse(function, name="random_graph")
    try:
        assert_verified(OPS["random_graph"].workload(x=TensorSpec("f32", (40, 96))), lucky=True)
    finally:
        forget()


@emulation
def test_a_total_of_what_is_the_same_along_rows():
    fuse(lambda a, b: a / (b / b.mean()), name="random_graph")
    try:
        op = backward_operator(OPS["random_graph"])
        full, column = TensorSpec("f64", (257, 128)), TensorSpec("f64", (257, 1))
        expanded = TensorSpec("f64", (257, 128), strides=(1, 0))
        assert_verified(op.workload(grad_output=full, a=column, b=expanded))
    finally:
        forget()


def assert_emulated(graph, config, w):
    found = Verifier(w, torch.device("cpu")).check(Emulated(graph, config, H200, w))
    # How well PyTorch's own rounding errors turn out on a few elements is luck.
    assert found.ok or "PyTorch's largest error" in found.message, (config, found.message)
