"""The kernels of the convolution weight gradient: resources and refusals."""

import struct
from dataclasses import replace

import pytest
from convolutions import RESNET50, SIMPLE, fp32, weight_grad, with_bias
from hypothesis import given
from hypothesis import strategies as st

from axes_of_cases import pairs
from tilewright.compile.cache import compiled
from tilewright.device import DEVICES
from tilewright.dispatch.selection import _fitting
from tilewright.errors import InvalidArgument
from tilewright.impl import IMPLS, OWN_BACKENDS, implementations
from tilewright.impls.weight_gradient import conv2d_weight_grad_sm80 as sm80
from tilewright.impls.weight_gradient import conv2d_weight_grad_sm90 as sm90
from tilewright.impls.weight_gradient._model import (
    ADD_THREADS,
    COMBINES,
    MARKED,
    SERIAL,
)
from tilewright.impls.weight_gradient._problem import Results, problem_of
from tilewright.op import Workload
from tilewright.record import Record
from tilewright.space import config_dict
from tilewright.suite import SUITES

H200 = DEVICES["h200"]
SM90 = IMPLS["conv2d_weight_grad_sm90"]
SM80 = IMPLS["conv2d_weight_grad_sm80"]


LAYERS = RESNET50[::2] + SUITES["unet_wgrad"].workloads()[::3]


@pytest.mark.parametrize("w", LAYERS, ids=str)
def test_the_heuristics_config_is_in_the_space_and_does_not_spill(w):
    assert SM90.unsupported(w, H200) is None
    config = SM90.heuristic(w, H200)
    assert SM90.space(w, H200).why_not(config) is None
    assert compiled(SM90.task(config, w, H200)).resources.spill_bytes == 0


@pytest.mark.parametrize(
    ("tile", "more"),
    [
        *((tile, {"combine": how}) for tile in sm90.WARPGROUPS for how in ("grid", MARKED)),
        *((tile, {"combine": SERIAL}) for tile in sm90.WARPGROUPS if tile != (64, 576)),
        *(((64, 64), {"combine": combine}) for combine in COMBINES),
        *(((64, 64), {"combine": "kernel", "add_threads": n}) for n in ADD_THREADS),
        *(((128, 256), {"cluster": size, "stages": 4}) for size in sm90.CLUSTERS),
        *(((128, 256), {"fetch": fetch}) for fetch in sm90.FETCHES),
        *((tile, {"warm": True, "pending": 0}) for tile in sm90.WARPGROUPS),
        *(((64, 128), {"cluster": size, "exchange": "sent"}) for size in (2, 8)),
        ((128, 192), {"cluster": 2, "exchange": "sent"}),
    ],
)
def test_every_tile_compiles_without_spills_or_serialised_products(tile, more):
    config = sm90.Config(*tile, **{"stages": 2, "split_k": 24, **more})
    built = compiled(SM90.task(config, SIMPLE, H200))
    assert built.resources.spill_bytes == 0
    assert built.resources.stack_bytes == 4 * config.sums  # used where there is a NaN
    assert "serialized" not in built.log


@pytest.mark.parametrize("tile", sm90.WARPGROUPS)
def test_the_smallest_operands_of_the_space_compile(tile):
    w = weight_grad("8,256,28,28", "8,256,28,28", "kernel_size=3, padding=1")
    configs = [sm90.Config(*tile, 32, stages) for stages in sorted(sm90.STAGES)]
    least = next(c for c in configs if SM90.space(w, H200).why_not(c) is None)
    assert compiled(SM90.task(least, w, H200)).resources.spill_bytes == 0


