"""The weight-gradient kernels are right, run on a CPU: guards, poison, and PyTorch's result."""

from dataclasses import replace

import pytest
import torch
from convolutions import bias_off_by, with_bias, with_fp32_bias
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tensor_cores_on_cpu import DEVICE, OnCpu, without_a_gpu

from geometries import EVERY, HALVES, configs, layer, layers
from infinities import assert_infinities_stay, assert_overflow_is_infinite, with_infinities
from on_cpu import fails
from tilewright.compile import cxx, nvrtc
from tilewright.impl import IMPLS
from tilewright.impls.weight_gradient import _launch
from tilewright.impls.weight_gradient._model import SERIAL
from tilewright.measure.verify import Verifier
from tilewright.op import Workload

pytestmark = pytest.mark.skipif(
    nvrtc.missing() is not None or cxx.missing() is not None, reason="a compiler is missing"
)
CPU = torch.device("cpu")
FEW = replace(DEVICE, sms=2)
"""So that small problems have blocks with several lines."""


@pytest.fixture(autouse=True)
def counters(monkeypatch):
    zeros = without_a_gpu(monkeypatch, _launch)
    yield zeros
    assert not zeros.any()


def workload(
    n, c, k, h, w, kernel, stride=1, padding=0, groups=1, dtype="f16", op="weight_grad", more=""
):
    p, q = ((size + 2 * padding - kernel) // stride + 1 for size in (h, w))
    return Workload.parse(
        f"conv2d_{op}(x={dtype}[{n},{c},{h},{w}]@channels_last,"
        f" grad_output={dtype}[{n},{k},{p},{q}]@channels_last, kernel_size={kernel},"
        f" stride={stride}, padding={padding}, groups={groups}{more})"
    )


STEM = (2, 3, 24, 9, 24, 7, 2, 3)
PLAIN = (2, 24, 40, 5, 6, 3, 1, 1)
GROUPS = (2, 16, 16, 6, 21, 3, 1, 1, 4)
DEPTHWISE = (2, 24, 24, 7, 9, 5, 2, 2, 24)
CASES = {
    "conv2d_weight_grad_narrow": [
        workload(*STEM),
        workload(*STEM, op="weight_bias_grad"),
        workload(*STEM, more=", into=f32[24,3,7,7]@channels_last"),
        workload(1, 3, 8, 4, 130, 3, 1, 1, dtype="bf16"),
        with_bias(workload(*STEM), "f32"),
        with_bias(workload(*STEM), "f16", donated=True),
        workload(*STEM, op="weight_bias_grad", more=", out_dtype=f32"),
    ],
    "conv2d_weight_grad_grouped": [
        workload(*GROUPS),
        workload(*GROUPS, dtype="bf16", more=", out_dtype=f32"),
        workload(1, 64, 64, 6, 7, 3, 2, 1, 2),
        workload(*GROUPS, op="weight_bias_grad"),
        workload(2, 24, 24, 7, 9, 3, 2, 1, 24, dtype="bf16"),
        workload(2, 16, 16, 6, 21, 3, 1, 1, 16, op="weight_bias_grad"),
        workload(2, 40, 40, 9, 11, 7, 1, 3, 40, op="weight_bias_grad"),
        workload(2, 32, 32, 11, 20, 5, 2, 2, 32),
        with_bias(workload(*GROUPS, dtype="bf16"), "f32"),
    ],
    "conv2d_weight_grad_depthwise": [
        workload(*DEPTHWISE),
        workload(*DEPTHWISE, op="weight_bias_grad"),
        workload(*DEPTHWISE, dtype="bf16", more=", into=f32[24,1,5,5]"),
        workload(*DEPTHWISE, op="weight_bias_grad", more=", out_dtype=f32"),
        with_bias(workload(*DEPTHWISE), "f16"),
        with_bias(workload(*DEPTHWISE, dtype="bf16"), "f32", donated=True),
        workload(2, 23, 23, 7, 9, 3, 1, 1, 23),
        workload(2, 1, 1, 7, 40, 7, 2, 3, 1, op="weight_bias_grad", dtype="bf16"),
        *(
            layer(2, c, c, 11, 17, kernel, stride, padding, dilation, more=f", groups={c}")
            for c, kernel, stride, padding, dilation in (
                (24, 3, 1, 2, 2),
                (7, (2, 3), (1, 2), (0, 4), (3, 5)),
                (8, (3, 4), (3, 4), (2, 3), (2, 3)),
                (9, (1, 5), (2, 3), (0, 4), (1, 2)),
            )
        ),
    ],
    "conv2d_weight_grad_depthwise_mma": [
        workload(*DEPTHWISE),
        workload(2, 24, 24, 9, 21, 7, 1, 3, 24, op="weight_bias_grad", dtype="bf16"),
        workload(3, 40, 40, 7, 7, 3, 1, 1, 40, more=", into=f32[40,1,3,3]@channels_last"),
        workload(2, 16, 16, 13, 40, 3, 2, 1, 16),
        workload(1, 8, 8, 5, 9, 1, 1, 0, 8),
        workload(2, 16, 16, 9, 20, 3, 1, 0, 16),
        workload(1, 8, 8, 4, 4, 2, 1, 0, 8),
        with_bias(workload(3, 40, 40, 7, 7, 3, 1, 1, 40), "f32"),
    ],
    "conv2d_weight_grad_sm80": [
        workload(*PLAIN),
        workload(*PLAIN, more=", out_dtype=f32"),
        workload(*PLAIN, more=", into=f16[40,24,3,3]@channels_last"),
        workload(2, 5, 7, 5, 6, 3, 1, 1, dtype="bf16"),
        workload(*PLAIN, dtype="f32"),
        workload(*PLAIN, dtype="f32", more=", allow_tf32=True"),
        workload(2, 5, 7, 5, 6, 3, 1, 1, dtype="f32", more=", into=f32[7,5,3,3]"),
        workload(2, 5, 7, 5, 6, 3, 1, 1, dtype="f32", more=", allow_tf32=True"),
        workload(2, 5, 7, 5, 6, 3, 1, 1, dtype="f64", more=", into=f64[7,5,3,3]"),
        workload(*PLAIN, op="weight_bias_grad"),
        workload(2, 24, 72, 5, 6, 1, dtype="bf16", op="weight_bias_grad"),
        workload(*PLAIN, dtype="f32", op="weight_bias_grad"),
        workload(*PLAIN, dtype="f64", op="weight_bias_grad"),
        workload(*PLAIN, dtype="f32", op="weight_bias_grad", more=", allow_tf32=True"),
        with_bias(workload(*PLAIN), "f16"),
        with_bias(workload(2, 24, 72, 5, 6, 1, dtype="bf16"), "f32", donated=True),
        with_bias(workload(2, 5, 7, 5, 6, 3, 1, 1, dtype="f64"), "f64"),
        workload(*PLAIN, op="weight_bias_grad", more=", out_dtype=f32"),
    ],
}
SM80 = IMPLS["conv2d_weight_grad_sm80"]
EVERY_WAY = [(1, "last"), (2, "last"), (2, "grid"), (2, "kernel"), (2, SERIAL)]
SPLITS = {
    CASES["conv2d_weight_grad_sm80"][0]: EVERY_WAY,
    CASES["conv2d_weight_grad_sm80"][1]: [(2, "kernel"), (2, SERIAL)],
    CASES["conv2d_weight_grad_sm80"][2]: [(1, "last")],
    **{w: [(2, "last")] for w in CASES["conv2d_weight_grad_sm80"][3:9]},
    **dict.fromkeys(CASES["conv2d_weight_grad_sm80"][9:], EVERY_WAY),
}


@pytest.mark.parametrize(
    ("name", "w"), [(name, w) for name, ws in CASES.items() for w in ws], ids=str
)
def test_kernels_are_right_and_deterministic_and_stay_in_their_memory(name, w):
    impl = IMPLS[name]
    assert impl.unsupported(w, FEW) is None
    heuristic = impl.heuristic(w, FEW)
    configs = [
        replace(heuristic, tile_m=64, tile_n=64, stages=3, split_k=split_k, combine=combine)
        for split_k, combine in SPLITS.get(w, [])
    ]
    for config in configs or [heuristic]:
        verdict = Verifier(w, CPU).check(OnCpu(impl, config, w, device=FEW))
        assert verdict.ok, (config, verdict.message)
        assert verdict.deterministic


@pytest.mark.parametrize(
    "fault",
    [
        ("    __syncthreads();  // the step's rows are there, those", "    // those"),
        ("wait_for_copies<STAGES - 3>();", "wait_for_copies<STAGES - 2>();"),
    ],
)
def test_a_missing_barrier_and_a_wait_too_short_are_found(fault):
    w, impl = CASES["conv2d_weight_grad_narrow"][0], IMPLS["conv2d_weight_grad_narrow"]
    broken = OnCpu(impl, impl.heuristic(w, FEW), w, fault, FEW)
    assert fails(lambda: Verifier(w, CPU).check(broken).ok)


@pytest.mark.parametrize(
    "fault",
    [
        ("if (t.group > 0) add_segment<", "if (t.group > 1) add_segment<"),
        (
            "return store_sums(running_sums(partial, t)",
            "return store_sums(running_sums(partial, t) + 32",
        ),
    ],
)
def test_a_turn_that_adds_nothing_or_other_sums_is_found(fault):
    w = CASES["conv2d_weight_grad_sm80"][0]
    config = replace(SM80.heuristic(w, FEW), tile_m=64, tile_n=64, stages=2, split_k=2)
    broken = OnCpu(SM80, replace(config, combine=SERIAL), w, fault)
    assert fails(lambda: Verifier(w, CPU).check(broken).ok)


@pytest.mark.parametrize("place", [5, 6, 7, 8])
def test_fp32_products_that_miss_a_pixel_are_found(place):
    w = CASES["conv2d_weight_grad_sm80"][3:][place - 4]
    config = replace(SM80.heuristic(w, FEW), tile_m=64, tile_n=64, stages=2, split_k=1)
    config = replace(config, combine="last")
    missed = (
        ("k + i / 2 * 4", "i < 6 ? k + i / 2 * 4 : k")
        if w["allow_tf32"]
        else ("item_at(stage, k + i,", "item_at(stage, k + i % (PIXELS - 1),")
    )
    broken = OnCpu(SM80, config, w, missed)
    assert fails(lambda: Verifier(w, CPU).check(broken).ok)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("conv2d_weight_grad_sm80", ("sum += RESULT::widen(bias[k]);", ";")),
        ("conv2d_weight_grad_narrow", ("into_bias ? value +", "into_bias ? sums[0] +")),
        ("conv2d_weight_grad_depthwise", ("RESULT::value(into_bias[c])", "0.0f")),
    ],
)
def test_a_bias_that_is_not_added_to_the_other_is_found(name, fault):
    w = next(w for w in CASES[name] if "into_bias" in w.tensors)
    impl = IMPLS[name]
    broken = OnCpu(impl, impl.heuristic(w, FEW), w, fault, FEW)
    assert fails(lambda: Verifier(w, CPU).check(broken).ok)


