"""Every operator gives PyTorch's result, through every implementation that supports the workload.

Values are held against the fp64 truth: at most twice PyTorch's own largest error and two ulps;
in fp64, where PyTorch's result is the truth, sixteen.
Shape, dtype, strides, NaN and infinities are PyTorch's exactly.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewright as tw
from operator_cases import CASES, MIXED
from tilewright.compile.cache import compiled
from tilewright.device import DEVICES, spec_of
from tilewright.impl import IMPLS
from tilewright.impls._vendor import call_reference
from tilewright.op import OPS, Workload
from tilewright.tensor_spec import same_layout

DTYPES = ("f32", "bf16", "f16", "f64")
SLOW_TO_BUILD = ("inductor", "inductor_max")
VENDORS = ("aten", *SLOW_TO_BUILD)
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]

on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])


def workloads(implementation):
    """Every case in every dtype for aten; one dtype each, in turn, where building costs time."""
    texts = []
    for cases in CASES.values():
        for i, case in enumerate(cases):
            every = implementation == "aten" or i == 0
            dtypes = DTYPES if every else (DTYPES[i % len(DTYPES)],)
            if implementation in SLOW_TO_BUILD:
                dtypes = DTYPES[:1] if i == 0 else ()
            texts += [case.format(d=d, w="f64" if d == "f64" else "f32") for d in dtypes]
    if implementation not in SLOW_TO_BUILD:
        texts += [case.format(d=d) for case in MIXED for d in ("f16", "bf16")]
    return texts


def pairs():
    return [
        (name, text)
        for name in IMPLS
        for text in workloads(name)
        if IMPLS[name].serves(text.partition("(")[0])
    ]


def own_and_vendor():
    """Those that serve any operator, and are quick to build."""
    return [name for name in IMPLS if name not in SLOW_TO_BUILD and IMPLS[name].op is None]


def refusal(implementation, w, device):
    impl, indexed = IMPLS[implementation], w.operator.indexed
    if device == "cuda" and implementation in VENDORS and indexed and indexed.last_wins:
        return "PyTorch's kernels race for the last write on a GPU"
    spec = spec_of(0 if device == "cuda" else None)
    return impl.unsupported(w, spec) if impl.serves(w.op) else f"it serves {impl.op}"


def skip_unless_supported(implementation, w, device):
    if reason := refusal(implementation, w, device):
        pytest.skip(reason)


def through(implementation, w, tensors):
    """The public function's result and PyTorch's."""
    args = w.call(tensors)
    with tw.use(implementation):
        found = getattr(tw, w.op)(**args)
    return found, call_reference(w.operator, args)


def assert_are_pytorchs(found, expected, truths):
    pairs = (v if isinstance(v, (tuple, list)) else (v,) for v in (found, expected))
    for own, right, truth in zip(*pairs, truths, strict=True):
        assert_is_pytorchs(own, right, truth)


def assert_is_pytorchs(found, expected, truth):
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    if found.numel() == 0:
        return
    assert same_layout(found.shape, found.stride(), expected.stride())
    finite = expected.isfinite()
    assert torch.equal(found.isnan(), expected.isnan())
    special = ~finite & ~expected.isnan()
    assert torch.equal(found[special], expected[special])
    if not finite.any():
        return
    dtype = expected.dtype
    found, expected, truth = (t[finite].double() for t in (found, expected, truth))
    pytorchs = (expected - truth).abs().max()
    ulp = torch.finfo(dtype).eps * truth.abs().clamp_min(truth.abs().mean())
    worst = ((found - truth).abs() - (16 if dtype == torch.float64 else 2) * ulp).max()
    assert worst <= 2 * pytorchs, f"off by {worst}, PyTorch by {pytorchs}"


def test_every_operator_has_cases():
    assert set(CASES) == {name for name in OPS if not OPS[name].fused}


@on_each_device
@pytest.mark.parametrize(("implementation", "text"), pairs(), ids=lambda value: str(value))
def test_the_result_is_pytorchs(implementation, text, device):
    w = Workload.parse(text)
    skip_unless_supported(implementation, w, device)
    tensors = w.operator.examples(w, "random", 0, device)
    found, expected = through(implementation, w, tensors)
    truths = w.operator.truth(w, tensors)
    if w.operator.indexed and w.operator.indexed.exact(w):
        expected.copy_(truths[0])  # see refusal
    assert_are_pytorchs(found, expected, truths)


@pytest.mark.parametrize("op", CASES)
def test_what_an_untuned_gpu_would_run_fits_and_is_emitted(op):
    """Whatever machine this is; one case compiles, too."""
    h200, tasks = DEVICES["h200"], []
    for implementation, text in pairs():
        if not text.startswith(f"{op}(") or implementation in VENDORS:
            continue
        w, impl = Workload.parse(text), IMPLS[implementation]
        if impl.unsupported(w, h200):
            continue
        config = impl.heuristic(w, h200)
        assert config in impl.space(w, h200), (implementation, text)
        tasks.append(impl.task(config, w, h200))
    for task in [task for task in tasks if task][-1:]:
        assert compiled(task).resources.spill_bytes == 0


@on_each_device
@pytest.mark.parametrize("implementation", own_and_vendor())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [-1, -2])
def test_softmax_of_infinite_rows_is_pytorchs(implementation, dtype, dim, device):
    w = Workload.parse(f"softmax(x={dtype}[5,12], dim={dim})")
    skip_unless_supported(implementation, w, device)
    (x,) = w.operator.examples(w, "random", 0, device)
    inf = float("inf")
    x[0], x[1, 3], x[2, 4], x[3, 5], x[:, 7] = -inf, -inf, inf, float("nan"), -inf
    found, expected = through(implementation, w, [x])
    assert_is_pytorchs(found, expected, w.operator.truth(w, [x])[0])


@on_each_device
@pytest.mark.parametrize("implementation", own_and_vendor())
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_a_constant_row_without_eps_is_pytorchs(implementation, name, device):
    w = Workload.parse(f"{name}(x=f32[4,16], eps=0.0)")
    skip_unless_supported(implementation, w, device)
    x = torch.randn(4, 16, device=device)
    x[0], x[1] = 0.0, 3.0
    x[2, 5] = float("nan")
    found, expected = through(implementation, w, [x])
    assert_is_pytorchs(found, expected, w.operator.truth(w, [x])[0])


@on_each_device
@pytest.mark.parametrize("implementation", own_and_vendor())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight", [0.0, 0.25, 0.5, 1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_lerp_at_the_edges_is_pytorchs(implementation, dtype, weight, as_tensor, device):
    """At weight 0 an infinite end gives NaN, and weight 1 gives end: as the formula has it."""
    given = f"{dtype}[9]" if as_tensor else 0.25
    w = Workload.parse(f"lerp(x={dtype}[9], end={dtype}[9], weight={given})")
    skip_unless_supported(implementation, w, device)
    like = {"dtype": w.main.torch_dtype, "device": device}
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([1.0, 1.0, inf, inf, 0.0, -0.0, nan, 3.5, 2.0], **like)
    end = torch.tensor([inf, -inf, inf, 1.0, 0.0, 0.0, 1.0, nan, 7.25], **like)
    by = torch.full((9,), weight, **like) if as_tensor else weight
    with tw.use(implementation):
        found = tw.lerp(x, end, by)
    wide = by.double() if as_tensor else by
    assert_is_pytorchs(found, torch.lerp(x, end, by), torch.lerp(x.double(), end.double(), wide))


@st.composite
def broadcast_shapes(draw):
    """Three shapes that broadcast together, and their dtype."""
    full = draw(st.lists(st.sampled_from([1, 2, 3, 5]), max_size=4))
    shapes = []
    for _ in range(3):
        ones = draw(st.lists(st.booleans(), min_size=len(full), max_size=len(full)))
        drop = draw(st.integers(0, len(full)))
        shapes.append([1 if one else n for n, one in zip(full, ones, strict=True)][drop:])
    return shapes, draw(st.booleans()), draw(st.sampled_from(DTYPES))


@on_each_device
@pytest.mark.parametrize("implementation", own_and_vendor())
def test_lerp_broadcasts_as_pytorch_does(implementation, device):
    @settings(max_examples=60 if implementation == "aten" else 12)
    @given(broadcast_shapes())
    def check(drawn):
        (x, end, weight), scalar, dtype = drawn
        by = 0.3 if scalar else f"{dtype}{weight}".replace(" ", "")
        w = Workload.parse(f"lerp(x={dtype}{x}, end={dtype}{end}, weight={by})")
        if refusal(implementation, w, device):
            return
        tensors = w.operator.examples(w, "random", 0, device)
        found, expected = through(implementation, w, tensors)
        assert_is_pytorchs(found, expected, w.operator.truth(w, tensors)[0])

    simplest = Workload.parse("lerp(x=f32[3], end=f32[3], weight=0.5)")
    skip_unless_supported(implementation, simplest, device)
    check()


@on_each_device
@pytest.mark.parametrize("implementation", own_and_vendor())
def test_an_implementation_that_supports_the_simplest_case_supports_most(implementation, device):
    """So that no test above passes by being skipped."""
    simplest = [Workload.parse(cases[0].format(d="f32", w="f32")) for cases in CASES.values()]
    if IMPLS[implementation].op or all(refusal(implementation, w, device) for w in simplest):
        pytest.skip("it is for one operator, or for another machine")
    served = {w.op for w in simplest if not refusal(implementation, w, device)}
    tried = [Workload.parse(t) for t in workloads(implementation)]
    refused = [refusal(implementation, w, device) for w in tried if w.op in served]
    assert refused.count(None) > 0.8 * len(refused)