@pytest.mark.parametrize("split_k", [1, 3])
@pytest.mark.parametrize("more", ["out_dtype=f32", "into=f16[128,64,3,3]", "into=f32[128,64,3,3]"])
@pytest.mark.parametrize("impl", [SM80, SM90])
def test_fp32_results_and_added_ones_compile_without_spills(impl, more, split_k):
    layout = "@channels_last" if "into" in more else ""
    rest = f"kernel_size=3, padding=1, {more}{layout}"
    w = weight_grad("8,64,56,56", "8,128,56,56", rest)
    assert impl.unsupported(w, H200) is None
    config = replace(impl.heuristic(w, H200), split_k=split_k, combine="last")
    if impl is SM90:
        config = replace(config, cluster=1)
    assert impl.space(w, H200).restricted({"split_k": [split_k]}).why_not(config) is None
    assert compiled(impl.task(config, w, H200)).resources.spill_bytes == 0
    assert impl.compile_key(config, w) != impl.compile_key(config, SIMPLE)


@pytest.mark.parametrize("impl", [SM80, SM90])
def test_what_the_bias_is_added_to_must_be_contiguous(impl):
    w = with_bias(SIMPLE, "f16")
    strided = replace(w["into_bias"], strides=(2,))
    assert impl.unsupported(w, H200) is None
    assert "is not contiguous" in impl.unsupported(w.with_args(into_bias=strided), H200)
    assert impl.compile_key(impl.heuristic(w, H200), w) != impl.compile_key(
        impl.heuristic(w, H200), bias_too(more=", out_dtype=f32")
    )


def test_what_a_gradient_is_added_to_must_be_aligned_unless_it_is_converted():
    rest = "kernel_size=3, padding=1, into=f32[64,64,3,3]"
    w = weight_grad("8,64,8,8", "8,64,8,8", rest + "@channels_last@align8")
    assert "is not aligned to 16 bytes" in SM90.unsupported(w, H200)
    assert SM90.unsupported(weight_grad("8,64,8,8", "8,64,8,8", rest + "@align8"), H200) is None


def bias_too(dtype="f16", more=""):
    text = str(weight_grad("8,64,56,56", "8,128,56,56", "kernel_size=3, padding=1", dtype=dtype))
    text = text.replace("conv2d_weight_grad", "conv2d_weight_bias_grad").replace("])", f"]{more})")
    return Workload.parse(text)


@pytest.mark.parametrize(
    ("tile", "more", "w"),
    pairs(
        sm90.WARPGROUPS,
        [
            *({"combine": how} for how in ("grid", MARKED, SERIAL)),
            {"cluster": 4, "stages": 4},
        ],
        [bias_too(), with_bias(SIMPLE, "f16"), with_bias(SIMPLE, "f32")],
    ),
    ids=str,
)
def test_every_tile_sums_the_bias_without_spills_or_serialised_products(tile, more, w):
    config = sm90.Config(*tile, **{"stages": 2, "split_k": 24, **more})
    if config.combine == SERIAL and (config.sums == 128 or config.threads > 288):
        space = SM90.space(w, H200).restricted({"split_k": [24]})
        assert "too few registers" in space.why_not(config)
        return
    built = compiled(SM90.task(config, w, H200))
    assert built.resources.spill_bytes == 0
    assert built.resources.stack_bytes == 4 * config.sums  # used where there is a NaN
    assert "serialized" not in built.log


@pytest.mark.parametrize(
    ("w", "tile", "device"),
    pairs(
        [
            bias_too(),
            bias_too("f32"),
            bias_too("f32", ", allow_tf32=True"),
            bias_too("f64"),
            with_bias(SIMPLE, "f32"),
        ],
        sm80.WARPS,
        ["a100", "h200", "b200"],
    ),
    ids=str,
)
def test_every_portable_tile_sums_the_bias_without_spills(w, tile, device):
    step = sm80.STEPS[w.main.itemsize]
    assert SM80.unsupported(w, DEVICES[device]) is None
    config = sm80.Config(*tile, step, stages=3, split_k=2, combine="kernel")
    if config.sums <= sm80.LARGEST[step]:
        assert compiled(SM80.task(config, w, DEVICES[device])).resources.spill_bytes == 0


def test_blocks_that_wait_for_each_other_run_at_once_beside_sums_of_the_bias():
    tall = sm80.Config(128, 64, 32, stages=3, split_k=16, combine="grid")
    refused = [
        SM80.space(w, H200).restricted({"split_k": [16]}).why_not(tall)
        for w in (SIMPLE, bias_too())
    ]
    assert refused == [None, "144 blocks cannot run at once"]


