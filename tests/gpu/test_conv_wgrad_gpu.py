"""The convolution weight-gradient kernels on a GPU: every tile, split mode and kind of layer."""

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st

import tilewright as tw
from geometries import EVERY, LAYOUTS, configs, layer, layers
from side_by_side import assert_graphs_and_threads_give
from tilewright.compile.counters import counters
from tilewright.device import spec_of
from tilewright.impl import IMPLS
from tilewright.impls.weight_gradient import conv2d_weight_grad_sm80 as sm80
from tilewright.impls.weight_gradient import conv2d_weight_grad_sm90 as sm90
from tilewright.impls.weight_gradient._model import COMBINES, MARKED, SERIAL
from tilewright.measure.verify import Verifier
from tilewright.op import Workload
from tilewright.suite import SUITES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]

DEVICE = torch.device("cuda:0")
TILES = {sm80: sm80.WARPS, sm90: sm90.WARPGROUPS}
NAMES = {sm80: "conv2d_weight_grad_sm80", sm90: "conv2d_weight_grad_sm90"}
CANDIDATES = [(module, tile) for module, tiles in TILES.items() for tile in tiles]
MODES = [(1, 1, "last"), (2, 1, "last"), (3, 1, "grid"), (5, 1, "kernel"), (4, 1, SERIAL)]
"""(split_k, cluster, combine)"""
HOPPERS = [(2, 2, "last"), (3, 3, "last"), (8, 8, "last"), (4, 2, "last"), (6, 2, "grid"),
           (8, 4, "kernel"), (2, 1, MARKED), (9, 1, MARKED)]  # fmt: skip
"""Of sm_90 alone."""


LAYERS = [
    layer(4, 64, 128, 15, 13, 3, padding=1),
    layer(3, 72, 40, 17, 9, 3, stride=2, padding=2, dilation=2),
    layer(4, 128, 256, 14, 14, 1, stride=2),
    layer(2, 24, 8, 20, 20, 5, padding=2, dtype="bf16"),
    layer(9, 320, 136, 7, 7, 1),
]
ODD = [
    layer(2, 3, 64, 32, 32, 7, stride=2, padding=3),
    layer(3, 5, 7, 11, 9, 3, padding=1),
    layer(2, 1, 1, 16, 16, 3, padding=1, dtype="bf16"),
    layer(2, 13, 24, 6, 7, 1),
]


def modes_of(module):
    return MODES + (HOPPERS if module is sm90 else [])


def fitting(module, w, tile, split_k=1, combine="last", cluster=1):
    """The config with as many stages as fit and, at most, this many slices, or None."""
    impl, spec = IMPLS[NAMES[module]], spec_of(0)
    space = impl.space(w, spec)
    for slices in range(split_k, 0, -1):
        for stages in (4, 3, 2):
            values = {"tile_m": tile[0], "tile_n": tile[1], "stages": stages, "split_k": slices}
            values["combine"] = combine if slices > cluster else "last"
            if cluster > 1:
                values["cluster"] = cluster
            config = module.Config(**values)
            if space.restricted({"split_k": [slices]}).why_not(config) is None:
                return config
    return None


def config_of(module, w, tile, *how, **named):
    return fitting(module, w, tile, *how, **named) or pytest.skip(f"{tile} does not fit {w}")


def build(module, w, config):
    impl, spec = IMPLS[NAMES[module]], spec_of(0)
    if reason := impl.unsupported(w, spec):
        pytest.skip(reason)
    return impl.build(config, w, spec)


@pytest.fixture(scope="module")
def verifiers():
    made = {}

    def of(w):
        if w not in made:
            made[w] = Verifier(w, DEVICE)
        return made[w]

    return of


def examples(w, kind="random", seed=0):
    return w.operator.examples(w, kind, seed, DEVICE)


@pytest.mark.parametrize(("module", "tile"), CANDIDATES)
def test_every_tile_and_split_mode_is_right(module, tile, verifiers):
    checked = set()
    for w in LAYERS:
        if IMPLS[NAMES[module]].unsupported(w, spec_of(0)):
            continue
        for split_k, cluster, combine in modes_of(module):
            space = IMPLS[NAMES[module]].space(w, spec_of(0)).restricted({"split_k": [split_k]})
            config = module.Config(*tile, stages=2, split_k=split_k, combine=combine)
            if cluster > 1:
                config = replace(config, cluster=cluster, stages=4)
            if space.why_not(config) is None:
                checked.add((split_k, cluster, combine))
                assert verifiers(w).check(build(module, w, config)).message == "", config
    assert len(checked) >= 3


