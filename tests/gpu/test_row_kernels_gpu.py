"""Generated row kernels under every kind of schedule: right, repeatable, capturable."""

import ctypes
import random
from dataclasses import replace

import pytest
import torch

from row_schedules import (
    FAR,
    MIXED,
    MIXED_SCHEDULES,
    PERSISTENT,
    STRIDED,
    assert_far_means_right,
)
from row_schedules import NORM as ONE_NORM
from side_by_side import assert_streams_keep_apart
from tilewright.compile.cache import compiled
from tilewright.compile.counters import counters
from tilewright.compile.launch import overlaps
from tilewright.device import spec_of
from tilewright.errors import LaunchError
from tilewright.fusion.cuda import target
from tilewright.fusion.cuda.rows.schedule import RowSchedule
from tilewright.impl import IMPLS
from tilewright.impls.fused import graph_of
from tilewright.measure.verify import Verifier
from tilewright.op import Workload

pytestmark = pytest.mark.gpu

NORM = "bias_layer_norm(x=d[{r},{h}], bias0=d[{h}], bias1=d[{h}], weight=d[{h}], bias=d[{h}])"
BACKWARD = (
    "layer_norm_backward(grad_output=d[{r},{h}], x=d[{r},{h}], mean=s[{r},1], rstd=s[{r},1],"
    " weight=d[{h}])"
)
SOFTMAX = "softmax(x=d[{r},{h}])"
MOMENTS = RowSchedule.__dataclass_fields__["moments"].metadata["values"]
# rows: fewer than blocks, and no multiple of anything; widths: tails, rows of 8-byte alignment
SIZES = [(3001, 768), (1027, 1000), (777, 5140), (130, 16384), (65, 65536)]


def workload(text, rows, width, dtype):
    statistics = "f32" if dtype in ("f16", "bf16") else dtype
    text = text.format(r=rows, h=width).replace("=d[", f"={dtype}[")
    return Workload.parse(text.replace("=s[", f"={statistics}["))


def kind_of(c):
    if not isinstance(c, RowSchedule):  # rows too wide to be read once are tiles
        return c.storage, c.combine, c.shares > 1, c.splits > 1, c.ahead
    kind = (c.storage, c.parameters, c.widened, c.stages > 0, c.cluster > 1, c.moments, c.combine)
    walk = (c.rows_per_block > 1, c.rows_per_thread > 1, c.contiguous, c.in_turn, c.bulk)
    return *kind, c.recompute, *walk


def executables(w, spec, kinds=10, tried=600):
    """One of each kind of schedule, as far as a sample of the space has them."""
    graph = graph_of(w)
    if target.unsupported(graph, spec):
        return
    space = target.space(graph, spec)
    found = {}
    for c in space.sample(random.Random(str(w)), tried):
        found.setdefault(kind_of(c), c)
    for config in random.Random(0).sample(list(found.values()), min(kinds, len(found))):
        yield config, IMPLS["fused"].build(config, w, spec)


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
@pytest.mark.parametrize(("rows", "width"), SIZES)
@pytest.mark.parametrize("text", [NORM, BACKWARD, SOFTMAX], ids=["norm", "backward", "softmax"])
def test_schedules_of_every_kind_pass_verification(text, rows, width, dtype, device):
    w, spec = workload(text, rows, width, dtype), spec_of(device.index)
    verifier, count = Verifier(w, device), 0
    for config, executable in executables(w, spec):
        found = verifier.check(executable)
        # A thread's sum of 65 rows has errors of 12 ulp, PyTorch's half of that: tuning refuses
        # tiles whose walk is not shared.
        excused = not isinstance(config, RowSchedule) and "PyTorch's largest" in found.message
        assert found.ok or excused, (config, found.message)
        count += 1
    assert count or target.unsupported(graph_of(w), spec)


@pytest.mark.parametrize("text", STRIDED)
def test_rows_whose_elements_are_apart_pass_verification(text, device):
    w, spec = Workload.parse(text), spec_of(device.index)
    verifier, untuned = Verifier(w, device), IMPLS["fused"].heuristic(w, spec)
    for config, executable in (
        (untuned, IMPLS["fused"].build(untuned, w, spec)),
        *executables(w, spec, kinds=6),
    ):
        assert verifier.check(executable).ok, config