@pytest.mark.parametrize("impl", [SM80, SM90])
def test_sums_of_the_bias_lie_behind_those_of_their_tile(impl):
    config = replace(impl.heuristic(SIMPLE, H200), tile_m=64, split_k=4, combine="kernel")
    plain, both, wide = (
        impl.build(config, w, H200) for w in (SIMPLE, bias_too(), bias_too(more=", out_dtype=f32"))
    )
    rows = plain.grid[0] * plain.grid[1] * 4 * 64
    assert both.workspace_bytes - plain.workspace_bytes == 4 * rows
    assert wide.workspace_bytes - plain.workspace_bytes == 8 * rows


@pytest.mark.parametrize("tile", sm80.WARPS)
def test_every_portable_tile_compiles_without_spills(tile):
    config = sm80.Config(*tile, stages=3, split_k=2, combine="kernel")
    assert compiled(SM80.task(config, SIMPLE, DEVICES["a100"])).resources.spill_bytes == 0


@pytest.mark.parametrize("w", [fp32(True), fp32(None), fp32(None, dtype="f64")], ids=str)
def test_every_tile_of_wide_operands_compiles_without_spills(w):
    step = sm80.STEPS[w.main.itemsize]
    for tile in sm80.WARPS:
        config = sm80.Config(*tile, step, stages=3, split_k=2, combine="kernel")
        if config.sums <= sm80.LARGEST[step]:
            assert compiled(SM80.task(config, w, H200)).resources.spill_bytes == 0


@pytest.mark.parametrize("allow_tf32", [True, None])
def test_fp32_of_any_channel_count_compiles_without_spills(allow_tf32):
    w = fp32(allow_tf32, channels=3)
    assert SM80.unsupported(w, H200) is None
    config = SM80.heuristic(w, H200)
    assert SM80.space(w, H200).why_not(config) is None
    assert compiled(SM80.task(config, w, H200)).resources.spill_bytes == 0


def test_tf32_is_part_of_the_workload_and_of_what_is_compiled():
    exact, rounded = fp32(None), fp32(True)
    assert str(rounded).endswith("allow_tf32=True)")
    assert "tf32" not in str(exact)
    config = SM80.heuristic(exact, H200)
    assert SM80.compile_key(config, exact) != SM80.compile_key(config, rounded)
    assert SM80.task(config, exact, H200) != SM80.task(config, rounded, H200)
    halves = weight_grad("8,64,8,8", "8,64,8,8", "kernel_size=1, allow_tf32=True")
    assert "tf32" not in str(halves)
    with pytest.raises(InvalidArgument, match="fp32_precision"):
        fp32(False)


def test_tiles_and_steps_of_halves_and_of_fp32_differ():
    space = SM80.space(fp32(True), H200)
    assert "too few registers" in space.why_not(sm80.Config(256, 128, 16, stages=2))
    assert space.why_not(sm80.Config(128, 128, 16, stages=2)) is None
    assert space.why_not(sm80.Config(128, 128, 32, stages=2)) is not None
    assert SM80.space(SIMPLE, H200).why_not(sm80.Config(128, 128, 16, stages=2)) is not None


@pytest.mark.parametrize("w", SUITES["resnet50_v15_stem_wgrad"].workloads()[::2], ids=str)
@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
def test_the_portable_heuristics_config_fits_and_does_not_spill(w, device):
    spec = DEVICES[device]
    assert SM80.unsupported(w, spec) is None
    config = SM80.heuristic(w, spec)
    assert SM80.space(w, spec).why_not(config) is None
    assert compiled(SM80.task(config, w, spec)).resources.spill_bytes == 0


@pytest.mark.parametrize("w", SUITES["depthwise_wgrad_n32"].workloads(), ids=str)
def test_depthwise_filters_compile_without_spills(w):
    impl = IMPLS["conv2d_weight_grad_depthwise"]
    assert impl.unsupported(w, H200) is None
    config = impl.heuristic(w, H200)
    assert config in impl.space(w, H200)
    assert compiled(impl.task(config, w, H200)).resources.spill_bytes == 0


