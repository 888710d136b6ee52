"""Graphs that take several CUDA kernels: how they are cut, what they compute (emulated here), and
that they compile for every architecture."""

import itertools
import math
import os
import random
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given

from emulated import Emulated
from program_graphs import KINDS, LERP, MIXED, PADDLE_C, broadcasts, mixed
from random_graphs import (
    KINDS_OF_STEPS,
    MANY_MOVES,
    MANY_REDUCTIONS,
    MANY_TOTALS,
    RARE_STEPS,
    Program,
    forget,
    programs,
    run_examples,
    workload,
)
from tilewright.compile import cxx, nvrtc
from tilewright.compile.cache import compiled
from tilewright.device import DEVICES, MAX_GRID
from tilewright.dispatch.functions.fuse import fuse
from tilewright.fusion.cuda import program_source, target
from tilewright.fusion.cuda import programs as kernels
from tilewright.fusion.cuda.tiles import capabilities
from tilewright.fusion.cuda.tiles.schedule import TileSchedule
from tilewright.impls.fused import graph_of
from tilewright.measure.verify import Verifier
from tilewright.op import OPS, Workload
from tilewright.tensor_spec import TensorSpec

H200 = DEVICES["h200"]
PARTIALS = "layer_norm_backward(grad_output=f16[8192,2048], x=f16[8192,2048], mean=f32[8192,1], rstd=f32[8192,1], weight=f16[2048])"  # noqa: E501

emulation = pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))


def described(text, device=H200):
    graph = graph_of(Workload.parse(text))
    return target.describe(graph, target.heuristic(graph, device), device)


def assert_right(w, tried=1):
    """The heuristic and some other schedules give what fp64 gives."""
    graph = graph_of(w)
    assert target.unsupported(graph, H200) is None
    verifier = Verifier(w, torch.device("cpu"))
    others = target.space(graph, H200).sample(random.Random(str(w)), tried)
    for config in (target.heuristic(graph, H200), *others):
        found = verifier.check(Emulated(graph, config, H200, w))
        # How well PyTorch's own rounding errors turn out on a few elements is luck.
        assert found.ok or "PyTorch's largest error" in found.message, (config, found.message)


@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
@pytest.mark.parametrize("text", KINDS)
def test_the_heuristics_kernels_compile_without_spilling(text, device):
    graph, spec = graph_of(Workload.parse(text)), DEVICES[device]
    log = compiled(target.task(graph, target.heuristic(graph, spec), spec)).log
    spilled = re.findall(r"(\d+) bytes spill stores", log)
    assert spilled
    assert set(spilled) == {"0"}


def test_three_gradients_of_a_broadcast_take_one_pass_and_one_launch_for_the_partials():
    graph = graph_of(Workload.parse(PADDLE_C))
    config = TileSchedule(4, 32, 8, 1, 4, 4)
    kernels = target.describe(graph, config, H200)
    assert len(kernels) == 3
    assert "reduces axes [1, 2, 3], [0, 2]" in kernels[0]
    assert "put together" in kernels[1]
    assert kernels[2].endswith("(in one launch with kernel 1)")
    assert "launch" not in kernels[1]
    joined = target.describe(graph, replace(config, combine="last"), H200)
    assert joined[2].endswith("(in one launch with kernel 0)")


LONG, SHORT = ("f16", (65536, 512)), ("f32", (4096, 1024))
"""Columns that leave a device idle unless they are divided, and those that blocks can keep."""
ROWS_NEED = "cut: a step needs a result of all rows"
PARTIALS_JOIN = "cut: the partials of a result are put together"


@pytest.mark.parametrize(
    ("name", "sizes", "launches"),
    [
        ("softmax of centred", SHORT, "tile tile row"),
        ("softmax of centred", LONG, "tile tile row"),
        ("norm of softmax", SHORT, "tile row"),
        ("norm of softmax", LONG, "tile tile tile tile row"),
        ("norm of norm", SHORT, "tile row"),
        ("norm of norm", LONG, "tile tile tile tile row"),
        ("full and reduced", SHORT, "tile row"),
        ("full and reduced", LONG, "tile tile tile tile row"),
        ("a row's end", LONG, "tile tile row"),
        ("rows first", SHORT, "row tile"),
        ("apart", SHORT, "row tile"),
    ],
)
@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
def test_what_rows_reduce_is_one_row_kernel_and_what_columns_do_few(
    graph_of_mixed, name, sizes, launches, device
):
    """The last kernel of the one exception has no reduction left to do."""
    graph, spec = graph_of_mixed(name, *sizes), DEVICES[device]
    config = target.heuristic(graph, spec)
    assert config in target.space(graph, spec)
    _, program, stages = program_source.emit(graph, config, spec)
    assert " ".join("tile" if s.launch is None else "row" for s in stages) == launches
    rows = [kernels.kind_of(program, k) for k in range(len(program.segments))].count("rows")
    assert rows == ((name, sizes) != ("full and reduced", LONG))