@pytest.mark.parametrize("text", [NORM, BACKWARD], ids=["forward", "backward"])
def test_captured_kernels_compute_what_called_ones_do(text, device):
    w, spec = workload(text, 1027, 4096, "f16"), spec_of(device.index)
    tensors = w.operator.examples(w, "random", 0, device)
    for config, executable in executables(w, spec, kinds=6):
        expected = executable(*tensors)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = executable(*tensors)
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        pairs = zip(*[o if isinstance(o, tuple) else (o,) for o in (out, expected)], strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), config


def test_streams_side_by_side_do_not_disturb_one_another(device):
    w, spec = workload(BACKWARD, 2048, 4096, "f16"), spec_of(device.index)
    sets = [w.operator.examples(w, "random", seed, device) for seed in range(4)]
    _, executable = next(executables(w, spec))
    assert_streams_keep_apart(executable, sets, rounds=10)


@pytest.mark.parametrize(("cluster", "stages", "groups"), [(1, 2, 2), (4, 1, 4), (4, 0, 4)])
def test_every_row_is_taken_once_and_the_next_launch_finds_its_turns_at_zero(
    cluster, stages, groups, device
):
    spec = spec_of(device.index)
    config = RowSchedule(
        8, 64, groups, 1, "registers", "two_pass", cluster, 1, stages=stages,
        parameters="shared", in_turn=True,
    )  # fmt: skip
    if cluster > spec.max_cluster:
        pytest.skip("no clusters here")
    for rows in (1, 7, 530, 5001):
        w = workload(NORM, rows, 4096, "f16")
        graph = graph_of(w)
        built = compiled(target.task(graph, config, spec))
        executable = target.executable(graph, config, w, built, spec)
        tensors = w.operator.examples(w, "random", rows, device)
        truth = w.operator.truth(w, tensors)[0]
        for _ in range(5):
            assert (executable(*tensors).double() - truth).abs().max() < 4e-3 * truth.abs().max()
        address = counters.address(device.index, torch.cuda.current_stream().cuda_stream, 1)
        assert word_at(address, device) == 0


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("cluster", [1, 2, 8])
def test_rows_that_come_in_bulk_are_awaited_and_not_overwritten(cluster, in_turn, device):
    spec = spec_of(device.index)
    for threads, groups, rows_per_thread, stages in ((32, 8, 1, 3), (64, 4, 2, 1), (128, 2, 1, 2)):
        config = RowSchedule(
            8, threads, groups, rows_per_thread, "registers", "two_pass", cluster, 1,
            stages=stages, parameters="shared", bulk=True, in_turn=in_turn,
        )  # fmt: skip
        for rows in (1, 530, 5001):
            w = workload(NORM, rows, 2048 * cluster + 8, "f16")
            graph = graph_of(w)
            if target.space(graph, spec).why_not(config):
                continue
            executable = target.executable(
                graph, config, w, compiled(target.task(graph, config, spec)), spec
            )
            verifier = Verifier(w, device)
            for _ in range(3):
                assert verifier.check(executable).message == "", config


def executable_of(w, config, spec):
    """Its kernel, or a skipped test that says why the schedule does not fit."""
    graph = graph_of(w)
    if why := target.space(graph, spec).why_not(config):
        pytest.skip(f"{config} on {spec.name}: {why}")
    return target.executable(graph, config, w, compiled(target.task(graph, config, spec)), spec)


@pytest.mark.parametrize("half", ["f16", "bf16"])
@pytest.mark.parametrize("changed", MIXED_SCHEDULES, ids=str)
def test_halves_beside_an_fp32_weight_and_a_bias_of_halves(changed, half, device):
    w, config = Workload.parse(MIXED.format(half=half, rows=9001)), replace(PERSISTENT, **changed)
    executable = executable_of(w, config, spec_of(device.index))
    assert Verifier(w, device).check(executable).message == ""


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(("dtype", "centre", "spread"), FAR)
def test_rows_of_huge_means_are_right_however_moments_are_found(
    moments, persistent, dtype, centre, spread, device
):
    if moments == "tensor_cores" and dtype == "f32":
        pytest.skip("tensor cores add up halves")
    w = Workload.parse(ONE_NORM.format(d=dtype, h=500))
    kept = {} if persistent else {"stages": 0, "parameters": "reload"}
    config = replace(PERSISTENT, moments=moments, **kept)
    executable = executable_of(w, config, spec_of(device.index))
    assert_far_means_right(w, executable, centre, spread, device)