LONG = {
    "conv2d_weight_grad_narrow": workload(4, 3, 24, 24, 40, 1, 1, 0),
    "conv2d_weight_grad_grouped": workload(4, 16, 16, 24, 40, 1, 1, 0, 4),
    "conv2d_weight_grad_depthwise_mma": workload(4, 24, 24, 24, 40, 1, 1, 0, 24),
    "conv2d_weight_grad_depthwise": workload(4, 24, 24, 24, 40, 1, 1, 0, 24),
    "conv2d_weight_grad_sm80": workload(4, 8, 24, 24, 40, 1),
}


@pytest.mark.parametrize("name", LONG)
def test_fp32_sums_of_the_bias_are_rounded_about_once(name):
    w = with_fp32_bias(LONG[name])
    impl = IMPLS[name]
    config = impl.heuristic(w, FEW)
    if impl is SM80:
        config = replace(config, split_k=2, combine=SERIAL)
    kernel, worse = (
        OnCpu(impl, config, w, fault, FEW) for fault in (("", ""), ("rest += before", "0 * before"))
    )
    assert bias_off_by(kernel, w) < 1 < 1.1 < bias_off_by(worse, w)


def test_what_is_added_in_place_is_right():
    w = workload(*STEM, more=", into=f32[24,3,7,7]@channels_last")
    w = replace(w, flags=("donate=into",))
    impl = IMPLS["conv2d_weight_grad_narrow"]
    verdict = Verifier(w, CPU).check(OnCpu(impl, impl.heuristic(w, FEW), w))
    assert verdict.ok, verdict.message