@pytest.mark.parametrize(
    "w",
    [
        weight_grad("8,64,28,28", "8,64,28,28", "kernel_size=3, padding=7, dilation=7, groups=64"),
        weight_grad("8,64,28,28", "8,64,28,28", "kernel_size=7, padding=6, dilation=2, groups=64"),
        weight_grad("8,63,28,28", "8,63,28,28", "kernel_size=7, padding=3, groups=63"),
        weight_grad("8,63,29,29", "8,63,13,13", "kernel_size=3, stride=2, dilation=2, groups=63"),
    ],
    ids=str,
)
def test_dilated_depthwise_filters_and_odd_channels_compile_without_spills(w):
    impl = IMPLS["conv2d_weight_grad_depthwise"]
    assert impl.unsupported(w, H200) is None
    for config in (impl.heuristic(w, H200), replace(impl.heuristic(w, H200), threads=256)):
        assert compiled(impl.task(config, w, H200)).resources.spill_bytes == 0


@pytest.mark.parametrize("more", [", out_dtype=f32", ", into=f16[96,1,7,7]", None])
def test_depthwise_filters_give_fp32_add_to_others_and_sum_the_bias(more):
    impl = IMPLS["conv2d_weight_grad_depthwise"]
    text = (
        "(x=f16[8,96,56,56]@channels_last, grad_output=f16[8,96,56,56]@channels_last,"
        f" kernel_size=7, padding=3, groups=96{more or ''})"
    )
    w = Workload.parse(f"conv2d_weight_{'' if more else 'bias_'}grad{text}")
    assert impl.unsupported(w, H200) is None
    assert impl.build(impl.heuristic(w, H200), w, H200).resources.spill_bytes == 0


@pytest.mark.parametrize(
    ("w", "words"),
    [
        (SIMPLE, "not one filter for each channel"),
        (
            weight_grad("8,64,9,9", "8,64,9,9", "kernel_size=9, padding=4, groups=64"),
            "more than 49 taps",
        ),
        (
            weight_grad("8,64,9,40", "8,64,5,8", "kernel_size=[3,5], dilation=[2,8], groups=64"),
            "reaches 33 outputs",
        ),
    ],
)
def test_what_the_depthwise_kernel_does_not_walk_is_refused_in_words(w, words):
    assert words in IMPLS["conv2d_weight_grad_depthwise"].unsupported(w, H200)


@pytest.mark.parametrize(
    ("channels", "features", "rest", "dtype"),
    [
        (64, 64, "kernel_size=3, padding=1, groups=64", "f32"),
        (64, 64, "kernel_size=3, padding=1, groups=8", "f64"),
        (64, 128, "kernel_size=3, padding=1, groups=64", "f16"),
        (64, 128, "kernel_size=3, padding=1, groups=8", "f16"),
        (96, 96, "kernel_size=3, padding=1, groups=32", "f16"),
        (64, 64, "kernel_size=3, padding=2, dilation=2, groups=16", "f16"),
        (60, 60, "kernel_size=3, padding=1, groups=15", "f16"),
        (64, 64, "kernel_size=31, padding=15, groups=64", "f16"),
        (64, 64, "kernel_size=3, padding=9, dilation=9, groups=64", "f16"),
        (64, 64, "kernel_size=5, padding=2, stride=5, groups=64", "bf16"),
    ],
)
def test_what_the_documentation_says_that_no_kernel_of_ours_serves(channels, features, rest, dtype):
    size = 8 if "stride" in rest else 40
    w = weight_grad(f"8,{channels},40,40", f"8,{features},{size},{size}", rest, dtype=dtype)
    ours = [i for i in implementations(w) if i.backend in OWN_BACKENDS]
    assert [i.name for i in ours if i.unsupported(w, H200) is None] == []