def word_at(address, device):
    """The 32-bit word at an address of device memory."""
    host, driver = ctypes.c_int(-1), ctypes.CDLL("libcuda.so.1")
    torch.cuda.synchronize(device)
    assert driver.cuMemcpyDtoH_v2(ctypes.byref(host), ctypes.c_uint64(address), 4) == 0
    return host.value


def test_the_second_kernel_sees_all_of_the_firsts_results(device):
    """It starts early; were it to read early, repeated calls on changing data would tell."""
    assert overlaps(device.index) == (torch.cuda.get_device_capability(device)[0] >= 9)
    w, spec = workload(BACKWARD, 8192, 768, "f16"), spec_of(device.index)
    _, executable = next(executables(w, spec))
    for seed in range(20):
        tensors = w.operator.examples(w, "random", seed, device)
        first = executable(*tensors)
        for _ in range(5):
            again = executable(*tensors)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        truth = w.operator.truth(w, tensors)
        for out, value in zip(first[1:], truth[1:], strict=True):
            assert (out.double() - value).abs().max() <= 2e-3 * value.abs().max()


def test_rows_of_nan_and_infinity_stay_by_themselves(device):
    w, spec = workload(NORM, 600, 5140, "f16"), spec_of(device.index)
    tensors = w.operator.examples(w, "random", 0, device)
    tensors[0][7, 100], tensors[0][8, 5139], tensors[0][9] = float("nan"), float("inf"), 1.0
    clean = torch.ones(600, dtype=torch.bool, device=device)
    clean[[7, 8]] = False
    expected = w.operator.reference(**w.call(tensors))
    for config, executable in executables(w, spec):
        out = executable(*tensors)
        assert out[~clean].isnan().all(), config
        assert torch.allclose(out[clean].float(), expected[clean].float(), atol=4e-3), config


MEETING = [
    {"row_threads": 32, "rows_per_block": 16, "rematerialize": True},
    {"row_threads": 64, "rows_per_block": 7, "bulk": True},
    {"row_threads": 96, "rows_per_block": 1, "min_blocks": 4, "stages": 3},
    {"row_threads": 64, "rows_per_block": 4, "cluster": 4},
]


@pytest.fixture(params=MEETING, ids=str)
def meeting(request, device):
    """A kernel whose blocks meet, and its workload by rows."""
    spec = spec_of(device.index)
    config = RowSchedule(
        4, 64, 4, 1, "registers", "two_pass", 1, 1, stages=2, parameters="shared", combine="grid"
    )  # fmt: skip
    config = replace(config, **request.param)
    if config.cluster > spec.max_cluster or (config.bulk and spec.capability < 90):
        pytest.skip(f"not on sm_{spec.capability}")

    def build(rows):
        w = workload(BACKWARD, rows, 768, "f16")
        graph = graph_of(w)
        assert config in target.space(graph, spec), target.space(graph, spec).constraint(config)
        built = compiled(target.task(graph, config, spec))
        return w, target.executable(graph, config, w, built, spec)

    return build


@pytest.mark.parametrize("rows", [2, 65, 8192, 40001])
def test_blocks_that_meet_are_right_the_same_every_time_and_leave_the_counter_at_zero(
    rows, meeting, device
):
    w, executable = meeting(rows)
    verdict = Verifier(w, device).check(executable)
    assert verdict.message == ""
    assert verdict.deterministic
    tensors = w.operator.examples(w, "random", 0, device)
    first = executable(*tensors)
    for _ in range(20):
        again = executable(*tensors)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    address = counters.address(device.index, torch.cuda.current_stream().cuda_stream, 1)
    assert word_at(address, device) == 0


