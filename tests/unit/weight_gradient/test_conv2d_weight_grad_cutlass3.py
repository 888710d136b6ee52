"""CUTLASS 3.x's weight gradient: what it takes, which configs there are, what is compiled."""

import pytest
from convolutions import RESNET50, SIMPLE, weight_grad

from tilewright.compile import nvcc
from tilewright.compile.cache import compiled
from tilewright.device import DEVICES
from tilewright.impl import IMPLS
from tilewright.impls.weight_gradient.conv2d_weight_grad_cutlass3 import Config

H200 = DEVICES["h200"]
CUTLASS3 = IMPLS["conv2d_weight_grad_cutlass3"]
LARGE = weight_grad("32,512,14,14", "32,512,14,14", "kernel_size=3, padding=1")


@pytest.fixture
def headers(monkeypatch, tmp_path):
    """Headers that are there, and a compiler that is."""
    (tmp_path / "include/cutlass").mkdir(parents=True)
    (tmp_path / "tools/util/include/cutlass/util").mkdir(parents=True)
    (tmp_path / "include/cutlass/cutlass.h").write_text("")
    (tmp_path / "include/cutlass/version.h").write_text("#define CUTLASS_MAJOR 4\n")
    program = tmp_path / "nvcc"
    program.write_text("#!/bin/sh\necho 'release 13.0, V13.0.88'\n")
    program.chmod(0o755)
    monkeypatch.setenv("TILEWRIGHT_CUTLASS", str(tmp_path / "include"))
    monkeypatch.setenv("TILEWRIGHT_NVCC", str(program))
    return tmp_path


@pytest.mark.parametrize(
    ("w", "words"),
    [
        (weight_grad("8,64,8,8", "8,64,8,8", "kernel_size=1", dtype="f32"), "x is f32"),
        (weight_grad("8,64,8,8", "8,64,8,8", "kernel_size=1, groups=2"), "no grouped"),
        (weight_grad("8,12,8,8", "8,64,8,8", "kernel_size=1"), "aligned to 16 bytes"),
        (weight_grad("8,64,8,8", "8,64,1,1", "kernel_size=1, stride=9"), "strides up to 8"),
        (weight_grad("1,8,256,1", "1,8,1,1", "kernel_size=[256,1]"), "reaches 255 pixels"),
        (weight_grad("8,64,8,8", "8,64,8,8", "kernel_size=1, into=f16[64,64,1,1]"), "not add"),
    ],
    ids=str,
)
def test_what_it_does_not_take_is_refused_in_words(w, words, headers):
    assert words in CUTLASS3.unsupported(w, H200)
    assert "is for sm_90a" in CUTLASS3.unsupported(w, DEVICES["a100"])


def test_without_headers_it_says_how_to_get_them(headers, monkeypatch):
    assert CUTLASS3.unsupported(SIMPLE, H200) is None
    monkeypatch.setenv("TILEWRIGHT_CUTLASS", str(headers / "nowhere"))
    assert "pip install --no-deps nvidia-cutlass" in CUTLASS3.unsupported(SIMPLE, H200)
    monkeypatch.setenv("TILEWRIGHT_CUTLASS", str(headers / "include"))
    (headers / "tools/util/include/cutlass/util").rename(headers / "include/cutlass/util")
    assert CUTLASS3.unsupported(SIMPLE, H200) is None  # as an installed CUTLASS has them
    (headers / "include/cutlass/util").rmdir()
    assert "cutlass/util is not beside" in CUTLASS3.unsupported(SIMPLE, H200)
    assert IMPLS["conv2d_weight_grad_cutlass"].unsupported(SIMPLE, H200) is None