def why(line):
    """Without the line of the source."""
    return line.rpartition("; ")[2].partition(" (")[0]


def test_it_is_said_why_there_is_another_kernel(graph_of_mixed):
    graph = graph_of_mixed("norm of softmax", *LONG)
    lines = target.describe(graph, target.heuristic(graph, H200), H200)
    assert [why(line) for line in lines[1:]] == [PARTIALS_JOIN, ROWS_NEED] * 2
    for name in ("rows first", "apart"):
        graph = graph_of_mixed(name, *SHORT)
        first, second = target.describe(graph, target.heuristic(graph, H200), H200)
        assert "cut" not in first
        assert why(second) == "cut: it reduces other dims than the kernels before"
    lines = described(KINDS[-1])
    assert why(lines[1]) == PARTIALS_JOIN
    assert why(lines[2]) == "cut: a step needs a result of a whole row"


@pytest.mark.parametrize("sizes", [SHORT, LONG], ids=["short", "long"])
@pytest.mark.parametrize("name", list(MIXED)[:4])
@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
def test_kernels_of_mixed_reductions_compile_without_spilling(graph_of_mixed, name, sizes, device):
    graph, spec = graph_of_mixed(name, *sizes), DEVICES[device]
    log = compiled(target.task(graph, target.heuristic(graph, spec), spec)).log
    assert set(re.findall(r"(\d+) bytes spill stores", log)) == {"0"}


@emulation
@pytest.mark.parametrize(
    ("dtype", "shape"), [("f32", (37, 67)), ("bf16", (33, 70)), ("f16", (130, 24))]
)
@pytest.mark.parametrize("name", MIXED)
def test_mixed_reductions_give_what_torch_gives(monkeypatch, name, dtype, shape):
    monkeypatch.setattr(capabilities, "LONG_ROWS", 1 << 10)  # so that walks are divided here, too
    try:
        w = mixed(name, dtype, shape)
        graph = graph_of(w)
        assert_right(w, tried=0)
        divided = TileSchedule(1, 16, 4, splits=4)
        if divided in target.space(graph, H200):
            found = Verifier(w, torch.device("cpu")).check(Emulated(graph, divided, H200, w))
            assert found.ok or "PyTorch's largest error" in found.message, found.message
    finally:
        forget()


def test_a_softmax_across_the_order_of_memory_is_one_kernel():
    assert len(described("softmax(x=f16[64,1000,49], dim=1)")) == 1


def test_two_long_rows_are_split_over_the_device():
    kernels = described(KINDS[-1])
    assert [k for k in kernels if " partials" in k]
    assert "put together" in kernels[1]


def test_a_space_of_tiles_says_why_a_schedule_is_not_in_it():
    graph = graph_of(Workload.parse(PADDLE_C))
    space, config = target.space(graph, H200), TileSchedule(4, 32, 8, 1, 4, 4)
    assert config in space
    for change, reason in (
        ({"turns": 4}, "turns=4"),
        ({"vector": 8}, "vector=8"),
        ({"shares": 1, "lanes": 8}, "a block of 8 threads"),
        ({"splits": 256}, "8 shares of 1 steps"),
        ({"lanes": 256, "shares": 1, "splits": 1}, "more than twice"),
    ):
        found = space.why_not(replace(config, **change))
        assert reason in found, (change, found)


def test_more_than_2_to_the_31_elements_have_64_bit_indices():
    text = "lerp_backward(grad_output=f16[{n}], x=f16[1], end=f16[{n}], weight=f16[{n}])"
    for n, index in ((3 << 30, "i64"), (1 << 20, "int")):
        graph = graph_of(Workload.parse(text.format(n=n)))
        task = target.task(graph, target.heuristic(graph, H200), H200)
        assert f"const {index} lane_column = (({index})" in task.source
        assert compiled(task).resources.spill_bytes == 0


def test_a_kernel_that_begins_early_reads_no_partials_as_constants():
    """`ld.global.nc` is of memory that nobody writes while the kernel runs."""
    graph = graph_of(Workload.parse(PARTIALS))
    joined = (c for c in target.promising(graph, H200) if c.combine == "kernel")
    task = target.task(graph, next(joined), H200)
    _, *entries = nvrtc.compile_ptx(task.source, task.flags, "partials").split(".entry")
    (waiting,) = (e for e in entries if "griddepcontrol.wait" in e)
    assert "ld.f32" in waiting.partition("griddepcontrol.wait")[2]
    assert "ld.global.nc" not in waiting


def distances(x, y):
    return (x[:, :, None] - y[:, None, :]).abs().sum((1, 2))


