"""What tests of the command line share."""

import pytest

from tilewright.measure.runner import InProcess
from tilewright.tune import run


@pytest.fixture
def own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_STORE", f"sqlite:///{tmp_path / 'records.db'}")
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def measures_here(monkeypatch):
    """A tune measures in this process, not in one of its own, which would import torch first."""
    monkeypatch.setattr(run, "Isolated", InProcess)