def test_bf16_compiles():
    w = weight_grad("8,64,8,8", "8,64,8,8", "kernel_size=1", dtype="bf16")
    assert compiled(SM90.task(sm90.Config(), w, H200)).resources.spill_bytes == 0


def test_one_binary_serves_every_shape_and_slice_count():
    first, second = LAYERS[0], LAYERS[20]
    one, other = sm90.Config(split_k=2), sm90.Config(split_k=16)
    assert SM90.task(one, first, H200) == SM90.task(other, second, H200)
    assert SM90.compile_key(one, first) == SM90.compile_key(other, second)


@pytest.mark.parametrize(
    ("w", "words"),
    [
        (weight_grad("8,64,8,8", "8,64,8,8", "kernel_size=1", dtype="f32"), "x is f32"),
        (weight_grad("8,60,8,8", "8,64,8,8", "kernel_size=1"), "aligned to 16 bytes"),
        (weight_grad("8,64,8,8", "8,62,8,8", "kernel_size=1"), "aligned to 16 bytes"),
        (weight_grad("8,64,8,8", "8,64,8,8", "kernel_size=1, groups=16"), "groups=16 of 4"),
        (weight_grad("8,64,8,8", "8,32,8,8", "kernel_size=1, groups=2"), "32 channels and 16"),
        (weight_grad("8,64,30,30", "8,64,3,3", "kernel_size=1, stride=10"), "strides up to 8"),
        (
            weight_grad("8,64,8,8", "8,64,8,8", "kernel_size=1", "@channels_last@align8"),
            "aligned to 16 bytes",
        ),
    ],
)
def test_what_the_copy_engine_cannot_walk_is_refused_in_words(w, words):
    assert words in SM90.unsupported(w, H200)


def test_other_architectures_are_refused():
    assert "sm_80" in SM90.unsupported(SIMPLE, DEVICES["a100"])


def test_the_space_says_why_a_config_does_not_fit():
    space = SM90.space(SIMPLE, H200)
    assert "needs no combining" in space.why_not(sm90.Config(split_k=1, combine="grid"))
    assert "shared memory" in space.why_not(sm90.Config(tile_m=128, tile_n=256, stages=8))
    assert "cannot run at once" in space.why_not(
        sm90.Config(tile_m=128, tile_n=256, stages=4, split_k=64, combine="grid")
    )
    assert "no arrangement" in space.why_not(sm90.Config(tile_m=256, tile_n=576, stages=2))
    assert "chip to chip" in space.why_not(sm90.Config(split_k=6, cluster=3, combine="grid"))
    assert "do not fill clusters" in space.why_not(sm90.Config(split_k=4, cluster=3))
    assert "a cluster adds all" in space.why_not(sm90.Config(split_k=4, cluster=4, combine="grid"))
    assert "mark no places" in space.why_not(sm90.Config(split_k=4, cluster=2, combine=MARKED))
    assert "in clusters" in space.why_not(sm90.Config(split_k=4, cluster=2, combine=SERIAL))
    assert "no second kernel" in space.why_not(sm90.Config(split_k=2, add_threads=128))
    assert "is no matrix" in space.why_not(sm90.Config(tile_n=128, fetch="shared"))
    assert "without neighbours" in space.why_not(sm90.Config(exchange="sent"))
    assert "is not asked for" in space.why_not(sm90.Config(tile_n=192, halo=1, warm=True))
    assert "gathered there" in space.why_not(sm90.Config(128, 128, 32, 2))


@pytest.mark.parametrize("impl", [SM80, SM90])
def test_slices_that_a_sweep_found_are_taken_though_the_space_does_not_list_them(impl):
    other = weight_grad("8,64,56,56", "8,256,56,56", "kernel_size=3, padding=1")
    config = replace(impl.heuristic(SIMPLE, H200), split_k=37, combine="last")
    if impl is SM90:
        config = replace(config, cluster=1)
    assert impl.space(SIMPLE, H200).unlisted(config) == ["split_k"]
    record = Record(str(SIMPLE), SIMPLE.op, impl.name, config_dict(config), "ok", device="")
    assert _fitting(SIMPLE, H200, SIMPLE, record) == config
    assert _fitting(other, H200, SIMPLE, record) is None
    assert "pixels are fewer" in impl.space(SIMPLE, H200).why_not(replace(config, split_k=10**6))


