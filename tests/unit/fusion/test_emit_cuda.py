"""Generated CUDA kernels, compiled for every architecture; what they compute is tests/gpu's."""

import gc
import math
import random
import re
from dataclasses import replace

import pytest
import torch

from tilewright.compile import together
from tilewright.compile.cache import cached, compiled, compiled_together
from tilewright.device import DEVICES
from tilewright.dispatch.functions.fuse import fuse
from tilewright.fusion.cuda import stages, target
from tilewright.fusion.cuda.rows.footprint import Footprint, estimated_registers
from tilewright.fusion.cuda.rows.schedule import RowSchedule
from tilewright.fusion.cuda.rows.space import SEARCHED, row_space
from tilewright.impl import IMPLS
from tilewright.impls.fused import graph_of
from tilewright.op import OPS, Workload
from tilewright.suite import SUITES

NORM = "bias_layer_norm(x=f16[8192,{h}], bias0=f16[{h}], bias1=f16[{h}], weight=f16[{h}], bias=f16[{h}])"  # noqa: E501
H200 = DEVICES["h200"]


def source(text, config, device=H200):
    return target.task(graph_of(Workload.parse(text)), config, device).source


LONG_SUITE = 200
"""Workloads: of so many, every third is compiled for other devices than an H200 too, of each three
in a row, which may be three operators at one width, another one."""


