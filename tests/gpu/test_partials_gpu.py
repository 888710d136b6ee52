"""Blocks that leave partials of results for the last of them to join, on a GPU: right, repeatable,
capturable, and the words they leave them in are zero again."""

import ctypes
import random

import pytest
import torch

from program_graphs import LERP, PADDLE_C
from side_by_side import assert_streams_keep_apart
from tilewright.compile import cuda
from tilewright.compile.cache import compiled
from tilewright.compile.counters import COUNTERS, counters
from tilewright.device import spec_of
from tilewright.fusion.cuda import target
from tilewright.impls.fused import graph_of
from tilewright.measure.verify import Verifier
from tilewright.op import Workload

pytestmark = pytest.mark.gpu

TEXTS = {
    "B": LERP.format(d="f32", g="16,3,224,224", x="16,1,1,1", e="16,3,224,224", w="1"),
    "C": PADDLE_C.removesuffix(")") + ", grads=[x,end])",
    "C, three": PADDLE_C,
    "halves": LERP.format(d="bf16", g="8,3,64,64", x="8,1,1,1", e="8,3,64,64", w="3,1,64"),
    "many rows": LERP.format(d="f32", g="70,90000", x="70,1", e="70,90000", w="90000"),
}
TEXTS["B"] = TEXTS["B"].replace("weight=f32[1]", "weight=0.5")
TEXTS["many rows"] = TEXTS["many rows"].removesuffix(")") + ", grads=[x,end])"


def joins(config):
    return getattr(config, "combine", "") == "last" or getattr(config, "blocks_per_row", 1) > 1


def executables(w, spec, tried):
    """Of the whole space, some add hundreds of terms one by one: verification refuses those."""
    graph = graph_of(w)
    found = [c for c in target.promising(graph, spec) if joins(c)]
    for config in random.Random(1).sample(found, min(tried, len(found))):
        built = compiled(target.task(graph, config, spec))
        yield config, target.executable(graph, config, w, built, spec)


def words(device):
    """What blocks count with on the current stream."""
    stream = torch.cuda.current_stream().cuda_stream
    address = counters.address(device.index, stream, COUNTERS)
    torch.cuda.synchronize()
    found = (ctypes.c_uint32 * COUNTERS)()
    copied = cuda.driver().cuMemcpyDtoH_v2(found, ctypes.c_uint64(address), ctypes.sizeof(found))
    assert copied == 0
    return found


@pytest.mark.parametrize("kind", TEXTS)
def test_partials_are_joined_and_their_words_are_zero_again(kind, device):
    w = Workload.parse(TEXTS[kind])
    verifier = Verifier(w, device)
    count = 0
    for config, executable in executables(w, spec_of(device.index), 10):
        verdict = verifier.check(executable)
        assert verdict.message == "", config
        assert verdict.deterministic, config
        assert not any(words(device)), config
        count += 1
    assert count


@pytest.mark.parametrize("kind", TEXTS)
def test_captured_kernels_join_what_called_ones_do(kind, device):
    w = Workload.parse(TEXTS[kind])
    tensors = w.operator.examples(w, "random", 0, device)
    for config, executable in executables(w, spec_of(device.index), 3):
        expected = executable(*tensors)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = executable(*tensors)
        for _ in range(200):  # without a pause: who joined too early, or too late, would tell
            graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(outs, expected, strict=True)), config


@pytest.mark.parametrize("kind", ["C", "C, three"])
def test_launches_on_several_streams_join_their_own_partials(kind, device):
    w = Workload.parse(TEXTS[kind])
    sets = [w.operator.examples(w, "random", seed, device) for seed in range(4)]
    _, executable = next(executables(w, spec_of(device.index), 1))
    assert_streams_keep_apart(executable, sets, rounds=20)
