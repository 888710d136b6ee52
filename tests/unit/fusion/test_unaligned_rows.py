"""Rows that begin at any place of an aligned vector, in row kernels and in pointwise ones."""

import itertools
import random
import re
from dataclasses import replace

import pytest
import torch

from emulated import Emulated
from tilewright.compile import cxx
from tilewright.device import DEVICES
from tilewright.fusion.cuda import target
from tilewright.impls.fused import graph_of
from tilewright.measure.verify import Verifier
from tilewright.op import Workload

H200 = DEVICES["h200"]


def space(text):
    return target.space(graph_of(Workload.parse(text)), H200)


def heuristic(text):
    return target.heuristic(graph_of(Workload.parse(text)), H200)


def test_odd_rows_of_halves_are_read_16_bytes_at_a_time():
    text = "softmax(x=bf16[4096,50257])"
    config = heuristic(text)
    assert (config.vector, config.shifted) == (8, True)
    source = target.task(graph_of(Workload.parse(text)), config, H200).source
    assert re.search(r"load_within<8, 16, true>\(row_in0\[r\]", source)
    assert re.search(r"store_within<16>\(row_out0\[r\]", source)


def test_rows_of_8_byte_alignment_keep_their_vectors():
    config = heuristic("softmax(x=f16[8192,5140])")
    assert (config.vector, config.shifted) == (4, False)
    assert True in space("softmax(x=f16[8192,5140])").values["shifted"]  # the tuner may try


def test_rows_of_input_and_output_that_begin_differently_are_not_shifted():
    padded = space("softmax(x=bf16[300,71]@strides(80,1))")
    assert padded.values["shifted"] == (False,)
    assert padded.values["vector"] == (1,)


def test_a_space_says_which_schedules_shift():
    found, config = space("softmax(x=f16[100,1003])"), heuristic("softmax(x=f16[100,1003])")
    assert config in found
    assert "shifted=False" in found.why_not(replace(config, shifted=False))
    assert "walked one by one" in found.why_not(replace(config, rows_per_thread=2))


@pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))
@pytest.mark.parametrize(
    "text",
    [
        "softmax(x=f16[37,1003])",
        "layer_norm(x=bf16[19,301], weight=bf16[301], bias=bf16[301])",
        "softmax(x=f64[140,131])",
        "rms_norm(x=f32[1,5001], weight=f32[5001])",
        "softmax(x=f16[16,15])",
    ],
)
def test_shifted_rows_give_what_torch_gives_and_touch_nothing_outside(text):
    w = Workload.parse(text)
    verifier, found, base = Verifier(w, torch.device("cpu")), space(text), heuristic(text)
    choices = itertools.product(found.values["vector"], ("registers", "shared", "reread"))
    shifted = [replace(base, vector=v, storage=s, shifted=True) for v, s in choices]
    configs = [c for c in shifted if c in found]
    assert len({c.storage for c in configs}) == 3
    for config in configs[:4]:
        executable = Emulated(graph_of(w), config, H200, w)
        assert verifier.check(executable).message == "", config


def test_steps_on_odd_rows_take_elements_in_the_order_of_memory():
    text = "lerp(x=f16[4096,515], end=f16[515], weight=0.3)"
    config = heuristic(text)
    assert (config.vector, config.flat) == (8, True)
    source = target.task(graph_of(Workload.parse(text)), config, H200).source
    assert re.search(r"gather_at<V>\(in1, offsets\d\)", source)
    assert "load<V, (WIDE ? 16 : 2)," in source
    assert "flat=True" in space(text).why_not(replace(config, vector=1))
    assert not heuristic("lerp(x=f16[4096,516], end=f16[516], weight=0.3)").flat


@pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))
@pytest.mark.parametrize(
    "text",
    [
        "lerp(x=f32[40,513], end=f32[513], weight=0.3)",
        "lerp(x=f16[7,5,33], end=f16[7,1,33], weight=f16[5,1])",
        "lerp(x=bf16[50,515]@strides(600,1), end=bf16[515], weight=0.3)",
    ],
)
def test_flat_vectors_give_what_torch_gives(text):
    w = Workload.parse(text)
    verifier = Verifier(w, torch.device("cpu"))
    flat = [c for c in space(text).sample(random.Random(0), 40) if c.flat]
    for config in (heuristic(text), flat[0]):
        assert config.flat
        assert verifier.check(Emulated(graph_of(w), config, H200, w)).message == "", config