@pytest.mark.parametrize("suite", list(SUITES))
def test_the_heuristic_of_every_workload_of_every_suite_compiles_without_spilling(suite):
    tasks, workloads = {}, SUITES[suite].workloads()
    every = 1 if len(workloads) < LONG_SUITE else 3
    for n, w in enumerate(workloads):
        graph = None
        for spec in (H200, DEVICES["a100"], DEVICES["b200"])[: 1 if (n + n // 3) % every else 3]:
            if IMPLS["fused"].unsupported(w, spec) is not None:
                continue
            graph = graph or graph_of(w)
            config = target.heuristic(graph, spec)
            task = target.task(graph, config, spec)
            tasks.setdefault((task.flags, task.shared), {})[task] = w, config
    for of_one_kind in tasks.values():
        todo = [task for task in of_one_kind if not cached(task)]
        for k in range(0, len(todo), together.MOST):
            compiled_together(todo[k : k + together.MOST])
        for task, told in of_one_kind.items():
            assert compiled(task).resources.spill_bytes == 0, told


@pytest.mark.parametrize("width", [1000, 16384])
@pytest.mark.parametrize("device", ["a100", "h200"])
def test_schedules_of_every_kind_compile(device, width):
    graph, spec = graph_of(Workload.parse(NORM.format(h=width))), DEVICES[device]
    space = row_space(graph, spec)
    kinds = {}
    for c in space.sample(random.Random(width), 400):
        kinds.setdefault((c.storage, c.parameters, c.stages > 0, c.cluster > 1, c.moments), c)
    assert len(kinds) >= 6
    for config in random.Random(0).sample(list(kinds.values()), 6):
        assert compiled(target.task(graph, config, spec)).resources.registers > 0


def test_a_persistent_kernel_walks_rows_and_waits_for_the_batch_it_reads():
    config = RowSchedule(8, 128, 4, 1, "registers", "two_pass", 1, 1, stages=2, parameters="shared")
    text = source(NORM.format(h=4096), config)
    assert "first_row += row_step" in text
    assert text.count("await_batch<1>") == 1
    assert len(re.findall(r"enqueue<8, 16>\(", text)) == 2  # before the loop, and in it


def test_groups_of_a_block_wait_for_themselves_only():
    config = RowSchedule(8, 128, 4, 1, "registers", "two_pass", 1, 1, stages=2, parameters="shared")
    body = source(NORM.format(h=4096), config).partition('extern "C"')[2]
    loop = body.partition("first_row += row_step")[2]
    assert "group_sync(group, 128)" in loop
    assert "__syncthreads" not in loop


def test_one_joining_sweep_takes_two_buffers_in_turn():
    config = RowSchedule(4, 128, 1, 1, "registers", "two_pass", 1, 4, stages=1)
    one = source("rms_norm(x=f32[8192,4096], weight=f32[4096])", config)
    two = source("softmax(x=f32[8192,4096])", config)
    assert "[group + steps % 2 * 1]" in one
    assert "steps % 2" not in two


@pytest.mark.parametrize(
    "text",
    [
        NORM.format(h=65536).replace("f16", "f32"),
        "layer_norm_backward(grad_output=f16[512,16384], x=f16[512,16384], mean=f32[512,1],"
        " rstd=f32[512,1], weight=f16[16384])",
        "layer_norm(x=f64[2000,5140], weight=f64[5140])",
        "rms_norm_backward(grad_output=f64[1,999], x=f64[1,999], rstd=f64[1,1], weight=f64[999])",
    ],
)
def test_shared_memory_is_never_more_than_the_space_reckons(text):
    graph = graph_of(Workload.parse(text))
    footprint = Footprint(target.one_pass(graph, H200))
    told = 0
    for config in target.space(graph, H200).sample(random.Random(0), 60):
        kernel, launch = target.emit(graph, config, H200)
        assert launch.shared_bytes <= footprint.shared_bytes(config), config
        exchanged = exchanged_bytes(kernel)
        assert exchanged <= footprint.exchanged_bytes(config), config
        told += exchanged > 0
    assert told > 0


def exchanged_bytes(kernel):
    """Of a block's shared memory that is no row's: barriers and what warps tell each other."""
    sizes = {"u64": 8, "i64": 8, "double": 8, "float": 4, "Moments<float>": 8, "Scaled<float>": 8}
    sizes |= {"Moments<double>": 16, "Scaled<double>": 16}
    arrays = r"__shared__ (\S+) (?:joined\d|turn|all_\w+)((?:\[\d+\])+);"
    return sum(
        sizes[kind] * math.prod(map(int, re.findall(r"\d+", dims)))
        for kind, dims in re.findall(arrays, kernel)
    )


def test_tensor_cores_add_up_halves_and_a_warp_far_from_zero_goes_over_them_again():
    config = RowSchedule(4, 256, 1, 1, "registers", "tensor_cores", 1, 1)
    text = source(NORM.format(h=5140), config)
    assert "halves[1] = {};" in text  # past the end of the row: zeros
    assert text.count("add_halves(gram[r], k, halves[r])") == 1
    assert "if (!near) {" in text
    space = row_space(graph_of(Workload.parse(NORM.format(h=512))), H200)
    assert "whole warps" in space.why_not(replace(config, row_threads=16, rows_per_block=2))
    in_fp32 = graph_of(Workload.parse("layer_norm(x=f32[64,4096], weight=f32[4096])"))
    assert "tensor_cores" not in row_space(in_fp32, H200).values["moments"]


@pytest.mark.parametrize("cluster", [1, 4])
def test_rows_taken_in_turn_are_told_with_the_first_reduction_alone(cluster):
    config = RowSchedule(
        8, 64, 4, 1, "registers", "two_pass", cluster, 1, stages=2, parameters="shared",
        in_turn=True,
    )  # fmt: skip
    text = source(NORM.format(h=4096), config).partition("while (batch < batches)")[2]
    assert text.count("take_turn(turns, batches)") == 1
    assert text.count("coming[2] = turn[group];") == 1
    _, second = sorted(set(re.findall(r"all_acc\d+\[", text)))
    assert text.index("coming[2] = turn[group];") < text.index(second)
    assert "(coming[1] * 1)" in text  # two stages ahead
    assert "row_step" not in text
    _, launch = target.emit(graph_of(Workload.parse(NORM.format(h=4096))), config, H200)
    assert launch.counters == 1
    assert launch.signature == "PPPPPPqP"


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_shared_memory_of_sums_over_rows_is_no_more_than_was_reckoned(dtype):
    x, of_rows = f"{dtype}[8192,1032]", f"{dtype}[8192,1]"
    given = f"grad_output={x}, x={x}, mean={of_rows}, rstd={of_rows}, weight={dtype}[1032]"
    graph = graph_of(Workload.parse(f"layer_norm_backward({given})"))
    footprint = Footprint(target.one_pass(graph, H200))
    for config in target.space(graph, H200).sample(random.Random(0), 40):
        launch = target.emit(graph, config, H200)[1]
        assert launch.shared_bytes <= footprint.shared_bytes(config), config


def test_rows_are_not_taken_in_turn_by_parts_of_a_warp():
    space = row_space(graph_of(Workload.parse("softmax(x=f16[8192,256])")), H200)
    config = RowSchedule(8, 32, 8, 1, "registers", "two_pass", 1, 1, stages=2, in_turn=True)
    assert space.why_not(config) is None
    narrow = replace(config, row_threads=16, min_blocks=2)
    assert space.why_not(replace(narrow, in_turn=False)) is None
    assert space.why_not(narrow) == (
        "rows are taken in turn by warps of a persistent kernel that adds up no columns"
    )


def test_a_search_begins_with_persistent_and_plain_schedules_in_every_way_to_walk():
    graph = graph_of(Workload.parse(NORM.format(h=16384)))
    found = target.promising(graph, H200)
    assert target.heuristic(graph, H200) in found
    assert len(found) == len(set(found)) <= 128
    assert all(c in row_space(graph, H200) for c in found)
    for name in ("persistent", "in_turn", "contiguous"):
        assert {getattr(c, name) for c in found} == {False, True}
    assert {c.moments for c in found} >= {"two_pass", "tensor_cores"}
    pointwise = graph_of(Workload.parse("lerp(x=f32[64,64], end=f32[64,64], weight=0.5)"))
    space = target.space(pointwise, H200)
    assert all(c in space for c in target.promising(pointwise, H200))


def test_sums_over_rows_are_added_up_by_a_fixed_walk():
    backward = (
        "layer_norm_backward(grad_output=f16[512,4096], x=f16[512,4096], mean=f32[512,1],"
        " rstd=f32[512,1], weight=f16[4096])"
    )
    graph = graph_of(Workload.parse(backward))
    sampled = target.space(graph, H200).sample(random.Random(0), 60)
    assert sampled
    assert not any(config.in_turn for config in sampled)


BACKWARD = (
    "layer_norm_backward(grad_output=f16[8192,{h}], x=f16[8192,{h}], mean=f32[8192,1],"
    " rstd=f32[8192,1], weight=f16[{h}])"
)


@pytest.mark.parametrize("text", [NORM, BACKWARD])
def test_a_sample_finds_schedules_where_few_of_them_fit(text):
    graph = graph_of(Workload.parse(text.format(h=65536).replace("f16", "f32")))
    assert target.space(graph, H200).sample(random.Random(0), 100)


@pytest.mark.parametrize("device", ["h200", "b200"])
@pytest.mark.parametrize("width", [768, 1280])
def test_a_search_begins_with_one_block_of_even_groups_on_each_sm_that_does_not_spill(
    width, device
):
    graph, spec = graph_of(Workload.parse(BACKWARD.format(h=width))), DEVICES[device]
    found = [
        c
        for c in target.promising(graph, spec)
        if c.min_blocks == 1 and c.block_threads >= 448 and c.rows_per_thread == 1
    ]
    spilled = [compiled(target.task(graph, c, spec)).resources.spill_bytes for c in found[:4]]
    assert 0 in spilled
    groups = {c.rows_per_block for c in found}
    assert any(-(-8192 // (spec.sms * n)) * spec.sms * n < 1.1 * 8192 for n in groups)


def two_sums(x):
    scaled = torch.tanh(x)
    first = scaled.sum(0)
    return scaled.softmax(-1), first, (x * x).sum(0)


def test_the_kernel_that_joins_sums_over_rows_is_at_the_lines_of_the_sums():
    fuse(two_sums)
    try:
        graph, spec = graph_of(Workload.parse("two_sums(x=f32[4096,768])")), DEVICES["h200"]
        rows, joined = target.describe(graph, target.heuristic(graph, spec), spec)
        line = two_sums.__code__.co_firstlineno
        assert rows.endswith("reduces axes [1], [0]") or rows.endswith("reduces axes [0], [1]")
        assert joined.endswith(f"sees all rows ({__file__}:{line + 2}, {__file__}:{line + 3})")
    finally:
        OPS.remove("two_sums")


@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
@pytest.mark.parametrize("width", [768, 1600])
def test_a_kernel_whose_blocks_meet_needs_no_second_one_and_does_not_spill(width, device):
    graph, spec = graph_of(Workload.parse(BACKWARD.format(h=width))), DEVICES[device]
    config = next(c for c in target.promising(graph, spec) if c.combine == "grid")
    task = target.task(graph, config, spec)
    assert task.source.count("__global__") == 1
    assert "release_next();" not in task.source.partition("__global__")[2]
    assert compiled(task).resources.spill_bytes == 0
    assert len(target.describe(graph, config, spec)) == 1


def test_the_second_kernel_is_let_in_at_the_end_of_the_rows_or_early():
    graph = graph_of(Workload.parse(BACKWARD.format(h=768)))
    config = target.heuristic(graph, H200)
    for early in (False, True):
        text = target.task(graph, replace(config, early=early), H200).source.partition("fused(")[2]
        assert (text.index("release_next();") < text.index("await_batch<")) == early
    why_not = target.space(graph, H200).why_not(replace(config, early=True, combine="grid"))
    assert "no second kernel" in why_not


def test_rows_of_the_last_round_are_dealt_out_over_blocks_not_over_the_groups_of_the_first():
    graph = graph_of(Workload.parse(BACKWARD.format(h=768)))
    config = target.heuristic(graph, H200)
    assert config.rows_per_block > 1
    text = target.task(graph, config, H200).source
    assert "i64 first_row = (group * blocks + block) * 1;" in text
    assert "first_row + r < count" not in text  # each group walks rows that exist


def test_no_asynchronous_copy_has_a_cache_policy():
    # ptxas before 13.4.59 makes illegal instructions of them
    graph = graph_of(Workload.parse(BACKWARD.format(h=768)))
    config = target.heuristic(graph, H200)
    for streams in (False, True):
        text = target.task(graph, replace(config, stream_loads=streams), H200).source
        assert "cp.async" in text
        assert "createpolicy" not in text


@pytest.mark.parametrize("h", [2048, 65536])
def test_a_search_of_sums_over_rows_begins_with_kernels_that_differ(h):
    graph = graph_of(Workload.parse(BACKWARD.format(h=h)))
    found = target.promising(graph, H200)
    assert len({target.task(graph, c, H200).source for c in found}) == len(found) > 20


def test_what_an_untuned_call_asked_of_a_graph_is_not_kept_after_it():
    def footprints():
        gc.collect()
        return sum(type(o) is Footprint for o in gc.get_objects())

    graph, before = graph_of(Workload.parse("softmax(x=f16[8192,16384])")), footprints()
    target.heuristic(graph, H200)
    assert footprints() <= before


def test_the_untuned_schedule_is_sought_once_however_many_configs_are_emitted(monkeypatch):
    graph = replace(graph_of(Workload.parse(NORM.format(h=1000))))
    sought = []
    found = stages.row_heuristic(graph, H200)
    monkeypatch.setattr(stages, "row_heuristic", lambda *_: sought.append(1) or found)
    for way in (True, False):
        target.task(graph, replace(found, rematerialize=way), H200)
    assert len(sought) == 1


def test_only_kernels_that_sum_over_rows_meet():
    assert target.space(graph_of(Workload.parse(NORM.format(h=768))), H200).values["combine"] == (
        "kernel",
    )


def test_a_scheduler_has_a_quarter_of_the_registers_for_its_warps():
    graph = graph_of(Workload.parse(BACKWARD.format(h=1280)))
    config = RowSchedule(
        8, 32, 9, 1, "registers", "two_pass", 1, 1, stages=2, parameters="shared",
        rematerialize=True,
    )  # fmt: skip
    space = target.space(graph, H200)
    room = H200.registers_left(9 * 32, 1)
    assert room == H200.registers_left(12 * 32, 1)  # 9 warps: as few for each as 12
    needed = estimated_registers(config, Footprint(target.one_pass(graph, H200)))
    assert needed > room
    assert (needed > SEARCHED * room) == ("registers" in str(space.constraint(config)))
    assert replace(config, rows_per_block=8) in space


@pytest.mark.parametrize(
    ("row_threads", "groups", "fits"), [(32, 16, True), (64, 15, True), (64, 16, False)]
)
def test_groups_of_several_warps_have_a_barrier_each(row_threads, groups, fits):
    graph = graph_of(Workload.parse(BACKWARD.format(h=256)))
    config = RowSchedule(4, row_threads, groups, 1, "registers", "two_pass", 1, 1, stages=2)
    reason = target.space(graph, H200).constraint(config)
    assert (reason is None) == fits, reason


def test_rematerialized_values_are_widened_again_in_every_sweep():
    config = RowSchedule(8, 256, 1, 1, "registers", "two_pass", 1, 1, rematerialize=True)
    assert source(NORM.format(h=4096), config).count("forget_widened(keep") == 2
    assert "forget_widened(keep" not in source(
        NORM.format(h=4096), replace(config, rematerialize=False)
    )


def test_vectors_follow_the_alignment_of_rows_and_never_cross_them():
    graph = graph_of(Workload.parse(NORM.format(h=5140)))  # rows are 8-byte aligned
    narrow = RowSchedule(4, 256, 1, 1, "registers", "two_pass", 1, 1)
    assert "load<4, 8, " in source(NORM.format(h=5140), narrow)
    assert "vector=8" in row_space(graph, H200).why_not(replace(narrow, vector=8))


@pytest.mark.parametrize("suite", ["bias_layer_norm_gpt", "norms_sweep"])
@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
def test_untuned_every_width_is_read_by_vectors(suite, device):
    """Of 16 bytes where rows are aligned to them, or two of 8; of 5140 halves by 8."""
    for w in SUITES[suite].workloads():
        config = IMPLS["fused"].heuristic(w, DEVICES[device])
        assert config.vector > 1, w
        if isinstance(config, RowSchedule) and not config.shifted:
            wide = config.vector * w.main.itemsize
            assert wide in {8, math.gcd(w.main.shape[-1] * w.main.itemsize, 16)}, w
            loads = rf"(load|enqueue)<{config.vector}, {wide}\b"
            assert config.bulk or re.search(loads, source(str(w), config)), w


def test_a_space_says_why_a_schedule_is_not_in_it():
    space = row_space(graph_of(Workload.parse(NORM.format(h=4096))), H200)
    persistent = RowSchedule(8, 128, 4, 1, "registers", "two_pass", 1, 1, stages=2)
    assert persistent in space
    for change, reason in (
        ({"row_threads": 1024, "rows_per_block": 1}, "idle"),
        ({"storage": "shared"}, "keeps its row in registers"),
        ({"rows_per_block": 1, "min_blocks": 1}, "fewer than 256 threads"),
        ({"unroll": 2}, "all turns over a row in registers are unrolled"),
        ({"storage": "shared", "unroll": 3, "row_threads": 256}, "unroll=3 of 2 turns"),
        ({"row_threads": 32, "rows_per_block": 8, "rows_per_thread": 4}, "registers a thread"),
        (
            {
                "stages": 3,
                "rows_per_thread": 2,
                "vector": 4,
                "rows_per_block": 8,
                "row_threads": 64,
                "parameters": "shared",
            },
            "shared memory",
        ),
    ):
        assert reason in space.why_not(replace(persistent, **change)), change


def test_slots_are_filled_in_bulk_again_once_all_threads_of_the_row_have_read_theirs():
    bulk = RowSchedule(
        8, 128, 2, 1, "registers", "two_pass", 1, 1, stages=2, parameters="shared", bulk=True
    )
    loop = source(NORM.format(h=4096), bulk).partition("for (; first_row")[2]
    assert loop.index("barrier_wait(") < loop.index("ahead0_") < loop.index("group_sync(")
    assert loop.index("group_sync(") < loop.index("copy_bulk(") < loop.index("lap ^=")
    one_warp = replace(bulk, row_threads=32, rows_per_block=8)
    loop = source(NORM.format(h=768), one_warp).partition("for (; first_row")[2]
    assert loop.index("__syncwarp();") < loop.index("copy_bulk(")
    in_clusters = replace(bulk, cluster=2)
    loop = source(NORM.format(h=4096), in_clusters).partition("for (; first_row")[2]
    assert loop.index("barrier_wait(&joined0") < loop.index("group_sync(") < loop.index("copy_bulk")


@pytest.mark.parametrize("width", [520, 768, 4096, 65536])
@pytest.mark.parametrize("device", ["h200", "b200"])
def test_kernels_whose_rows_come_in_bulk_compile(width, device):
    cluster = 8 if width == 65536 else 1
    bulk = RowSchedule(
        8, 128, 2, 1, "registers", "two_pass", cluster, 1, stages=2, parameters="shared", bulk=True
    )
    graph = graph_of(Workload.parse(NORM.format(h=width)))
    if width == 520:
        bulk = replace(bulk, row_threads=32, rows_per_block=8)
    assert bulk in row_space(graph, DEVICES[device])
    assert compiled(target.task(graph, bulk, DEVICES[device])).resources.spill_bytes == 0


def test_rows_come_in_bulk_where_a_copy_engine_can_fetch_them():
    def offered(text, device=H200):
        return True in row_space(graph_of(Workload.parse(text)), device).values["bulk"]

    assert offered(NORM.format(h=4096))
    assert not offered(NORM.format(h=5140))  # 8-byte rows
    assert not offered(NORM.format(h=4096), DEVICES["a100"])
    assert not offered("rms_norm(x=f16[512,4096]@align8, weight=f16[4096])")
    space = row_space(graph_of(Workload.parse(NORM.format(h=4096))), H200)
    bulk = RowSchedule(8, 128, 2, 1, "registers", "two_pass", 1, 1, stages=2, bulk=True)
    assert bulk in space
    for change in ({"stages": 0, "parameters": "shared"}, {"contiguous": True}):
        assert "in bulk" in space.why_not(replace(bulk, **change))


def test_only_what_is_read_once_streams_past_the_cache():
    text = "lerp(x=bf16[4096,4096], end=bf16[4096], weight=0.3)"
    config = target.heuristic(graph_of(Workload.parse(text)), H200)
    loads = re.findall(
        r"load<V, [^;]*, (true|false)>\((in\d)", source(text, replace(config, stream_loads=True))
    )
    assert loads == [("true", "in0"), ("false", "in1")]


def test_the_greatest_of_widened_halves_is_found_among_the_halves():
    config = RowSchedule(8, 64, 1, 1, "registers", "two_pass", 1, 1)
    text = source("softmax(x=bf16[64,2048])", config)
    assert "Max::join(acc2[r], cast<float>(fold_pairs<Max>(v0)))" in text
    in_fp32 = source("softmax(x=f32[64,2048])", replace(config, vector=4))
    assert "cast<float>(fold_pairs" not in in_fp32


def test_turns_that_are_full_are_peeled_off_the_last_or_checked_like_it():
    w = Workload.parse("softmax(x=f16[64,5140])")
    config = IMPLS["fused"].heuristic(w, H200)
    peeled, predicated = (
        IMPLS["fused"].task(replace(config, tail=tail), w, H200).source
        for tail in ("peeled", "predicated")
    )
    vectors = 5140 // config.vector
    full = vectors // (config.row_threads * config.cluster)
    assert f"if (k < {full} || vector < {vectors})" in peeled
    assert predicated == peeled.replace(f"k < {full} || vector", "vector")