def test_blocks_that_share_boxes_come_in_pairs():
    space = SM90.space(weight_grad("8,128,56,56", "8,192,56,56", "kernel_size=1"), H200)
    assert space.why_not(sm90.Config(tile_n=128, fetch="matrix")) is None
    assert space.why_not(sm90.Config(tile_n=128, fetch="shared")) == (
        "2 blocks cannot share tiles of 64 x 128 evenly"
    )
    assert "add slices together" in space.why_not(
        sm90.Config(tile_n=128, split_k=2, cluster=2, fetch="shared")
    )


CAPPED = [
    ("sm90", weight_grad("8,64,56,56", "8,64,56,56", "kernel_size=3, padding=1"), 1 << 18),
    ("sm80", weight_grad("8,64,56,56", "8,64,56,56", "kernel_size=3, padding=1"), 1 << 18),
    (
        "narrow",
        weight_grad("8,3,64,64", "8,64,32,32", "kernel_size=7, padding=3, stride=2"),
        1 << 20,
    ),
    (
        "grouped",
        weight_grad("8,128,28,28", "8,128,28,28", "kernel_size=3, padding=1, groups=32"),
        1 << 20,
    ),
    (
        "narrow_sm90",
        weight_grad("8,3,64,64", "8,64,32,32", "kernel_size=7, padding=3, stride=2"),
        1 << 20,
    ),
    *(
        (
            f"depthwise{way}",
            weight_grad("8,96,28,28", "8,96,28,28", "kernel_size=7, padding=3, groups=96"),
            1 << bits,
        )
        for way, bits in {"": 20, "_mma": 20, "_sm90": 19, "_fma_sm90": 19}.items()
    ),
]


@pytest.mark.parametrize(("name", "w", "limit"), CAPPED, ids=str)
def test_no_untuned_config_needs_more_workspace_than_is_allowed(name, w, limit, monkeypatch):
    impl = IMPLS[f"conv2d_weight_grad_{name}"]

    def needed():
        config = impl.heuristic(w, H200)
        assert config in impl.space(w, H200)
        return impl.build(config, w, H200).workspace_bytes

    with monkeypatch.context() as limited:
        limited.setenv("TILEWRIGHT_WORKSPACE_BYTES", str(limit))
        capped = needed()
    assert capped <= limit < needed()


@pytest.mark.parametrize(("name", "w"), [case[:2] for case in CAPPED[2:]], ids=str)
def test_kernels_that_keep_the_sums_of_each_slice_refuse_less_room_than_one_takes(
    name, w, monkeypatch
):
    impl = IMPLS[f"conv2d_weight_grad_{name}"]
    monkeypatch.setenv("TILEWRIGHT_WORKSPACE_BYTES", "4096")
    assert "exceed the 4096 of TILEWRIGHT_WORKSPACE_BYTES" in impl.unsupported(w, H200)


@pytest.mark.parametrize("impl", [SM90, SM80], ids=lambda impl: impl.name)
def test_slices_are_not_more_than_a_grid_has(impl):
    w = weight_grad("256,64,112,112", "256,64,112,112", "kernel_size=1")
    config = replace(impl.heuristic(w, H200), tile_m=64, tile_n=64, tile_k=32, stages=3)
    config = replace(config, split_k=65536, combine=SERIAL)
    config = replace(config, cluster=1, halo=0, fetch="walk", blocks=0) if impl is SM90 else config
    space = impl.space(w, H200)
    assert "than a grid has" in space.restricted({"split_k": [65536]}).why_not(config)
    config = replace(config, split_k=65535)
    assert space.restricted({"split_k": [65535]}).why_not(config) is None