TALL = ("depthwise", "depthwise_mma", "grouped")


@pytest.mark.parametrize("name", TALL)
@pytest.mark.parametrize("rows", [32, 33, 49])
def test_tall_filters_are_right_or_refused_in_words(rows, name):
    padding, height = rows // 2, rows + 20
    w = Workload.parse(
        f"conv2d_weight_grad(x=f16[2,8,{height},20]@channels_last, "
        f"grad_output=f16[2,8,{height + 2 * padding - rows + 1},20]@channels_last, "
        f"kernel_size=[{rows},1], padding=[{padding},0], groups=8)"
    )
    impl = IMPLS[f"conv2d_weight_grad_{name}"]
    if reason := impl.unsupported(w, FEW):
        assert "filter of" in reason
        assert name != "depthwise" or f"{rows} rows has more than 32" in reason
        return
    assert name != "depthwise" or rows == 32
    verdict = Verifier(w, CPU).check(OnCpu(impl, impl.heuristic(w, FEW), w, device=FEW))
    assert verdict.ok, verdict.message


@settings(max_examples=4)
@given(st.data())
def test_any_depthwise_geometry_is_right(data):
    def draw(low, high):
        return data.draw(st.integers(low, high))

    kernel, c = draw(1, 7), 8 * draw(1, 3)
    w = workload(
        draw(1, 3), c, c, draw(kernel, 12), draw(kernel, 36), kernel,
        draw(1, kernel), draw(0, kernel), c, data.draw(st.sampled_from(HALVES)),
    )  # fmt: skip
    impl = IMPLS["conv2d_weight_grad_depthwise_mma"]
    assume(impl.unsupported(w, FEW) is None)
    verdict = Verifier(w, CPU).check(OnCpu(impl, impl.heuristic(w, FEW), w, device=FEW))
    assert verdict.ok, verdict.message


