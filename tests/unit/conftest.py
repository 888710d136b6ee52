"""Fixtures of the unit tests."""

import ctypes
import functools
from dataclasses import dataclass

import pytest
import torch
from dispatching import ProbeExecutable

import tilewright as tw
from program_graphs import mixed
from random_graphs import forget
from tilewright.device import DEVICES, spec_of
from tilewright.dispatch import evidence, prepared, selection
from tilewright.dispatch.evidence import OperatorRecords
from tilewright.dispatch.prepared import reload_records
from tilewright.impl import IMPLS, Implementation, allocator
from tilewright.impls.fused import graph_of
from tilewright.measure import worker
from tilewright.space import ConfigSpace, param


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Outputs and workspace on a CPU are of ones: not the right results of an earlier call."""
    plain = allocator.on

    def on(device):
        empty = plain(device)
        if device.type != "cpu":
            return empty

        def poisoned(shape, strides, dtype):
            t = empty(shape, strides, dtype)
            ctypes.memset(t.data_ptr(), 0xFF, t.untyped_storage().nbytes())
            return t

        return poisoned

    monkeypatch.setattr(allocator, "on", on)


@pytest.fixture(scope="session", autouse=True)
def ceilings_measured_once():
    """Runners in this process share the machine's ceilings, which take seconds to measure."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "measure_ceilings", functools.cache(worker.measure_ceilings))
        yield


@pytest.fixture
def records_of_its_own(tmp_path, monkeypatch, forgets_functions):
    """For a test that fuses functions: an empty store, read afresh."""
    monkeypatch.setenv("TILEWRIGHT_STORE", f"sqlite:///{tmp_path}/records.db")
    reload_records()
    yield
    reload_records()


@pytest.fixture
def conv2d_chooses(store):
    """An implementation for the weight's gradient of `tw.conv2d`, whatever records there are."""
    with tw.use("conv2d_weight_grad_contiguous", op="conv2d_weight_grad"):
        yield


@pytest.fixture
def graph_of_mixed():
    """The graph of one of `MIXED` or `WITH_TOTALS`, which is then no operator any more."""

    def graph(*given):
        try:
            return graph_of(mixed(*given))
        finally:
            forget()

    return graph


@pytest.fixture
def probe(store):
    """An implementation that counts its builds and runs, and fails when told to."""

    class Probe(Implementation):
        name, backend = "probe", "cpp"
        builds, runs, built_with = 0, 0, None
        build_error, launch_error, refusal = "", "", None
        widths = (1, 2, 4)

        @dataclass(frozen=True)
        class Config:
            width: int = param(1, 2, 4)

        def unsupported(self, w, device):
            return self.refusal

        def space(self, w, device):
            return ConfigSpace(self.Config, {"width": self.widths})

        def heuristic(self, w, device):
            return self.Config(width=1)

        def build(self, config, w, device):
            self.builds += 1
            self.built_with = config
            if self.build_error:
                raise tw.CompileError(self.build_error)
            return ProbeExecutable(self, w)

    yield IMPLS["probe"]
    del IMPLS._things["probe"]


@pytest.fixture
def records(monkeypatch):
    """What the store of an H200 holds; change it in place."""
    held = []
    monkeypatch.setattr(
        selection,
        "device_spec_of",
        lambda d: DEVICES["h200"] if d.type == "cuda" else spec_of(None),
    )
    monkeypatch.setattr(evidence, "records_of", lambda device, op: OperatorRecords(held))
    return held


@pytest.fixture
def built(monkeypatch):
    """Choices that were built for a GPU; what was built returns its implementation's name."""
    made = []

    def build(w, device, choice):
        made.append(choice)
        return lambda *tensors: choice.implementation

    monkeypatch.setattr(prepared, "_build", build)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    yield made
    torch.use_deterministic_algorithms(False)
    prepared.state.forget()
