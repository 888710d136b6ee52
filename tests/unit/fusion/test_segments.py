"""Where graphs are cut into kernels, and that every cut and division gives the same result."""

import dataclasses
import itertools
import random
import re

import pytest
import torch
from torch.nn import functional as F

from tilewright.compile import cxx
from tilewright.device import DEVICES
from tilewright.dispatch.functions.fuse import fuse
from tilewright.fusion.cpp.emit import program_of
from tilewright.fusion.cuda import programs, target
from tilewright.fusion.cuda.tiles.capabilities import TileKernels
from tilewright.fusion.cuda.tiles.schedule import TileSchedule
from tilewright.fusion.program import walking
from tilewright.fusion.segments import cut
from tilewright.impl import IMPLS
from tilewright.impls.fused import graph_of
from tilewright.measure.verify import Verifier
from tilewright.op import OPS, Workload
from tilewright.suite import SUITES
from tilewright.tensor_spec import TensorSpec

CPU = dataclasses.replace(DEVICES["cpu"], threads=2)
LAYER_NORM = (
    "layer_norm_backward(grad_output={d}[{n},40], x={d}[{n},40], mean=f32[{n},1], rstd=f32[{n},1],"
    " weight={d}[40])"
)
LERP = (
    "lerp_backward(grad_output=f32[16,3,24,24], x=f32[16,1,1,1], end=f32[16,3,24,24],"
    " weight=f32[3,1,24])"
)

needs_compiler = pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))


@pytest.fixture
def fused():
    """Graphs of functions; what was registered is taken back."""
    names = []

    def graph(function, *specs):
        fuse(function, name=f"cut{len(names)}")
        op = OPS[f"cut{len(names)}"]
        names.append(op.name)
        named = zip(op.parameters, specs, strict=False)  # and no seed
        w = Workload.parse(f"{op.name}({', '.join(f'{n}={s}' for n, s in named)})")
        return graph_of(w)

    yield graph
    for name in names:
        OPS.remove(name)


def spaces(graph, **options):
    return [s.graph.space for s in cut(graph, **options).segments]


def test_layer_norms_gradients_take_one_pass_and_a_small_combination():
    graph = graph_of(Workload.parse(LAYER_NORM.format(d="f16", n=64)))
    program = cut(graph, splits=8)
    first, second = program.segments
    assert first.graph.reduction_sets == ((1,), (0,))
    assert (first.row, first.partials) == ((1,), 8)
    assert second.graph.space == (8, 40)
    first, second = program.describe()
    assert first == "kernel 0: space [64, 40], reduces axes [1], [0], 8 partials"
    second, _, line = second.partition(" (")
    assert second == (
        "kernel 1: space [8, 40], reduces axes [0]; cut: the partials of a result are put together"
    )
    assert re.fullmatch(r".*/ops/layer_norm_backward\.py:\d+\)", line)


def test_overlapping_sets_of_dims_take_one_pass():
    program = cut(graph_of(Workload.parse(LERP)), splits=4)
    assert [s.graph.space for s in program.segments] == [(16, 3, 24, 24), (4, 72)]
    assert program.segments[0].row == (1, 2, 3)


def test_both_bias_gradients_are_one_sum():
    vectors = ", ".join(f"{n}=f16[40]" for n in ("bias0", "bias1", "weight"))
    text = (
        "bias_layer_norm_backward(grad_output=f16[64,40], x=f16[64,40], mean=f32[64,1],"
        f" rstd=f32[64,1], {vectors}, grads=[bias0,bias1])"
    )
    graph = graph_of(Workload.parse(text))
    assert sum(graph.axes(i) == (0,) for i in graph.reductions) == 1


def test_a_graph_that_one_kernel_can_do_is_not_cut():
    for text in ("softmax(x=f32[8,40])", "softmax(x=f32[8,40], dim=0)", "layer_norm(x=f32[8,40])"):
        assert len(cut(graph_of(Workload.parse(text)), splits=4).segments) == 1