@pytest.mark.parametrize("tile", [tile for tile in sm90.WARPGROUPS if tile[1] % 128 == 0])
@pytest.mark.parametrize("fetch", sm90.FETCHES[1:])
def test_x_copied_as_a_matrix_is_right(tile, fetch, verifiers):
    w = layer(4, 200, 512, 15, 13, 1)
    for split_k, combine in [(1, "last"), (3, "last"), (3, "grid"), (3, "kernel")]:
        config = sm90.Config(*tile, stages=2, split_k=split_k, combine=combine, fetch=fetch)
        assert verifiers(w).check(build(sm90, w, config)).message == "", config


@pytest.mark.parametrize("tile", sm90.WARPGROUPS)
@pytest.mark.parametrize("more", [{"warm": True}, {"pending": 0}], ids=str)
def test_pixels_asked_for_ahead_and_stages_freed_early_change_nothing(tile, more, verifiers):
    fits = [(w, config) for w in LAYERS if (config := fitting(sm90, w, tile, split_k=3))]
    assert fits
    for w, config in fits:
        changed = replace(config, **more)
        assert verifiers(w).check(build(sm90, w, changed)).message == "", changed


@pytest.mark.parametrize("more", ["out_dtype=f32", "into=f16", "into=f32"])
@pytest.mark.parametrize("module", [sm80, sm90])
def test_fp32_results_and_added_ones_are_right_in_every_split_mode(module, more):
    for plain in (LAYERS[0], LAYERS[2], ODD[1]):
        shape = list(plain.outputs[0].shape)
        rest = f"{more}{shape}@channels_last".replace(" ", "") if "into" in more else more
        w = Workload.parse(f"{str(plain).removesuffix(')')}, {rest})")
        impl = IMPLS[NAMES[module]]
        if impl.unsupported(w, spec_of(0)):
            continue
        verifier = Verifier(w, DEVICE)
        for split_k, cluster, combine in modes_of(module):
            space = impl.space(w, spec_of(0)).restricted({"split_k": [split_k]})
            config = module.Config(64, 64, stages=2, split_k=split_k, combine=combine)
            config = replace(config, cluster=cluster) if module is sm90 else config
            if space.why_not(config) is None:
                assert verifier.check(build(module, w, config)).message == "", config


