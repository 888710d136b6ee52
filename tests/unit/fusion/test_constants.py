"""Constants and casts of every dtype in the middle of a function: as PyTorch has them, on the CPU
target, by the kernels for an H200, emulated, and by NVRTC for every architecture."""

import math

import pytest
import torch

import tilewright as tw
from constants_and_casts import FUNCTIONS, X
from emulated import Emulated
from tilewright.compile import cxx
from tilewright.compile.cache import compiled
from tilewright.device import DEVICES
from tilewright.errors import NoImplementation
from tilewright.fusion.cuda import target
from tilewright.impls.fused import graph_of
from tilewright.op import OPS
from tilewright.tensor_spec import TensorSpec

pytestmark = [
    pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing())),
    pytest.mark.usefixtures("forgets_functions"),
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_constants_and_casts_are_pytorch_s(function):
    own, expected = tw.fuse(function, name="constants")(X), function(X)
    w = OPS["constants"].workload(x=TensorSpec.of(X))
    graph = graph_of(w)
    h200 = DEVICES["h200"]
    emulated = Emulated(graph, target.heuristic(graph, h200), h200, w)(X)
    for results in (own, emulated):
        for result, right in zip(results, expected, strict=True):
            torch.testing.assert_close(result, right, rtol=0, atol=0, equal_nan=True)
    for name in ("a100", "h200", "b200"):
        task = target.task(graph, target.heuristic(graph, DEVICES[name]), DEVICES[name])
        assert compiled(task).resources.spill_bytes == 0


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.where(x > 0, 2**24 + 1, 0),
        lambda x: torch.where(x > 0, 2**62 + 1, -(2**62) - 1) + (x > 1).long(),
        lambda x: torch.zeros_like(x, dtype=torch.int64).masked_fill(x > 0, -(2**24) - 1),
    ],
)
def test_whole_numbers_that_fp32_has_not_are_chosen_exactly(function):
    found = tw.fuse(function, name="constants")(X)
    assert found.dtype == torch.int64
    assert torch.equal(found, function(X))


BESIDE = 1 + 2**-24
"""Between two numbers of fp32: its decimals are a little more, and read as fp32 the greater."""


def beside_a_number_of_fp32(x):
    return x + BESIDE, x * 1e-50, x * 1e39, x / 3e-46, x.double() * BESIDE


def test_numbers_between_those_of_fp32_are_rounded_once():
    x = torch.zeros(4)
    own, expected = tw.fuse(beside_a_number_of_fp32)(x), beside_a_number_of_fp32(x)
    w = OPS["beside_a_number_of_fp32"].workload(x=TensorSpec.of(x))
    graph, h200 = graph_of(w), DEVICES["h200"]
    config = target.heuristic(graph, h200)
    for results in (own, Emulated(graph, config, h200, w)(x)):
        for result, right in zip(results, expected, strict=True):
            torch.testing.assert_close(result, right, rtol=0, atol=0, equal_nan=True)
    assert compiled(target.task(graph, config, h200)).resources.spill_bytes == 0


def test_casts_are_not_compared_with_whole_numbers_that_fp32_has_not():
    def function(x):
        return x.long() == 2**24 + 1

    with pytest.raises(NoImplementation, match="16777217 beside whole numbers in f32, which holds"):
        tw.fuse(function, name="constants")(X)
    wide = torch.tensor([2.0**24, 2.0**24 + 1], dtype=torch.float64)
    assert tw.fuse(function, name="constants_wide")(wide).tolist() == function(wide).tolist()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_counts_that_would_wrap_are_refused(dtype):
    with pytest.raises(NoImplementation, match="integer arithmetic"):
        tw.fuse(lambda x: (x > 0).sum(dtype=dtype).float(), name="constants")(X)


def test_numbers_beyond_a_dtype_are_refused_in_pytorch_s_words():
    with pytest.raises(NoImplementation, match="cannot be converted to type int64_t"):
        tw.fuse(lambda x: torch.full_like(x, math.inf, dtype=torch.int64), name="constants")(X)
