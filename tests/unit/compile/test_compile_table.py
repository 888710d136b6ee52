"""The table of what compiling takes has each kernel once, and leaves it in the cache."""

import pytest
from click.testing import CliRunner

import compile_table
from tilewright.compile.cache import cached
from tilewright.device import DEVICES
from tilewright.impl import IMPLS
from tilewright.op import Workload

LAYERS = [
    f"conv2d_weight_grad(x=f16[{n},3,32,32]@channels_last, "
    f"grad_output=f16[{n},64,16,16]@channels_last, kernel_size=7, stride=2, padding=3)"
    for n in (2, 4)
]
NARROW, H200 = IMPLS["conv2d_weight_grad_narrow"], DEVICES["h200"]


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))


def test_each_kernel_is_compiled_once_and_told_with_its_resources():
    arguments = ["--impl", NARROW.name, "--most", "2", "--jobs", "2", *LAYERS]
    done = CliRunner().invoke(compile_table.main, arguments, catch_exceptions=False)
    head, _, *lines, _, total = done.stdout.splitlines()
    assert head.endswith("| seconds | registers | spilled |")
    kernels = compile_table.first_configs(NARROW, map(Workload.parse, LAYERS), H200, 2)
    assert len(lines) == len(kernels) < 4  # sizes are arguments
    assert total.startswith(f"{len(lines)} kernels in {len(lines)} binaries")
    for line, (task, _) in zip(lines, kernels.values(), strict=True):
        registers = int(line.split("|")[-3])
        assert cached(task).resources.registers == registers > 30


def test_what_is_not_supported_is_told():
    wide = LAYERS[0].replace("[2,3,", "[2,64,")
    done = CliRunner().invoke(compile_table.main, ["--impl", NARROW.name, wide])
    assert not done.stdout
    assert "64" in done.stderr


def test_what_does_not_compile_stands_in_its_line(monkeypatch):
    monkeypatch.setattr(type(NARROW), "task", _broken)
    done = CliRunner().invoke(compile_table.main, ["--impl", NARROW.name, "--most", "1", LAYERS[0]])
    assert "rejected" in done.stdout.splitlines()[2]


def _broken(self, config, w, device):
    from tilewright.build import CompileTask

    return CompileTask("cxx", "int main( {", (), "broken")
