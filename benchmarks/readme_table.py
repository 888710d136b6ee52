"""Bring README.md and its pictures in step with the result files.

A result file DEVICE/SUITE.json is shown between the lines `<!-- results: DEVICE/SUITE -->` and
`<!-- end -->`, and drawn to docs/DEVICE_SUITE.svg.

    python benchmarks/readme_table.py            rewrite them
    python benchmarks/readme_table.py --check    exit 1 if a rewrite would change something
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from chart import bars

ROOT = Path(__file__).parent.parent
MARKED = re.compile(r"(<!-- results: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
TENSOR = re.compile(r"\b(f16|bf16|f32|f64|i32|i64|bool)(\[[\d,]*\])")


def label(workload: str) -> str:
    """`lerp bf16 [4096,4096] [4096]`: operator, dtype of the first tensor, distinct shapes."""
    tensors = TENSOR.findall(workload)
    shapes = dict.fromkeys(shape for _, shape in tensors)
    return " ".join([workload.partition("(")[0], tensors[0][0], *shapes])


def chosen_us(row: dict[str, Any]) -> float:
    own = row["own"]
    if own and row["chosen"] == own["implementation"]:
        return own["median_us"]
    return row["baselines"][row["chosen"]]["median_us"]


def ratio(row: dict[str, Any], baseline: str) -> float | None:
    """How many times faster than a baseline the chosen implementation is."""
    measured = row["baselines"].get(baseline)
    return measured["median_us"] / chosen_us(row) if measured else None


def times(row: dict[str, Any], baseline: str) -> str:
    """The ratio in words, with a star where the baseline's result is refused by verification."""
    value = ratio(row, baseline)
    star = "*" if baseline in row.get("wrong", ()) else ""
    return f"{value:.2f}x{star}" if value else "-"


def share(row: dict[str, Any], least: str) -> str:
    us = row.get(least)
    return f"{us / chosen_us(row):.2f}" if us else "-"


BASELINES = {
    "aten": ("against eager", "eager's speed"),
    "inductor": ("against torch.compile", "torch.compile's"),
    "inductor_max": ("against max-autotune", "that with max-autotune"),
}
"""Name in result files -> what its column is called, and its speed in a sentence."""
COMPILED = {"inductor": "torch.compile", "inductor_max": "max-autotune"}
"""Name in result files -> what its bar is called."""


def table(result: dict[str, Any]) -> str:
    rows, summary = result["rows"], result["summary"]
    compared = [n for n in BASELINES if any(n in row["baselines"] for row in rows)]
    columns = ["workload", "chosen", "time", *(BASELINES[n][0] for n in compared), "of the floor"]
    on_gpu = "sms" in result["device"]
    columns += ["of a copy"] * on_gpu
    lines = [f"| {' | '.join(columns)} |", f"|--|--|{'--:|' * (len(columns) - 2)}"]
    for row in rows:
        cells = [label(row["workload"]), row["chosen"], duration(chosen_us(row))]
        cells += [*(times(row, n) for n in compared), share(row, "floor_us")]
        cells += [share(row, "copy_us")] * on_gpu
        lines.append(f"| {' | '.join(cells)} |")
    speeds = [
        f"{summary[f'geomean_vs_{n}']:.2f}x of {BASELINES[n][1]}"
        for n in compared
        if f"geomean_vs_{n}" in summary
    ]
    said = ", ".join(speeds)
    if on_gpu and "geomean_of_copy" in summary:
        said += f"; {summary['geomean_of_copy']:.2f} of a copy's"
    lines.append(
        f"\nOur own kernels, geometric mean: {said}. "
        f"Tuning took {result['tuning_s']:.0f} s, compilation of the baselines apart."
    )
    if any("*" in line for line in lines):
        lines.append(
            "\n\\* Verification refuses its result ([why](docs/measuring.md#baselines)). Its time "
            "stands, and it is never chosen."
        )
    lines.append(f"\nMeasured on {where(result)}, {result['date'][:10]}.")
    return "\n".join(lines)


def where(result: dict[str, Any]) -> str:
    device, versions = result["device"], result["versions"]
    threads = f", {device['threads']} threads" if device.get("threads") else ""
    return f"{device['name']}{threads}, torch {versions['torch']}"


def duration(us: float) -> str:
    return f"{us:.1f} us" if us < 1000 else f"{us / 1000:.2f} ms"


def picture(result: dict[str, Any]) -> str:
    compared = [n for n in COMPILED if any(n in row["baselines"] for row in result["rows"])]
    rows = []
    for row in result["rows"]:
        eager_us = row["baselines"]["aten"]["median_us"]
        speeds = {"eager": 1.0}
        for name in compared:
            measured = row["baselines"].get(name)
            speeds[COMPILED[name]] = eager_us / measured["median_us"] if measured else 0.0
        speeds["tilewright"] = eager_us / chosen_us(row)
        rows.append((label(row["workload"]), speeds))
    return bars(f"Speed against eager PyTorch: {result['suite']} on {where(result)}", rows)


def wanted(readme: str) -> dict[Path, str]:
    """What each file should hold, for the result files that are there."""
    files: dict[Path, str] = {}

    def fill(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        path = ROOT / "benchmarks" / "results" / f"{name}.json"
        if not path.exists():
            return match.group(0)
        result = json.loads(path.read_text())
        svg = ROOT / "docs" / f"{name.replace('/', '_')}.svg"
        files[svg] = picture(result)
        shown = f"![{result['suite']}: speed against eager PyTorch](docs/{svg.name})"
        return f"{begin}{shown}\n\n{table(result)}\n{end}"

    return {ROOT / "README.md": MARKED.sub(fill, readme), **files}


def main() -> int:
    files = wanted((ROOT / "README.md").read_text())
    stale = [p for p, text in files.items() if not p.exists() or p.read_text() != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is stale: run python benchmarks/readme_table.py")
        return 1 if stale else 0
    for path in stale:
        path.write_text(files[path])
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
