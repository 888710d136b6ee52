"""`tw.index_put_` beside PyTorch's, whole calls in place: a Markdown table.

What `index_put_` does beside an operator, which `tilewright tune` times, is to make one flat index
of several, in front of it. Without records of `index_add` and `scatter` kernels run untuned.

    python benchmarks/index_put.py
    python benchmarks/index_put.py --json index_put.json
    python benchmarks/index_put.py --device cpu --scale 1000     a thousandth of the positions
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import click
import torch
from torch import Tensor

import tilewright as tw
from tilewright.environment import environment
from tilewright.measure.timing import time_interleaved
from tilewright.op import Workload
from tilewright.results import commit

TABLES = ((1000, 64, 1_000_000), (50_000, 256, 200_000), (30_522, 768, 65_536))
"""Places, columns and positions of rows that are added."""
DATA, WINDOW = (21, 3, 2600, 212), (1, 1, 2600, 212)
"""What four index tensors point into, and their shape (apache/tvm issue 8479)."""
BUDGET_S = 3.0
Inputs = list[Tensor]


def cases(device: torch.device, scale: int) -> Iterator[tuple[str, bool, Inputs]]:
    """A name, whether values are added, and x, values and index tensors."""
    for places, columns, positions in TABLES:
        count = max(1, positions // scale)
        for indices in ("uniform", "zipf"):
            w = Workload.parse(
                f"index_add(x=f32[{places},{columns}], dim=0, index=i64[{count}], "
                f"source=f32[{count},{columns}])!indices={indices}"
            )
            x, index, values = w.operator.examples(w, "random", 0, device)
            yield f"f32[{places},{columns}], {count} {indices}", True, [x, values, index]
    window = (*WINDOW[:2], max(1, WINDOW[2] // scale), WINDOW[3])
    generator = torch.Generator(device).manual_seed(0)
    drawn = {"generator": generator, "device": device}
    for adds in (False, True):
        each = [torch.randint(size, window, **drawn) for size in DATA]
        x, values = torch.randn(DATA, **drawn), torch.randn(window, **drawn)
        shape = ",".join(map(str, window))
        name = f"f32[{','.join(map(str, DATA))}], four indices of [{shape}]"
        yield name, adds, [x, values, *each]


def calls(adds: bool) -> dict[str, Callable[..., None]]:
    """By name, of x, values and index tensors. PyTorch's mode is the process's."""

    def own(x: Tensor, values: Tensor, *index: Tensor) -> None:
        tw.index_put_(x, index, values, adds)

    def pytorch(x: Tensor, values: Tensor, *index: Tensor) -> None:
        x.index_put_(index, values, adds)

    def deterministic(x: Tensor, values: Tensor, *index: Tensor) -> None:
        torch.use_deterministic_algorithms(True)
        try:
            x.index_put_(index, values, adds)
        finally:
            torch.use_deterministic_algorithms(False)

    return {"tilewright": own, "torch": pytorch, "torch deterministic": deterministic}


def rows(device: torch.device, scale: int) -> Iterator[dict[str, object]]:
    method = "cpu" if device.type == "cpu" else "events"
    for name, adds, inputs in cases(device, scale):
        for _ in range(3):  # a kernel may be built once its shape has come twice
            tw.index_put_(inputs[0].clone(), inputs[2:], inputs[1], adds)
        timings = time_interleaved(calls(adds), [inputs], device, method, budget_s=BUDGET_S)
        yield {
            "case": name,
            "accumulate": adds,
            "us": {call: timing.median_us for call, timing in timings.items()},
            "ci_us": {call: timing.ci_us for call, timing in timings.items()},
        }


@click.command()
@click.option("--device", default=None, help="The GPU if torch sees one, else the CPU.")
@click.option("--scale", default=1, help="Divides the number of positions.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the rows there, too.")
def main(device: str | None, scale: int, path: Path | None) -> None:
    on = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    found: list[dict[str, object]] = []
    names: Sequence[str] = list(calls(True))
    click.echo(f"| x, positions | accumulate | {' | '.join(names)} |\n|--|--|{'--|' * len(names)}")
    for row in rows(on, scale):
        found.append(row)
        us = row["us"]
        assert isinstance(us, dict)
        cells = " | ".join(f"{us[name]:.4g}" for name in names)
        click.echo(f"| {row['case']} | {'yes' if row['accumulate'] else 'no'} | {cells} |")
    if path:
        key, info, versions = environment(on)
        about = {"commit": commit(), "device": {"key": key, **info}, "versions": versions}
        path.write_text(json.dumps({**about, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
