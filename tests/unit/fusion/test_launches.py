"""Kernels side by side in one launch: which are, and that each computes what it does alone."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from emulated import Emulated
from neighbour_functions import (
    LARGE,
    SMALL,
    TOKENS,
    blurred,
    shift_of_norm,
    short_convolution,
    token_shift,
)
from random_graphs import gradients_of
from tilewright.compile import nvrtc
from tilewright.compile.cache import compiled
from tilewright.device import DEVICES, REGISTER_STEP
from tilewright.dispatch.functions.fuse import fuse
from tilewright.fusion.cuda import launches, program_source, programs, target
from tilewright.fusion.cuda.kernel import ENTRY, prelude, tiles_prelude
from tilewright.fusion.cuda.parts import parts_of, side_by_side
from tilewright.impl import CompileTask
from tilewright.impls.fused import graph_of
from tilewright.measure.verify import Verifier
from tilewright.op import Workload

H200, CPU = DEVICES["h200"], torch.device("cpu")

pytestmark = pytest.mark.usefixtures("forgets_functions")


def launches_of(w, spec=H200, config=None):
    graph = graph_of(w)
    if target.one_pass(graph, spec) is not None:
        _, launch = target.emit(graph, config or target.heuristic(graph, spec), spec)
        return 1 + (launch.finish is not None)
    _, _, stages = program_source.emit(graph, config or target.heuristic(graph, spec), spec)
    return len(stages)


@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
@pytest.mark.parametrize(("function", "tensors", "forward", "backward"), LARGE)
def test_what_needs_nothing_of_one_another_is_one_launch(
    function, tensors, forward, backward, device
):
    fuse(function)
    w, spec = Workload.parse(f"{function.__name__}({tensors})"), DEVICES[device]
    assert launches_of(w, spec) == forward
    assert launches_of(gradients_of(w), spec) == backward


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("function", "tensors"), SMALL.items())
def test_kernels_side_by_side_are_right(function, tensors, backward):
    fuse(function)
    w = Workload.parse(f"{function.__name__}({tensors})")
    w = gradients_of(w) if backward else w
    graph = graph_of(w)
    kernel = Emulated(graph, target.heuristic(graph, H200), H200, w)
    assert Verifier(w, CPU).check(kernel).message == ""


def test_it_is_said_which_kernels_are_one_launch():
    fuse(token_shift)
    graph = graph_of(Workload.parse(f"token_shift({TOKENS}, mix=f16[2048])"))
    first, others = target.describe(graph, target.heuristic(graph, H200), H200)
    assert first.startswith("kernel 0: space [8, 2048]")
    assert first.endswith("(in one launch with kernel 1)")
    assert "in one launch" not in others


def test_one_source_serves_other_numbers_of_rows():
    fuse(token_shift)
    sources = set()
    for batches in (8, 3, 16):
        text = f"token_shift(x=f16[{batches},1024,2048], mix=f16[2048])"
        graph = graph_of(Workload.parse(text))
        points = target.heuristic(graph, H200)
        config = type(points)(vector=8, vectors_per_thread=1)
        source, _, (stage,) = program_source.emit(graph, config, H200)
        assert stage.blocks == sum(
            batches * n * 2048 // (8 * config.block_threads) for n in (1023, 1)
        )
        sources.add(source)
    assert len(sources) == 1


@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
@pytest.mark.parametrize(("function", "tensors"), [(f, t) for f, t, *_ in LARGE])
def test_nothing_spills_beside_another(function, tensors, device):
    fuse(function)
    w, spec = Workload.parse(f"{function.__name__}({tensors})"), DEVICES[device]
    for each in (w, gradients_of(w)):
        graph = graph_of(each)
        if target.one_pass(graph, spec) is None:
            found = compiled(target.task(graph, target.heuristic(graph, spec), spec))
            assert found.resources.spill_bytes == 0


def registers_of(program, group, config):
    """Of a launch of these kernels."""
    text, _ = side_by_side(parts_of(program, group, config, H200), ENTRY)
    source = "\n".join([prelude(), tiles_prelude(), text])
    flags = (*nvrtc.flags_for(H200.arch), "--ptxas-options=-v")
    return compiled(CompileTask("nvrtc", source, flags, ENTRY, len(prelude()))).resources.registers


@pytest.mark.parametrize("function", [short_convolution, blurred, token_shift])
def test_the_largest_kernel_pays_no_registers_for_those_beside_it(function):
    fuse(function)
    tensors = next(tensors for f, tensors, *_ in LARGE if f is function)
    graph = graph_of(Workload.parse(f"{function.__name__}({tensors})"))
    config = target.heuristic(graph, H200)
    program = programs.program_of(graph, config, H200)
    (group,) = launches.launches(program, config, H200)
    assert len(group) == len(program.segments) > 1
    alone = registers_of(program, group[:1], config)
    assert registers_of(program, group, config) <= alone + REGISTER_STEP


def groups_under(text, **changes):
    """Launches of the gradients under the heuristic's schedule with some knobs turned."""
    graph = graph_of(gradients_of(Workload.parse(text)))
    config = target.heuristic(graph, H200)
    config = type(config)(**{**vars(config), **changes})
    assert config in target.space(graph, H200)
    return launches.launches(programs.program_of(graph, config, H200), config, H200)


