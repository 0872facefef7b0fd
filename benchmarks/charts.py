"""Charts of how cost grows, as SVG: both axes logarithmic, one line for each candidate, named where it ends.

They bring their own ground and follow the reader's choice of light or dark.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from html import escape

from benchmarks.harness import Result, duration

WIDTH, HEIGHT = 720, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 190, 44, 44  # the margins; names stand in the right one

LIGHT = ("#0b6bcb", "#c2410c", "#15803d", "#7e22ce", "#6b7280", "#0e7490", "#be185d")
DARK = ("#7cb8ff", "#ff9d66", "#6fd38d", "#c9a2ff", "#9aa4b2", "#63d3e6", "#ff8fc0")


def charts_of(results: Sequence[Result]) -> dict[str, str]:
    """Draw every chart that these results have points for.

    Args:
        results: The results of a run.

    Returns:
        The charts by their titles; a chart needs two sizes.
    """
    groups: dict[str, list[Result]] = {}
    for result in results:
        if result.row.growth is not None and not result.error:
            groups.setdefault(result.row.growth.title, []).append(result)
    return {
        title: chart(group) for title, group in groups.items() if len({result.row.growth.size for result in group}) > 1
    }


def file_name(title: str) -> str:
    """Give the name of a chart's file.

    Args:
        title: The title of the chart.

    Returns:
        Small letters, digits and hyphens.
    """
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") + ".svg"


def chart(results: Sequence[Result]) -> str:
    """Draw one chart.

    Args:
        results: The results of its rows.

    Returns:
        The SVG.
    """
    growth, ours = results[0].row.growth, results[0].row.ours
    lines: dict[str, list[tuple[float, float]]] = {}
    for result in sorted(results, key=lambda result: result.row.growth.size):
        for name, seconds in result.time.items():
            lines.setdefault(name, []).append((result.row.growth.size, seconds))
    sizes = [x for points in lines.values() for x, _ in points]
    times = [y for points in lines.values() for _, y in points]
    across = _Axis(min(sizes), max(sizes), LEFT, WIDTH - RIGHT)
    up = _Axis(min(times), max(times), HEIGHT - BOTTOM, TOP)

    parts = [f'<text class="title" x="{LEFT}" y="22">{escape(growth.title)}</text>']
    for value in across.decades():
        x = across.place(value)
        parts.append(f'<path class="grid" d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}"/>')
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{value:,.0f}</text>'
        )
    for value in up.decades():
        y = up.place(value)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{duration(value)}</text>')
    parts.append(f'<text class="tick" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">')
    parts.append(f"{escape(growth.along)}</text>")

    heights = _apart([up.place(points[-1][1]) for points in lines.values()], 15)
    for number, ((name, points), height) in enumerate(zip(lines.items(), heights, strict=True)):
        places = [(across.place(x), up.place(y)) for x, y in points]
        way = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        parts.append(f'<g class="line{number % len(LIGHT)}"><path class="line{" ours" * (name == ours)}" d="M{way}"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in places]
        parts.append(f'<text x="{places[-1][0] + 10:.1f}" y="{height + 4:.1f}">{escape(name)}</text></g>')
    return _page(growth.title, parts)


class _Axis:
    """A logarithmic axis: values between whole decades on the screen between two places."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.high = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
        self.high = max(self.high, self.low + 1)
        self.start, self.end = start, end

    def place(self, value: float) -> float:
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def decades(self) -> list[float]:
        return [10.0**power for power in range(self.low, self.high + 1)]


def _apart(heights: Sequence[float], distance: float) -> list[float]:
    """Move names down where they would cover each other."""
    placed, last = list(heights), -math.inf
    for number in sorted(range(len(heights)), key=lambda number: heights[number]):
        last = placed[number] = max(heights[number], last + distance)
    return placed


def _colours(palette: Sequence[str]) -> str:
    return "".join(f".line{number}{{color:{colour}}}" for number, colour in enumerate(palette))


def _page(title: str, parts: Sequence[str]) -> str:
    style = (
        "svg{background:#ffffff;font:12px system-ui,sans-serif}text{fill:#1f2328}.title{font-size:14px;font-weight:600}"
        ".tick{fill:#57606a}.grid{stroke:#d8dee4}.line{fill:none;stroke:currentColor;stroke-width:1.6}.ours{stroke-width:3.5}"
        "g circle,g text{fill:currentColor}"
        f"{_colours(LIGHT)}@media(prefers-color-scheme:dark){{svg{{background:#16191d}}text{{fill:#e6edf3}}"
        f".tick{{fill:#9da7b3}}.grid{{stroke:#2d333b}}g text{{fill:currentColor}}{_colours(DARK)}}}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )
