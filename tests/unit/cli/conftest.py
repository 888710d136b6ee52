"""What tests of the command line share."""

import pytest


@pytest.fixture
def own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_STORE", f"sqlite:///{tmp_path / 'records.db'}")
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
