"""The tables of docs/split_k_study.md: ResNet-50 v1's weight gradients with split-K, then and here.

split_k_study.csv holds the times that the study beside apache/tvm PR 10185 published
(github.com/masahi/tvm-cutlass-eval, conv2d/): no split, the tuner's kernel, that kernel called from
TVM, and cuDNN called from TVM. Ours are of resnet50_v1_wgrad.json and, without a split,
resnet50_v1_wgrad_no_split.json.

    python benchmarks/split_k_table.py          write the page's tables
    python benchmarks/split_k_table.py --check  exit 1 if that would change something
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilewright.op import Workload

BENCHMARKS = Path(__file__).parent
PAGE = BENCHMARKS.parent / "docs" / "split_k_study.md"
RESULTS = BENCHMARKS / "results" / "h200"
CUTLASS, CUTLASS_3 = "conv2d_weight_grad_cutlass", "conv2d_weight_grad_cutlass3"
THEIRS = ("no_split_us", "tuned_us", "called_us", "cudnn_us")
REFUSED = {
    (256, 64, 256, 1, 56, 1),
    (256, 64, 64, 1, 56, 1),
    (256, 64, 64, 3, 56, 1),
    (256, 256, 64, 1, 56, 1),
}
"""Layers of which all 82 configs were refused in the run at a8784e2, whose rows are too old to say
so: fp32 chains of 802816 products are wrong by more than the bound allows."""
MARKED = re.compile(r"(<!-- batch (\d+) -->\n).*?(<!-- end -->)", re.DOTALL)
COLUMNS = [
    *("no split", "kernel", "called", "cuDNN, called"),
    *("no split", "kernel", "called", "CUTLASS 2.x", "CUTLASS 3.x", "cuDNN", "cuDNN, called"),
]


def rows_of(name: str) -> dict[Workload, dict[str, Any]]:
    result = json.loads((RESULTS / f"{name}.json").read_text())
    return {Workload.parse(row["workload"]): row for row in result["rows"]}


def layer(w: Workload) -> tuple[int, ...]:
    """(batch, channels, features, kernel, size, stride), the first columns of the study's file."""
    n, channels, size, _ = w["x"].shape
    return n, channels, w["grad_output"].shape[1], w["kernel_size"][0], size, w["stride"][0]


def table(batch: int) -> str:
    """Times in microseconds, or what became of a layer without one: see `untimed`."""
    with (BENCHMARKS / "split_k_study.csv").open() as file:
        study = list(csv.DictReader(file))
    measured = {layer(w): row for w, row in rows_of("resnet50_v1_wgrad").items()}
    unsplit = {layer(w): row for w, row in rows_of("resnet50_v1_wgrad_no_split").items()}
    newer = {layer(w): row for w, row in rows_of("resnet50_v1_wgrad_cutlass3").items()}
    lines = [f"| layer | {' | '.join(COLUMNS)} |", "|--" + "|--:" * len(COLUMNS) + "|"]
    sums = [0.0] * len(COLUMNS)
    for theirs in study:
        n, channels, features, kernel, size, stride = key = tuple(map(int, [*theirs.values()][:6]))
        if n != batch:
            continue
        row, split_less, by_newer = measured[key], unsplit[key], newer[key]
        times = [
            *(float(theirs[name]) for name in THEIRS),
            split_less["own"]["median_us"] if split_less["own"] else untimed(key, split_less),
            row["own"]["median_us"],
            row["eager_us"]["own"],
            row["baselines"][CUTLASS]["median_us"],
            by_newer["baselines"].get(CUTLASS_3, {}).get("median_us") or untimed(key, by_newer),
            row["baselines"]["aten"]["median_us"],
            row["eager_us"]["aten"],
        ]
        numbers = [float("nan") if isinstance(us, str) else us for us in times]
        sums = [total + us for total, us in zip(sums, numbers, strict=True)]
        name = f"{channels} to {features}, {kernel}x{kernel}, {size} x {size}"
        lines.append(line(name + (f", stride {stride}" if stride > 1 else ""), times))
    return "\n".join([*lines, line("all", sums)])


def untimed(key: tuple[int, ...], row: dict[str, Any]) -> str:
    """ "refused" where no config that was tried is right, "-" where the budget ended before one."""
    failed = any(f["configs"] for f in row.get("none_right", {}).values())
    return "refused" if failed or key in REFUSED else "-"


def line(name: str, times: Sequence[float | str]) -> str:
    cells = [
        us if isinstance(us, str) else "-" if us != us else f"{us:.{1 if us < 100 else 0}f}"
        for us in times
    ]
    return f"| {name} | {' | '.join(cells)} |"


def main() -> int:
    before = PAGE.read_text()
    after = MARKED.sub(lambda m: f"{m[1]}{table(int(m[2]))}\n{m[3]}", before)
    if "--check" in sys.argv[1:]:
        return int(after != before)
    PAGE.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