def test_a_result_of_all_rows_that_rows_need_is_a_cut(fused):
    graph = fused(lambda x: torch.softmax(x - x.mean(0), -1), "f32[64,40]")
    program = cut(graph, splits=4)
    assert spaces(graph, splits=4) == [(64, 40), (4, 40), (64, 40)]
    assert "cut: a step needs a result of all rows (" in program.describe()[2]
    assert program.temporaries[0].numel == 4 * 40


def centred_softmax(x):
    mean = x.mean(0)
    centred = x - mean
    return torch.softmax(centred, -1)


def test_a_cut_is_at_the_line_of_the_step_that_needs_it(fused):
    first = centred_softmax.__code__.co_firstlineno
    _, partials, rows = cut(fused(centred_softmax, "f32[64,40]"), splits=4).describe()
    assert partials.endswith(f"the partials of a result are put together ({__file__}:{first + 1})")
    assert rows.endswith(f"a step needs a result of all rows ({__file__}:{first + 2})")


def test_a_sum_over_rows_of_a_single_split_is_put_together_by_no_kernel(fused):
    graph = fused(lambda x: torch.softmax(x - x.mean(0), -1), "f32[64,40]")
    assert spaces(graph, splits=1) == [(64, 40), (64, 40)]
    assert "cut: a step needs a result of all rows (" in cut(graph).describe()[1]
    assert spaces(fused(lambda x: x.mean(0), "f32[64,40]"), splits=1)[1:] == [(40,)]


def test_a_column_sum_is_added_up_in_the_order_of_memory(fused):
    graph = fused(lambda x: (x * x).sum(0), "f32[6400,40]")
    assert spaces(graph, splits=4) == [(6400, 40), (4, 40)]


def test_a_long_row_is_split_and_many_rows_are_not_made_to_wait(fused):
    graph = fused(lambda x: (x * x).sum(-1), "f32[2,400000]")
    assert spaces(graph, splits=4) == [(2, 400000)]
    assert spaces(graph, splits=4, split_rows=True) == [(2, 400000), (4, 2)]
    fused_space = IMPLS["fused"].heuristic
    w = Workload.parse("cut0(x=f32[2,400000])")
    assert fused_space(w, CPU).split_rows
    assert not fused_space(Workload.parse("cut0(x=f32[4000,200])"), CPU).split_rows


def test_splitting_rows_never_adds_a_pass_over_large_tensors(fused):
    graph = fused(lambda x: x / x.sum(-1, keepdim=True), "f32[2,40000]")
    assert spaces(graph, splits=4, split_rows=True) == spaces(graph, splits=4) == [(2, 40000)]


def test_outputs_that_read_different_tensors_are_kernels_of_their_own(fused):
    graph = fused(lambda x, w: (x + 1, w * w), "f32[64,40]", "f32[40]")
    assert spaces(graph) == [(40,), (2560,)]


@pytest.mark.parametrize(
    "kernels", [None, TileKernels(TileSchedule(), rows=True)], ids=["cpu", "gpu"]
)
def test_rows_are_not_walked_again_for_dims_that_they_do_not_have(kernels, fused):
    """As one kernel each goes through a row for every element of its result."""

    row, x, y = TensorSpec("f32", (64,)), TensorSpec("f32", (16, 64)), TensorSpec("f32", (16, 9))
    expected_spaces = [((16, 64), (16, 9)), ((16, 64), (16, 30))]
    graphs = [
        fused(lambda x, y: x.sum(-1, keepdim=True) * y, x, y),
        fused(lambda x: F.rms_norm(x, (64,))[:, :30], x),
    ]
    for graph, expected in zip(graphs, expected_spaces, strict=True):
        assert tuple(spaces(graph, kernels=kernels)) == expected
        assert target.one_pass(graph, DEVICES["h200"]) is None
    small = fused(lambda row, x: row.softmax(0) * x, row, x)  # as much as x alone
    assert len(spaces(small, kernels=kernels)) == 1


