"""CUTLASS's weight gradient: what it takes, which configs there are, what is compiled."""

import struct
from dataclasses import replace

import pytest

from tilewright.compile import nvcc
from tilewright.compile.cache import compiled
from tilewright.compile.resources import parse_ptxas
from tilewright.device import DEVICES
from tilewright.errors import CompilerMissing
from tilewright.impl import IMPLS
from tilewright.impls.weight_gradient._cutlass import packed
from tilewright.impls.weight_gradient.conv2d_weight_grad_cutlass import OLDER, PROMISING, Config
from tilewright.op import Workload
from tilewright.suite import SUITES

H200, A100 = DEVICES["h200"], DEVICES["a100"]
CUTLASS = IMPLS["conv2d_weight_grad_cutlass"]


def weight_grad(x, grad, rest, layout="@channels_last", dtype="f16"):
    return Workload.parse(
        f"conv2d_weight_grad(x={dtype}[{x}]{layout}, grad_output={dtype}[{grad}]{layout}, {rest})"
    )


SIMPLE = weight_grad("8,64,56,56", "8,128,56,56", "kernel_size=3, padding=1")
ODD = weight_grad("8,3,20,20", "8,66,20,20", "kernel_size=3, padding=1", dtype="bf16")
HALF_ALIGNED = weight_grad("8,6,20,20", "8,12,20,20", "kernel_size=3, padding=1")


@pytest.fixture
def headers(monkeypatch, tmp_path):
    """Headers that are there, and a compiler that is."""
    (tmp_path / "cutlass").mkdir()
    (tmp_path / "cutlass/cutlass.h").write_text("")
    version = "#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 2\n#define CUTLASS_PATCH 1\n"
    (tmp_path / "cutlass/version.h").write_text(version)
    program = tmp_path / "nvcc"
    program.write_text("#!/bin/sh\necho 'release 13.0, V13.0.88'\n")
    program.chmod(0o755)
    monkeypatch.setenv("TILEWRIGHT_CUTLASS", str(tmp_path))
    monkeypatch.setenv("TILEWRIGHT_NVCC", str(program))
    return tmp_path


def test_without_nvcc_or_headers_it_says_how_to_get_them(headers, monkeypatch):
    assert CUTLASS.unsupported(SIMPLE, H200) is None
    monkeypatch.setenv("TILEWRIGHT_CUTLASS", str(headers / "nowhere"))
    assert "pip install --no-deps nvidia-cutlass" in CUTLASS.unsupported(SIMPLE, H200)
    with pytest.raises(CompilerMissing, match="TILEWRIGHT_CUTLASS"):
        nvcc.cutlass_flags()
    monkeypatch.setenv("TILEWRIGHT_NVCC", str(headers / "no-nvcc"))
    assert "TILEWRIGHT_NVCC" in CUTLASS.unsupported(SIMPLE, H200)


def test_versions_of_compiler_and_headers_are_known(headers):
    assert nvcc.version() == "13.0.88"
    assert nvcc.cutlass_flags() == (f"-I{headers}", "-DTW_CUTLASS_VERSION=40201")


@pytest.mark.parametrize(
    ("w", "words"),
    [
        (weight_grad("8,64,8,8", "8,64,8,8", "kernel_size=1", dtype="f32"), "x is f32"),
        (weight_grad("8,64,8,8", "8,64,8,8", "kernel_size=1, groups=2"), "no grouped"),
        (weight_grad("8,64,8,8", "8,64,8,8", "kernel_size=1, into=f16[64,64,1,1]"), "not add"),
        (weight_grad("256,64,256,256", "256,8,256,256", "kernel_size=1"), "less than 2147483648"),
    ],
)
def test_what_cutlass_does_not_take_is_refused_in_words(w, words, headers):
    assert words in CUTLASS.unsupported(w, H200)


