"""Tile kernels whose blocks share walks and wait for one another, on a GPU."""

import random
from dataclasses import replace

import pytest
import torch

from shared_walks import FUNCTIONS, channel_softmax, images, normed_columns, workload
from side_by_side import assert_streams_keep_apart
from tilewright.device import spec_of
from tilewright.impl import IMPLS
from tilewright.measure.verify import Verifier
from tilewright.tensor_spec import TensorSpec

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("forgets_functions")]
FUSED = IMPLS["fused"]
ADDERS = 64
"""Threads to each column, at least: one that adds up many in turn is less exact than PyTorch's."""


def meeting_in(w, device, count):
    """The untuned schedule, if its blocks meet, and so many others whose do."""
    spec = spec_of(device.index)
    found = FUSED.space(w, spec).sample(random.Random(str(w)), 6000)
    every = [c for c in found if c.combine == "grid" and c.splits * c.shares >= ADDERS][:count]
    assert len(every) == count
    untuned = FUSED.heuristic(w, spec)
    return [*([untuned] if untuned.combine == "grid" else []), *every]


def built(w, device, count):
    for config in meeting_in(w, device, count):
        yield config, FUSED.build(config, w, spec_of(device.index))


def assert_right(w, device, count=4):
    verifier, untuned = Verifier(w, device), FUSED.heuristic(w, spec_of(device.index))
    for config, executable in built(w, device, count):
        found = verifier.check(executable)
        # Of any schedule a tuner asks, too, whether long sums by few threads are as exact.
        excused = config != untuned and "PyTorch's largest error" in found.message
        assert found.ok or excused, (config, found.message)


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("shape", [(9001, 96), (4096, 1024), (601, 70)])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_block_goes_on_with_what_all_have_found(function, shape, dtype, device):
    assert_right(workload(function, TensorSpec(dtype, shape)), device)


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
@pytest.mark.parametrize(("channels", "size"), [(64, 56), (128, 28), (250, 15), (1024, 14)])
def test_batch_norm_of_channels_last_images_and_its_gradients(channels, size, dtype, device):
    for w in images(32, channels, size, dtype):
        assert_right(w, device)


def test_each_sample_has_walks_of_its_own(device):
    assert_right(workload(channel_softmax, TensorSpec("f16", (5, 3000, 49))), device)


def test_a_captured_kernel_meets_as_a_called_one_does(device):
    w, _ = images(32, 128, 28)
    tensors = w.operator.examples(w, "random", 0, device)
    for config, executable in built(w, device, 3):
        expected = executable(*tensors)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [executable(*tensors) for _ in range(3)]
        for _ in range(100):  # without a pause: who went on too early would tell
            graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, expected) for out in outs), config


def test_launches_on_several_streams_meet_their_own_blocks(device):
    w = images(32, 128, 28)[1]
    sets = [w.operator.examples(w, "random", seed, device) for seed in range(4)]
    for _, executable in built(w, device, 2):
        assert_streams_keep_apart(executable, sets, rounds=20)


def test_more_blocks_than_run_at_once_are_refused_before_launch(device):
    w = workload(normed_columns, TensorSpec("f32", (100000, 512)))
    spec = spec_of(device.index)
    (config,) = meeting_in(w, device, 1)[-1:]
    space = FUSED.space(w, spec)
    many = replace(config, lanes=32, shares=32, splits=1024, storage="reread")
    assert "wait for one another" in space.why_not(many)