@pytest.mark.parametrize(
    "kernels", [None, TileKernels(TileSchedule(), rows=True)], ids=["cpu", "gpu"]
)
def test_outputs_of_different_dims_share_what_they_reduce(kernels, fused):
    """A value that several need is reduced once, and along with what others need of the tensor."""

    def rolled(x):
        y = F.rms_norm(x, (65,))
        return y.roll(9, -1), y.norm()

    def beside(x, y):
        return x.amax(-1)[:, None, None] * y, x - x.mean(-1, keepdim=True)

    x, y = TensorSpec("f32", (16, 65)), TensorSpec("f32", (1, 3, 7))
    _, *rest = walked = [s.graph for s in _walking(fused(rolled, x), kernels)]
    assert [g.space for g in walked] == [(16, 65), (16, 9), (16, 56)]
    assert not any(g.reductions for g in rest)
    rows, outer = [s.graph for s in _walking(fused(beside, x, y), kernels)]
    assert (rows.space, outer.space) == ((16, 65), (16, 21))
    assert {rows.nodes[i].op for i in rows.reductions} == {"sum", "amax"}
    assert not outer.reductions
    other = fused(lambda x, y, z: (z.amax(-1)[:, None, None] * y, x.sum(-1)), x, y, x)
    assert len(_walking(other, kernels)) == 3  # z is not what the sum reads


def _walking(graph, kernels):
    segments = cut(graph, kernels=kernels).segments
    return [segments[k] for k in walking(segments)]


def test_only_what_later_kernels_read_is_kept(fused):
    """Of a variance and its mean the variance, and the greatest of all variances."""
    graph = fused(lambda x: x.var(-1, correction=0).softmax(0), "f32[64,40]")
    rows, few = cut(graph).segments
    assert (rows.graph.space, few.graph.space) == ((64, 40), (64,))
    assert {*rows.writes} == {*few.reads}


def test_a_total_of_what_does_not_vary_along_a_row_is_not_left_to_that_row(fused):
    """The gradients read rows without their last element, and add up one number of them all."""

    def rolled(x, weight, scale, gradient, total):
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            y = F.rms_norm(leaf, leaf.shape[-1:], weight) * scale
            outs = y.roll(1, -1), y.norm()
            return torch.autograd.grad(outs, leaf, [gradient, total])[0]

    x, weight = TensorSpec("f32", (200, 129)), TensorSpec("f32", (129,))
    graph = fused(rolled, x, weight, TensorSpec("f16", (200, 1)), x, TensorSpec("f32", ()))
    device = DEVICES["h200"]
    program = programs.program_of(graph, target.heuristic(graph, device), device)
    assert not any(s.row == () and s.lane is None for s in program.segments)
    for config in target.space(graph, device).sample(random.Random(1), 20):
        target.task(graph, config, device)  # which asserts that there is room for partials


def test_every_output_is_written_once_and_every_buffer_before_it_is_read():
    for text in (LAYER_NORM.format(d="f32", n=9), LERP):
        program = cut(graph_of(Workload.parse(text)), splits=4)
        written = [b for s in program.segments for b in s.writes]
        assert len(written) == len(set(written))
        known = set(range(program.inputs))
        for s in program.segments:
            assert set(s.reads) <= known
            known |= set(s.writes)
        assert set(range(program.inputs, program.inputs + program.outputs)) <= known


def assert_right(verifier, executable, config):
    """Within the error bound. How PyTorch's own errors turn out on a few elements is luck."""
    message = verifier.check(executable).message
    assert message == "" or "PyTorch's largest error" in message, (config, message)


@needs_compiler
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("text", [LAYER_NORM.replace("{n}", "67"), LERP])
def test_every_schedule_gives_what_torch_gives(text, dtype):
    w = Workload.parse(text.format(d=dtype))
    verifier, fused = Verifier(w, torch.device("cpu")), IMPLS["fused"]
    start = fused.heuristic(w, CPU)
    for rows, unroll, splits in ((1, 1, 16), (2, 2, 4), (4, 1, 256), (1, 4, 8)):
        config = dataclasses.replace(start, rows=rows, unroll=unroll, splits=splits)
        assert_right(verifier, fused.build(config, w, CPU), config)


