"""The table of errors in docs/fusion.md, of what `tilewright verify --suite accuracy` wrote.

tilewright verify --suite accuracy --impl fused --json accuracy.json
python benchmarks/accuracy_table.py accuracy.json
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from tilewright.op import Workload

ERRORS = {"ulp": "own", "vendor_ulp": "PyTorch", "apart_ulp": "apart"}
"""Fields of an output, and what a column calls them."""


def largest(w: Workload) -> tuple[int, ...]:
    """The shape of its largest tensor."""
    return max((spec.shape for spec in w.tensors.values()), key=math.prod)


def named(w: Workload, usual: tuple[int, ...]) -> str:
    """The operator, what tells the workload from others of it, and which gradients it returns."""
    numbers = "".join(f" by {number:g}" for number in w.scalars.values())
    shape = "" if largest(w) == usual else f" of {'x'.join(map(str, largest(w)))}"
    grads = f": {', '.join(grads)}" if (grads := dict(w.args).get("grads")) else ""
    return f"{w.op}{numbers}{shape}{grads}"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: a line for each operator, and for each dtype a column for each kind of error.

    Shapes are told that are not the first one's.
    """
    lines: dict[str, dict[str, Sequence[dict[str, float]]]] = {}
    workloads = [Workload.parse(row["workload"]) for row in rows]
    for w, row in zip(workloads, rows, strict=True):
        name = named(w, largest(workloads[0]))
        lines.setdefault(name, {})[w.main.dtype] = row["outputs"]
    dtypes = list(dict.fromkeys(dtype for found in lines.values() for dtype in found))
    columns = [(dtype, error) for dtype in dtypes for error in ERRORS]
    text = [
        "| " + " | ".join(["outputs", *(f"{d} {ERRORS[e]}" for d, e in columns)]) + " |",
        "|--" * (1 + len(columns)) + "|",
    ]
    for name, found in lines.items():
        cells = [", ".join(f"{o[e]:.1f}" for o in found.get(d, ())) or "-" for d, e in columns]
        text.append("| " + " | ".join([name, *cells]) + " |")
    return "\n".join(text)


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(file: Path) -> None:
    """Print the table of FILE, which `tilewright verify --json` wrote."""
    try:
        rows = json.loads(file.read_text())
        click.echo(table(rows))
    except (ValueError, TypeError, KeyError):
        raise click.UsageError(
            f"{file} is not what tilewright verify --suite accuracy --json {file} writes"
        ) from None


if __name__ == "__main__":
    main()
