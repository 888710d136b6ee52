"""The text of a plug-in folder: one operator, and implementations that fail in every way."""

from __future__ import annotations

from tilewright.op import Workload
from tilewright.report import Row
from tilewright.store import Store
from tilewright.tune import tune

OP = '''
from tilewright.op import op


@op(flops=lambda w: w.main.numel)
def fake_double(x: "Tensor") -> "Tensor":
    """Twice x."""
    return x * 2.0
'''

IMPL = '''
import os
import signal
import time
from dataclasses import dataclass

from tilewright.build import CompileTask
from tilewright.errors import CompileError
from tilewright.impl import Executable, Implementation, allocate
from tilewright.space import ConfigSpace, param


class Fake(Executable):
    workspace_bytes = 64

    def __init__(self, w, config):
        self.spec, self.config = w.outputs[0], config

    def __call__(self, x):
        fault = self.config.fault
        if fault == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if fault == "exit":
            os._exit(3)
        if fault == "hang":
            time.sleep(1000)
        if fault == "raise":
            raise RuntimeError("no luck")
        out = allocate(self.spec, x.device)
        out.copy_(x).mul_(3.0 if fault == "wrong" else 2.0)
        until = time.perf_counter() + self.config.delay_us * 1e-6
        while time.perf_counter() < until:
            pass
        return out


class FakeOwn(Implementation):
    """Twice x, late by a delay, or with a fault."""

    name, backend, op = "fake_own", "cpp", "fake_double"

    @dataclass(frozen=True)
    class Config:
        delay_us: int = param(300, 100, 0, 600, 900, 2000, 4000)
        fault: str = param("none", "segfault", "exit", "hang", "raise", "wrong", "refused")

    def unsupported(self, w, device):
        if w.main.rank != 2:
            return f"x has rank {w.main.rank}; fake_own takes matrices"

    def space(self, w, device):
        return ConfigSpace(self.Config)

    def heuristic(self, w, device):
        return self.Config()

    def build(self, config, w, device):
        if config.fault == "refused":
            raise CompileError("error: the fake compiler refused")
        return Fake(w, config)


class FakeNever(Implementation):
    name, backend, op = "fake_never", "cpp", "fake_double"

    def unsupported(self, w, device):
        return "never fits"


class FakeLibrary(FakeOwn):
    """As fake_own, but of other people."""

    name, backend = "fake_library", "cutlass"
'''

WORKLOAD = "fake_double(x=f32[64,128])"
FAKES = ("fake_own", "fake_never")
FAST = {"fault": ("none",)}
HEURISTIC = {"delay_us": 300, "fault": "none"}


def quick(w: Workload, runner, store, **changed) -> Row:
    options = {"budget_s": 6.0, "baselines": (), "params": FAST, "strategy": "exhaustive"}
    options["implementations"] = FAKES
    report = tune([w], runner=runner, store=store, **{**options, **changed})
    assert not report.failed, report.failed
    (row,) = report.rows
    return row


def statuses(store: Store) -> dict[str, set[str]]:
    """implementation -> statuses of its records."""
    found: dict[str, set[str]] = {}
    for record in store.query():
        found.setdefault(record.implementation, set()).add(record.status)
    return found
