"""What unit and GPU tests share."""

import os

# Before torch: threads of OpenMP that wait would spin, on cores that other workers could use.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
from hypothesis import HealthCheck, settings

import tilewright as tw
from tilewright.op import OPS
from tilewright.store import Store

settings.register_profile(
    "same_everywhere",  # examples do not depend on the run, nor whether they pass on the machine
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("same_everywhere")


@pytest.fixture(autouse=True)
def same_draws():
    """What a test draws of PyTorch depends on no test before it."""
    torch.default_generator.manual_seed(0)


@pytest.fixture
def forgets_functions():
    """What a test makes an operator with `tw.fuse` is none afterwards: names are used again."""
    before = set(OPS)
    yield
    for name in set(OPS) - before:
        OPS.remove(name)


@pytest.fixture
def store(tmp_path, monkeypatch):
    """An empty store of records, which dispatch reads too."""
    monkeypatch.setenv("TILEWRIGHT_STORE", f"sqlite:///{tmp_path / 'records.db'}")
    tw.reload_records()
    with Store() as opened:
        yield opened
    monkeypatch.undo()
    tw.reload_records()


@pytest.fixture
def tf32_flag():
    """Sets whether convolutions of fp32 on a GPU may round to TF32."""
    before = torch.backends.cudnn.allow_tf32
    yield lambda allowed: setattr(torch.backends.cudnn, "allow_tf32", allowed)
    torch.backends.cudnn.allow_tf32 = before


@pytest.fixture(params=(1, 2), ids="schedule{}".format)
def late_warps(request, monkeypatch):
    """Warps of kernels that are emulated are held up, others then: see cuda_on_cpu.hpp."""
    monkeypatch.setenv("EMULATED_SCHEDULE", str(request.param))