@pytest.mark.parametrize("name", ["conv2d_weight_grad_cutlass", "conv2d_weight_grad_cutlass3"])
def test_it_may_be_chosen_only_where_no_padding_meets_an_infinity(name):
    alone = weight_grad("8,64,56,56", "8,128,54,54", "kernel_size=3")
    one_side = weight_grad("8,64,56,56", "8,128,54,56", "kernel_size=3, padding=[0,1]")
    assert IMPLS[name].only_compared(alone) is None
    assert "padding=[0, 1] is multiplied" in IMPLS[name].only_compared(one_side)


def test_one_stage_compiles_but_is_wrong_and_is_rejected(headers):
    space = CUTLASS.space(SIMPLE, H200)
    assert "wrong" in space.why_not(Config(stages=1))
    assert "WEIGHT_GRAD(1)" not in CUTLASS.task(Config(), SIMPLE, H200).source


def test_the_space_says_why_a_config_does_not_fit(headers):
    space = CUTLASS.space(SIMPLE, H200)
    assert "needs no order" in space.why_not(Config(mode="serial"))
    assert "arrangement" in space.why_not(Config(256, 256))
    assert "shared memory" in space.why_not(Config(256, 128, 64, stages=6))
    assert "two stages" in space.why_not(Config(instruction_k=8))
    assert space.why_not(Config(instruction_k=8, stages=2)) is None
    assert "64 x 64 x 32" in space.why_not(Config(stages=10))
    assert space.why_not(Config(64, 64, stages=10)) is None
    assert "allow two stages" in CUTLASS.space(ODD, H200).why_not(Config(64, 64))


def test_no_mode_takes_more_workspace_than_is_allowed(headers, monkeypatch):
    wide = weight_grad("8,64,56,56", "8,128,56,56", "kernel_size=3, padding=1, out_dtype=f32")
    copy_bytes = 4 * 128 * 64 * 9
    monkeypatch.setenv("TILEWRIGHT_WORKSPACE_BYTES", str(copy_bytes))
    in_turn, beside = Config(split_k=2, mode="serial"), Config(split_k=2)
    assert CUTLASS.space(SIMPLE, H200).why_not(in_turn) is None
    assert CUTLASS.forecast(in_turn, SIMPLE, H200)["workspace_bytes"] == copy_bytes
    assert "exceed" in CUTLASS.space(SIMPLE, H200).why_not(beside)
    monkeypatch.setenv("TILEWRIGHT_WORKSPACE_BYTES", str(copy_bytes - 1))
    assert "exceed" in CUTLASS.space(SIMPLE, H200).why_not(in_turn)
    assert CUTLASS.space(wide, H200).why_not(in_turn) is None  # the result itself holds the sums
    assert CUTLASS.heuristic(SIMPLE, H200).split_k == 1


def test_a_search_begins_with_what_fills_the_device(headers):
    few = SUITES["resnet50_v1_wgrad"].workloads()[1]  # 64 x 64 sums of 25088 pixels
    space, found = CUTLASS.space(few, H200), CUTLASS.promising(few, H200)
    assert len(found) == len(set(found)) == PROMISING
    assert all(c in space for c in found)
    assert all(H200.sms / 8 <= c.split_k <= 2 * H200.sms for c in found[:8])


def test_tiles_of_the_shorter_instruction_have_a_share_of_what_a_search_begins_with(headers):
    found = CUTLASS.promising(SIMPLE, H200)
    assert [c.instruction_k for c in found[:8]] == [16, 16, 16, 8] * 2
    assert sum(c.instruction_k == 8 for c in found) == PROMISING // OLDER
    bf16 = weight_grad("8,64,56,56", "8,128,56,56", "kernel_size=3, padding=1", dtype="bf16")
    assert {c.instruction_k for c in CUTLASS.promising(bf16, H200)} == {16}
    assert len(CUTLASS.promising(bf16, H200)) == PROMISING


@pytest.mark.parametrize("w", [SIMPLE, ODD, HALF_ALIGNED, *SUITES["resnet50_v1_wgrad"].workloads()])
def test_the_heuristics_config_is_in_the_space(w, headers):
    assert CUTLASS.unsupported(w, H200) is None
    for device in (H200, A100):
        assert CUTLASS.space(w, device).why_not(CUTLASS.heuristic(w, device)) is None