@pytest.mark.parametrize("impl", [SM90, SM80], ids=lambda impl: impl.name)
@pytest.mark.parametrize("how", [{"combine": "last"}, {"combine": SERIAL}], ids=str)
def test_sums_of_the_bias_count_where_memory_is_limited(impl, how, monkeypatch):
    w = with_bias(weight_grad("8,64,56,56", "8,64,56,56", "kernel_size=3, padding=1"))
    config = replace(impl.heuristic(w, H200), tile_m=64, tile_n=64, stages=2, split_k=4, **how)
    config = replace(config, cluster=1, halo=0) if impl is SM90 else config
    needed = impl.build(config, w, H200).workspace_bytes
    assert impl.forecast(config, w, H200)["workspace_bytes"] == needed
    for limit, fits in ((needed, True), (needed - 1, False)):
        monkeypatch.setenv("TILEWRIGHT_WORKSPACE_BYTES", str(limit))
        why = impl.space(w, H200).restricted({"split_k": [4]}).why_not(config)
        assert why is None if fits else f"exceed {limit} bytes" in why


def test_where_memory_leaves_room_for_one_slice_blocks_add_one_after_the_other(monkeypatch):
    few = weight_grad("8,64,56,56", "8,64,56,56", "kernel_size=3, padding=1")
    config = sm80.Config(64, 64, 32, split_k=8, combine=SERIAL)
    space = SM80.space(few, H200).restricted({"split_k": [8]})
    assert space.why_not(config) is None
    assert space.why_not(replace(config, combine="last")) is None
    monkeypatch.setenv("TILEWRIGHT_WORKSPACE_BYTES", str(1 << 18))
    space = SM80.space(few, H200).restricted({"split_k": [8]})
    assert space.why_not(config) is None
    assert "exceed 262144 bytes" in space.why_not(replace(config, combine="last"))
    untuned = SM80.heuristic(few, H200)
    assert untuned.combine == SERIAL
    assert SM80.build(untuned, few, H200).workspace_bytes == 4 * 64 * 576


def test_the_problem_is_packed_as_the_kernel_reads_it():
    w = weight_grad(
        "3,72,20,17", "3,40,10,5", "kernel_size=[3,5], stride=[2,3], padding=[1,1], dilation=[1,1]"
    )
    found = struct.unpack_from("24i", problem_of(w).packed(64, 32, 3))
    taps, panels_per_tap = 15, 2
    assert found == (
        40, 72, taps * panels_per_tap, panels_per_tap, taps * 72, 5,
        1, 3, 1, 2,
        150, 10, 5, 0, 6, 2, 20, 17,
        2, 3, 1, 1, 1, 1,
    )  # fmt: skip


@given(st.integers(1, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_kernels_divide_by_multiplying(divisor, n):
    packed = problem_of(SIMPLE).packed(64, 32, divisor)
    assert len(packed) == 128
    *multipliers, shifts = struct.unpack_from("7I", packed, 96)
    divisors = (56, 56, 1, 9, 3, divisor)
    for i, (d, multiplier) in enumerate(zip(divisors, multipliers, strict=True)):
        for value in (n, n // d * d, max(n // d * d - 1, 0)):
            assert value * multiplier >> 31 + (shifts >> 5 * i & 31) == value // d


def test_gradients_that_are_written_in_place_share_no_memory():
    w = with_bias(weight_grad("2,8,6,6", "2,16,6,6", "kernel_size=3, padding=1"), "f16", True)
    results = Results(w)
    x, grad_output, into, into_bias = w.operator.examples(w, "random", 0, "cpu")
    found = results.memory((x, grad_output, into, into_bias), into.device)
    assert found[0] is into
    assert found[1] is into_bias
    with pytest.raises(InvalidArgument, match="into is written in place and shares memory with"):
        results.memory((x, grad_output, into, into.as_strided((16,), (1,), 3)), into.device)
    with pytest.raises(InvalidArgument, match=r"into_bias is written .* memory with grad_output"):
        results.begun((x, grad_output, into, grad_output.as_strided((16,), (1,), 9)), into.device)
    copied = Results(w.operator.workload(**dict(w.args)))
    copied.memory((x, grad_output, into, into.as_strided((16,), (1,), 3)), into.device)