def greatest(x):
    return x.amax(-1)


@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
@pytest.mark.parametrize(
    ("text", "index"),
    [
        ("distances(x=f32[1000,50000], y=f32[1000,50000])", "int"),  # by 50000 steps
        ("greatest(x=f16[200,3000000000])", "i64"),
        ("greatest(x=f16[2,3000000000])", "i64"),
    ],
)
def test_rows_of_more_columns_than_an_int_numbers_are_walked_in_pieces(
    text, index, device, forgets_functions
):
    fuse(distances)
    fuse(greatest)
    graph, spec = graph_of(Workload.parse(text)), DEVICES[device]
    for config in (target.heuristic(graph, spec), *target.promising(graph, spec)[:5]):
        assert isinstance(config, TileSchedule)
        assert config in target.space(graph, spec)
        assert f"const {index} lane_column" in target.task(graph, config, spec).source


@emulation
def test_the_sum_over_a_leading_dim_that_one_operand_lacks_is_not_missing():
    """x [2,3,4] of a result [2,2,3,4]: Paddle's pull request 45946 takes it for no reduction."""
    assert_right(Workload.parse(LERP.format(d="f32", g="2,2,3,4", x="2,3,4", e="2,2,3,4", w="1")))


@emulation
def test_lerps_gradients_are_right_for_every_kind_of_broadcast():
    for named in broadcasts((3, 5, 8), 8):
        assert_right(Workload.parse(LERP.format(d="f32", **named)), tried=0)


@emulation
@pytest.mark.parametrize(
    "text",
    [
        "lerp_backward(grad_output=f32[4,3,20,20], x=f32[4,1,1,1], end=f32[4,3,20,20], weight=f32[3,1,20])",  # noqa: E501
        "softmax(x=f16[2,100,49], dim=1)",
        "layer_norm_backward(grad_output=f16[40,96], x=f16[40,96], mean=f32[40,1], rstd=f32[40,1], weight=f16[96])",  # noqa: E501
    ],
)
def test_schedules_give_what_torch_gives(text):
    assert_right(Workload.parse(text), tried=3)


@pytest.mark.parametrize(
    "text",
    [
        "layer_norm_backward(grad_output=f16[6,40], x=f16[6,40], mean=f32[6,1], rstd=f32[6,1], weight=f16[40], grads=[weight])",  # noqa: E501
        "lerp_backward(grad_output=f16[6,40], x=f16[40], end=f16[6,40], weight=0.3)",
        "lerp_backward(grad_output=f16[4,3,5,7], x=f16[4,1,1,1], end=f16[4,3,5,7], weight=f16[3,1,7], grads=[weight])",  # noqa: E501
    ],
)
def test_a_walk_that_is_not_divided_leaves_no_partials_to_put_together(text):
    graph = graph_of(Workload.parse(text))
    config = target.heuristic(graph, H200)
    assert config.splits == 1
    assert config in target.space(graph, H200)
    assert compiled(target.task(graph, config, H200)).resources.spill_bytes == 0


def test_a_walk_may_be_divided_into_splits_of_a_single_step():
    fuse(lambda a: 0.75 * a.amin(0, keepdim=True), name="random_graph")
    try:
        graph = graph_of(OPS["random_graph"].workload(a=TensorSpec("f16", (2, 64))))
    finally:
        forget()
    config = TileSchedule(8, 4, 8, 1, 1, splits=2, combine="last")
    assert config in target.space(graph, H200)
    assert compiled(target.task(graph, config, H200)).resources.spill_bytes == 0


@emulation
@pytest.mark.parametrize(
    ("function", "a", "b"),
    [
        pytest.param(
            lambda a, b: b.abs() + b.amax(0, keepdim=True) * a, (1, 37), (2, 37),
            id="a row again, and what is known of all rows",
        ),
        pytest.param(
            lambda a, b: torch.softmax(a + b, 0) + b, (1, 17), (3, 1),
            id="a sum over rows of what follows from their maximum",
        ),
        pytest.param(
            lambda a, b: b.sum(0, keepdim=True) * a.sum(1, keepdim=True), (1, 40), (30, 40),
            id="a sum along a row that is not one of those added up",
        ),
        pytest.param(
            lambda a, b: torch.softmax(a + b.amax(0, keepdim=True), 1) + b, (1, 1, 17), (2, 5, 1),
            id="two sweeps that load the same vector",
        ),
    ],
)  # fmt: skip
def test_sums_over_rows_and_what_follows_give_what_torch_gives(function, a, b):
    fuse(function, name="random_graph")
    try:
        specs = {"a": TensorSpec("f32", a), "b": TensorSpec("f32", b)}
        assert_right(OPS["random_graph"].workload(**specs), tried=1)
    finally:
        forget()