def test_blocks_that_meet_are_captured_and_replayed(meeting, device):
    w, executable = meeting(5000)
    tensors = w.operator.examples(w, "random", 0, device)
    expected = executable(*tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = executable(*tensors)
    for _ in range(20):
        for out in outs:
            out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(outs, expected, strict=True))


def test_blocks_that_meet_on_several_streams_wait_for_their_own(meeting, device):
    w, executable = meeting(5000)
    sets = [w.operator.examples(w, "random", seed, device) for seed in range(3)]
    expected = [executable(*tensors) for tensors in sets]
    streams = [torch.cuda.Stream() for _ in sets]
    torch.cuda.synchronize()
    found = []
    for _ in range(20):
        for stream, tensors in zip(streams, sets, strict=True):
            with torch.cuda.stream(stream):
                found.append(executable(*tensors))
    torch.cuda.synchronize()
    for k, outs in enumerate(found):
        assert all(torch.equal(a, b) for a, b in zip(outs, expected[k % 3], strict=True))


def test_more_blocks_than_run_at_once_are_refused_rather_than_awaited(meeting, device):
    w, executable = meeting(40001)
    tensors = w.operator.examples(w, "random", 0, device)
    executable(*tensors)
    (blocks, *_) = executable.grids[device.index]
    executable.grids[device.index] = (64 * blocks, 1, 1)
    with pytest.raises(LaunchError):
        executable(*tensors)


HUGE_SHAPE, HUGE_BYTES = (524300, 4100), 20e9
"""Of more than 2^31 elements, and memory that three such tensors of halves take beside what is
compared at once."""


def assert_norms_gradients(run, shape, device, chunk):
    """dx of some rows, and the sums over all of them, against fp64; `chunk` rows at once."""
    rows, width = shape
    generator = torch.Generator(device).manual_seed(0)
    tensors = {"generator": generator, "dtype": torch.half, "device": device}
    grad, x = (torch.randn(rows, width, **tensors) for _ in range(2))
    weight = torch.randn(width, **tensors)
    parts = list(range(0, rows, chunk))
    mean = torch.cat([x[k : k + chunk].double().mean(-1, keepdim=True) for k in parts]).float()
    deviations = [x[k : k + chunk].double().std(-1, keepdim=True, correction=0) for k in parts]
    rstd = torch.cat(deviations).add(1e-5).reciprocal().float()
    dx, dweight, dbias = run(grad, x, mean, rstd, weight)

    def doubles(some):
        normed = (x[some].double() - mean[some].double()) * rstd[some].double()
        return grad[some].double(), normed

    sums = torch.zeros(2, width, dtype=torch.float64, device=device)
    for k in parts:
        g, normed = doubles(slice(k, k + chunk))
        sums += torch.stack([(g * normed).sum(0), g.sum(0)])
    for found, right in zip((dweight, dbias), sums, strict=True):
        torch.testing.assert_close(found.double(), right, rtol=1e-3, atol=0.02)
    middle = min(2**31 // width, rows - 2)  # rows before, on and behind the 2^31st element
    ends = [0, 1, middle - 1, middle, middle + 1, rows - 2, rows - 1]
    sample = torch.cat([torch.tensor(ends), torch.randperm(rows)[:1000]]).unique().to(device)
    g, normed = doubles(sample)
    g = g * weight.double()
    of_rows = g.mean(-1, keepdim=True) + normed * (g * normed).mean(-1, keepdim=True)
    right = rstd[sample].double() * (g - of_rows)
    torch.testing.assert_close(dx[sample].double(), right, rtol=2e-3, atol=2e-3)


@pytest.mark.alone
def test_layer_norms_gradients_of_more_than_two_to_the_31_elements(device, needs_memory):
    needs_memory(HUGE_BYTES)
    w, spec, fused = workload(BACKWARD, *HUGE_SHAPE, "f16"), spec_of(device.index), IMPLS["fused"]
    assert w["x"].numel > 2**31
    executable = fused.build(fused.heuristic(w, spec), w, spec)
    assert_norms_gradients(executable, HUGE_SHAPE, device, chunk=8192)