@settings(max_examples=4)
@given(st.data())
def test_any_geometry_of_rows_is_right(data):
    def draw(low, high):
        return data.draw(st.integers(low, high))

    kernel, grouped = draw(1, 5), draw(0, 1)
    groups = draw(2, 3) if grouped else 1
    c = 8 * groups if grouped else draw(1, 4)
    w = workload(
        draw(1, 2), c, c if grouped else 8 * draw(1, 4), draw(kernel, 8), 2 * draw(3, 12), kernel,
        draw(1, kernel), draw(0, kernel), groups, data.draw(st.sampled_from(HALVES)),
    )  # fmt: skip
    impl = IMPLS[f"conv2d_weight_grad_{'grouped' if grouped else 'narrow'}"]
    assume(impl.unsupported(w, FEW) is None)
    verdict = Verifier(w, CPU).check(OnCpu(impl, impl.heuristic(w, FEW), w))
    assert verdict.ok, verdict.message


@settings(max_examples=6)
@given(st.data())
def test_any_two_axes_and_any_config_of_mma_sync_are_right(data):
    w = data.draw(layers((1, 8), dtypes=EVERY, most_images=2, most_size=9, most_units=10))
    start = replace(SM80.heuristic(w, FEW), split_k=1, combine="last", add_threads=256)
    config = data.draw(configs(SM80.space(w, FEW), start))
    verdict = Verifier(w, CPU).check(OnCpu(SM80, config, w, device=FEW))
    assert verdict.ok, (config, verdict.message)


@pytest.mark.parametrize(
    ("name", "w"),
    [
        ("conv2d_weight_grad_narrow", workload(1, 4, 8, 4, 14, 3)),
        ("conv2d_weight_grad_grouped", workload(1, 16, 16, 4, 14, 3, groups=4)),
        ("conv2d_weight_grad_depthwise_mma", workload(1, 16, 16, 4, 14, 3, groups=16)),
    ],
)
def test_infinities_of_x_stay_with_the_taps_that_meet_them(name, w):
    """Rows are rounded up to sixteen pixels: what lies beyond them must not be multiplied."""
    x, grad = w.operator.examples(w, "random", 0, "cpu")
    x[:, :, :, -1] = float("inf")  # met by the last column of taps alone
    found = OnCpu(IMPLS[name], IMPLS[name].heuristic(w, FEW), w)(x, grad)
    assert found[..., :2].isfinite().all()
    assert not found[..., 2].isfinite().any()


BORDERS = [
    (name, w)
    for name, ws in CASES.items()
    for w in ws
    if "into" not in w.tensors and len(w.outputs) == 1 and not w["allow_tf32"]
]


@pytest.mark.parametrize(("name", "w"), BORDERS, ids=str)
def test_infinities_of_grad_output_at_its_border_do_not_meet_the_padding(name, w):
    x, grad = with_infinities(w)
    assert_infinities_stay(
        w, OnCpu(IMPLS[name], IMPLS[name].heuristic(w, FEW), w)(x, grad), x, grad
    )


@pytest.mark.parametrize(
    ("name", "w"),
    [(name, next(w for w in ws if w.outputs[0].dtype == "f16")) for name, ws in CASES.items()],
    ids=str,
)
def test_results_beyond_the_range_of_a_half_are_infinite(name, w):
    impl = IMPLS[name]
    config = impl.heuristic(w, FEW)
    if impl is SM80:
        config = replace(config, tile_m=64, tile_n=64, split_k=2, combine=SERIAL)
    assert_overflow_is_infinite(w, OnCpu(impl, config, w, device=FEW))
