"""Tuning on a GPU: crashes that end a CUDA context, pipelining, budgets, duels."""

from __future__ import annotations

import functools
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from host_cost import host_us, most_us, pytorchs_softmax
from tilewright.dispatch.call import as_called
from tilewright.impl import IMPLS
from tilewright.measure.candidate import COPY, Candidate, Outcome
from tilewright.measure.runner import InProcess, Isolated
from tilewright.measure.timing import Timing
from tilewright.op import Workload
from tilewright.store import Store
from tilewright.tune import bench, tune, verify_all

pytestmark = pytest.mark.gpu

NORM = (
    "bias_layer_norm(x=f16[8192,{h}], bias0=f16[{h}], bias1=f16[{h}],"
    " weight=f16[{h}], bias=f16[{h}])"
)
DOUBLE = "gpu_double(x=f32[4096,4096])"

OP = '''
from tilewright.op import op


@op(flops=lambda w: w.main.numel)
def gpu_double(x: "Tensor") -> "Tensor":
    """Twice x."""
    return x * 2.0
'''

IMPL = '''
from dataclasses import dataclass

import torch

from tilewright.build import CompileTask
from tilewright.compile.cache import compiled
from tilewright.compile.launch import CudaKernel
from tilewright.impl import Executable, Implementation, allocate
from tilewright.space import ConfigSpace, param

SOURCE = r"""
// Four floats a thread: with one, too few bytes are in flight to keep the memory busy.
extern "C" __global__ void twice(const float4* x, float4* y, long long quads, int fault) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (fault == 1) y = (float4*)0x10;
    if (fault == 2) while (quads) { if (clock64() == 1) break; }
    if (i >= quads) return;
    float4 v = x[i];
    float k = fault == 3 ? 3.0f : 2.0f;
    y[i] = make_float4(k * v.x, k * v.y, k * v.z, k * v.w);
}
"""
FAULTS = ("none", "illegal_address", "hang", "wrong")


class Double(Executable):
    def __init__(self, w, config, device):
        self.spec, self.config = w.outputs[0], config
        task = CompileTask("nvrtc", SOURCE, (f"--gpu-architecture={device.arch}",
                           "--ptxas-options=-v"), "twice")
        binary = compiled(task)
        self.resources = binary.resources
        self.kernel = CudaKernel(binary, "twice", "PPqi")

    def __call__(self, x):
        out = allocate(self.spec, x.device)
        quads, threads = x.numel() // 4, self.config.threads
        grid = ((quads + threads - 1) // threads, 1, 1)
        stream = torch.cuda.current_stream(x.device).cuda_stream
        self.kernel.launch(grid, (threads, 1, 1), 0, stream, x.device.index,
                           x.data_ptr(), out.data_ptr(), quads, FAULTS.index(self.config.fault))
        return out


class GpuDouble(Implementation):
    name, backend, op = "gpu_double_cuda", "cuda", "gpu_double"

    @dataclass(frozen=True)
    class Config:
        threads: int = param(256, 128, 512)
        fault: str = param(*FAULTS)

    def unsupported(self, w, device):
        return None if device.kind == "cuda" else "needs a GPU"

    def space(self, w, device):
        return ConfigSpace(self.Config)

    def heuristic(self, w, device):
        return self.Config()

    def build(self, config, w, device):
        return Double(w, config, device)
'''


