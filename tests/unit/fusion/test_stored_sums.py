"""What a walk adds up to one partial it stores itself, where that is an output."""

import pytest
import torch

from emulated import Emulated
from on_targets import TARGETS, executable
from program_graphs import KINDS, MIXED, WITH_TOTALS
from tilewright.compile import cxx
from tilewright.device import DEVICES
from tilewright.dispatch.functions.fuse import fuse
from tilewright.fusion.cuda import target
from tilewright.fusion.cuda.programs import program_of
from tilewright.fusion.cuda.tiles.capabilities import TileKernels
from tilewright.fusion.cuda.tiles.schedule import TileSchedule
from tilewright.fusion.segments import cut
from tilewright.impls.fused import graph_of
from tilewright.measure.verify import Verifier
from tilewright.op import OPS, Workload
from tilewright.tensor_spec import TensorSpec

H200 = DEVICES["h200"]
SUMS = {
    "beside rows of another tensor": lambda x, y: (x.sum(-1, keepdim=True) * y, x.amax(0)),
    "of rows, too": lambda x, y: (x.sum(-1, keepdim=True) * y, x.amax(0), x.sum(-1)),
    "twice": lambda x, y: (x.sum(-1, keepdim=True) * y, x.amax(0), x.amax(0)),
    "beside what follows": lambda x, y: (x.sum(-1, keepdim=True) * y, x.amax(0), 2 * x.sum(0)),
    "of every dim": lambda x, y: (x.sum(0), x.sum(1), y.sum()),
    "that rows need": lambda x, y: (x.sum(0), x.softmax(-1) - x.sum(0), y.amin(0)),
}
SIZES = [((8, 16), (8, 300)), ((64, 128), (64, 300)), ((5, 33), (5, 70))]
LARGE = [((4096, 1024), (4096, 3000)), ((32, 20000), (32, 30000))]

pytestmark = pytest.mark.usefixtures("forgets_functions")
emulation = pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))


def summed(name, x, y, dtype="f32"):
    fuse(SUMS[name], name="summed")
    return OPS["summed"].workload(x=TensorSpec(dtype, x), y=TensorSpec(dtype, y))


def copies(program):
    """Kernels of loads and stores alone, but for that of a value that is an output twice."""
    return [
        line
        for line, s in zip(program.describe(), program.segments, strict=True)
        if s.row is None and all(n.op == "load" for n in s.graph.nodes)
        if len({i for i, _ in s.graph.outputs}) == len(s.graph.outputs)
    ]


def test_kernels_that_store_what_they_add_up_are_others_than_those_that_leave_it():
    last, own, grid = (TileKernels(TileSchedule(combine=c)) for c in ("last", "kernel", "grid"))
    assert (last.stores_sums, own.stores_sums, grid.stores_sums) == (False, True, True)
    assert own == grid != last


def untuned(graph):
    return program_of(graph, target.heuristic(graph, H200), H200)


@pytest.mark.parametrize("sizes", SIZES + LARGE, ids=str)
@pytest.mark.parametrize("name", SUMS)
def test_no_kernel_copies_what_an_earlier_one_could_store(name, sizes):
    graph = graph_of(summed(name, *sizes))
    assert not copies(untuned(graph))
    assert not copies(cut(graph, splits=1))


@pytest.mark.parametrize("sizes", [("f32", (4096, 1024)), ("f32", (36, 67)), ("f16", (65536, 512))])
@pytest.mark.parametrize("name", [*MIXED, *WITH_TOTALS])
def test_nor_is_there_one_of_mixed_reductions(graph_of_mixed, name, sizes):
    assert not copies(untuned(graph_of_mixed(name, *sizes)))


@pytest.mark.parametrize("text", KINDS)
def test_nor_one_of_other_operators(text):
    assert not copies(untuned(graph_of(Workload.parse(text))))


@pytest.mark.parametrize("sizes", SIZES[:2], ids=str)
def test_two_kernels_take_rows_of_another_tensor_and_an_extreme_of_columns(sizes):
    graph = graph_of(summed("beside rows of another tensor", *sizes))
    first, second = target.describe(graph, target.heuristic(graph, H200), H200)
    assert first.endswith("reduces axes [1], [0]")
    assert "cut: a step needs a result of a whole row" in second


def test_no_room_is_made_for_what_is_stored_at_once():
    program = untuned(graph_of(summed("beside rows of another tensor", *SIZES[0])))
    assert [t.numel for t in program.temporaries] == [8]


@emulation
@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", SUMS)
def test_they_are_right(kind, name, sizes):
    w = summed(name, *sizes)
    verdict = Verifier(w, torch.device("cpu")).check(executable(kind, w))
    assert verdict.ok, verdict.message


ROUNDED = ("beside rows of another tensor", "of every dim")


def rounds_alone(program):
    """Kernels that only round what an earlier one has added up."""
    return [
        s for s in program.segments
        if s.row is None and {n.op for n in s.graph.nodes} == {"load", "cast"}
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("sizes", SIZES[:2] + LARGE[1:], ids=str)
@pytest.mark.parametrize("name", ROUNDED)
def test_nor_does_one_round_what_an_earlier_one_could(name, sizes, dtype):
    graph = graph_of(summed(name, *sizes, dtype))
    program = untuned(graph)
    assert not rounds_alone(program)
    assert rounds_alone(cut(graph, splits=1))  # partials are added up in memory there


@emulation
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", SUMS)
def test_rounded_ones_are_right(name, sizes, dtype):
    w = summed(name, *sizes, dtype)
    graph = graph_of(w)
    kernel = Emulated(graph, target.heuristic(graph, H200), H200, w)
    assert Verifier(w, torch.device("cpu")).check(kernel).message == ""


def stores_at_once(program):
    outputs = range(program.inputs, program.inputs + program.outputs)
    return any(s.writes[k] in outputs for s in program.segments for k in s.added())


@emulation
@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x.sum(0), x.sum(), x.amax()),
        lambda x: (x.sum(0), x.softmax(-1) - x.sum(0), x.amin(0)),
    ],
)
def test_schedules_of_theirs_are_right(function):
    fuse(function, name="summed")
    count = 0
    for shape in ((8, 16), (24, 72), (32, 1030)):
        w = OPS["summed"].workload(x=TensorSpec("f32", shape))
        graph, verifier = graph_of(w), Verifier(w, torch.device("cpu"))
        configs = target.promising(graph, H200)
        for config in [c for c in configs if stores_at_once(program_of(graph, c, H200))][:5]:
            verdict = verifier.check(Emulated(graph, config, H200, w))
            assert verdict.ok, (config, verdict.message)
            count += 1
    assert count >= 5
