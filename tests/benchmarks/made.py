"""Made-up rows and results."""

from benchmarks.harness import Growth, Result, Row
from benchmarks.record import Record


def result(title, figures, *, package="package", ours="ours", base="plain", size=None, **goal):
    """A result whose candidates have these ratios to the base; a microsecond is the base's time."""
    growth = Growth("a chart", "elements", size) if size else None
    row = Row(package, title, dict, ours, base, growth=growth, **goal)
    scale = size or 1
    return Result(
        row,
        ratio={base: 1.0, **figures},
        spread=dict.fromkeys([base, *figures], 0.1),
        time={name: ratio * scale * 1e-6 for name, ratio in {base: 1.0, **figures}.items()},
        noise=0.2,
        took=1.5,
    )


def record(*results, quick=False, rows=None):
    """A record of these results, all measured at once."""
    made = Record(quick, rows or len(results), {"processor": "abacus", "torch": "2.13"})
    for one in results:
        made.results[one.row.name] = one
        made.measured[one.row.name] = "2026-01-02 03:04"
    return made