@pytest.fixture
def searching():
    """PyTorch's result as the tuner has it: by the kernel that cuDNN's search finds, in TF32."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.allow_tf32
    cudnn.benchmark = cudnn.allow_tf32 = True
    yield
    cudnn.benchmark, cudnn.allow_tf32 = before


FP32_RESULTS = [w for n in (8, 32) for w in SUITES[f"resnet50_v15_wgrad_f32_out_n{n}"].workloads()]


@pytest.mark.parametrize("w", FP32_RESULTS, ids=str)
def test_untuned_fp32_sums_are_as_exact_as_is_asked(w, searching):
    impl = IMPLS[NAMES[sm90]]
    if reason := impl.unsupported(w, spec_of(0)):
        pytest.skip(reason)
    assert Verifier(w, DEVICE).check(build(sm90, w, impl.heuristic(w, spec_of(0)))).message == ""


@pytest.mark.parametrize(("split_k", "cluster", "combine"), MODES)
@pytest.mark.parametrize("w", ODD, ids=str)
def test_channels_that_come_in_no_eights_are_gathered(w, split_k, cluster, combine, verifiers):
    config = config_of(sm80, w, (64, 64), split_k, combine)
    assert verifiers(w).check(build(sm80, w, config)).message == ""


@pytest.mark.parametrize("part", range(5))
@pytest.mark.parametrize("module", [sm80, sm90])
def test_any_geometry_is_right(module, part):
    if sm90 is module and spec_of(0).arch != "sm_90a":
        pytest.skip("wgmma needs sm_90a")
    impl = IMPLS[NAMES[module]]
    served = layers((8,), depths=(None, 8, 16, 32, 64), layouts=LAYOUTS)
    if module is sm80:
        served = layers((1, 8), dtypes=EVERY, layouts=LAYOUTS)

    @seed(part)
    @settings(max_examples=12)
    @given(st.data())
    def check(data):
        w = data.draw(served)
        if impl.unsupported(w, spec_of(0)):
            return
        untuned, tensors = impl.heuristic(w, spec_of(0)), examples(w, "integer")
        (truth,) = w.operator.truth(w, tensors)
        for config in {untuned, data.draw(configs(impl.space(w, spec_of(0)), untuned))}:
            found = build(module, w, config)(*tensors)
            assert torch.equal(found, truth.to(found.dtype)), (w, config)

    check()


@pytest.mark.parametrize(
    ("module", "split_k", "cluster", "combine"),
    [(module, *mode) for module in (sm80, sm90) for mode in modes_of(module)],
)
def test_streams_graphs_and_threads_give_the_same_bits(module, split_k, cluster, combine):
    w = LAYERS[0]
    run = build(module, w, config_of(module, w, (64, 64), split_k, combine, cluster))
    tensors = examples(w)
    expected = run(*tensors)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        on_stream = run(*tensors)
    stream.synchronize()
    assert torch.equal(on_stream, expected)

    assert_graphs_and_threads_give(run, tensors, expected)


@pytest.mark.parametrize(
    ("module", "split_k", "cluster", "combine"),
    [(sm80, 3, 1, "last"), (sm80, 3, 1, "grid"), (sm90, 3, 1, "last"), (sm90, 3, 1, "grid"),
     (sm90, 4, 2, "last"), (sm90, 6, 2, "grid"), (sm90, 4, 1, MARKED),
     (sm80, 4, 1, SERIAL), (sm90, 4, 1, SERIAL)],
)  # fmt: skip
def test_counters_are_zero_again(module, split_k, cluster, combine):
    w = LAYERS[0]
    run = build(module, w, config_of(module, w, (64, 64), split_k, combine, cluster))
    for _ in range(5):
        run(*examples(w))
    torch.cuda.synchronize()
    assert counters._kept
    assert not any(words.any() for words in counters._kept)


@pytest.mark.parametrize("module", [sm80, sm90])
def test_operands_of_one_sign_stay_within_what_truncation_allows(module):
    w = layer(64, 64, 64, 28, 28, 3, padding=1)
    tensors = [t.abs() for t in examples(w)]
    run = build(module, w, config_of(module, w, (64, 64), 16, "grid"))
    truth = w.operator.truth(w, tensors)[0]
    off = (run(*tensors).double() - truth).abs() / truth
    assert off.max() < 2**-10  # one ulp of fp16


@pytest.mark.parametrize("module", [sm80, sm90])
@pytest.mark.parametrize("split_k", [1, 3])
def test_overflow_nan_and_infinity_are_what_pytorch_gives(module, split_k):
    w = layer(2, 64, 64, 12, 12, 3, padding=1)
    run = build(module, w, config_of(module, w, (64, 64), split_k, "grid"))
    x, grad = examples(w)
    x.fill_(40.0)
    grad.fill_(40.0)
    assert torch.equal(run(x, grad), torch.full_like(run(x, grad), torch.inf))
    x, grad = examples(w)
    grad[0, 3, 5, 5], x[1, 7, 6, 6] = torch.nan, torch.inf
    found = run(x, grad)
    truth = w.operator.truth(w, [x, grad])[0]
    assert torch.equal(found.isnan(), truth.isnan())
    assert torch.equal(found.isinf(), truth.isinf())


@pytest.mark.parametrize("module", [sm80, sm90])
def test_two_graphs_with_split_reductions_run_side_by_side(module):
    w = LAYERS[0]
    run = build(module, w, config_of(module, w, (64, 64), 3, "last"))
    tensors = examples(w)
    expected = run(*tensors)
    graphs, outputs = [], []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs.append([run(*tensors) for _ in range(10)])
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(10):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(o, expected) for outs in outputs for o in outs)


DEPTHWISE = [
    (4, 72, 15, 13, 3, 1, 1),
    (3, 30, 17, 18, 3, 2, 1),
    (2, 144, 14, 14, 5, 1, 2),
    (5, 16, 11, 23, 5, 2, 2),
    (2, 96, 9, 9, 7, 1, 3),
    (1, 600, 3, 2, 3, 1, 1),
    (3, 57, 17, 18, 3, 1, 1),
    (2, 1, 40, 33, 7, 2, 3),
    (4, 64, 28, 27, 3, 1, 2, 2),
    (2, 63, 31, 40, (2, 3), (1, 2), (0, 4), (3, 5)),
    (2, 24, 20, 40, (3, 4), (3, 4), (2, 3), (2, 3)),
]


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("shape", DEPTHWISE, ids=str)
def test_depthwise_filters_are_right(shape, dtype):
    n, c, *rest = shape
    workload = layer(n, c, c, *rest, dtype=dtype, more=f", groups={c}")
    impl, verifier = IMPLS["conv2d_weight_grad_depthwise"], Verifier(workload, DEVICE)
    for config in impl.space(workload, spec_of(0)):
        run = impl.build(config, workload, spec_of(0))
        assert verifier.check(run).message == ""


def bias_too(plain, into):
    text = str(plain).replace("weight_grad", "weight_bias_grad")
    if into:
        features, *rest = plain.outputs[0].shape
        shape = f"[{','.join(map(str, (features, *rest)))}]@channels_last"
        text = f"{text[:-1]}, into={into}{shape}, into_bias={into}[{features}])"
    return Workload.parse(text)


@pytest.mark.parametrize("tile", [(64, 64), (64, 128), (128, 128), (256, 64), (128, 256)])
@pytest.mark.parametrize(
    ("module", "into"),
    [(sm80, None), (sm80, "f32"), (sm90, None), (sm90, "x"), (sm90, "f32")],
)
def test_the_bias_is_summed_beside_the_weight_in_every_split_mode(module, tile, into, verifiers):
    impl, checked = IMPLS[NAMES[module]], 0
    for plain in (*LAYERS, ODD[1]):
        if module is sm90 and into == "f32" and plain["kernel_size"] == (5, 5):
            continue  # PyTorch's fp32 gradient of this weight owes nothing to tensor cores
        w = bias_too(plain, plain["x"].dtype if into == "x" else into)
        if impl.unsupported(w, spec_of(0)):
            continue
        for split_k, cluster, combine in modes_of(module):
            space = impl.space(w, spec_of(0)).restricted({"split_k": [split_k]})
            config = module.Config(*tile, stages=2, split_k=split_k, combine=combine)
            if cluster > 1:
                config = replace(config, cluster=cluster, stages=4)
            if space.why_not(config) is None:
                assert verifiers(w).check(build(module, w, config)).message == "", config
                checked += 1
    assert checked


MANY = layer(32, 64, 128, 56, 56, 1)
"""100352 pixels, and as many terms of the bias."""


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("tile", [(64, 64), (128, 64), (64, 128)])
@pytest.mark.parametrize("module", [sm80, sm90])
def test_long_fp32_sums_of_the_bias_are_rounded_about_once(module, tile, dtype):
    """Of 100352 terms: whoever adds them."""
    w = Workload.parse(str(bias_too(MANY, None)).replace("f16", dtype)[:-1] + ", out_dtype=f32)")
    x, grad = examples(w)
    truth = grad.double().sum((0, 2, 3))
    unit = 2.0 ** (truth.abs().clamp_min(truth.abs().mean()).log2().floor() - 23)
    modes = [(132, 1, "last"), (132, 1, "grid"), (64, 1, "kernel"), (16, 1, SERIAL)]
    more = [(132, 2, "last"), (132, 1, MARKED)] if module is sm90 else []
    for split_k, cluster, combine in [(1, 1, "last"), *modes, *more]:
        config = fitting(module, w, tile, split_k, combine, cluster)
        if config is None:
            continue
        found = build(module, w, config)(x, grad)[1]
        assert ((found.double() - truth).abs() / unit).max() < 1.5, config


FP32 = [re.sub(r"\bb?f16\[", "f32[", str(w)) for w in LAYERS + ODD]


@pytest.mark.parametrize("text", FP32)
def test_fp64_is_right_in_every_tile_and_split_mode(text):
    w = Workload.parse(text.replace("f32[", "f64["))
    impl, verifier = IMPLS[NAMES[sm80]], Verifier(w, DEVICE)
    space, checked = impl.space(w, spec_of(0)), 0
    for tile in sm80.WARPS:
        for split_k, _, combine in MODES:
            config = sm80.Config(*tile, 8, stages=2, split_k=split_k, combine=combine)
            if space.restricted({"split_k": [split_k]}).why_not(config) is None:
                assert verifier.check(build(sm80, w, config)).message == "", config
                checked += 1
    assert checked > 2


@pytest.mark.parametrize("text", FP32)
@pytest.mark.parametrize("allow_tf32", [True, None])
def test_fp32_is_right_in_every_tile_and_split_mode(text, allow_tf32, tf32_flag):
    w = Workload.parse(text.replace(")", f", allow_tf32={allow_tf32})"))
    tf32_flag(bool(allow_tf32))
    impl, verifier = IMPLS[NAMES[sm80]], Verifier(w, DEVICE)
    space, checked = impl.space(w, spec_of(0)), 0
    assert verifier.check(build(sm80, w, impl.heuristic(w, spec_of(0)))).message == ""
    for tile in sm80.WARPS:
        for split_k, _, combine in MODES:
            config = sm80.Config(*tile, 16, stages=2, split_k=split_k, combine=combine)
            if space.restricted({"split_k": [split_k]}).why_not(config) is None:
                assert verifier.check(build(sm80, w, config)).message == "", config
                checked += 1
    assert checked > 2


@pytest.mark.parametrize("module", [sm80, sm90])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_conv2d_has_its_weight_and_bias_gradients_in_one_pass_under_autograd(module, layout):
    x = torch.randn(4, 64, 20, 20, device=DEVICE, dtype=torch.half).to(memory_format=layout)
    weight = torch.randn(96, 64, 3, 3, device=DEVICE, dtype=torch.half, requires_grad=True)
    bias = torch.zeros(96, device=DEVICE, dtype=torch.half, requires_grad=True)
    found = []
    for convolve in (tw.conv2d, torch.nn.functional.conv2d):
        with tw.use(NAMES[module], op="conv2d_weight_bias_grad"):
            out = convolve(x, weight, bias, padding=1)
            found.append(torch.autograd.grad(out.square().sum(), (weight, bias)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=4e-3, atol=theirs.abs().max().item() * 2e-3)


def test_torchs_flag_decides_whether_a_call_uses_tf32(tf32_flag):
    x, grad = (torch.randn(2, 64, 32, 32, device=DEVICE) for _ in range(2))
    truth = torch.nn.grad.conv2d_weight(x.double(), (64, 64, 3, 3), grad.double(), padding=1)
    errors = []
    for allowed in (True, False):
        tf32_flag(allowed)
        with tw.use(NAMES[sm80], op="conv2d_weight_grad"):
            found = tw.conv2d_weight_grad(x, grad, 3, padding=1)
        errors.append((found - truth).abs().max().item())
    assert errors[1] < 1e-3 < errors[0] < 1.0


NCHW = [
    *(str(w).replace("@channels_last", "") for w in LAYERS + ODD),
    str(LAYERS[0]).replace("@channels_last", "", 1),
    str(LAYERS[0]).replace("@channels_last", "@strides(0,0,0,0)", 1),
    "@strides(0,0,0,0)".join(str(LAYERS[0]).rsplit("@channels_last", 1)),  # of sum().backward()
    str(LAYERS[0]).replace("@channels_last", "").replace(")", ", into=f32[128,64,3,3])"),
    str(LAYERS[0]).replace("@channels_last", "").replace(")", ", into=f16[128,64,3,3])"),
]


@pytest.mark.parametrize("text", NCHW)
@pytest.mark.parametrize("module", [sm80, sm90])
def test_other_layouts_are_served(module, text, verifiers):
    w, impl = Workload.parse(text), IMPLS[NAMES[module]]
    if impl.unsupported(w, spec_of(0)):
        pytest.skip("channels are not aligned")
    assert verifiers(w).check(build(module, w, impl.heuristic(w, spec_of(0)))).message == ""


def test_conversions_can_be_captured_and_run_side_by_side():
    w = Workload.parse(NCHW[0])
    run = build(sm90, w, IMPLS[NAMES[sm90]].heuristic(w, spec_of(0)))
    tensors = examples(w)
    expected = run(*tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [run(*tensors) for _ in range(3)]
    with torch.cuda.stream(torch.cuda.Stream()):
        beside = run(*tensors)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in (*captured, beside))


def test_one_binary_serves_two_shapes():
    first, second = LAYERS[0], layer(2, 64, 64, 9, 9, 3, padding=1)
    config = replace(config_of(sm90, first, (64, 64)), stages=2)
    for w in (first, second):
        tensors = examples(w, "integer")
        found = build(sm90, w, config)(*tensors)
        assert torch.equal(found, w.operator.truth(w, tensors)[0].to(found.dtype))
    assert COMBINES[0] == config.combine
