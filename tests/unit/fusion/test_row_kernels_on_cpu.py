"""Row kernels under each kind of schedule, run on a CPU."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from emulated import Emulated
from row_schedules import (
    FAR,
    MIXED,
    MIXED_SCHEDULES,
    PERSISTENT,
    STRIDED,
    assert_far_means_right,
)
from row_schedules import NORM as ONE_NORM
from tilewright.compile import cxx
from tilewright.compile.cache import compiled
from tilewright.device import DEVICES, spec_of
from tilewright.dispatch.functions.fuse import fuse
from tilewright.fusion.cuda import target
from tilewright.fusion.cuda.rows.footprint import Footprint
from tilewright.fusion.cuda.rows.kernel import RowKernel
from tilewright.fusion.cuda.rows.schedule import RowSchedule
from tilewright.impl import IMPLS
from tilewright.impls.fused import graph_of
from tilewright.measure.verify import Verifier
from tilewright.op import OPS, Workload
from tilewright.tensor_spec import DTYPES, TensorSpec

pytestmark = pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))
H200 = DEVICES["h200"]
NORM = "bias_layer_norm(x=f16[{r},{h}], bias0=f16[{h}], bias1=f16[{h}], weight=f16[{h}], bias=f16[{h}])"  # noqa: E501


def emulated(text, config):
    w = Workload.parse(text)
    return w, Emulated(graph_of(w), config, H200, w)


def check(text, config):
    w, executable = emulated(text, config)
    verdict = Verifier(w, torch.device("cpu")).check(executable)
    assert verdict.message == "", config


@pytest.mark.parametrize("rows", [1, 5, 31])
@pytest.mark.parametrize(
    "changed",
    [
        {"stages": 2},
        {"stages": 0},
        {"stages": 1, "moments": "merge"},
        {"stages": 1, "rows_per_thread": 2, "rows_per_block": 2},
        {"stages": 1, "row_threads": 32, "rows_per_block": 8, "parameters": "registers"},
    ],
    ids=str,
)
def test_rows_taken_in_turn_are_all_walked_and_the_counter_is_put_back(rows, changed):
    check(NORM.format(r=rows, h=500), replace(PERSISTENT, in_turn=True, **changed))


@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize(
    "text",
    [
        *(f"softmax(x={dtype}[{{r}},{h}])" for dtype in ("f16", "f32") for h in (768, 1000, 4096)),
        "softmax(x=bf16[{r},1604])",
        *(f"rms_norm(x=f16[{{r}},{h}], weight=f16[{h}])" for h in (1028, 1280, 2048)),
        "rms_norm(x=f32[{r},1000], weight=f32[1000])",
    ],
)
def test_what_many_narrow_rows_get_untuned_is_right_for_the_last_ones(text, rows):
    many = Workload.parse(text.format(r=8192))
    config = IMPLS["fused"].heuristic(many, DEVICES["h100"])
    assert config.storage == "shared" or config.rows_per_thread == 2
    check(text.format(r=rows), config)


@pytest.mark.parametrize("rows", [1, 6, 7])
@pytest.mark.parametrize(("dtype", "width"), [("bf16", 768), ("f16", 256), ("f32", 384)])
def test_narrow_weighed_rows_are_a_warp_each_where_memory_is_fast(dtype, width, rows):
    text = f"rms_norm(x={dtype}[{{r}},{width}], weight={dtype}[{width}])"
    many = Workload.parse(text.format(r=8192))
    ways = {d: IMPLS["fused"].heuristic(many, DEVICES[d]) for d in ("h100", "h200", "b200")}
    assert ways["h200"] == ways["b200"]
    assert (ways["h200"].row_threads, ways["h200"].parameters) == (32, "ahead")
    assert ways["h100"].persistent
    check(text.format(r=rows), ways["h200"])


MOMENTS = RowSchedule.__dataclass_fields__["moments"].metadata["values"]


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize(
    "changed",
    [
        {"contiguous": True},
        {"tail": "predicated"},
        {"rematerialize": True},
        {"contiguous": True, "rows_per_block": 1, "row_threads": 256, "rows_per_thread": 2},
    ],
    ids=str,
)
def test_pieces_of_rows_and_ways_to_keep_them_give_the_same_result(moments, changed):
    width = 1004 if "row_threads" in changed else 500  # a warp without any vector, and a tail
    check(NORM.format(r=7, h=width), replace(PERSISTENT, moments=moments, **changed))


@pytest.mark.parametrize("rows", [1, 31])
@pytest.mark.parametrize(
    "changed",
    [
        {"stages": 1, "moments": "merge"},
        {"stages": 3, "rows_per_block": 1, "row_threads": 128},
        {"stages": 2, "rows_per_thread": 2, "in_turn": True},
        {"stages": 2, "row_threads": 32, "rows_per_block": 8, "parameters": "registers"},
    ],
    ids=str,
)
def test_rows_that_come_in_bulk_are_awaited_and_not_overwritten(rows, changed):
    check(NORM.format(r=rows, h=520), replace(PERSISTENT, bulk=True, **changed))


@pytest.mark.usefixtures("late_warps")
@pytest.mark.parametrize(
    "changed",
    [
        {"in_turn": True, "stages": 2},
        {"moments": "merge", "stages": 1},
        {"bulk": True, "stages": 3, "rows_per_block": 1, "row_threads": 128},
        {"bulk": True, "stages": 2, "rows_per_thread": 2, "in_turn": True},
        {"cluster": 4, "stages": 2, "in_turn": True, "bulk": True},
        {"cluster": 2, "stages": 0, "parameters": "reload", "rows_per_block": 1},
    ],
    ids=str,
)
def test_any_warp_may_be_late(changed):
    check(
        NORM.format(r=31, h=2000 if "cluster" in changed else 520), replace(PERSISTENT, **changed)
    )


@pytest.mark.usefixtures("late_warps")
def test_late_warps_read_rows_that_came_in_bulk_where_no_row_is_reduced(forgets_functions):
    """And so nothing but a barrier of its own keeps the next rows from overwriting them."""
    fuse(lambda a, b: (a * b, (a * b).sum(0)), name="products_and_sums")
    config = RowSchedule(4, 128, 2, 1, "registers", "two_pass", 1, 1, stages=2, bulk=True)
    check("products_and_sums(a=f32[37,520], b=f32[37,520])", config)


@pytest.mark.parametrize(
    "changed",
    [
        {"cluster": 2, "stages": 0, "parameters": "reload", "rows_per_block": 1},
        {"cluster": 4, "stages": 1, "moments": "merge", "rows_per_thread": 2},
        {"cluster": 4, "stages": 2, "in_turn": True, "bulk": True},
        {"cluster": 2, "stages": 0, "contiguous": True, "moments": "tensor_cores"},
    ],
    ids=str,
)
def test_blocks_of_a_cluster_tell_one_another_what_they_found(changed):
    check(NORM.format(r=7, h=2000), replace(PERSISTENT, **changed))


@pytest.mark.parametrize("combine", ["kernel", "grid"])
def test_clusters_leave_one_result_of_each_sum_over_rows(combine):
    check(BACKWARD.format(r=37, h=1032), replace(PERSISTENT, cluster=2, combine=combine))


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"moments": "merge", "rows_per_block": 2},
        {"cluster": 8, "row_threads": 64, "moments": "merge"},
        {"moments": "lanes"},
        {"cluster": 8, "row_threads": 64, "moments": "lanes"},
        {"row_threads": 32, "rows_per_block": 4, "rows_per_thread": 2},
    ],
    ids=str,
)
def test_parameters_come_ahead_of_a_row_that_one_kernel_walks_once(changed):
    config = RowSchedule(4, 128, 1, 1, "registers", "two_pass", 1, 1, parameters="ahead")
    check(NORM.format(r=3, h=2004), replace(config, **changed))


@pytest.mark.parametrize("width", [1000, 5140, 12288, 20480])
@pytest.mark.parametrize("rows", [2, 140])
def test_what_a_search_for_few_rows_begins_with_computes_the_rows(rows, width):
    text = f"softmax(x=f16[{rows},{width}])"
    graph = graph_of(Workload.parse(text))
    for config in target.promising(graph, H200)[:2]:
        check(text, config)


@pytest.mark.parametrize(
    "changed",
    [
        {"moments": "merge"},
        {"moments": "merge", "cluster": 2, "rows_per_block": 1},
        {"moments": "merge", "stages": 1, "in_turn": True},
        {"moments": "merge", "row_threads": 32, "rows_per_thread": 2},
        {"recompute": False},
        {"recompute": False, "cluster": 2, "rows_per_block": 1},
        {"recompute": False, "stages": 2},
        {"recompute": False, "row_threads": 32, "rows_per_thread": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_rows_of_infinities_and_of_the_greatest_numbers_are_those_of_softmax(dtype, changed):
    config = RowSchedule(4, 64, 2, 1, "registers", "two_pass", 1, 1)
    w, executable = emulated(f"softmax(x={dtype}[9,1000])", replace(config, **changed))
    x = w.operator.examples(w, "random", 0, torch.device("cpu"))[0]
    most = torch.finfo(torch.float16).max
    x[1], x[2, 3], x[3, 999] = -torch.inf, torch.inf, torch.nan
    x[4, :500], x[5, 500:] = -torch.inf, -torch.inf  # warps without anything that counts
    x[6] += most - x[6].max()
    x[7], x[8] = -most, x[8] * 1000
    found, truth = executable(x).double(), torch.softmax(x.double(), -1)
    assert torch.equal(found.isnan(), truth.isnan())
    assert torch.allclose(
        found, truth, rtol=2e-3 if dtype == "f16" else 8e-3, atol=1e-7, equal_nan=True
    )


def test_a_cluster_that_does_not_wait_for_its_barriers_is_caught(monkeypatch):
    config = replace(PERSISTENT, cluster=2, stages=0, parameters="reload", rows_per_block=1)
    monkeypatch.setattr(RowKernel, "await_cluster", lambda kernel: None)
    w, executable = emulated(NORM.format(r=4, h=1000), config)
    tensors = w.operator.examples(w, "random", 0, torch.device("cpu"))
    executable(*tensors)  # blocks begin together; in the second call one after the other
    with pytest.raises(AssertionError, match="waits for what never comes"):
        executable(*tensors)


def test_rows_of_several_tensors_come_in_bulk_beside_their_single_values():
    backward = (
        "layer_norm_backward(grad_output=f16[31,520], x=f16[31,520], mean=f32[31,1],"
        " rstd=f32[31,1], weight=f16[520])"
    )
    for stages in (1, 3):
        check(backward, replace(PERSISTENT, bulk=True, stages=stages))


@pytest.mark.parametrize("centre", [0.0, 3.0, 300.0])
def test_moments_by_products_hold_where_the_mean_is_far_from_zero(centre):
    config = replace(PERSISTENT, moments="tensor_cores")
    w, executable = emulated("layer_norm(x=f16[9,500], weight=f16[500], bias=f16[500])", config)
    x, weight, bias = w.operator.examples(w, "random", 0, torch.device("cpu"))
    tensors = [(x.float() + centre).half(), weight, bias]
    truth = w.operator.truth(w, tensors)[0]
    far = (executable(*tensors).double() - truth).abs()
    assert (far <= 1e-3 * truth.abs() + 1e-3).all()


@pytest.mark.parametrize("moments", ["two_pass", "merge", "lanes"])
@pytest.mark.parametrize("centre", [1e3, 1e5])
def test_a_mean_far_above_the_deviation_costs_no_more_than_its_own_rounding(centre, moments):
    w, kernel = emulated(
        "layer_norm(x=f32[9,500], weight=f32[500], bias=f32[500])",
        replace(PERSISTENT, moments=moments),
    )
    fused, spec = IMPLS["fused"], spec_of(None)
    x, weight, bias = w.operator.examples(w, "random", 0, torch.device("cpu"))
    tensors = [x + centre, weight, bias]
    truth = w.operator.truth(w, tensors)[0]
    rounding = 2 * centre * torch.finfo(torch.float32).eps * weight.abs() + 1e-5
    for run in (kernel, fused.build(fused.heuristic(w, spec), w, spec)):
        assert ((run(*tensors).double() - truth).abs() <= rounding).all()


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize(("dtype", "centre", "spread"), FAR)
def test_rows_of_huge_means_are_right_however_moments_are_found(moments, dtype, centre, spread):
    if moments == "tensor_cores" and dtype == "f32":
        pytest.skip("tensor cores add up halves")
    w, kernel = emulated(ONE_NORM.format(d=dtype, h=500), replace(PERSISTENT, moments=moments))
    assert_far_means_right(w, kernel, centre, spread, torch.device("cpu"))


@pytest.mark.parametrize("half", ["f16", "bf16"])
@pytest.mark.parametrize("changed", MIXED_SCHEDULES, ids=str)
def test_halves_beside_an_fp32_weight_and_a_bias_of_halves(changed, half):
    config = replace(PERSISTENT, **changed)
    w, executable = emulated(MIXED.format(half=half, rows=31), config)
    assert target.space(graph_of(w), H200).why_not(config) is None
    assert Verifier(w, torch.device("cpu")).check(executable).message == ""


LANES = RowSchedule(4, 64, 2, 1, "registers", "lanes", 1, 1)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"row_threads": 32, "rows_per_block": 4},
        {"row_threads": 8, "rows_per_block": 4, "vector": 4},
        {"row_threads": 416, "rows_per_block": 1},
        {"cluster": 2, "rows_per_block": 1},
        {"contiguous": True},
        {"stages": 2, "rows_per_thread": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("width", [100, 256, 1000, 1032])
def test_lanes_that_hold_more_than_others_count_for_more(width, changed):
    config = replace(LANES, **changed)
    if width < config.row_threads * config.cluster * config.vector // 2:
        config = replace(config, vector=2)
    text = f"layer_norm(x=f16[5,{width}], weight=f16[{width}], bias=f16[{width}])"
    check(text, config)


def norm_of_a_norm(x):
    return F.layer_norm(torch.tanh(F.layer_norm(x, x.shape[-1:])), x.shape[-1:])


def deviations_in_turn(x):
    y = x / (1 + x.std(-1, keepdim=True))
    return y / (1 + y.var(-1, keepdim=True))


@pytest.mark.parametrize("function", [norm_of_a_norm, deviations_in_turn])
@pytest.mark.parametrize("x", ["f32[64,1000]", "f16[3,20480]"])
def test_moments_that_follow_from_moments_are_found_by_lanes_too(function, x, forgets_functions):
    fuse(function)
    w = Workload.parse(f"{function.__name__}(x={x})")
    config = target.heuristic(graph_of(w), H200)
    assert config.moments == "lanes"
    for device in (DEVICES[name] for name in ("a100", "h200", "b200")):
        compiled(target.task(graph_of(w), target.heuristic(graph_of(w), device), device))
    check(str(w), config)


@pytest.mark.parametrize("dtype", ["f16", "f32", "f64"])
@pytest.mark.parametrize("width", [512, 700])
@pytest.mark.parametrize("moments", ["merge", "lanes"])
def test_moments_that_are_merged_hold_for_rows_of_any_kind(moments, width, dtype):
    """Of one value, of outliers in one lane, of a mean far off, and of infinities."""
    w, executable = emulated(
        f"layer_norm(x={dtype}[7,{width}], weight={dtype}[{width}], bias={dtype}[{width}])",
        replace(LANES, moments=moments),
    )
    x, weight, bias = w.operator.examples(w, "random", 0, torch.device("cpu"))
    x[0], x[1] = 2.0, x[1] + 300
    x[2], x[2, :4] = x[2] / 64, 1000
    x[3], x[4] = 0, x[4] * 1000
    x[5, 3], x[6, -1] = torch.inf, torch.nan
    found, truth = executable(x, weight, bias).double(), w.operator.truth(w, [x, weight, bias])[0]
    assert torch.equal(found.isnan(), truth.isnan())
    near = {"f16": 2e-3, "f32": 2e-4, "f64": 1e-9}[dtype]
    assert torch.allclose(found, truth, rtol=near, atol=near, equal_nan=True)


EVEN = [
    *({"moments": moments} for moments in MOMENTS),
    *({"moments": m, "row_threads": 32, "rows_per_block": 4} for m in MOMENTS),
    *({"moments": m, "row_threads": 448, "rows_per_block": 1, "vector": 2} for m in MOMENTS),
    *({"moments": m, "cluster": 2, "rows_per_block": 1} for m in MOMENTS),
    {"moments": "lanes", "row_threads": 16, "rows_per_block": 4},
    {"moments": "merge", "storage": "shared"},
    {"moments": "two_pass", "storage": "reread"},
    {"moments": "two_pass", "shifted": True},
]


def centred(x):
    x = x if x.dtype == torch.float64 else x.float()
    mean = x.mean(-1, keepdim=True)
    return x - mean, mean, x.std(-1), x.var(-1)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("width", [1000, 1002])
@pytest.mark.parametrize("changed", EVEN, ids=str)
def test_equal_halves_have_no_deviations(changed, width, dtype, forgets_functions):
    """Their sum is exact, and so is their mean. What lanes that hold more or less than others have
    by that much more or less is rounded."""
    fuse(centred)
    width -= "shifted" in changed
    vector = 4 if "shifted" in changed else 4 - width % 4
    config = replace(LANES, **({"vector": vector} | changed))
    values = [1000.1, 0.1, -3.3e3, 1e4, 1e-4, 7.0, 0.0]
    w, executable = emulated(f"centred(x={dtype}[{len(values)},{width}])", config)
    assert target.space(graph_of(w), H200).why_not(config) is None
    x = torch.tensor(values).to(DTYPES[dtype]).unsqueeze(-1).expand(-1, width).contiguous()
    apart, mean, deviation, variance = executable(x)
    assert torch.equal(mean, x[:, :1].float())
    assert torch.equal(apart, torch.zeros_like(apart))
    roundings = 4 * torch.finfo(torch.float32).eps if config.moments == "lanes" else 0
    most = roundings * x[:, 0].float().abs()
    assert ((deviation >= 0) & (deviation <= most)).all()
    assert ((variance >= 0) & (variance <= most**2)).all()


@pytest.mark.parametrize("text", STRIDED)
def test_untuned_rows_whose_elements_are_apart_are_right(text):
    w = Workload.parse(text)
    check(text, target.heuristic(graph_of(w), H200))


@pytest.mark.parametrize(
    "changed",
    [
        *({"storage": where} for where in ("registers", "shared", "reread")),
        *({"vector": 1, "stages": n, "row_threads": 256, "rows_per_block": 1} for n in (1, 2)),
        {"parameters": "registers"},
        {"parameters": "shared"},
        {"contiguous": True},
    ],
    ids=str,
)
def test_rows_whose_elements_are_apart_are_right_under_every_schedule(changed):
    text = "layer_norm(x=f32[600,1024]@strides(2048,2), weight=f32[1024], bias=f32[1024])"
    w = Workload.parse(text)
    c = replace(RowSchedule(4, 128, 1, 1, "registers", "two_pass", 1, 4), **changed)
    space = target.space(graph_of(w), H200)
    assert c in space, space.why_not(c)
    check(text, c)


def test_rows_whose_elements_are_apart_are_not_copied_ahead_in_vectors():
    w = Workload.parse("rms_norm(x=f32[600,1024]@strides(2048,2), weight=f32[1024])")
    c = replace(PERSISTENT, row_threads=256, rows_per_block=1)
    space = target.space(graph_of(w), H200)
    assert "side by side" in space.why_not(c)
    assert replace(c, vector=1) in space


BACKWARD = (
    "layer_norm_backward(grad_output=f16[{r},{h}], x=f16[{r},{h}], mean=f32[{r},1],"
    " rstd=f32[{r},1], weight=f16[{h}])"
)


@pytest.mark.parametrize("groups", [1, 2, 3, 8, 13, 16])
def test_sums_over_rows_of_a_blocks_groups_are_joined(groups):
    config = replace(PERSISTENT, row_threads=32, rows_per_block=groups)
    check(BACKWARD.format(r=37, h=200), config)


@pytest.mark.parametrize("rows", [1, 8, 37])
def test_groups_that_share_a_warp_walk_as_many_rows_as_the_first_of_them(rows):
    config = replace(PERSISTENT, row_threads=16, rows_per_block=16, early=True)
    check(BACKWARD.format(r=rows, h=200), config)


@pytest.mark.parametrize("rows", [2, 37])
@pytest.mark.parametrize(
    "changed",
    [
        {"rows_per_block": 16},
        {"rows_per_block": 9, "bulk": True, "rematerialize": True},
        {"rows_per_block": 1, "row_threads": 256, "stages": 0},
        {"rows_per_block": 3, "row_threads": 96, "rows_per_thread": 2},
    ],
    ids=str,
)
def test_blocks_that_have_met_join_what_each_left(rows, changed):
    config = replace(PERSISTENT, row_threads=32, combine="grid")
    check(BACKWARD.format(r=rows, h=1032), replace(config, **changed))


def test_what_follows_from_sums_over_rows_is_computed_once_blocks_have_met():
    fuse(
        lambda a, b: (a.amax(0, keepdim=True), a * b, (a * b).sum(0, keepdim=True) * 2),
        name="sums_over_rows",
    )
    try:
        spec = TensorSpec("f32", (37, 200))
        w = OPS["sums_over_rows"].workload(a=spec, b=spec)
        config = RowSchedule(
            4, 32, 8, 1, "registers", "two_pass", 1, 1, stages=1, combine="grid"
        )  # fmt: skip
        assert "meet(counter, gridDim.x)" in target.task(graph_of(w), config, H200).source
        verdict = Verifier(w, torch.device("cpu")).check(Emulated(graph_of(w), config, H200, w))
        assert verdict.message == ""
    finally:
        OPS.remove("sums_over_rows")


def mean_then_variance(x):
    s = x.mean(1, keepdim=True)
    return (x + s) * (x * s).var(1, keepdim=True, correction=0)


def greatest_then_variance(x):
    s = x.amax(1, keepdim=True)
    return (x + s) * (x * s).var(1, keepdim=True, correction=0)


@pytest.mark.parametrize("moments", ["two_pass", "merge"])
@pytest.mark.parametrize("function", [mean_then_variance, greatest_then_variance])
def test_a_sweep_overwrites_nothing_that_moments_read_once_more(function, moments):
    if function.__name__ not in OPS:
        fuse(function)
    check(f"{function.__name__}(x=f32[3,500])", RowSchedule(4, 64, 2, 1, "shared", moments, 1, 1))


def test_softmax_in_shared_memory_takes_one_row_of_it():
    text, config = "softmax(x=f32[5,768])", RowSchedule(4, 32, 4, 1, "shared", "two_pass", 1, 1)
    check(text, config)
    assert Footprint(graph_of(Workload.parse(text))).shared_bytes(config) == 4 * 768 * 4


@pytest.mark.parametrize(
    ("text", "tried"),
    [
        ("softmax(x=f32[8192,1024])", {(32, 2), (32, 1), (128, 1)}),
        ("softmax(x=f16[8192,4096])", {(32, 1), (128, 1)}),
        ("rms_norm(x=f32[8192,1024], weight=f32[1024])", {(32, 2), (32, 1)}),
        ("rms_norm(x=f32[8192,1280], weight=f32[1280])", set()),
        ("softmax(x=f32[8192,5140])", set()),
        ("softmax(x=f32[512,1024])", {(256, 1)}),  # of those that are all on chip at once
    ],
)
def test_a_search_tries_rows_that_are_copied_to_shared_memory(text, tried):
    begins_with = target.promising(graph_of(Workload.parse(text)), DEVICES["h200"])[:12]
    shared = {(c.row_threads, c.rows_per_block) for c in begins_with if c.storage == "shared"}
    assert shared == tried


@pytest.mark.parametrize("unroll", [1, 2, 3])
@pytest.mark.parametrize("storage", ["shared", "reread"])
@pytest.mark.parametrize("width", [1000, 768])
def test_turns_over_rows_that_registers_do_not_hold_are_unrolled_as_told(width, storage, unroll):
    config = RowSchedule(4, 32, 2, 1, storage, "two_pass", 1, 1, unroll=unroll)
    check(f"softmax(x=f16[3,{width}])", config)
    source = target.task(
        graph_of(Workload.parse(f"softmax(x=f16[3,{width}])")), config, DEVICES["h200"]
    ).source
    assert f'_Pragma("unroll {unroll}") for (int k' in source


@pytest.mark.parametrize(
    ("text", "vector", "copies"),
    [
        ("softmax(x=f32[5,769])", 1, 1),
        ("softmax(x=f16[5,514])", 2, 1),
        ("softmax(x=f16[5,515])", 1, 0),
        ("rms_norm(x=bf16[5,776], weight=bf16[776])", 8, 1),
        ("softmax_backward(grad_output=f32[5,260], output=f32[5,260])", 4, 0),
    ],
)  # fmt: skip
def test_rows_come_into_shared_memory_at_once_where_copies_are_wide_enough(text, vector, copies):
    config = RowSchedule(vector, 32, 4, 1, "shared", "two_pass", 1, 1)
    check(text, config)
    source = target.task(graph_of(Workload.parse(text)), config, DEVICES["h200"]).source
    kernel = source.partition("fused(")[2]
    assert kernel.count("enqueue<") == copies
    assert kernel.count("await_batch<0>();") == min(copies, 1)
