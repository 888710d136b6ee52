"""What tests of the tuner share: fake implementations, a runner of this process, a store."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from measured_fakes import IMPL, OP, WORKLOAD

from tilewright.impl import IMPLS
from tilewright.measure.runner import InProcess
from tilewright.op import OPS, Workload
from tilewright.store import Store
from tilewright.tune import duel


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
    for name in ("fake_own", "fake_never", "fake_library"):
        IMPLS._things.pop(name, None)


@pytest.fixture(scope="module")
def w(fakes) -> Workload:
    return Workload.parse(WORKLOAD)


@pytest.fixture(scope="module")
def runner(w) -> Iterator[InProcess]:
    with InProcess("cpu") as runner:
        yield runner


@pytest.fixture(autouse=True)
def brief_duels(monkeypatch):
    """Duels end after the shortest time, target reached or not: fakes differ by factors."""
    monkeypatch.setattr(duel, "LONGEST_S", duel.SHORTEST_S)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(f"sqlite:///{tmp_path / 'records.db'}") as store:
        yield store


@pytest.fixture
def slow_aten(runner, monkeypatch) -> Iterator[None]:
    """aten takes 20 ms longer, so that a fake can win."""
    build = IMPLS["aten"].build

    def slow(config, w, device):
        executable = build(config, w, device)
        original = type(executable).__call__

        class Slow(type(executable)):
            def __call__(self, *tensors):
                time.sleep(0.02)
                return original(self, *tensors)

        executable.__class__ = Slow
        return executable

    monkeypatch.setattr(IMPLS["aten"], "build", slow, raising=False)
    runner._bench._w = None  # forget what is built
    yield
    runner._bench._w = None
