"""The weight-gradient kernels that walk rows, of few channels and of groups: what they take, and
what is compiled. They run on a GPU alone; see tests/gpu/test_conv_wgrad_rows_gpu.py."""

import csv
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from geometries import layer
from tilewright.compile.cache import compiled
from tilewright.device import DEVICES
from tilewright.impl import IMPLS
from tilewright.impls.weight_gradient import (
    conv2d_weight_grad_depthwise_fma_sm90 as depthwise_fma_sm90,
)
from tilewright.impls.weight_gradient._rows import Config, chunk_of
from tilewright.op import Workload
from tilewright.suite import SUITES

H200 = DEVICES["h200"]
NARROW = IMPLS["conv2d_weight_grad_narrow"]
HOPPER = IMPLS["conv2d_weight_grad_narrow_sm90"]
GROUPED = IMPLS["conv2d_weight_grad_grouped"]
DEPTHWISE = IMPLS["conv2d_weight_grad_depthwise_mma"]
IMAGES = IMPLS["conv2d_weight_grad_depthwise_sm90"]
FMA = IMPLS["conv2d_weight_grad_depthwise_fma_sm90"]


def weight_grad(x, grad, rest, layout="@channels_last", dtype="f16", op="conv2d_weight_grad"):
    return Workload.parse(
        f"{op}(x={dtype}[{x}]{layout}, grad_output={dtype}[{grad}]{layout}, {rest})"
    )


STEMS = [
    *SUITES["resnet50_v15_stem_wgrad"].workloads()[::2],
    weight_grad("8,3,96,96", "8,32,48,48", "kernel_size=3, stride=2, padding=1", dtype="bf16"),
    weight_grad("8,3,224,224", "8,96,56,56", "kernel_size=4, stride=4"),
    weight_grad(
        "8,3,32,32", "8,64,32,32", "kernel_size=3, padding=1", op="conv2d_weight_bias_grad"
    ),
    weight_grad("8,1,28,28", "8,32,24,24", "kernel_size=5, out_dtype=f32"),
    *(
        weight_grad(
            f"{n},3,224,224",
            f"{n},64,112,112",
            "kernel_size=7, stride=2, padding=3, out_dtype=f32",
            op="conv2d_weight_bias_grad",
        )
        for n in (8, 256)
    ),
]
GROUPS = [
    *SUITES["resnext50_wgrad_n32"].workloads(),
    weight_grad("8,96,56,56", "8,96,56,56", "kernel_size=7, padding=3, groups=96"),
    weight_grad("8,144,56,56", "8,144,28,28", "kernel_size=5, stride=2, padding=2, groups=144"),
]


@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
@pytest.mark.parametrize(
    ("name", "w"),
    [(NARROW.name, w) for w in STEMS]
    + [(GROUPED.name, w) for w in GROUPS]
    + [(DEPTHWISE.name, w) for w in SUITES["depthwise_wgrad_n32"].workloads()[::3]],
    ids=str,
)
def test_the_heuristics_config_fits_and_does_not_spill(name, w, device):
    impl, spec = IMPLS[name], DEVICES[device]
    assert impl.unsupported(w, spec) is None
    config = impl.heuristic(w, spec)
    assert impl.space(w, spec).why_not(config) is None
    assert compiled(impl.task(config, w, spec)).resources.spill_bytes == 0


@pytest.mark.parametrize("impl", [IMAGES, FMA], ids=lambda impl: impl.name)
@pytest.mark.parametrize("w", SUITES["depthwise_wgrad_n32"].workloads()[::2], ids=str)
def test_depthwise_kernels_for_hopper_fit_and_do_not_spill(impl, w):
    for config in (impl.heuristic(w, H200), *impl.promising(w, H200)[1:3]):
        assert impl.space(w, H200).why_not(config) is None
        assert compiled(impl.task(config, w, H200)).resources.spill_bytes == 0


def test_the_depthwise_model_ranks_what_was_timed_on_an_h200():
    """12 configs of each layer at commit 18b1de6: the model's first choice against the fastest."""
    workloads, timed = SUITES["depthwise_wgrad"].workloads(), {}
    with (Path(__file__).parent / "depthwise_h200.csv").open() as lines:
        for row in csv.DictReader(lines):
            layer, us = int(row.pop("layer")), float(row.pop("us"))
            knobs = {k: int(v) for k, v in row.items()}
            config = depthwise_fma_sm90.Config(**{**knobs, "whole": bool(knobs["whole"])})
            timed.setdefault(workloads[layer], {})[config] = us
    assert list(timed) == workloads
    logs = []
    for w, times in timed.items():
        first = min(times, key=lambda c: depthwise_fma_sm90._cycles(w, c, H200))
        logs.append(math.log(times[first] / min(times.values())))
    assert math.exp(sum(logs) / len(logs)) < 1.04
    assert math.exp(max(logs)) < 1.4


