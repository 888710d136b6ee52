"""Tables and progress for people. rich is imported when something is printed, not before."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tilewright.record import knob_order
from tilewright.text import duration_text

if TYPE_CHECKING:
    from rich.console import Console

    from tilewright.profiling.doctor import Diagnosis
    from tilewright.regressions import Change

PIPE_WIDTH = 10_000
"""Columns where the output is not a terminal, more than any line has: none is broken that another
program may read."""
WORD, GAP = 16, 2
"""Columns of a table's longest word that wraps whole, and between two of its columns."""
FAR = 0.03
"""Of a median, that its interval may reach to either side before a table shows it: ratios of two
decimals would say more than is known."""


def console(stderr: bool = False) -> Console:
    from rich.console import Console

    found = Console(stderr=stderr, highlight=False, markup=False)
    return (
        found
        if found.is_terminal
        else Console(stderr=stderr, highlight=False, markup=False, width=PIPE_WIDTH)
    )


def table(
    columns: Sequence[str], rows: Iterable[Sequence[Any]], stderr: bool = False, title: str = ""
) -> None:
    """Print rows; a column whose name starts with ">" is aligned to the right, and one whose name
    starts with "=" is never broken: it holds names to type. On a terminal too narrow for the words
    of them all, each row is a list of what it has in each column."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    out = console(stderr)
    texts = [["-" if value is None else str(value) for value in row] for row in rows]
    if _least_width(columns, texts) > out.width:
        _as_lists(out, columns, texts, title)
        return
    shown = Table(
        box=SIMPLE_HEAD,
        title=title or None,
        title_justify="left",
        pad_edge=False,
        collapse_padding=True,
    )
    for name in columns:
        shown.add_column(
            name.lstrip(">="),
            justify="right" if name.startswith(">") else "left",
            overflow="fold",
            no_wrap=name.startswith("="),
        )
    for row in texts:
        shown.add_row(*row)
    out.print(shown)


def _least_width(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """Of a table in which no word is broken, but for words that are longer than WORD anyway."""
    widths = []
    for name, *texts in zip(columns, *rows, strict=True):
        words = " ".join((name.lstrip(">="), *texts)).split()
        longest = max(map(len, words), default=0)
        widths.append(longest if name.startswith("=") else min(longest, WORD))
    return sum(widths) + GAP * len(widths)


def _as_lists(
    out: Console, columns: Sequence[str], rows: Sequence[Sequence[str]], title: str
) -> None:
    from rich.table import Table

    if title:
        out.print(title)
    for row in rows:
        shown = Table.grid(padding=(0, GAP))
        shown.add_column(no_wrap=True)
        shown.add_column(overflow="fold")
        for name, text in zip(columns, row, strict=True):
            if text not in ("", "-"):
                shown.add_row(name.lstrip(">="), text)
        out.print()
        out.print(shown)
    out.print()


def crossed(
    names: Sequence[str], places: Sequence[tuple[tuple[Any, ...], str]], stderr: bool = False
) -> None:
    """A table of texts by the values of several names, the last name's values as columns."""
    columns = sorted({values[-1] for values, _ in places}, key=knob_order)
    lines: dict[tuple[Any, ...], dict[Any, str]] = {}
    for values, text in places:
        lines.setdefault(values[:-1], {})[values[-1]] = text
    table(
        [*names[:-1], *(f">{names[-1]}={value}" for value in columns)],
        [[*values, *(line.get(c) for c in columns)] for values, line in lines.items()],
        stderr,
    )


def diagnosis(found: Diagnosis) -> None:
    for section, findings in found.sections.items():
        rows = [
            (f.subject, f.found if f.found is not None else f"{f.fault}: {f.remedy}")
            for f in findings
        ]
        table([section, ""], rows)


def duration(us: float | None) -> str | None:
    return None if us is None else duration_text(us)


def times(ratio: float | None) -> str | None:
    return None if ratio is None else f"{ratio:.2f}x"


def config(values: Mapping[str, Any]) -> str:
    """The form that --config takes."""
    return ",".join(f"{name}={value}" for name, value in values.items())


def yes(value: bool | None) -> str | None:
    return None if value is None else "yes" if value else "NO"


def brief(workload: str) -> str:
    """`lerp(x=f32[16,102400], end=f32[16,102400], weight=0.3)` as `lerp(x=f32[16,102400], …)`."""
    call, mark, flags = workload.partition(")!")
    first, comma, _ = call.partition(", ")
    return f"{first}, …){mark[1:]}{flags}" if comma else workload


def shortened(texts: Sequence[str]) -> list[str]:
    """Workloads for a narrow column: in brief where that tells them apart."""
    short = [brief(text) for text in texts]
    return [
        text if short.count(brief) > 1 else brief for text, brief in zip(texts, short, strict=True)
    ]


def told_once(reasons: Iterable[tuple[str, str, str]]) -> list[str]:
    """One line for each (workload, who, reason) that are alike but for the workload."""
    texts_of: dict[tuple[str, str], list[str]] = {}
    for workload, who, reason in reasons:
        texts_of.setdefault((who, reason), []).append(workload)
    return [
        f"{who} on {texts[0] if len(texts) == 1 else f'{len(texts)} workloads'}: {reason}"
        for (who, reason), texts in texts_of.items()
    ]


