"""Reductions over channels, and sums along memory of what follows from them: one walk on a GPU."""

import random

import pytest
import torch

from across_rows import (
    SCHEDULES,
    SIZES,
    channel_norm,
    dice_loss,
    response_norm,
    shares_of_classes,
    workload,
    workloads,
)
from emulated import Emulated
from random_graphs import gradients_of
from tilewright.compile import cxx
from tilewright.compile.cache import compiled
from tilewright.device import DEVICES
from tilewright.fusion.cuda import programs, target
from tilewright.fusion.cuda.tiles.schedule import TileSchedule
from tilewright.impls.fused import graph_of
from tilewright.measure.verify import Verifier

H200, CPU = DEVICES["h200"], torch.device("cpu")
emulation = pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))
pytestmark = pytest.mark.usefixtures("forgets_functions")


def walks(graph, spec=H200, config=None):
    """Over large tensors, of the schedule or an untuned one."""
    return programs.program_of(graph, config or target.heuristic(graph, spec), spec).large()


@pytest.mark.parametrize(
    ("function", "sizes", "forward", "backward"),
    [
        (channel_norm, (32, 64, 56, 56), 1, 1),
        (channel_norm, (32, 384, 14, 14), 1, 1),
        (response_norm, (32, 384, 56, 56), 2, 2),
        (dice_loss, (16, 21, 256, 256), 1, 2),
        (shares_of_classes, (16, 21, 256, 256), 1, 3),  # the greatest, how many, gradients
    ],
)
@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
def test_sums_along_memory_take_no_walk_of_their_own(function, sizes, forward, backward, device):
    w, spec = workload(function, "bf16", sizes), DEVICES[device]
    assert walks(graph_of(w), spec) == forward
    assert walks(graph_of(gradients_of(w)), spec) == backward


@pytest.mark.parametrize(
    ("sizes", "count"), [((4096, 64, 1, 2), 2), ((4096, 64, 1, 7), 2), ((4096, 64, 1, 8), 1)]
)
def test_few_elements_along_memory_would_leave_more_partials_than_a_walk_reads(sizes, count):
    assert walks(graph_of(gradients_of(workload(channel_norm, "bf16", sizes)))) == count


@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
def test_untuned_kernels_spill_nothing(device):
    for sizes in ((32, 96, 56, 56), (32, 384, 28, 28), (32, 768, 14, 14)):
        graph = graph_of(gradients_of(workload(channel_norm, "bf16", sizes)))
        spec = DEVICES[device]
        task = target.task(graph, target.heuristic(graph, spec), spec)
        assert compiled(task).resources.spill_bytes == 0


def test_partials_of_a_step_are_added_up_by_one_block():
    """A walk that completes reductions is divided by nothing, but it may be kept."""
    graph = graph_of(gradients_of(workload(channel_norm, "bf16", (32, 64, 56, 56))))
    space = target.space(graph, H200)
    assert space.values["splits"] == (1,)
    assert space.values["combine"] == ("kernel",)
    assert set(space.values["storage"]) == {"reread", "registers"}
    partials = programs.program_of(graph, target.heuristic(graph, H200), H200).segments[0].partials
    tried = [c for c in space.sample(random.Random(0), 50) if c.lanes > 32]
    assert tried
    for c in tried:  # one for each warp along the lane
        segment = programs.program_of(graph, c, H200).segments[0]
        assert segment.partials == 32 * -(-3136 // (c.lanes * c.vector)) * (c.lanes // 32)
    assert partials > 1


@emulation
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64"])
def test_what_is_added_up_along_memory_is_right(dtype, sizes):
    """With an untuned schedule, and with those that every kind of kernel has."""
    across = 0
    for w in workloads(dtype, sizes):
        graph, verifier = graph_of(w), Verifier(w, CPU)
        config, space = target.heuristic(graph, H200), target.space(graph, H200)
        others = SCHEDULES if isinstance(config, TileSchedule) else []
        for c in (config, *(c for c in others if c in space)):
            found = verifier.check(Emulated(graph, c, H200, w))
            # On few elements how well PyTorch's own rounding turns out is luck.
            assert found.ok or "PyTorch's largest error" in found.message, (w, c, found.message)
            segments = programs.program_of(graph, c, H200).segments
            across += any(s.adds_across for s in segments)
    assert across >= (8 if sizes[2] * sizes[3] >= 32 else 0)
