"""The page of results, made from the record of a run and from nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.charts import charts_of, file_name
from benchmarks.harness import BEHIND, Result, duration
from benchmarks.record import Record

ABOUT = """\
A figure is the median over rounds of ours / base, or of base / ours where it says *faster*. All candidates are
interleaved in each round, each after an untimed call; *iqr*, the interquartile range of the ratios, is the noise.
Everything runs on one thread."""

FIELD = """\
The field lists the ratio of every candidate to the base and its time per call. A *peer* does the same job; the others
are the plain operation that leaves nothing out, a limit that nothing can beat, or ours in another form."""

WORST = 5  # rows behind their goal that the summary lists
CHARTS = (
    "a healthy step of the guard, CNN",
    "a guarded step, a module raises, 1 bad, MLP",
    "masked.mean of all elements, with its gradient, 10 % NaN",
)
"""The charts of the summary."""

FASTER = 1.05  # below this, a peer that is faster is noise


def page(record: Record, charts: str) -> str:
    """Write the page.

    Args:
        record: What was measured.
        charts: Where the charts lie, seen from the page.

    Returns:
        The page, as Markdown.
    """
    results = list(record.results.values())
    sections = [
        _head(record),
        FIELD,
        _behind(results),
        _faster(results),
        _charts(results, charts),
        _failed(results),
        *(_section(package, results) for package in dict.fromkeys(result.row.package for result in results)),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def summary(record: Record, charts: str) -> str:
    """Write the page on one screen: how many goals are met, the worst misses, and how cost grows.

    Args:
        record: What was measured.
        charts: Where the charts lie, seen from the page.

    Returns:
        The page, as Markdown.
    """
    results = list(record.results.values())
    packages = dict.fromkeys(result.row.package for result in results)
    lines = []
    for package in packages:
        met = [result.met for result in results if result.row.package == package]
        lines.append((package, str(len(met)), f"{met.count(True)} of {len(met) - met.count(None)}"))
    every = "All rows with their peers are in `benchmarks/results.md` of the repository."
    table = _table(("package", "rows", "goals met"), lines)
    sections = [_head(record), f"{every}\n\n{table}", _behind(results, WORST), _charts(results, charts, CHARTS)]
    return "\n\n".join(section for section in sections if section) + "\n"


def figure(result: Result) -> str:
    """Give the figure that the goal speaks of, with its noise.

    Args:
        result: What a row gave.

    Returns:
        One cell of a table.
    """
    row = result.row
    if row.counts:
        return f"{result.figure:.3g}"
    if row.microseconds is not None:
        return f"{duration(result.figure * 1e-6)} (iqr {result.noise:.0%})"
    noise = result.spread[row.ours]
    if row.at_least is not None:
        return f"{result.figure:.3g} x faster (iqr {noise * result.figure**2:.2g})"
    return f"{result.figure:.3g} (iqr {noise:.2g})"


def cells(result: Result) -> tuple[str, ...]:
    """Give a result as the cells of a line.

    Args:
        result: What a row gave.

    Returns:
        The title, the goal, the figure, the verdict and the field.
    """
    verdict = {True: "met", False: "MISSED", None: ""}[result.met]
    return result.row.title, result.goal, figure(result), verdict, _field(result)


def _field(result: Result) -> str:
    def entry(name: str) -> str:
        cost = f"{result.time[name]:,.0f}" if result.row.counts else duration(result.time[name])
        return f"{name} {result.ratio[name]:.3g} ({cost}{', peer' if name in result.row.peers else ''})"

    return ", ".join(entry(name) for name in result.ratio)


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    written = ["| " + " | ".join(line) + " |" for line in (heads, *lines)]
    return "\n".join([written[0], "|" + "---|" * len(heads), *written[1:]])


def _head(record: Record) -> str:
    results = record.results.values()
    met, goals = sum(result.met is True for result in results), sum(result.met is not None for result in results)
    command = "make bench-quick" if record.quick else "make bench"
    machine = ", ".join(f"{name} {value}" for name, value in record.machine.items())
    when = f"{min(record.measured.values())} to {max(record.measured.values())} UTC" if record.measured else "never"
    missing = record.rows - len(record.results)
    lacking = f" {missing} of {record.rows} rows are not in it." if missing else ""
    run = f"`{command}`, {when}. **{met} of {goals} goals are met.**{lacking}"
    return "\n\n".join(["# Benchmarks", run, f"{machine}.", ABOUT])


def _behind(results: Sequence[Result], most: int | None = None) -> str:
    behind = sorted((result for result in results if result.behind > BEHIND), key=lambda result: -result.behind)
    title = "## Behind its goal by more than 25 %\n\n"
    if not behind:
        return title + "Nothing."
    heads = ("package", "what", "goal", "measured", "behind")
    lines = [(r.row.package, r.row.title, r.goal, figure(r), f"{r.behind - 1:.0%}") for r in behind[:most]]
    shown = f"{len(behind)} rows; the first {most} of them:\n\n" if most is not None and len(behind) > most else ""
    return title + shown + _table(heads, lines)


def _faster(results: Sequence[Result]) -> str:
    title = "## Where a peer is faster\n\n"
    found = [(times, result, peer) for result in results for peer, times in result.faster_peers.items()]
    found = sorted((entry for entry in found if entry[0] >= FASTER), key=lambda entry: -entry[0])
    if not found:
        return title + "Nowhere."
    lines = [
        (
            result.row.package,
            result.row.title,
            peer,
            f"{times:.2f} x",
            f"{duration(result.time[peer])} against {duration(result.time[result.row.ours])}",
        )
        for times, result, peer in found
    ]
    return title + _table(("package", "what", "peer", "faster", "time per call"), lines)


def _charts(results: Sequence[Result], where: str, shown: Sequence[str] | None = None) -> str:
    titles = [title for title in charts_of(results) if shown is None or title in shown]
    pictures = [f"![{title}]({where}{file_name(title)})" for title in titles]
    return "## How cost grows\n\n" + "\n\n".join(pictures) if pictures else ""


def _failed(results: Sequence[Result]) -> str:
    failed = [f"- {result.row.name}: {result.error}" for result in results if result.error]
    return "## Did not run\n\n" + "\n".join(failed) if failed else ""


def _section(package: str, results: Sequence[Result]) -> str:
    lines = [cells(result) for result in results if result.row.package == package and not result.error]
    heads = ("what", "goal", "measured", "", "the field: ratio (time)")
    return f"## {package}\n\n" + _table(heads, lines) if lines else ""
