"""Register caps of generated CUDA kernels, in the place of launch bounds, and what is reckoned
before a compiler counts."""

import random
import re
from dataclasses import replace

import pytest
from torch.nn import functional as F

import tilewright as tw
from program_graphs import PADDLE_C
from tilewright.compile.cache import compiled
from tilewright.compile.resources import parse_ptxas
from tilewright.device import DEVICES, REGISTER_STEP
from tilewright.dispatch.dumps import kernels
from tilewright.fusion.cuda import target
from tilewright.fusion.cuda.pointwise.schedule import PointwiseSchedule
from tilewright.fusion.cuda.rows.schedule import RowSchedule
from tilewright.fusion.cuda.rows.space import row_space
from tilewright.fusion.cuda.tiles.schedule import TileSchedule
from tilewright.impl import IMPLS
from tilewright.impls.fused import graph_of
from tilewright.op import Workload

NORM = "bias_layer_norm(x=f16[8192,4096], bias0=f16[4096], bias1=f16[4096], weight=f16[4096], bias=f16[4096])"  # noqa: E501
BACKWARD = (
    "layer_norm_backward(grad_output=f16[8192,1024], x=f16[8192,1024], mean=f32[8192,1],"
    " rstd=f32[8192,1], weight=f16[1024])"
)
LERP = "lerp(x=f32[8192,4096], end=f32[8192,4096], weight=f32[8192,4096])"
SOFTMAX = "softmax(x=f16[64,1000,49], dim=1)"
H200 = DEVICES["h200"]


def source(text, config, device=H200):
    return target.task(graph_of(Workload.parse(text)), config, device).source


CAPPED = RowSchedule(8, 128, 1, 1, "registers", "two_pass", 1, 1, max_registers=64)


def test_a_register_cap_takes_the_place_of_launch_bounds():
    heads = re.findall(r"(__\w+__\([^()]*\)) fused", source(NORM, CAPPED))
    assert heads == ["__maxnreg__(64)"]
    assert "__launch_bounds__(128, 1)" in source(NORM, replace(CAPPED, max_registers=0))
    graph = graph_of(Workload.parse(NORM))
    free, capped = (
        compiled(target.task(graph, replace(CAPPED, max_registers=n), H200)).resources
        for n in (0, 64)
    )
    assert capped.registers <= 64 < free.registers


def test_the_kernel_that_joins_sums_over_rows_keeps_its_launch_bounds():
    config = replace(CAPPED, vector=4, row_threads=256, stages=2, min_blocks=2)
    text = source(BACKWARD, config)
    assert text.count("__maxnreg__(64)") == text.count("__launch_bounds__(") == 1


def test_a_search_tries_the_register_caps_it_is_told_to():
    space = row_space(graph_of(Workload.parse(NORM)), H200)
    assert space.values["max_registers"] == (0,)
    assert CAPPED in space
    asked = space.restricted({"max_registers": (0, 64, 80, 96), "min_blocks": (1,)})
    found = asked.sample(random.Random(0), 60)
    assert len(found) == 60
    assert {c.max_registers for c in found} == {0, 64, 80, 96}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"min_blocks": 2}, "takes the place of launch bounds: min_blocks=2 says nothing"),
        ({"row_threads": 512}, None),
        ({"max_registers": 255}, "launch bounds leave a thread 255 registers"),
        ({"row_threads": 512, "max_registers": 128}, "launch bounds leave a thread 128 registers"),
        ({"max_registers": 84}, "24 or more, in steps of 8"),
        ({"max_registers": 16}, "24 or more, in steps of 8"),
        ({"max_registers": 32}, None),
        ({"min_blocks": 8, "max_registers": 0, "row_threads": 256}, "a thread exceed 32"),
        ({"row_threads": 64, "max_registers": 128, "stages": 1}, None),
        ({"max_registers": -8}, "max_registers=-8 is not one of 0"),
    ],
    ids=str,
)
def test_a_register_cap_that_changes_nothing_or_cannot_be_is_refused(change, reason):
    space = row_space(graph_of(Workload.parse(NORM)), H200)
    found = space.why_not(replace(CAPPED, **change))
    assert found is None if reason is None else reason in found


WIDE = PointwiseSchedule(4, 256, 4)
WALK = TileSchedule(1, 64, 8, 1, 8)
OTHERS = [
    (LERP, WIDE, 40),
    (SOFTMAX, WALK, 32),
    (PADDLE_C, TileSchedule(2, 32, 8, 1, 8), 48),
    (PADDLE_C, TileSchedule(1, 32, 8, 1, 8, combine="last"), 48),
]


@pytest.mark.parametrize(("text", "config", "cap"), OTHERS, ids=str)
def test_steps_alone_and_tiles_are_capped_too(text, config, cap):
    graph = graph_of(Workload.parse(text))
    capped = replace(config, max_registers=cap)
    assert capped in target.space(graph, H200)
    free = target.task(graph, config, H200)
    task = target.task(graph, capped, H200)
    heads = re.findall(r"(__\w+__\([^()]*\)) fused\(", task.source)
    assert heads == [f"__maxnreg__({cap})"]
    assert free.source.count("__launch_bounds__") == task.source.count("__launch_bounds__") + 1
    assert registers_of(task, "fused") <= cap < registers_of(free, "fused")


