"""A plug-in folder with one operator and implementations that fail in every way there is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tilewright.impl import IMPLS
from tilewright.op import OPS

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
'''


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The operator fake_double and its implementations, for one test module."""
    folder = tmp_path_factory.mktemp("plugins")
    for kind, name, text in (("ops", "fake_double", OP), ("impls", "fakes", IMPL)):
        (folder / kind).mkdir(parents=True)
        (folder / kind / f"{name}.py").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEWRIGHT_PLUGINS", str(folder))
        yield
    OPS._things.pop("fake_double", None)
    for name in ("fake_own", "fake_never"):
        IMPLS._things.pop(name, None)
