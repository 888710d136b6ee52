"""The table of which kernel is chosen from how many elements on has every row of the suite."""

import json

from click.testing import CliRunner

import crossover_table
from tilewright.suite import SUITES


def row(workload, us):
    own = {"implementation": "scatter_tiled", "median_us": us}
    return {"workload": workload, "own": own, "baselines": {"aten": {"median_us": 9.0}}}


def test_every_size_of_a_group_stands_in_one_line(tmp_path):
    workloads = [str(w) for w in SUITES["scatter_crossover"].workloads()]
    rows = [row(text, 6.0) for text in workloads]
    rows[1] = {**rows[1], "own": None}
    file = tmp_path / "result.json"
    file.write_text(json.dumps({"rows": rows}))
    done = CliRunner().invoke(crossover_table.main, [str(file)], catch_exceptions=False)
    head, _, *lines = done.output.splitlines()
    assert head == "| operator | dtype | rank | a place | 4096 | 32768 | 262144 | 2097152 |"
    assert len(lines) * 4 == len(workloads) == 144
    first = "scatter_tiled 6 (1.50x)"
    assert lines[0] == f"| scatter | f16 | 1 | 1/16 | {first} | aten 9 | {first} | {first} |"
    assert lines[-1].startswith("| scatter_add | f64 | 2 | 16 |")


def test_densities_and_ranks_are_what_the_suite_says():
    groups = {crossover_table.place(w)[0] for w in SUITES["scatter_crossover"].workloads()}
    assert {density for *_, density in groups} == {1, 16, crossover_table.Fraction(1, 16)}
    assert {rank for _, _, rank, _ in groups} == {1, 2}