@emulation
@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: (a > b, torch.where(b > 0, a, -a)),
        lambda a, b: (a.prod(0), b.prod(2)),
        lambda a, b: (a.max(), b.amin((0, 2)), (a > b).sum(1).float()),
        lambda a, b: (*torch.var_mean(a, (0, 2)), torch.linalg.vector_norm(b, dim=1)),
        lambda a, b: a.sum(1, keepdim=True) * b,
    ],
    ids=["booleans", "products", "extremes", "moments", "broadcast"],
)
def test_steps_of_every_kind_give_what_torch_gives(function):
    fuse(function, name="random_graph")
    try:
        spec = TensorSpec("f32", (3, 5, 24))
        assert_right(OPS["random_graph"].workload(a=spec, b=spec), tried=1)
    finally:
        forget()


@emulation
@pytest.mark.parametrize(
    "kinds",
    [KINDS_OF_STEPS, MANY_REDUCTIONS, MANY_MOVES, MANY_TOTALS, RARE_STEPS],
    ids=["any", "many reductions", "many moves", "many totals", "rare steps"],
)
def test_random_graphs_give_what_fp64_gives(kinds):
    @given(programs(kinds=kinds))
    def check(program):
        try:
            assert_right(workload(program), tried=0)
        finally:
            forget()

    run_examples(check, 15)


OUTER_MAXIMA = (("outer", (0,), (0,)), ("amax", (1,), (0,)))
"""Of whose rows no tensor is read alone."""


def test_schedules_for_random_graphs_of_many_reductions_are_emitted_and_compile():
    examples = itertools.count()

    @given(programs(kinds=(*MANY_REDUCTIONS, "move")))
    @example(
        Program((TensorSpec("f32", (17,)),), (("outer", (0,), (0,)), ("amax", (1,), (0,))), (2,))
    )
    def check(program):
        try:
            graph = graph_of(workload(program))
        finally:
            forget()
        assert target.unsupported(graph, H200) is None
        space, heuristic = target.space(graph, H200), target.heuristic(graph, H200)
        assert heuristic in space, space.why_not(heuristic)
        others = space.sample(random.Random(str(program)), 2)
        for config in (heuristic, *target.promising(graph, H200)[:2], *others):
            task = target.task(graph, config, H200)
        if graph.reductions and next(examples) % 8 == 0:  # compiling takes longest
            assert compiled(task).resources is not None

    run_examples(check, 100)


@pytest.mark.parametrize(
    "text",
    [
        "layer_norm(x=f16[3000000000,8])",
        "softmax(x=f16[2,3,3000000000], dim=1)",
        "softmax(x=f16[100000,2,70000], dim=1)",
        "lerp(x=f16[30000000000], end=f16[1], weight=0.5)",
        "layer_norm_backward(grad_output=f16[3000000000,8], x=f16[3000000000,8],"
        " mean=f32[3000000000,1], rstd=f32[3000000000,1], weight=f16[8])",
    ],
)
def test_grids_have_one_axis_and_fit_beyond_two_to_the_31_rows(text):
    graph = graph_of(Workload.parse(text))
    assert target.unsupported(graph, H200) is None
    config = target.heuristic(graph, H200)
    if target.one_pass(graph, H200) is None:
        _, _, stages = program_source.emit(graph, config, H200)
        blocks = [s.launch.blocks(s.count) if s.launch else s.blocks for s in stages]
    else:
        _, launch = target.emit(graph, config, H200)
        blocks = [launch.blocks(math.prod(graph.space))]
    assert all(0 < n <= MAX_GRID for n in blocks)


def test_a_grid_that_would_not_fit_is_refused_in_words():
    graph = graph_of(Workload.parse("softmax(x=f16[4000000000000,3,17], dim=1)"))
    assert "tiles exceed a grid of 2147483647" in target.unsupported(graph, H200)


def test_sources_are_the_same_in_every_process():
    """What one process compiled is found by others, whatever the order of their sets of strings."""
    emitting = """if True:
        from tilewright.device import DEVICES
        from tilewright.fusion.cuda import target
        from tilewright.impls.fused import graph_of
        from tilewright.op import Workload

        x = "f32[304,3,32,64]"
        operands = f"grad_output={x}, x={x}, end={x}, weight=f32[1,3,1,1]"
        graph, device = graph_of(Workload.parse(f"lerp_backward({operands})")), DEVICES["h200"]
        print(target.task(graph, target.heuristic(graph, device), device).source)
    """
    sources = [
        subprocess.run(
            [sys.executable, "-c", emitting], env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE, check=True, text=True,
        ).stdout
        for seed in "01"
    ]  # fmt: skip
    assert sources[0] == sources[1]
    assert "splits_factor" in sources[0]
    assert "pieces_factor" in sources[0]
