"""benchmarks/index_put.py: what it times does what it says, and its table is whole."""

import json

import pytest
import torch
from click.testing import CliRunner

import index_put

CPU = torch.device("cpu")


def test_every_call_puts_the_same_into_the_tensor_itself(monkeypatch):
    monkeypatch.setattr(index_put, "DATA", (5, 3, 40, 7))
    monkeypatch.setattr(index_put, "WINDOW", (1, 1, 40, 7))
    for _, adds, (x, values, *index) in index_put.cases(CPU, 5000):
        results = []
        for call in index_put.calls(adds).values():
            own = x.clone()
            call(own, values, *index)
            assert not torch.equal(own, x)
            results.append(own)
        torch.testing.assert_close(results[0], results[1])
        assert torch.equal(results[1], results[2]) or adds
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.slow
def test_the_table_and_the_file_have_a_row_for_each_case(tmp_path, monkeypatch):
    monkeypatch.setattr(index_put, "TABLES", ((10, 4, 1000),))
    monkeypatch.setattr(index_put, "DATA", (5, 3, 40, 7))
    monkeypatch.setattr(index_put, "WINDOW", (1, 1, 40, 7))
    monkeypatch.setattr(index_put, "BUDGET_S", 0.05)
    path = tmp_path / "rows.json"
    asked = ["--device", "cpu", "--scale", "10", "--json", str(path)]
    done = CliRunner().invoke(index_put.main, asked, catch_exceptions=False)
    assert done.output.count("\n") == 2 + 4, done.output
    rows = json.loads(path.read_text())["rows"]
    assert [row["accumulate"] for row in rows] == [True, True, False, True]
    assert all(us > 0 for row in rows for us in row["us"].values())
