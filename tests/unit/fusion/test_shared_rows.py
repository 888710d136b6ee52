"""Rows that blocks anywhere on the device share: what they compute, and where they are offered."""

import random
from dataclasses import replace

import pytest
import torch

from emulated import Emulated
from tilewright.compile import cxx
from tilewright.compile.cache import compiled
from tilewright.compile.counters import COUNTERS
from tilewright.device import DEVICES
from tilewright.dispatch.functions.fuse import fuse
from tilewright.fusion.cuda import target
from tilewright.fusion.cuda.partials import words_of_row
from tilewright.fusion.cuda.rows.schedule import RowSchedule
from tilewright.impls.fused import graph_of
from tilewright.measure.verify import Verifier
from tilewright.op import OPS, Workload
from tilewright.tensor_spec import TensorSpec

H200 = DEVICES["h200"]
PADDLE_B = "lerp_backward(grad_output=f32[16,3,224,224], x=f32[16,1,1,1], end=f32[16,3,224,224], weight=0.5)"  # noqa: E501
PADDLE_C = "lerp_backward(grad_output=f32[16,3,244,244], x=f32[16,1,1,1], end=f32[16,3,244,244], weight=f32[3,1,244], grads=[x,end])"  # noqa: E501
SMALL_C = "lerp_backward(grad_output={d}[4,3,20,{n}], x={d}[4,1,1,1], end={d}[4,3,20,{n}], weight={d}[3,1,{n}], grads=[x,end])"  # noqa: E501
SHARED = RowSchedule(2, 64, 1, 1, "registers", "two_pass", 1, 1, blocks_per_row=4)

emulation = pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))


def assert_right(w, config):
    graph = graph_of(w)
    assert target.space(graph, H200).why_not(config) is None
    verdict = Verifier(w, torch.device("cpu")).check(Emulated(graph, config, H200, w))
    assert verdict.message == "", config


@emulation
@pytest.mark.parametrize("storage", ["registers", "reread"])
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"row_threads": 32, "blocks_per_row": 16, "vector": 1},
        {"row_threads": 128, "blocks_per_row": 2, "min_blocks": 4},
        {"blocks_per_row": 8, "vector": 1, "tail": "predicated"},
    ],
    ids=str,
)
def test_blocks_sum_their_shares_of_a_row_and_the_last_to_begin_joins_them(storage, changed):
    w = Workload.parse(SMALL_C.format(d="f32", n=20))
    assert_right(w, replace(SHARED, storage=storage, **changed))


@emulation
@pytest.mark.usefixtures("late_warps")
def test_any_warp_may_be_late():
    assert_right(Workload.parse(SMALL_C.format(d="f32", n=20)), SHARED)


@emulation
def test_rows_of_halves_are_shared():
    assert_right(Workload.parse(SMALL_C.format(d="bf16", n=24)), replace(SHARED, vector=4))


@emulation
def test_several_sums_of_a_row_and_what_follows_from_them_are_shared():
    fuse(
        lambda a, b: (a.amax(1, keepdim=True), a * b, (a * b).mean(1, keepdim=True) * 2 + 1),
        name="two_of_a_row",
    )
    try:
        spec = TensorSpec("f32", (3, 1000))
        assert_right(OPS["two_of_a_row"].workload(a=spec, b=spec), SHARED)
    finally:
        OPS.remove("two_of_a_row")


def _offered(graph, device=H200):
    return target.space(graph, device).values["blocks_per_row"]


def test_rows_are_shared_where_nothing_of_a_row_waits_for_its_sums():
    for text, most in (
        (PADDLE_B, 128),
        (PADDLE_C, 128),
        ("softmax(x=f32[16,100000])", 1),
        ("layer_norm(x=f32[16,100000], weight=f32[100000], bias=f32[100000])", 1),
        (PADDLE_B.replace("f32", "f64"), 1),
        (SMALL_C.format(d="f32", n=20).replace("[4,", "[20000,"), 1),
    ):
        assert max(_offered(graph_of(Workload.parse(text)))) == most, text


def test_a_sample_has_rows_shared_by_clusters_and_by_blocks_anywhere():
    found = target.space(graph_of(Workload.parse(PADDLE_C)), H200).sample(random.Random(0), 100)
    assert len(found) == 100
    assert sum(c.blocks_per_row > 1 for c in found) > 20
    assert sum(c.cluster > 1 for c in found) > 20


def test_words_of_all_rows_fit_what_a_launch_may_count_with():
    for rows in (1, 16, 400, 3000):
        text = PADDLE_B.replace("[16,", f"[{rows},")
        blocks = max(_offered(graph_of(Workload.parse(text))))
        assert rows * words_of_row(blocks, 1) <= COUNTERS


@pytest.mark.parametrize(("device", "rows"), [("a100", 60), ("h200", 16), ("b200", 16)])
@pytest.mark.parametrize("text", [PADDLE_B, PADDLE_C], ids=["B", "C"])
def test_rows_of_paddles_gradients_are_shared_in_one_wave_without_spilling(text, device, rows):
    text = text.replace("[16,", f"[{rows},")
    graph, spec = graph_of(Workload.parse(text)), DEVICES[device]
    heuristic = target.heuristic(graph, spec)
    assert rows * heuristic.blocks_per_row <= spec.sms * heuristic.min_blocks
    shared = [c for c in target.promising(graph, spec) if c.blocks_per_row > 1]
    assert len(shared) > 20
    for config in [heuristic, *shared[::9]]:
        assert compiled(target.task(graph, config, spec)).resources.spill_bytes == 0, config


def test_a_block_leaves_its_partial_before_it_stores_what_the_row_holds():
    config = replace(SHARED, vector=4, row_threads=256, blocks_per_row=32)
    graph = graph_of(Workload.parse(PADDLE_C))
    kernel = target.task(graph, config, H200).source.partition('extern "C"')[2]
    assert kernel.index("take_ticket") < kernel.index("load<4") < kernel.index("leave_partial(")
    assert kernel.index("leave_partial(") < kernel.index("store<16>")
    assert kernel.index("store<16>") < kernel.index("join_partials<")
    assert "cluster" not in kernel
