"""Which kernel was chosen from how many elements on: a result file's rows by size, as Markdown.

    tilewright tune --suite scatter_crossover --baseline aten --budget 10m --json crossover.json
    python benchmarks/crossover_table.py crossover.json

A cell is the kernel, its time in us, and PyTorch's time over it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import click

from tilewright.op import Workload

Group = tuple[str, str, int, Fraction]


def place(w: Workload) -> tuple[Group, int]:
    """Operator, dtype, rank and positions for each place; and the number of positions."""
    positions = w["index"].numel
    density = Fraction(positions, w["x"].numel)
    return (w.op, w["x"].dtype, w["x"].rank, density), positions


def cell(row: Mapping[str, Any]) -> str:
    own, aten = row["own"], row["baselines"]["aten"]["median_us"]
    if own is None:
        return f"aten {aten:.3g}"
    us = own["median_us"]
    return f"{own['implementation']} {us:.3g} ({aten / us:.2f}x)"


def table(result: Mapping[str, Any]) -> str:
    cells: dict[Group, dict[int, str]] = {}
    for row in result["rows"]:
        group, positions = place(Workload.parse(row["workload"]))
        cells.setdefault(group, {})[positions] = cell(row)
    sizes = sorted({size for found in cells.values() for size in found})
    head = ["operator", "dtype", "rank", "a place", *map(str, sizes)]
    lines = [head, ["--"] * len(head)]
    for (op, dtype, rank, density), found in cells.items():
        lines.append([op, dtype, str(rank), str(density), *(found.get(n, "") for n in sizes)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


@click.command()
@click.argument("file", type=click.Path(exists=True, path_type=Path))
def main(file: Path) -> None:
    click.echo(table(json.loads(file.read_text())), nl=False)


if __name__ == "__main__":
    main()
