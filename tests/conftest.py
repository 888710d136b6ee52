"""What unit and GPU tests share."""

import pytest

import tilewright as tw
from tilewright.store import Store


@pytest.fixture
def store(tmp_path, monkeypatch):
    """An empty store of records, which dispatch reads too."""
    monkeypatch.setenv("TILEWRIGHT_STORE", f"sqlite:///{tmp_path / 'records.db'}")
    tw.reload_records()
    with Store() as opened:
        yield opened
    monkeypatch.undo()
    tw.reload_records()
