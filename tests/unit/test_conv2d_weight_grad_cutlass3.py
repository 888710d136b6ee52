"""CUTLASS 3.x's weight gradient: what it takes, which configs there are, what is compiled."""

import pytest
from convolutions import RESNET50, SIMPLE, weight_grad

from tilewright.compile import nvcc
from tilewright.compile.cache import compiled
from tilewright.compile.resources import parse_ptxas
from tilewright.device import DEVICES
from tilewright.impl import IMPLS
from tilewright.impls.conv2d_weight_grad_cutlass3 import CLUSTERS, Config

H200 = DEVICES["h200"]
CUTLASS3 = IMPLS["conv2d_weight_grad_cutlass3"]


@pytest.fixture
def headers(monkeypatch, tmp_path):
    """Headers that are there, and a compiler that is."""
    (tmp_path / "include/cutlass").mkdir(parents=True)
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


def test_the_space_says_why_a_config_does_not_fit():
    space = CUTLASS3.space(SIMPLE, H200)
    assert "too large for one warpgroup" in space.why_not(Config(256, 128))
    assert "shared memory" in space.why_not(Config(256, 64, stages=6))
    assert "not among" in space.why_not(Config(64, 64, cluster_m=2, cluster_n=2))
    assert "1 x 9 tiles do not fill" in space.why_not(Config(128, 64, cluster_m=2))
    assert "half as large" in space.why_not(Config(64, 128))
    assert {(c.tile_m, c.tile_n, c.cluster) for c in space} == {
        (64, 64, "1x1"), (64, 64, "2x1"), (128, 64, "1x1")
    }  # fmt: skip


@pytest.mark.parametrize("w", [SIMPLE, *RESNET50[1::3]], ids=str)
def test_the_heuristics_config_is_in_the_space(w):
    assert CUTLASS3.space(w, H200).why_not(CUTLASS3.heuristic(w, H200)) is None


def test_one_library_serves_every_layer_and_cluster_of_a_tile(headers):
    other = weight_grad("2,128,9,9", "2,64,7,7", "kernel_size=3")
    task = CUTLASS3.task(Config(64, 64, cluster_m=2), other, H200)
    assert task == CUTLASS3.task(Config(64, 64), SIMPLE, H200)
    assert f"-I{headers}/tools/util/include" in task.flags
    assert task.source.endswith("WEIGHT_GRAD(1, 1)\nWEIGHT_GRAD(2, 1)\nWEIGHT_GRAD(1, 2)\n")


@pytest.mark.slow
@pytest.mark.skipif(
    bool(nvcc.missing() or nvcc.cutlass_missing()), reason="nvcc or CUTLASS's headers are missing"
)
def test_a_library_compiles_with_a_kernel_for_each_cluster():
    log = compiled(CUTLASS3.task(Config(), SIMPLE, H200)).log
    for m, n in CLUSTERS:
        resources = parse_ptxas(log, f"weight_grad_kernel_{m}x{n}")
        assert resources.registers > 100
        assert resources.spill_bytes == 0
