"""Fixtures of the unit tests."""

from dataclasses import dataclass

import pytest
from dispatching import ProbeExecutable

import tilewright as tw
from tilewright.impl import IMPLS, Implementation
from tilewright.space import ConfigSpace, param


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