@needs_compiler
def test_a_split_row_gives_what_torch_gives():
    text = "lerp_backward(grad_output=f32[2,9001], x=f32[2,9001], end=f32[2,1], weight=f32[])"
    w = Workload.parse(text)
    fused, verifier = IMPLS["fused"], Verifier(w, torch.device("cpu"))
    start = fused.heuristic(w, CPU)
    for unroll, splits in itertools.product((1, 4), (2, 8)):
        config = dataclasses.replace(start, split_rows=True, unroll=unroll, splits=splits)
        assert_right(verifier, fused.build(config, w, CPU), config)


@needs_compiler
def test_more_elements_than_32_bits_count_are_summed():
    """Of two small tensors, the second of them greater throughout but for its last column."""

    def maxima(x, y):
        return torch.maximum(x[:, None], y).sum(0) / 65536, (x[:, None] - y).amax()

    fuse(maxima)
    try:
        x, y = TensorSpec("f32", (65536,)), TensorSpec("f32", (32769,))
        assert x.numel * y.numel > 2**31
        w = OPS["maxima"].workload(x=x, y=y)
        x, y = torch.full((65536,), 0.5), torch.ones(32769)
        x[-1], y[-1] = 0.75, 0.25
        sums, greatest = IMPLS["fused"].build(IMPLS["fused"].heuristic(w, CPU), w, CPU)(x, y)
        assert torch.equal(sums[:-1], torch.ones(32768))
        assert sums[-1].item() == pytest.approx(0.5 + 0.25 / 65536, abs=1e-7)
        assert greatest == 0.5
    finally:
        OPS.remove("maxima")


@needs_compiler
def test_the_number_of_threads_does_not_change_a_bit_of_a_sum_over_rows():
    w = Workload.parse(LAYER_NORM.format(d="f32", n=1001))
    fused = IMPLS["fused"]
    built = fused.build(dataclasses.replace(fused.heuristic(w, CPU), threads="all"), w, CPU)
    tensors = w.operator.examples(w, "random", 0)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(built(*tensors))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@needs_compiler
def test_random_config_samples_build_and_verify():
    import random

    w = Workload.parse(LERP)
    fused, verifier = IMPLS["fused"], Verifier(w, torch.device("cpu"))
    for config in fused.space(w, CPU).sample(random.Random(0), 6):
        assert_right(verifier, fused.build(config, w, CPU), config)


DYNAMIC = {
    "layer_norm": "layer_norm(x=f32[{n},768], weight=f32[768], bias=f32[768])",
    "softmax": "softmax(x=f32[4,{n},32])",
    "lerp": "lerp(x=f32[{n},96], end=f32[96], weight=0.3)",
    "layer_norm_backward": LAYER_NORM.replace("{d}", "f32").replace("40]", "768]"),
    "lerp_backward": "lerp_backward(grad_output=f32[{n},96], x=f32[{n},96], end=f32[96],"
    " weight=0.3)",
}


@pytest.mark.parametrize("name", DYNAMIC)
def test_two_hundred_row_counts_compile_a_handful_of_kernels(name):
    fused, devices = IMPLS["fused"], {"cpu": CPU, "h200": DEVICES["h200"]}
    sources = {device: set() for device in devices}
    for n in range(3, 3 + 200 * 41, 41):
        w = Workload.parse(DYNAMIC[name].format(n=n))
        for device, spec in devices.items():
            assert fused.unsupported(w, spec) is None
            sources[device].add(fused.task(fused.heuristic(w, spec), w, spec).source)
    counts = {device: len(found) for device, found in sources.items()}
    assert max(counts.values()) <= 6, counts


@needs_compiler
@pytest.mark.parametrize("text", [t for t in SUITES["lerp_paddle"].texts if "f32[16," in t])
def test_long_sums_are_as_accurate_as_pytorchs(text):
    w, fused = Workload.parse(text), IMPLS["fused"]
    verdict = Verifier(w, torch.device("cpu")).check(fused.build(fused.heuristic(w, CPU), w, CPU))
    assert verdict.message == ""


def test_a_schedules_program_has_its_splits():
    graph = graph_of(Workload.parse(LAYER_NORM.format(d="f32", n=64)))
    config = IMPLS["fused"].heuristic(Workload.parse(LAYER_NORM.format(d="f32", n=64)), CPU)
    first = program_of(graph, config).segments[0]
    assert first.partials == config.splits
