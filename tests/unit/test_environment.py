"""What names a device in the store, and the versions beside a measurement."""

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tilewright import environment as module
from tilewright.device import DEVICES
from tilewright.environment import cpu_model, driver_version, environment, idle_cores
from tilewright.errors import CompilerMissing


@pytest.fixture
def gpu(monkeypatch):
    """Pretend that two GPUs are there: the second is a slice of the same kind."""
    whole = SimpleNamespace(
        name="NVIDIA H200", multi_processor_count=132, total_memory=150_110_011_392
    )
    part = SimpleNamespace(
        name="NVIDIA H200 MIG 1g.18gb", multi_processor_count=16, total_memory=17 * 2**30
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: (whole, part)[index])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(module, "driver_version", lambda: "580.95.05")
    module._gpu.cache_clear()
    yield
    module._gpu.cache_clear()


def test_a_gpu_is_named_by_name_sms_and_memory(gpu):
    key, info, versions = environment("cuda:0")
    assert key == "NVIDIA H200, 132 SMs, 140 GiB"
    assert info == {"name": "NVIDIA H200", "sms": 132, "memory_bytes": 150_110_011_392}
    assert (versions["cuda"], versions["driver"]) == ("13.0", "580.95.05")


def test_a_baselines_package_is_named_where_it_is_installed(gpu, monkeypatch):
    installed = {"quack-kernels": "0.6.5"}
    monkeypatch.setattr(module, "installed_version", installed.get)
    module._baseline_versions.cache_clear()
    try:
        assert environment("cuda:0")[2]["quack-kernels"] == "0.6.5"
    finally:
        module._baseline_versions.cache_clear()


def test_without_an_index_the_current_gpu_is_meant(gpu):
    assert environment(torch.device("cuda"))[0].endswith("16 SMs, 17 GiB")


def test_a_cpu_is_named_by_model_instruction_set_and_threads():
    key, info, versions = environment("cpu")
    assert set(info) == {"name", "isa", "threads"}
    assert key == f"{cpu_model()}, {info['isa']}, {torch.get_num_threads()} threads"
    assert versions["torch"] == torch.__version__
    assert set(versions) == {"torch", "tilewright", "commit", "compiler"}


def test_another_number_of_threads_is_another_device():
    threads = torch.get_num_threads()
    before = environment("cpu")[0]
    try:
        torch.set_num_threads(threads + 1)
        assert environment("cpu")[0] != before
    finally:
        torch.set_num_threads(threads)
    assert environment("cpu")[0] == before


def test_the_compilers_version_is_recorded_if_one_is_there():
    from tilewright.compile import cxx

    version = environment("cpu")[2]["compiler"]
    assert (version is None) == (cxx.missing() is not None)


def test_a_compiler_that_does_not_answer_has_no_version(monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CXX", "/bin/false")
    assert environment("cpu")[2]["compiler"] is None


def test_a_gpus_record_tells_the_versions_of_what_compiles_for_it(gpu, monkeypatch):
    from tilewright.compile import nvcc, nvrtc

    def missing():
        raise CompilerMissing("no nvcc")

    monkeypatch.setattr(nvrtc, "version", lambda: "13.1")
    monkeypatch.setattr(nvcc, "version", missing)
    monkeypatch.setattr(module, "installed_version", {"triton": "3.7.1"}.get)
    versions = environment("cuda:0")[2]
    assert (versions["nvrtc"], versions["nvcc"], versions["triton"]) == ("13.1", None, "3.7.1")


def test_the_cpu_model_is_read_or_falls_back(tmp_path):
    told = tmp_path / "x86"
    told.write_text("processor\t: 0\nmodel name\t: AMD EPYC 9B14\nmodel name\t: AMD EPYC 9B14\n")
    assert cpu_model(told) == "AMD EPYC 9B14"
    untold = tmp_path / "arm"
    untold.write_text("processor\t: 0\nCPU part\t: 0xd40\n")
    assert cpu_model(untold)
    assert cpu_model(tmp_path / "none")


@pytest.mark.parametrize(
    ("line", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build",
            "580.95.05",
        ),
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15 UTC 2023",
            "535.104.05",
        ),
    ],
)
def test_the_driver_version_is_read_without_nvml(tmp_path, line, version):
    proc = tmp_path / version
    proc.write_text(line + "\nGCC version:  gcc version 12.3.0\n")
    assert driver_version(proc) == version


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_the_commit_is_that_of_the_checkout_the_package_runs_from():
    head = ["git", "-C", str(Path(module.__file__).parent), "rev-parse", "HEAD"]
    found = subprocess.run(head, capture_output=True, text=True)
    commit = environment("cpu")[2]["commit"]
    assert (commit and commit.removesuffix("-dirty")) == (found.stdout.strip() or None)


def test_reading_the_store_needs_no_torch():
    code = "import sys, tilewright.store; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_architectures_compare_by_capability_and_not_by_their_names():
    capability = {name: DEVICES[name].capability for name in ("cpu", "a100", "h200", "b200")}
    assert capability == {"cpu": 0, "a100": 80, "h200": 90, "b200": 100}


def test_cores_that_nobody_uses_are_counted_while_this_process_waits(tmp_path, monkeypatch):
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 0 50 800 0 0 0 0 0 0\ncpu0 100 0 50 800 0 0 0 0 0 0\n")
    later = "cpu  130 5 52 855 5 0 1 2 0 0\ncpu0 100 0 50 800 0 0 0 0 0 0\n"
    monkeypatch.setattr(module.time, "sleep", lambda s: stat.write_text(later))
    monkeypatch.setattr(module.os, "cpu_count", lambda: 4)
    assert idle_cores(stat=stat) == pytest.approx(4 * 60 / 100)
    assert idle_cores(stat=stat) is None  # no time has passed
    assert idle_cores(stat=tmp_path / "none") is None
