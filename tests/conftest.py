"""What unit and GPU tests share."""

import pytest

import tilewright as tw
from tilewright.op import OPS
from tilewright.store import Store


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