def median(us: float, ci_us: tuple[float, float]) -> str:
    """A time, and how far its interval reaches where that is wide."""
    low, high = ci_us
    far = max(high - us, us - low) / us if us else 0.0
    return duration_text(us) + (f" ±{far:.0%}" if far > FAR else "")


def results(
    rows: Sequence[Mapping[str, Any]], stderr: bool = False, winner: str = "chosen"
) -> None:
    """The final table of tune and bench, from `tilewright.results.table_rows`.

    `winner` is the heading of who won: tune's is chosen from now on, bench's only the fastest. A
    ratio to a baseline whose result is wrong is marked by a star. Where nothing of ours was
    right, what was refused stands beside the choice.
    """
    workloads = shortened([row["workload"] for row in rows])

    def against(row: Mapping[str, Any], baseline: str) -> str | None:
        ratio = times(row[f"vs_{baseline}"])
        return f"{ratio}*" if ratio and baseline in row["wrong"] else ratio

    def chosen(row: Mapping[str, Any]) -> str:
        if not row["none_right"]:
            return row["chosen"]
        configs = sum(row["none_right"])
        return f"{row['chosen']}, {f'{configs} refused' if configs else 'none tried'}"

    table(
        ["workload", winner, ">time", ">x eager", ">x compile", ">of floor", "verified"],
        [
            (
                workload,
                chosen(row),
                median(row["us"], row["ci_us"]),
                against(row, "aten"),
                against(row, "inductor"),
                None if row["chosen_of_floor"] is None else f"{row['chosen_of_floor']:.2f}",
                yes(row["verified"]),
            )
            for workload, row in zip(workloads, rows, strict=True)
        ],
        stderr,
    )


def groups(
    fields: str,
    lines: Sequence[Mapping[str, Any]],
    stderr: bool = False,
    winner: str = "chosen",
) -> None:
    """One line for each group of workloads, from `tilewright.summaries.summary_by`: geometric means
    of our own kernels and, in brackets, the worst of the group. `winner` as for `results`."""
    names = [name.strip() for name in fields.split(",")]
    known = {"aten": "eager", "inductor": "compile"}
    vs = "geomean_vs_"
    baselines = dict.fromkeys(k.removeprefix(vs) for line in lines for k in line if vs in k)
    columns = [(f">x {known.get(b, b)}", f"vs_{b}", "{:.2f}x") for b in baselines]
    columns += [(">of copy", "of_copy", "{:.2f}"), (">of floor", "of_floor", "{:.2f}")]
    networks = {"network_us_chosen": winner, "network_us_aten": "aten"}
    network = {k: of for k, of in networks.items() if any(k in x for x in lines)}
    table(
        [
            *names,
            ">workloads",
            *(heading for heading, _, _ in columns),
            *(f">network, {of}" for of in network.values()),
        ],
        [
            (
                *(line[name] for name in names),
                line["workloads"],
                *(
                    f"{form.format(line[f'geomean_{of}'])} ({line[f'worst_{of}']:.2f})"
                    if f"geomean_{of}" in line
                    else None
                    for _, of, form in columns
                ),
                *(duration(line.get(k)) for k in network),
            )
            for line in lines
        ],
        stderr,
    )


def changes(found: Sequence[Change]) -> None:
    """What moved, the slowest first, and one line of counts."""
    moved = [c for c in found if c.verdict != "same"]
    moved.sort(key=lambda c: -(c.times or math.inf))
    if moved:
        table(
            ["workload", "verdict", ">old", ">new", ">time"],
            [
                (name, c.verdict, duration(c.old_us), duration(c.new_us), times(c.times))
                for name, c in zip(shortened([c.workload for c in moved]), moved, strict=True)
            ],
        )
    counts = Counter(c.verdict for c in found)
    kinds = ("slower", "gone", "same", "faster")
    console().print(", ".join(f"{counts[kind]} {kind}" for kind in kinds))


def summary(data: Mapping[str, Any], stderr: bool = False) -> None:
    """One line below the table, of a result file: geometric means of our own kernels, and time."""
    means = data["summary"]
    names = {
        "geomean_vs_aten": "{:.2f}x eager",
        "geomean_vs_inductor": "{:.2f}x torch.compile",
        "geomean_vs_quack": "{:.2f}x Quack",
        "geomean_of_floor": "{:.2f} of the floor",
        "geomean_heuristic_vs_own": "untuned {:.2f} of the tuned speed",
        "without_heuristic": "{:.0f} not told untuned, as where that is not right",
        "geomean_eager_vs_graph": "{:.2f} of the graph's time in calls one after the other",
        "geomean_events_vs_graph": "{:.2f} of the graph's time called from PyTorch",
    }
    told = [form.format(means[name]) for name, form in names.items() if name in means]
    line = f"own kernels, geometric mean: {', '.join(told)}; " if told else ""
    made = [
        f"{e['kernels']} compiled by {name}, {e['kernels'] / e['cpu_s']:.1f} a second and core"
        for name, e in data.get("compiling", {}).items()
        if e["kernels"] and e["cpu_s"]
    ]
    time = f"{data['tuning_s']:.0f} s, compiling the baselines not counted"
    console(stderr).print("; ".join([f"{line}{time}", *made]))
