"""Weight gradients of few channels, of groups and depthwise, and CUTLASS's, on a GPU."""

import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, seed, settings
from hypothesis import strategies as st

from compile_ahead import compile_ahead
from geometries import LAYOUTS, layers
from tilewright.device import spec_of
from tilewright.impl import IMPLS
from tilewright.impls.weight_gradient.conv2d_weight_grad_cutlass import Config as CutlassConfig
from tilewright.impls.weight_gradient.conv2d_weight_grad_cutlass3 import Config as Cutlass3Config
from tilewright.measure.verify import Verifier
from tilewright.op import Workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]

DEVICE = torch.device("cuda:0")
NARROW, GROUPED = "conv2d_weight_grad_narrow", "conv2d_weight_grad_grouped"
HOPPER = "conv2d_weight_grad_narrow_sm90"
DEPTHWISE, CUTLASS = "conv2d_weight_grad_depthwise", "conv2d_weight_grad_cutlass"
MMA, IMAGES = "conv2d_weight_grad_depthwise_mma", "conv2d_weight_grad_depthwise_sm90"
FMA = "conv2d_weight_grad_depthwise_fma_sm90"
CUTLASS3 = "conv2d_weight_grad_cutlass3"


def workload(
    n, c, k, h, w, kernel, stride=1, padding=0, groups=1, dtype="f16", op="conv2d_weight_grad",
    more="", dilation=1,
):  # fmt: skip
    reach = dilation * (kernel - 1) + 1
    p, q = ((size + 2 * padding - reach) // stride + 1 for size in (h, w))
    return Workload.parse(
        f"{op}(x={dtype}[{n},{c},{h},{w}]@channels_last,"
        f" grad_output={dtype}[{n},{k},{p},{q}]@channels_last, kernel_size={kernel},"
        f" stride={stride}, padding={padding}, dilation={dilation}, groups={groups}{more})"
    )


NARROWS = [
    workload(4, 3, 64, 64, 224, 7, 2, 3),
    workload(3, 3, 72, 21, 30, 7, 2, 3),
    workload(3, 3, 40, 9, 300, 3, 1, 1, dtype="bf16"),
    workload(2, 1, 16, 28, 28, 5, 1, 2),
    workload(2, 3, 96, 32, 32, 4, 4),
    workload(2, 4, 64, 12, 20, 7, 2, 3),
    workload(2, 3, 64, 12, 20, 7, 2, 3, op="conv2d_weight_bias_grad"),
    workload(2, 3, 64, 12, 20, 7, 2, 3, more=", out_dtype=f32"),
    workload(2, 3, 64, 12, 20, 7, 2, 3, more=", into=f32[64,3,7,7]@channels_last"),
    workload(1, 1, 8, 2, 2, 1),
]
GROUPEDS = [
    workload(2, 128, 128, 28, 28, 3, 1, 1, groups=32, op="conv2d_weight_bias_grad"),
    workload(2, 64, 64, 9, 13, 3, 2, 1, groups=4, op="conv2d_weight_bias_grad", dtype="bf16"),
    workload(2, 128, 128, 56, 56, 3, 1, 1, groups=32),
    workload(2, 256, 256, 28, 28, 3, 2, 1, groups=32),
    workload(3, 512, 512, 14, 14, 3, 1, 1, groups=32, dtype="bf16"),
    workload(4, 1024, 1024, 7, 7, 3, 1, 1, groups=32),
    workload(2, 24, 24, 17, 9, 3, 1, 1, groups=12),
    workload(2, 48, 48, 7, 120, 3, 1, 1, groups=6, more=", into=f16[48,8,3,3]@channels_last"),
    workload(4, 72, 72, 56, 56, 3, 1, 1, groups=72),
    workload(2, 64, 64, 112, 112, 3, 2, 1, groups=64, dtype="bf16"),
    workload(2, 96, 96, 14, 14, 7, 1, 3, groups=96, op="conv2d_weight_bias_grad"),
    workload(3, 72, 72, 28, 28, 5, 2, 2, groups=72, more=", into=f32[72,1,5,5]@channels_last"),
]
DEPTHWISES = [
    workload(2, 24, 24, 17, 9, 3, 1, 1, groups=24, more=", out_dtype=f32"),
    workload(2, 96, 96, 14, 14, 7, 1, 3, groups=96, more=", into=f32[96,1,7,7]"),
    workload(2, 96, 96, 14, 14, 5, 2, 2, groups=96, more=", into=f16[96,1,5,5]"),
    workload(
        2,
        96,
        96,
        14,
        14,
        5,
        2,
        2,
        groups=96,
        op="conv2d_weight_bias_grad",
        more=", into=f16[96,1,5,5], into_bias=f16[96]",
    ),
    workload(2, 72, 72, 14, 14, 5, 2, 2, groups=72, op="conv2d_weight_bias_grad"),
]
BATCHES = [
    workload(40, 40, 40, 20, 37, 3, 1, 1, groups=40, op="conv2d_weight_bias_grad", dtype="bf16"),
    workload(256, 96, 96, 7, 7, 7, 1, 3, groups=96),
    workload(33, 64, 64, 27, 30, 5, 2, 2, groups=64, more=", into=f32[64,1,5,5]"),
    workload(16, 32, 32, 13, 14, 3, 2, 0, groups=32, more=", out_dtype=f32"),
]
BOTH = workload(
    2, 3, 64, 12, 20, 7, 2, 3, op="conv2d_weight_bias_grad",
    more=", into=f32[64,3,7,7]@channels_last, into_bias=f32[64]",
)  # fmt: skip
FEW, SHARED, OWN = ((32, c, k, 56, 56, 3, 1, 1) for c, k in ((3, 64), (128, 128), (96, 96)))
"""100352 pixels, and as many terms of the bias: few channels, groups, and one filter each."""
LONG = [
    *((name, FEW, 1) for name in (NARROW, HOPPER)),
    (GROUPED, SHARED, 32),
    *((name, OWN, 96) for name in (DEPTHWISE, MMA, IMAGES, FMA)),
]
ULPS = {name: 4.6 if name in (MMA, IMAGES, FMA) else 2.5 for name, *_ in LONG}
"""Of such a sum: that of as many threads' in a tree is up to 4.6 off: see
docs/weight_gradient_kernels.md."""
IN_PLACE = workload(2, 3, 64, 12, 20, 7, 2, 3, more=", into=f32[64,3,7,7]@channels_last")


@pytest.mark.parametrize(
    ("name", "w"),
    [(NARROW, NARROWS[0]), (NARROW, NARROWS[6]), (GROUPED, GROUPEDS[0]), (GROUPED, GROUPEDS[3]),
     (DEPTHWISE, DEPTHWISES[0]), (DEPTHWISE, DEPTHWISES[3]), (IMAGES, BATCHES[0]),
     (FMA, BATCHES[0])],
)  # fmt: skip
def test_contiguous_tensors_are_converted(name, w):
    w = Workload.parse(str(w).replace("@channels_last", ""))
    assert Verifier(w, DEVICE).check(built(name, w)).message == ""


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize(("name", "sizes", "groups"), LONG)
def test_long_fp32_sums_of_the_bias_are_nearly_exact(name, sizes, groups, dtype):
    how = {"groups": groups, "dtype": dtype, "op": "conv2d_weight_bias_grad"}
    w = workload(*sizes, more=", out_dtype=f32", **how)
    x, grad = w.operator.examples(w, "random", 0, DEVICE)
    truth = grad.double().sum((0, 2, 3))
    unit = 2.0 ** (truth.abs().clamp_min(truth.abs().mean()).log2().floor() - 23)
    for config in configs(name, w, 6):
        found = built(name, w, config)(x, grad)[1]
        assert ((found.double() - truth).abs() / unit).max() < ULPS[name], config


def configs(name, w, count):
    """The heuristic's, and some others that differ in every knob."""
    space = list(IMPLS[name].space(w, spec_of(0)))
    return [IMPLS[name].heuristic(w, spec_of(0)), *space[:: max(1, len(space) // count)]]


def built(name, w, config=None):
    impl, spec = IMPLS[name], spec_of(0)
    if reason := impl.unsupported(w, spec):
        pytest.skip(reason)
    return impl.build(config or impl.heuristic(w, spec), w, spec)


@pytest.mark.parametrize(
    ("name", "w"),
    [
        *((name, w) for name in (NARROW, HOPPER) for w in NARROWS),
        *((GROUPED, w) for w in GROUPEDS),
        *((name, w) for name in (DEPTHWISE, MMA) for w in DEPTHWISES),
        *((MMA, w) for w in GROUPEDS[-4:]),
        *((name, w) for name in (IMAGES, FMA) for w in (*DEPTHWISES, *GROUPEDS[-4:], *BATCHES)),
        *((name, replace(IN_PLACE, flags=("donate=into",))) for name in (NARROW, HOPPER)),
        *((name, BOTH) for name in (NARROW, HOPPER)),
        *((name, replace(BOTH, flags=("donate=into,into_bias",))) for name in (NARROW, HOPPER)),
    ],
    ids=str,
)
def test_results_are_right_in_every_kind_of_config(name, w):
    verifier = Verifier(w, DEVICE)
    for config in configs(name, w, 6):
        assert verifier.check(built(name, w, config)).message == "", config


any_geometry = pytest.mark.parametrize("part", range(5))
"""Examples in parts, each with draws of its own: they compile kernels one after the other, and
workers that run side by side share them so."""


def assert_any_geometry_is_right(name, part, case, any_config=False):
    """`case`: a workload, of a function that draws a number and hypothesis's data."""

    @seed(part)
    @settings(max_examples=12)
    @given(st.data())
    def holds(data):
        w = case(lambda low, high: data.draw(st.integers(low, high)), data)
        if IMPLS[name].unsupported(w, spec_of(0)) is None:
            space = list(IMPLS[name].space(w, spec_of(0))) if any_config else None
            config = data.draw(st.sampled_from(space)) if space else None
            assert Verifier(w, DEVICE).check(built(name, w, config)).message == "", config

    holds()


@any_geometry
@pytest.mark.parametrize("name", [NARROW, HOPPER])
def test_any_narrow_geometry_is_right(name, part):
    def case(draw, data):
        kernel = draw(1, 7)
        return workload(
            draw(1, 5), draw(1, 4), 8 * draw(1, 12), draw(kernel, 40), 2 * draw(4, 60), kernel,
            draw(1, min(kernel, 4)), draw(0, kernel),
            dtype=data.draw(st.sampled_from(["f16", "bf16"])),
        )  # fmt: skip

    assert_any_geometry_is_right(name, part, case)


LINES = {"layouts": LAYOUTS, "most_size": (30, 130), "most_units": 12}


@pytest.mark.parametrize(
    ("name", "served"),
    [
        (GROUPED, layers(depths=(1, 2, 4, 8, 16, 32), most_dilation=1, **LINES)),
        (MMA, layers(depths=(1,), most_kernel=7, most_dilation=1, **LINES)),
        (DEPTHWISE, layers((1, 8), depths=(1,), most_kernel=7, most_dilation=3, **LINES)),
    ],
    ids=[GROUPED, MMA, DEPTHWISE],
)
@any_geometry
def test_any_grouped_geometry_is_right(name, served, part):
    assert_any_geometry_is_right(name, part, lambda draw, data: data.draw(served))


@any_geometry
@pytest.mark.parametrize("name", [IMAGES, FMA])
def test_any_depthwise_geometry_is_right_on_hopper(name, part):
    def case(draw, data):
        kernel, channels = draw(1, 9), 8 * draw(1, 9)
        return workload(
            draw(1, 70), channels, channels, draw(kernel, 30), draw(kernel, 130), kernel,
            draw(1, min(kernel, 4)), draw(0, kernel), channels,
            dtype=data.draw(st.sampled_from(["f16", "bf16"])),
        )  # fmt: skip

    assert_any_geometry_is_right(name, part, case, any_config=True)


@pytest.mark.parametrize(
    ("name", "w"),
    [
        (NARROW, NARROWS[0]),
        (HOPPER, NARROWS[0]),
        (GROUPED, GROUPEDS[0]),
        (IMAGES, BATCHES[0]),
        (FMA, BATCHES[0]),
    ],
)
def test_streams_graphs_and_threads_do_not_change_the_bits(name, w):
    run = built(name, w)
    tensors = w.operator.examples(w, "random", 0, DEVICE)
    expected = run(*tensors)
    found = {}
    torch.cuda.synchronize()

    def on_a_stream(i):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            found[i] = [run(*tensors) for _ in range(20)][-1]
        stream.synchronize()

    threads = [threading.Thread(target=on_a_stream, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found["graph"] = run(*tensors)
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(list(found.values()), [expected] * len(found), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "w"),
    [
        (NARROW, workload(1, 4, 8, 6, 14, 3)),
        (HOPPER, workload(1, 4, 8, 6, 14, 3)),
        (GROUPED, workload(1, 16, 16, 6, 14, 3, groups=4)),
        *((name, workload(17, 16, 16, 6, 14, 3, groups=16)) for name in (IMAGES, FMA)),
    ],
)
def test_infinities_of_x_stay_with_the_taps_that_meet_them(name, w):
    """Rows are rounded up to sixteen pixels: what lies beyond them must not be multiplied."""
    x, grad = w.operator.examples(w, "random", 0, DEVICE)
    x[:, :, :, -1] = float("inf")  # met by the last column of taps alone
    found = built(name, w)(x, grad)
    assert found[..., :2].isfinite().all()
    assert not found[..., 2].isfinite().any()


# --- groups in tiles of their own channels -------------------------------------------------------


LARGE_IMAGES = workload(2, 128, 128, 56, 56, 3, 1, 1, groups=16)


@pytest.mark.parametrize("w", [LARGE_IMAGES, *(GROUPEDS[i] for i in (1, 3, 4, 5, 7))], ids=str)
def test_tiles_of_groups_are_right_in_every_kind_of_config(w):
    impl, spec, verifier = IMPLS["conv2d_weight_grad_sm90"], spec_of(0), Verifier(w, DEVICE)
    if reason := impl.unsupported(w, spec):
        pytest.skip(reason)
    configs = impl.promising(w, spec)[:16]
    assert any(c.halo for c in configs) == (w == LARGE_IMAGES)
    for config in configs:
        assert verifier.check(built(impl.name, w, config)).message == "", config


# --- CUTLASS -------------------------------------------------------------------------------------

CUTLASS_LAYERS = [
    workload(4, 64, 128, 15, 13, 3, 1, 1),
    workload(3, 72, 40, 17, 9, 3, 2, 2, dtype="bf16", dilation=2),
    workload(4, 12, 30, 14, 14, 3, 1, 1),
    workload(4, 3, 7, 14, 14, 3, 2, 1),
    workload(4, 64, 128, 15, 13, 3, 1, 1, more=", out_dtype=f32"),
]
CUTLASS_CONFIGS = [
    CutlassConfig(64, 64, 32, stages, split_k, mode)
    for stages in (2, 4)
    for split_k, mode in ((1, "parallel"), (5, "parallel"), (5, "serial"))
]


@pytest.mark.parametrize("w", CUTLASS_LAYERS, ids=str)
def test_cutlass_is_right_in_both_split_modes(w):
    if reason := IMPLS[CUTLASS].unsupported(w, spec_of(0)):
        pytest.skip(reason)
    verifier, space = Verifier(w, DEVICE), IMPLS[CUTLASS].space(w, spec_of(0))
    for config in CUTLASS_CONFIGS:
        if space.restricted({"split_k": [1, 5]}).why_not(config) is None:
            assert verifier.check(built(CUTLASS, w, config)).message == "", config


@pytest.mark.parametrize("tile", [(64, 64, 32), (64, 128, 64)])
def test_cutlass_is_right_with_the_shorter_instruction(tile):
    w = CUTLASS_LAYERS[0]
    if reason := IMPLS[CUTLASS].unsupported(w, spec_of(0)):
        pytest.skip(reason)
    config = CutlassConfig(*tile, stages=2, split_k=4, instruction_k=8)
    assert IMPLS[CUTLASS].space(w, spec_of(0)).why_not(config) is None
    assert Verifier(w, DEVICE).check(built(CUTLASS, w, config)).message == ""


@pytest.mark.parametrize("w", [*CUTLASS_LAYERS[:2], CUTLASS_LAYERS[-1]], ids=str)
def test_cutlass_3_is_right_in_clusters_and_alone(w):
    if reason := IMPLS[CUTLASS3].unsupported(w, spec_of(0)):
        pytest.skip(reason)
    verifier, space = Verifier(w, DEVICE), IMPLS[CUTLASS3].space(w, spec_of(0))
    configs = [Cutlass3Config(64, 64, 64, 4, *cluster) for cluster in ((1, 1), (2, 1), (1, 2))]
    configs = [c for c in configs if space.why_not(c) is None]
    configs.append(IMPLS[CUTLASS3].heuristic(w, spec_of(0)))
    compile_ahead(IMPLS[CUTLASS3], [(w, c) for c in configs])
    for config in configs:
        assert verifier.check(built(CUTLASS3, w, config)).message == "", config


@any_geometry
@pytest.mark.parametrize(
    ("name", "tile"),
    [
        (CUTLASS, {"tile_m": [64], "tile_n": [64], "tile_k": [32], "instruction_k": [16]}),
        (CUTLASS3, {"tile_m": [64], "tile_n": [64], "tile_k": [64], "stages": [4]}),
    ],
)
def test_cutlass_is_right_of_any_geometry(name, tile, part):
    """Of one tile and channels in eights, which few libraries serve."""
    if reason := IMPLS[name].unsupported(CUTLASS_LAYERS[0], spec_of(0)):
        pytest.skip(reason)

    @seed(part)
    @settings(max_examples=4)
    @given(st.data())
    def check(data):
        w = data.draw(layers(layouts=LAYOUTS))
        assume(IMPLS[name].unsupported(w, spec_of(0)) is None)
        space = IMPLS[name].space(w, spec_of(0)).restricted(tile)
        config = data.draw(st.sampled_from(list(space)))
        assert Verifier(w, DEVICE).check(built(name, w, config)).message == "", config

    check()


def test_cutlass_runs_on_the_callers_stream_and_in_a_graph():
    w = CUTLASS_LAYERS[0]
    for mode in ("parallel", "serial"):
        run = built(CUTLASS, w, CutlassConfig(64, 64, 32, 4, 5, mode))
        tensors = w.operator.examples(w, "random", 0, DEVICE)
        expected = run(*tensors)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            found = run(*tensors)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run(*tensors)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, expected)
        assert torch.equal(captured, expected)


# --- every kernel --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "w"),
    [
        *((name, NARROWS[0]) for name in (NARROW, HOPPER)),
        (GROUPED, GROUPEDS[2]),
        *((name, BATCHES[1]) for name in (DEPTHWISE, MMA, IMAGES, FMA)),
        *((name, CUTLASS_LAYERS[0]) for name in (CUTLASS, CUTLASS3)),
    ],
)
def test_operands_of_one_sign_stay_within_what_truncation_allows(name, w):
    tensors = [t.abs() for t in w.operator.examples(w, "random", 0, DEVICE)]
    (truth,) = w.operator.truth(w, tensors)
    off = (built(name, w)(*tensors).double() - truth).abs() / truth
    assert off.max() < 2**-10  # one ulp of fp16