def test_the_space_says_why_a_config_does_not_fit():
    space = CUTLASS3.space(SIMPLE, H200)
    assert "too large for one warpgroup" in space.why_not(Config(256, 128))
    assert "shared memory" in space.why_not(Config(256, 64, stages=7))
    assert "8 stages let as many blocks share an SM, 1" in space.why_not(Config(128, 64, stages=7))
    assert "not among" in space.why_not(Config(64, 64, cluster_m=2, cluster_n=2))
    assert "1 x 9 tiles do not fill" in space.why_not(Config(128, 64, stages=4, cluster_m=2))
    assert "half as large" in space.why_not(Config(64, 128, stages=4))
    assert {(c.tile_m, c.tile_n, c.cluster_m, c.cluster_n) for c in space} == {
        (64, 64, 1, 1), (64, 64, 2, 1), (128, 64, 1, 1)
    }  # fmt: skip


def test_stages_are_all_that_one_two_or_three_blocks_of_an_sm_have_room_for():
    stages = {}
    for c in CUTLASS3.space(LARGE, H200):
        stages.setdefault((c.tile_m, c.tile_n), set()).add(c.stages)
    assert stages == {
        (64, 64): {14, 7, 4}, (64, 128): {9, 4}, (128, 64): {9, 4},
        (128, 128): {7}, (64, 256): {5}, (256, 64): {5},
    }  # fmt: skip


@pytest.mark.parametrize("w", [SIMPLE, *RESNET50[1::3]], ids=str)
def test_a_search_begins_with_the_untuned_config_and_has_the_whole_space(w):
    found = CUTLASS3.promising(w, H200)
    assert found[0] == CUTLASS3.heuristic(w, H200)
    assert set(found) == set(CUTLASS3.space(w, H200))
    expected = [CUTLASS3.forecast(c, w, H200)["predicted_us"] for c in found]
    assert expected == sorted(expected)


def test_few_tiles_are_small_ones_with_all_stages_and_many_are_larger():
    few = CUTLASS3.heuristic(SIMPLE, H200)  # at most 2 x 9 tiles of 12544 pixels
    assert (few.tile_m, few.tile_n, few.stages) == (64, 64, 14)
    many = CUTLASS3.heuristic(weight_grad("32,2048,7,7", "32,2048,7,7", "kernel_size=1"), H200)
    assert many.tile_m * many.tile_n == 128 * 128


def test_a_tile_has_channels_of_one_tap():
    w = weight_grad("8,192,20,20", "8,128,20,20", "kernel_size=3, padding=1")
    tiles = {n: CUTLASS3.forecast(Config(128, n), w, H200)["tiles"] for n in (64, 128)}
    assert tiles == {64: 27, 128: 18}


def test_one_library_serves_every_layer_and_cluster_of_a_tile(headers):
    other = weight_grad("2,128,9,9", "2,64,7,7", "kernel_size=3")
    task = CUTLASS3.task(Config(64, 64, cluster_m=2), other, H200)
    assert task == CUTLASS3.task(Config(64, 64), SIMPLE, H200)
    assert f"-I{headers}/tools/util/include" in task.flags
    assert task.source.endswith("WEIGHT_GRAD(1, 1)\nWEIGHT_GRAD(2, 1)\nWEIGHT_GRAD(1, 2)\n")
    space = list(CUTLASS3.space(LARGE, H200))
    assert len({CUTLASS3.compile_key(c, LARGE) for c in space}) == len(space) == 30
    assert len({CUTLASS3.task(c, LARGE, H200) for c in space}) == 10


@pytest.mark.slow
@pytest.mark.skipif(
    bool(nvcc.missing() or nvcc.cutlass_missing(utilities=True)),
    reason="nvcc or CUTLASS's headers are missing",
)
@pytest.mark.parametrize("config", [Config(64, 64, stages=14), Config(cluster_n=2)])
def test_a_library_compiles(config):
    assert config in CUTLASS3.space(LARGE, H200)
    resources = CUTLASS3.build(config, LARGE, H200).resources
    log = compiled(CUTLASS3.task(config, LARGE, H200)).log
    assert resources == CUTLASS3.resources(config, log)
    assert resources.spill_bytes == 0
    assert resources.registers <= config.sums + config.beside_sums  # as the space reckons