@pytest.fixture(scope="module")
def w(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plugins")
    for kind, text in (("ops", OP), ("impls", IMPL)):
        (folder / kind).mkdir()
        (folder / kind / "gpu_double.py").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEWRIGHT_PLUGINS", str(folder))
        yield Workload.parse(DOUBLE)


@pytest.fixture(scope="module")
def isolated(w):
    with Isolated("cuda", run_limit_s=20.0) as runner:
        yield runner


@pytest.fixture
def store(tmp_path: Path):
    with Store(f"sqlite:///{tmp_path / 'records.db'}") as store:
        yield store


def double(fault: str = "none", threads: int = 256) -> Candidate:
    return Candidate.of("gpu_double_cuda", {"threads": threads, "fault": fault})


@pytest.mark.parametrize(
    ("fault", "status"),
    [("illegal_address", "launch_error"), ("hang", "timeout"), ("wrong", "wrong_result")],
)
def test_a_bad_kernel_costs_one_outcome_and_the_others_go_on(w, isolated, fault, status):
    candidates = [double(threads=128), double(fault), double(threads=512)]
    outcomes = dict(isolated.verify(w, candidates))
    assert [outcomes[c].status for c in candidates] == ["ok", status, "ok"]
    assert outcomes[candidates[0]].resources.spill_bytes == 0


def test_an_illegal_address_while_several_are_timed_is_charged_to_the_guilty_one(w, isolated):
    good = [double(threads=t) for t in (128, 256, 512)]
    bad = double("illegal_address")
    found = isolated.time(w, [good[0], bad, *good[1:], COPY], "events", budget_s=0.2)
    assert isinstance(found[bad], Outcome)
    assert found[bad].status == "launch_error"
    assert all(isinstance(found[c], Timing) for c in [*good, COPY])


@pytest.mark.alone
@pytest.mark.parametrize("method", ["events", "graph"])
def test_a_streaming_kernel_takes_about_what_a_copy_takes(w, isolated, method):
    found = isolated.time(w, [double(), COPY], method, budget_s=1.0)
    ratio = found[double()].median_us / found[COPY].median_us
    assert 0.8 < ratio < 1.5
    limits = isolated.prepare(w, method)
    assert limits.hard_limit_us < limits.floor_us <= 1.1 * found[double()].median_us


def test_describing_and_preparing_leaves_this_process_without_a_cuda_context(w):
    code = (
        "import torch\n"
        "from tilewright.measure.runner import Isolated\n"
        "with Isolated('cuda') as runner:\n"
        "    d = runner.describe()\n"
        "assert d.spec.kind == 'cuda', d\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_tuning_records_crashes_and_chooses_a_verified_kernel(w, store):
    report = tune([w], device="cuda", store=store, strategy="exhaustive", baselines=(),
                  params={"fault": ("none", "illegal_address", "wrong")}, budget_s=90)  # fmt: skip
    (row,) = report.rows
    assert not report.failed
    assert row.own is not None
    assert row.chosen_us <= row.baselines["aten"].median_us
    found = {(r.config.get("fault"), r.status) for r in store.query()
             if r.implementation == "gpu_double_cuda"}  # fmt: skip
    assert ("illegal_address", "launch_error") in found
    assert ("wrong", "wrong_result") in found
    assert not any(fault == "wrong" and status in ("ok", "slower") for fault, status in found)


@pytest.mark.alone
def test_a_width_has_a_hundred_distinct_verified_executables_within_its_budget(store):
    workloads = [Workload.parse(NORM.format(h=h)) for h in (768, 4096)]
    start = time.monotonic()
    report = tune(workloads, device="cuda", store=store, baselines=(), budget_s=60)
    assert time.monotonic() - start < 75
    for row in report.rows:
        assert row.candidates >= 100, row
        assert row.own.median_us < row.baselines["aten"].median_us
        assert row.own.resources["spill_bytes"] == 0
        assert row.verified.deterministic
        assert row.host_us["own"] > 0
        assert row.host_us["aten"] > 0
        assert all(row.eager_us[name] > us for name, us in row.host_us.items())
    start = time.monotonic()
    again = tune(workloads, device="cuda", store=store, baselines=())
    assert time.monotonic() - start < 30
    assert [r.own for r in again.rows] == [r.own for r in report.rows]


QUIET_BENCHES = 3
"""A bench has 50 ms for the host's part of a call of ours; in one of so many the host was quiet."""


@pytest.mark.alone
def test_bench_agrees_with_the_tuning_it_follows(store):
    w = Workload.parse(NORM.format(h=2048))
    (tuned,) = tune([w], device="cuda", store=store, baselines=(), budget_s=20).rows
    called = functools.partial(as_called, str(store.url))
    options = {"device": "cuda", "store": store, "baselines": (), "budget_s": 5}
    rows = [bench([w], **options, as_called=called).rows[0] for _ in range(QUIET_BENCHES)]
    for row in rows:
        assert row.own.config == tuned.own.config
        assert row.own.median_us == pytest.approx(tuned.own.median_us, rel=0.1)
    own_us, public_us = (min(row.host_us[name] for row in rows) for name in ("own", "public"))
    (pytorchs_us,) = host_us(pytorchs_softmax())
    assert own_us < public_us <= most_us(pytorchs_us)


@pytest.mark.alone
def test_both_methods_agree_on_a_large_workload():
    w = Workload.parse(NORM.format(h=4096))
    with InProcess("cuda") as runner:
        spec = runner.describe().spec
        own = Candidate.of("fused", IMPLS["fused"].heuristic(w, spec))
        aten = Candidate("aten")
        ratios = {}
        for method in ("events", "graph"):
            found = runner.time(w, [own, aten], method, budget_s=1.0)
            ratios[method] = found[aten].median_us / found[own].median_us
    assert ratios["events"] == pytest.approx(ratios["graph"], rel=0.25)


@pytest.mark.parametrize("h", [768, 5140, 16384])
def test_every_implementation_of_the_suite_s_operator_verifies(h):
    w = Workload.parse(NORM.format(h=h))
    verdicts = {name: verdict for name, _, verdict in verify_all(w, device="cuda")}
    assert verdicts["aten"].ok, verdicts["aten"]
    assert verdicts["fused"].ok, verdicts["fused"]


def test_the_second_gpu_is_measured_on_itself_while_the_first_is_current(store):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    w = Workload.parse("softmax(x=f16[1024,1024])")
    (row,) = tune([w], device="cuda:1", store=store, baselines=(), budget_s=10).rows
    assert row.verified is not None