OF_SM75 = {
    (256, 128, 32): (4, 2, 1), (128, 256, 32): (2, 4, 1), (128, 128, 32): (2, 2, 1),
    (64, 128, 32): (2, 2, 1), (128, 64, 32): (2, 2, 1), (64, 64, 32): (2, 2, 1),
    (64, 128, 64): (1, 2, 2),
}  # fmt: skip
"""Tiles of m16n8k8 and their warps, in two stages, that apache/tvm PR 10185 searched."""
OF_SM80 = {
    (256, 128, 32): (3,), (128, 256, 32): (3,), (256, 64, 32): (4,), (64, 256, 32): (4,),
    (128, 128, 32): (3, 4, 5), (128, 64, 32): (6,), (64, 128, 32): (6,), (64, 64, 32): (10,),
    (256, 128, 64): (3,), (128, 256, 64): (3,), (256, 64, 64): (4,), (64, 256, 64): (4,),
    (128, 128, 64): (4,), (128, 64, 64): (3,), (64, 128, 64): (3,), (64, 64, 64): (5,),
}  # fmt: skip
"""Those of m16n8k16, and their stages."""


def test_every_tile_of_the_original_system_and_more_is_there():
    searched = [Config(*t, 2, instruction_k=8) for t in OF_SM75]
    searched += [Config(*t, stages) for t, found in OF_SM80.items() for stages in found]
    space = CUTLASS.space(SIMPLE, H200)
    assert len(searched) == 25
    assert [c for c in searched if c not in space] == []
    assert {c.tile: c.warps for c in searched[:7]} == OF_SM75
    kernels = {(c.tile, c.stages, c.instruction_k) for c in space}
    assert len(kernels) > 60
    assert {(c.tile, c.stages, c.instruction_k) for c in searched} < kernels


def test_accesses_are_as_wide_as_channels_and_addresses_allow(headers):
    def aligned(w):
        lines = CUTLASS.task(Config(64, 64, stages=2), w, H200).source.splitlines()
        return [line.split()[2] for line in lines if line.startswith("#define ALIGN_")]

    assert aligned(SIMPLE) == ["8", "8"]
    assert aligned(HALF_ALIGNED) == ["2", "4"]
    assert aligned(ODD) == ["1", "2"]
    shifted = weight_grad("8,64,8,8", "8,64,8,8", "kernel_size=1", "@channels_last@align4")
    assert aligned(shifted) == ["2", "2"]


def test_one_library_serves_every_layer_and_number_of_stages(headers):
    other = weight_grad("2,128,9,9", "2,64,7,7", "kernel_size=3")
    assert CUTLASS.task(Config(split_k=2), SIMPLE, H200) == CUTLASS.task(
        Config(split_k=7, stages=4, mode="serial"), other, H200
    )


def test_the_problem_is_packed_as_the_library_reads_it():
    w = weight_grad(
        "3,72,20,17", "3,40,9,5", "kernel_size=[3,5], stride=[2,3], padding=[0,1], dilation=[1,1]"
    )
    assert struct.unpack("17i", packed(w, 6, True)) == (
        3, 20, 17, 72, 40, 9, 5, 3, 5, 0, 1, 2, 3, 1, 1, 6, 1,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("w", "config"),
    [
        (SIMPLE, Config(64, 64, split_k=4)),
        (ODD, Config(64, 64, 32, 2)),
        (HALF_ALIGNED, Config(64, 64, 32, 2, split_k=3)),
        (SIMPLE, Config(64, 128, 64, 2, split_k=2, instruction_k=8)),
    ],
)
def test_a_library_compiles_with_a_kernel_for_each_number_of_stages(w, config):
    if reason := CUTLASS.unsupported(w, H200):
        pytest.skip(reason)
    built = CUTLASS.build(config, w, H200)
    assert built.resources.registers > 60
    log = compiled(CUTLASS.task(config, w, H200)).log
    if config.stages > 2:
        more = replace(config, stages=5)
        assert parse_ptxas(log, f"weight_grad_kernel_{more.stages}").spill_bytes == 0