def test_blocks_of_a_launch_have_the_threads_of_the_first():
    """Steps alone may have any number, and what walks a few tokens more shares than there are."""
    fuse(token_shift)
    text = f"token_shift({TOKENS}, mix=f16[2048])"
    assert groups_under(text) == [[1, 0, 2], [3]]
    assert groups_under(text, shares=16, unroll=4) == [[1, 0, 2], [3]]
    assert groups_under(text, shares=2) == [[1, 0, 2], [3]]


def test_rows_of_a_cluster_have_a_launch_to_themselves():
    fuse(shift_of_norm)
    tensors = "x=bf16[8,2048,4096], w=bf16[4096], mix=bf16[4096]"
    w = gradients_of(Workload.parse(f"shift_of_norm({tensors})"))
    graph = graph_of(w)
    config = target.heuristic(graph, H200)
    program = programs.program_of(graph, config, H200)
    assert launches.schedule_of(program, 1, config, H200).cluster > 1
    assert launches.launches(program, config, H200) == [[0], [1], [2, 3], [4]]


def two_sizes(x, y):
    return F.layer_norm(x, x.shape[-1:]), F.layer_norm(y * torch.sigmoid(y), y.shape[-1:])


@pytest.mark.parametrize(
    "tensors",
    [
        "x=f32[16384,2048], y=f32[512,8192]",
        "x=bf16[16384,2048], y=bf16[1024,4096]",
        "x=f32[4096,1024], y=f32[512,1024]",
    ],
)
def test_no_kernel_has_fewer_registers_beside_another_than_it_asks_for(tensors):
    fuse(two_sizes)
    graph = graph_of(Workload.parse(f"two_sizes({tensors})"))
    found = compiled(target.task(graph, target.heuristic(graph, H200), H200))
    assert found.resources.spill_bytes == 0


def test_kernels_of_a_launch_share_memory():
    """What NVRTC makes of several arrays is as large as all of them."""
    names = [f"x{k}" for k in range(8)]
    text = f"lambda {', '.join(names)}: ({', '.join(f'{n}.sum(0)' for n in names)},)"
    fuse(eval(text), name="sums_of_eight")
    tensors = ", ".join(f"{n}=bf16[{64 << k},2048]" for k, n in enumerate(names))
    graph = graph_of(Workload.parse(f"sums_of_eight({tensors})"))
    config = replace(target.heuristic(graph, H200), vector=8, lanes=32, shares=8, unroll=1)
    program = programs.program_of(graph, config, H200)
    group = launches.launches(program, config, H200)[0]
    assert len(group) > 2
    parts = parts_of(program, group, config, H200)
    text, _ = side_by_side(parts, ENTRY)
    assert text.count("__shared__") == 1
    assert f"shared[{max(part.shared_bytes for part in parts) // 16}]" in text


def many_outputs(tensors):
    """One of all elements, and many of the first rows, which are so many parts."""
    first = sum(x * (k + 1) for k, x in enumerate(tensors))[:, 0]
    return sum(x.abs() for x in tensors), *((first * (k + 1.5)).tanh() for k in range(30))


def test_parameters_of_a_launch_are_no_more_than_drivers_take():
    names = [f"a{k}" for k in range(12)]
    given = ", ".join(names)
    fuse(eval(f"lambda {given}: many_outputs(({given}))", globals()), name="outputs")
    strides = [f"{864 + 16 * k},96,8,1" for k in range(12)]
    tensors = [f"{n}=f32[4,9,6,8]@strides({each})" for n, each in zip(names, strides, strict=True)]
    graph = graph_of(Workload.parse(f"outputs({', '.join(tensors)})"))
    _, program, stages = program_source.emit(graph, target.heuristic(graph, H200), H200)
    assert len(program.segments) > 1
    assert all(8 * len(s.signature) <= launches.MOST_BYTES for s in stages)
