"""Rows that begin at any place of an aligned vector, in row kernels and in pointwise ones."""

import itertools
import random
import re
from dataclasses import replace

import pytest
import torch

from emulated import Emulated
from tilewright.compile import cxx
from tilewright.compile.cache import compiled
from tilewright.device import DEVICES
from tilewright.dispatch.functions.fuse import fuse
from tilewright.fusion.cuda import target
from tilewright.fusion.cuda.kernel import Launch
from tilewright.fusion.cuda.rows.schedule import RowSchedule
from tilewright.impls.fused import graph_of
from tilewright.measure.verify import Verifier
from tilewright.op import Workload
from tilewright.suite import SUITES

H200 = DEVICES["h200"]


def space(text):
    return target.space(graph_of(Workload.parse(text)), H200)


def heuristic(text):
    return target.heuristic(graph_of(Workload.parse(text)), H200)


def test_few_odd_rows_of_halves_are_read_16_bytes_at_a_time():
    text = "softmax(x=bf16[300,50257])"
    config = heuristic(text)
    assert (config.vector, config.shifted) == (8, True)
    source = target.task(graph_of(Workload.parse(text)), config, H200).source
    assert re.search(r"load_within<8, 16, true>\(row_in0\[r\]", source)
    assert re.search(r"store_within<16>\(row_out0\[r\]", source)


@pytest.mark.parametrize("width", [2561, 5141, 5373, 8193, 16381, 16385, 32769, 49147, 50257])
@pytest.mark.parametrize("op", ["softmax", "layer_norm"])
def test_blocks_of_many_odd_rows_share_an_sm_and_read_8_bytes_at_a_time(op, width):
    weights = f", weight=bf16[{width}], bias=bf16[{width}]" if op == "layer_norm" else ""
    text = f"{op}(x=bf16[8192,{width}]{weights})"
    config = heuristic(text)
    assert (config.vector, config.shifted, config.storage) == (4, True, "registers")
    assert config.min_blocks >= 2
    assert config.min_blocks * config.block_threads >= 640
    kernel = compiled(target.task(graph_of(Workload.parse(text)), config, H200))
    assert kernel.resources.spill_bytes == 0


def test_rows_of_8_byte_alignment_keep_their_vectors():
    config = heuristic("softmax(x=f16[8192,5140])")
    assert (config.vector, config.shifted) == (4, False)
    assert True in space("softmax(x=f16[8192,5140])").values["shifted"]  # the tuner may try


def test_rows_of_input_and_output_that_begin_differently_are_not_shifted():
    padded = space("softmax(x=bf16[300,71]@strides(80,1))")
    assert padded.values["shifted"] == (False,)
    assert padded.values["vector"] == (1,)


@pytest.mark.parametrize("n", [1, 16])
def test_rows_that_add_up_the_same_are_not_shifted(forgets_functions, n):
    """Each would do so in an order of its own, and all write it to one place."""

    def with_first(x):
        return x - x.mean(-1, keepdim=True), x[:1].mean(-1)

    def with_weight(x, weight):
        return x.softmax(-1) * weight.softmax(-1)

    fuse(with_first), fuse(with_weight)
    first = space(f"with_first(x=f32[{n},67])")
    assert first.values["shifted"] == ((False, True) if n == 1 else (False,))
    weight = space(f"with_weight(x=f16[{n},67], weight=f16[67])")
    assert weight.values["shifted"] == ((False, True) if n == 1 else (False,))


def test_a_space_says_which_schedules_shift():
    found, config = space("softmax(x=f16[100,1003])"), heuristic("softmax(x=f16[100,1003])")
    assert config in found
    assert "shifted=False" in found.why_not(replace(config, shifted=False))
    assert "walked one by one" in found.why_not(replace(config, rows_per_thread=2))
    assert "adds up columns only" in found.why_not(replace(config, stages=1))


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
    for config in (*configs[:4], replace(configs[0], tail="predicated")):
        executable = Emulated(graph_of(w), config, H200, w)
        assert verifier.check(executable).message == "", config


LAYER_NORM = (
    "layer_norm_backward(grad_output={d}[{r},{h}], x={d}[{r},{h}], mean=f32[{r},1], "
    "rstd=f32[{r},1], weight={d}[{h}])"
)
RMS_NORM = (
    "rms_norm_backward(grad_output={d}[{r},{h}], x={d}[{r},{h}], rstd=f32[{r},1], weight={d}[{h}])"
)
LERP = "lerp_backward(grad_output={d}[{r},{h}], x={d}[{r},{h}], end={d}[{h}], weight=0.3)"