@pytest.mark.parametrize("shares", [1, 4])
def test_other_shares_of_the_stem_do_not_spill(shares):
    config = replace(NARROW.heuristic(STEMS[0], H200), shares=shares)
    assert NARROW.space(STEMS[0], H200).why_not(config) is None
    assert compiled(NARROW.task(config, STEMS[0], H200)).resources.spill_bytes == 0


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ("kernel_size=3, padding=1, groups=12", "not one filter for each channel"),
        ("kernel_size=9, padding=4, groups=24", "45 fragments"),
    ],
)
def test_what_is_no_small_depthwise_filter_is_refused_in_words(sizes, words):
    assert words in DEPTHWISE.unsupported(weight_grad("8,24,9,9", "8,24,9,9", sizes), H200)


@pytest.mark.parametrize(("n", "w"), list(enumerate(STEMS)), ids=str)
def test_no_config_for_hopper_spills(n, w):
    """Of each workload's configs every third, and not the same of two."""
    space = HOPPER.space(w, H200)
    assert space.why_not(HOPPER.heuristic(w, H200)) is None
    for config in sorted({replace(c, waves=1.0) for c in space}, key=str)[n % 3 :: 3]:
        assert compiled(HOPPER.task(config, w, H200)).resources.spill_bytes == 0, config


def test_sizes_are_arguments_and_one_binary_serves_them():
    config = Config()
    larger = weight_grad("256,3,300,224", "256,64,150,112", "kernel_size=7, stride=2, padding=3")
    assert NARROW.task(config, STEMS[0], H200) == NARROW.task(config, larger, H200)
    assert NARROW.compile_key(config, STEMS[0]) == NARROW.compile_key(config, larger)


def test_a_slice_has_a_line_at_least():
    w = weight_grad("1,3,8,8", "1,64,8,8", "kernel_size=3, padding=1")
    assert NARROW.build(NARROW.heuristic(w, H200), w, H200).grid == (8, 1, 1)


def test_rows_are_cut_into_equal_chunks_of_whole_sixteens():
    assert [chunk_of(n) for n in (7, 16, 56, 112, 113, 300)] == [16, 16, 64, 112, 64, 112]


@pytest.mark.parametrize(
    ("w", "words"),
    [
        (weight_grad("8,4,8,8", "8,8,4,4", "kernel_size=2, dilation=4"), "without gaps"),
        (weight_grad("8,4,9,9", "8,8,3,3", "kernel_size=1, stride=4"), "up to the filter"),
        (weight_grad("8,4,8,8", "8,12,8,8", "kernel_size=1"), "in eights"),
        (weight_grad("8,64,8,8", "8,64,8,8", "kernel_size=1"), "more than 7 rows of 32 columns"),
        (weight_grad("8,3,9,9", "8,64,7,7", "kernel_size=3"), "4 aligned bytes"),
        (weight_grad("8,4,8,8", "8,8,8,8", "kernel_size=1", "@channels_last@align2"), "eights"),
        (
            weight_grad("8,8,8,8", "8,8,8,8", "kernel_size=1", op="conv2d_weight_bias_grad"),
            "none for the bias",
        ),
        (
            weight_grad(
                "8,4,8,8", "8,8,7,7", "kernel_size=2, into=f16[8,4,2,2]@channels_last@align4"
            ),
            "into=f16.* is not aligned to 16 bytes",
        ),
    ],
)
def test_what_does_not_fit_narrow_rows_is_refused_in_words(w, words):
    assert re.search(words, NARROW.unsupported(w, H200))


@pytest.mark.parametrize(
    ("channels", "features", "groups", "kernel", "words"),
    [
        (64, 64, 1, 3, "groups=1 of 64 to 64"),
        (64, 128, 16, 3, "groups=16 of 64 to 128"),
        (72, 72, 3, 3, "groups of 1, 2, 4, 8, 16, 32"),
        (64, 64, 2, 11, "a row of 11 taps"),
    ],
)
def test_groups_that_do_not_fit_are_refused_in_words(channels, features, groups, kernel, words):
    sizes = f"kernel_size={kernel}, padding={kernel // 2}, groups={groups}"
    w = weight_grad(f"8,{channels},9,9", f"8,{features},9,9", sizes)
    assert words in GROUPED.unsupported(w, H200)


TALL = layer(8, 32, 144, 8, 157, (7, 1), (3, 2), (1, 0))
TALL_DEPTHWISE = layer(1, 32, 32, 12, 200, (9, 1), 4, 1, more=", groups=32, out_dtype=f32")


@pytest.mark.parametrize(
    ("impl", "w", "device"),
    [
        (GROUPED, layer(1, 56, 56, 4, 97, (4, 1), (3, 1), more=", groups=56"), "h200"),
        (HOPPER, TALL, "h200"),
        (NARROW, TALL, "a100"),
        (DEPTHWISE, TALL_DEPTHWISE, "a100"),
    ],
)
def test_lines_that_leave_no_config_room_are_refused_in_words(impl, w, device):
    assert not list(impl.space(w, DEVICES[device]))
    assert "than a block has room for" in impl.unsupported(w, DEVICES[device])
