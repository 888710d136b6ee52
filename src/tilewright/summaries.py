"""What many rows say together: geometric means and worst cases, of all of them or by group."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tilewright.errors import InvalidArgument
from tilewright.op import Workload
from tilewright.tensor_spec import TensorSpec

if TYPE_CHECKING:
    from tilewright.report import Row

_FIELD = re.compile(r"(\w+)(?:\[(-?\d+)\]|\.(dtype))?")


def geomean(values: Iterable[float | None]) -> float | None:
    """Geometric mean of what is there; None of nothing."""
    logs = [math.log(v) for v in values if v]
    return math.exp(sum(logs) / len(logs)) if logs else None


def summary(rows: Sequence[Row], counts: Mapping[str, int] | None = None) -> dict[str, float]:
    """Geometric means of `own` against each baseline, the floor and copy, and the worst cases; and
    of the speed that the heuristic alone has of the search's result, with the number of rows that
    lack it, as where its result was refused (`without_heuristic`). Where workloads were timed by
    both methods, of a call's time in a program to that in a graph, too. `eager` is of calls in a
    row, as programs make them.

    Args:
        counts: how often a network has each workload. Then there is its time in microseconds, too:
            `network_us_chosen`, and by each baseline that all rows have.
    """
    found: dict[str, float | None] = {}
    for baseline in dict.fromkeys(name for row in rows for name in row.baselines):
        ratios = [r for row in rows if (r := row.own_vs(baseline)) is not None]
        found[f"geomean_vs_{baseline}"] = geomean(ratios)
        found[f"worst_vs_{baseline}"] = min(ratios, default=None)
    for name in ("floor", "copy"):
        fractions = [f for row in rows if (f := getattr(row, f"of_{name}")) is not None]
        found[f"geomean_of_{name}"] = geomean(fractions)
        found[f"worst_of_{name}"] = min(fractions, default=None)
    found["geomean_heuristic_vs_own"] = geomean(
        row.own.median_us / row.own.heuristic_us for row in rows if row.own and row.own.heuristic_us
    )
    untold = [row for row in rows if row.own and row.own.heuristic_us is None]
    found["without_heuristic"] = len(untold) or None
    called = events_vs_graph(rows)
    found["geomean_events_vs_graph"] = geomean(called)
    found["worst_events_vs_graph"] = max(called, default=None)
    in_a_row = [r for row in rows if (r := row.eager_vs_graph) is not None]
    found["geomean_eager_vs_graph"] = geomean(in_a_row)
    found["worst_eager_vs_graph"] = max(in_a_row, default=None)
    found |= network_us(rows, counts or {})
    return {name: value for name, value in found.items() if value is not None}


def network_us(rows: Sequence[Row], counts: Mapping[str, int]) -> dict[str, float | None]:
    """Times of all layers of a network together: as chosen, and by each baseline that all have."""
    layers = [(row, counts[row.workload]) for row in rows if row.workload in counts]
    if not layers:
        return {}
    shared = set.intersection(*(set(row.baselines) for row, _ in layers))
    return {
        "network_us_chosen": sum(n * row.chosen_us for row, n in layers),
        **{
            f"network_us_{name}": sum(n * row.baselines[name].median_us for row, n in layers)
            for name in sorted(shared)
        },
    }


def events_vs_graph(rows: Sequence[Row]) -> list[float]:
    """For each workload that was timed by both methods, the time of our own kernel called from
    PyTorch over its time in a graph."""
    times: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.own:
            times.setdefault(row.workload, {})[row.method] = row.own.median_us
    return [t["events"] / t["graph"] for t in times.values() if {"events", "graph"} <= set(t)]


def summary_by(
    rows: Sequence[Row], fields: str, counts: Mapping[str, int] | None = None
) -> list[dict[str, Any]]:
    """A summary for each group of rows that agree in some fields of their workloads.

    Args:
        fields: separated by commas: `op`, an argument's name (`eps`), a size of a tensor (`x[0]`,
            `x[-1]`) or its dtype (`x.dtype`).
        counts: as `summary` has them.

    Returns:
        For each group the fields' values, the number of `workloads`, and its `summary`; in the
        order of the values, numbers by size.

    Raises:
        InvalidArgument: a field that cannot be read, or that a workload does not have.
    """
    names = [name.strip() for name in fields.split(",")]
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        w = Workload.parse(row.workload)
        groups.setdefault(tuple(_value(w, name) for name in names), []).append(row)
    return [
        {**dict(zip(names, values, strict=True)), "workloads": len(found), **summary(found, counts)}
        for values, found in sorted(groups.items(), key=lambda group: [*map(_order, group[0])])
    ]


def _value(w: Workload, field: str) -> str:
    if field == "op":
        return w.op
    match = _FIELD.fullmatch(field)
    if match is None:
        raise InvalidArgument(
            f"cannot read the field {field!r}; write op, eps, x[0], x[-1] or x.dtype"
        )
    name, dim, dtype = match.groups()
    known = dict(w.args)
    value = known.get(name)
    if dtype is None and dim is None and name in known:
        return str(value)
    if not isinstance(value, TensorSpec):
        raise InvalidArgument(f"{w} has no {field}; its arguments: {', '.join(known)}")
    if dtype is not None:
        return value.dtype
    if not -value.rank <= int(dim) < value.rank:
        raise InvalidArgument(f"{w} has no {field}: {name} has rank {value.rank}")
    return str(value.shape[int(dim)])


def _order(value: str) -> tuple[float, str]:
    return (float(value), "") if value.isdecimal() else (math.inf, value)