@pytest.mark.parametrize("width", [769, 5141, 12289, 20481, 32769])
@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize("text", [LAYER_NORM, RMS_NORM, LERP], ids=lambda t: t.partition("(")[0])
def test_gradients_of_odd_rows_are_one_pass_by_8_bytes_or_more(text, dtype, width):
    text = text.format(d=dtype, r=8192, h=width)
    graph, config = graph_of(Workload.parse(text)), heuristic(text)
    assert target.one_pass(graph, H200) is not None
    assert config.shifted
    wide = config.vector * (2 if dtype == "f16" else 4)
    assert wide >= 8
    source = target.task(graph, config, H200).source
    unchecked, checked = re.search(
        r"if \(row \+ 1 < count\)([^\0]*?)else([^\0]*?)close", source
    ).groups()
    assert f"enqueue<{config.vector}, {wide}>(" in unchecked
    assert "count - 1 - row" in checked
    assert "count" not in unchecked
    assert re.search(r"store_within<4>\(partials", source)


@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
@pytest.mark.parametrize("w", SUITES["odd_widths"].workloads(), ids=str)
def test_odd_widths_do_not_spill_and_fill_an_sm(w, device):
    """Of wide rows with 8 KiB on an SM, not 16, took twice the time on an H100."""
    graph, spec = graph_of(w), DEVICES[device]
    config = target.heuristic(graph, spec)
    assert compiled(target.task(graph, config, spec)).resources.spill_bytes == 0
    if isinstance(config, RowSchedule):
        rows = config.min_blocks * config.rows_per_block / config.cluster
        wide = 2 * graph.space[-1] >= 1 << 14
        assert rows * 2 * graph.space[-1] >= (12000 if wide else 6000)
    else:
        assert spec.capability < 90  # no clusters


def test_sums_of_samples_are_not_shifted(forgets_functions):
    def sums_of_samples(x):
        y = x - x.mean(-1, keepdim=True)
        return y, y.sum(1)

    fuse(sums_of_samples)
    assert space("sums_of_samples(x=f16[3,301,1031])").values["shifted"] == (False,)


@pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))
@pytest.mark.parametrize(
    ("text", "changed"),
    [
        (LAYER_NORM.format(d="f16", r=37, h=1003), {"vector": 8}),
        (LAYER_NORM.format(d="f16", r=37, h=1003), {"vector": 4, "combine": "grid", "stages": 3}),
        (LAYER_NORM.format(d="f16", r=5, h=1003), {"parameters": "registers", "stages": 0}),
        (LAYER_NORM.format(d="f16", r=37, h=1003), {"vector": 4, "cluster": 2}),
        (RMS_NORM.format(d="bf16", r=50, h=302), {"vector": 8, "parameters": "shared"}),
        (RMS_NORM.format(d="bf16", r=50, h=301), {"parameters": "shared", "widened": True}),
        (
            LAYER_NORM.format(d="f32", r=19, h=131),
            {"row_threads": 32, "rows_per_block": 8, "min_blocks": 1},
        ),
        (LAYER_NORM.format(d="f32", r=19, h=130), {"vector": 4, "row_threads": 32}),
        (LERP.format(d="f16", r=60, h=515), {"vector": 8, "early": True, "row_threads": 32}),
        (RMS_NORM.format(d="f64", r=19, h=131).replace("f32", "f64"), {}),
        (LERP.format(d="f16", r=700, h=131), {"row_threads": 32, "rows_per_block": 8}),
    ],
)
def test_sums_over_shifted_rows_give_what_torch_gives_and_touch_nothing_outside(text, changed):
    w = Workload.parse(text)
    base = RowSchedule(2, 64, 2, 1, "registers", "two_pass", 1, 4, stages=2, shifted=True)
    config = replace(base, **changed)
    assert space(text).why_not(config) is None, config
    verdict = Verifier(w, torch.device("cpu")).check(Emulated(graph_of(w), config, H200, w))
    assert verdict.message == ""


def test_groups_that_share_a_warp_walk_no_shifted_rows_of_columns():
    """Where one has no row left it would go along with one that begins elsewhere."""
    narrow = space(LERP.format(d="f16", r=700, h=35))
    config = RowSchedule(8, 8, 16, 1, "registers", "two_pass", 1, 2, stages=2, shifted=True)
    assert "whole warps" in narrow.why_not(config)


@pytest.mark.parametrize("multiple", [1, 2, 4, 8])
@pytest.mark.parametrize("cluster", [1, 2, 8])
@pytest.mark.parametrize("rows", [1, 5, 64, 1000, 100_000])
def test_blocks_whose_rows_must_begin_alike_are_a_multiple(multiple, cluster, rows):
    made = Launch(256, 2, 0, cluster, "", persistent=True, multiple=multiple)
    for resident in (132, 264, 16):
        blocks = made.walking(rows, resident)
        assert blocks % (multiple * cluster) == 0
        assert 0 < blocks <= max(resident, multiple * cluster)
        enough = -(-rows // 2) + multiple
        assert blocks // cluster <= enough
        least = min(-(-rows // 2), resident // cluster - multiple + 1)
        assert blocks // cluster >= least


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
