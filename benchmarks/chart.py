"""A grouped horizontal bar chart as SVG, from numbers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

COLOURS, LAST = ("#9aa5b1", "#5b8def", "#2a9d8f"), "#e4572e"
"""Of the series in their order, and of the last one."""
WIDTH, LABELS, NUMBERS = 900, 300, 60
BAR, GAP, TOP = 11, 10, 62


def bars(title: str, rows: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """One group of bars per row; every row has the same series. Longer is better."""
    series = list(rows[0][1])
    longest = max(value for _, values in rows for value in values.values())
    scale = (WIDTH - LABELS - NUMBERS) / longest
    colours = [*COLOURS[: len(series) - 1], LAST]
    group = len(series) * BAR + GAP
    height = TOP + group * len(rows) + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="22" font-size="14" font-weight="bold">{escape(title)}</text>',
        *_legend(series, colours),
    ]
    for i, (name, values) in enumerate(rows):
        top = TOP + i * group
        middle = top + len(series) * BAR / 2 + 4
        parts.append(
            f'<text x="{LABELS - 8}" y="{middle:.1f}" text-anchor="end">{escape(name)}</text>'
        )
        for j, value in enumerate(values.values()):
            y, length = top + j * BAR, value * scale
            parts.append(
                f'<rect x="{LABELS}" y="{y}" width="{length:.1f}" height="{BAR - 1}" '
                f'fill="{colours[j]}"/>'
                f'<text x="{LABELS + length + 4:.1f}" y="{y + BAR - 2}" font-size="9">'
                f"{value:.2f}x</text>"
            )
    return "\n".join([*parts, "</svg>", ""])


def _legend(series: Sequence[str], colours: Sequence[str]) -> list[str]:
    return [
        f'<rect x="{12 + 130 * j}" y="34" width="12" height="12" fill="{colours[j]}"/>'
        f'<text x="{30 + 130 * j}" y="44">{escape(name)}</text>'
        for j, name in enumerate(series)
    ]