def registers_of(task, entry):
    return parse_ptxas(compiled(task).log, entry).registers


@pytest.mark.parametrize(
    ("text", "config", "cap", "reason"),
    [
        (LERP, WIDE, 255, "launch bounds leave a thread 255 registers: max_registers=255"),
        (
            LERP,
            replace(WIDE, block_threads=1024, vectors_per_thread=1),
            64,
            "launch bounds leave a thread 64 registers",
        ),
        (LERP, WIDE, 100, "24 or more, in steps of 8"),
        (SOFTMAX, WALK, 128, "launch bounds leave a thread 128 registers"),
        (SOFTMAX, WALK, 16, "24 or more, in steps of 8"),
    ],
    ids=str,
)
def test_other_caps_that_change_nothing_or_cannot_be_are_refused(text, config, cap, reason):
    space = target.space(graph_of(Workload.parse(text)), H200)
    assert config in space
    assert reason in space.why_not(replace(config, max_registers=cap))


@pytest.mark.parametrize("text", [LERP, SOFTMAX, PADDLE_C, BACKWARD, "softmax(x=f32[4,2000000])"])
def test_what_threads_are_reckoned_to_need_is_near_what_the_compiler_gives_them(text):
    w, fused = Workload.parse(text), IMPLS["fused"]
    built = fused.build(fused.heuristic(w, H200), w, H200)
    (each,) = kernels(built, fused.tasks(fused.heuristic(w, H200), w, H200), H200)
    found = [k for k in each if k.launched.work.estimated_registers]
    assert found
    for kernel in found:
        estimated = kernel.launched.work.estimated_registers
        assert 0.5 < estimated / kernel.resources.registers < 2, kernel


def test_a_block_of_tiles_that_would_have_an_sm_to_itself_is_capped_untuned():
    graph = graph_of(Workload.parse(SOFTMAX))
    config = target.heuristic(graph, H200)
    free = replace(config, max_registers=0)
    assert config.max_registers == H200.registers_left(config.block_threads, 2)
    with_room, alone = (
        parse_ptxas(compiled(target.task(graph, c, H200)).log, "fused") for c in (config, free)
    )
    assert with_room.spill_bytes == 0
    blocks = [H200.occupancy(config.block_threads, r.registers, 0)[0] for r in (with_room, alone)]
    assert blocks == [2, 1]


def test_launch_bounds_of_tiles_ask_for_as_many_blocks_as_threads_are_reckoned_to_leave_room_for():
    text = "softmax(x=f32[2,19,131072], dim=1)"
    graph = graph_of(Workload.parse(text))
    config = target.heuristic(graph, H200)
    assert config.max_registers == 0
    (threads, blocks) = re.findall(
        r"__launch_bounds__\((\d+), (\d+)\) fused\(", source(text, config)
    )[0]
    assert (int(threads), int(blocks)) == (256, 4)
    assert registers_of(target.task(graph, config, H200), "fused") <= H200.registers_left(256, 4)
    joined = source(PADDLE_C, TileSchedule(2, 32, 8, 1, 8))
    assert re.findall(r"__launch_bounds__\(\d+, (\d+)\) fused(?:1)?\(", joined) == ["3", "1"]


def test_a_search_of_tiles_begins_with_one_block_more_on_an_sm_too():
    found = target.promising(graph_of(Workload.parse(PADDLE_C)), H200)
    assert H200.registers_left(256, 5) in {c.max_registers for c in found[:6]}
    assert {c.max_registers for c in found[6:]} == {0}


KEEPING = ["8,512,1024", "64,512,768", "16,1000,100", "8,256,4096", "64,384,196"]


@pytest.mark.parametrize("shape", KEEPING)
@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
def test_threads_that_keep_steps_do_so_in_registers_halves_of_either_kind_packed(device, shape):
    spec, taken = DEVICES[device], {}
    for dtype in ("f16", "bf16"):
        graph = graph_of(Workload.parse(f"softmax(x={dtype}[{shape}], dim=1)"))
        config = target.heuristic(graph, spec)
        assert config.storage == "registers"
        found = parse_ptxas(compiled(target.task(graph, config, spec)).log, "fused")
        assert found.spill_bytes == 0, config
        taken[dtype] = found.registers
    if device == "h200":
        assert taken["bf16"] <= taken["f16"] + REGISTER_STEP


def batch_norm_relu(x, weight, bias):
    return F.relu(F.batch_norm(x, None, None, weight, bias, training=True))


@pytest.mark.usefixtures("forgets_functions")
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("device", ["a100", "h100", "b200"])
def test_gradients_whose_sweeps_read_two_kept_tensors_again_have_registers_for_one_widened(
    device, dtype
):
    tw.fuse(batch_norm_relu)
    images, spec = f"{dtype}[32,256,28,28]", DEVICES[device]
    graph = graph_of(
        Workload.parse(
            f"batch_norm_relu_backward(grad_output={images}, x={images}, weight=f32[256],"
            " bias=f32[256])"
        )
    )
    config = target.heuristic(graph, spec)
    assert isinstance(config, RowSchedule)
    assert parse_ptxas(compiled(target.task(graph, config, spec)).log, "fused").spill_bytes == 0
