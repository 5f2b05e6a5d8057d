"""A comparison as one HTML file that needs nothing else: no script, no font, no request."""

from __future__ import annotations

from html import escape

from optimus.measure import report
from optimus.measure.figures import Comparison, Row
from optimus.measure.plots import Bar, on_decades, plot
from optimus.measure.side import STOCK
from optimus.measure.waterfall import Fall, Waterfall

STYLE = """
:root { color-scheme: light dark; --ink: #1a1c1e; --faint: #5b6167; --paper: #fff; --line: #d5d8db;
  --mine: #2a6fb0; --stock: #8b9299; --slower: #b5561c }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --faint: #a3a9af; --paper: #17191b;
  --line: #3a3d40; --mine: #62a5e0; --stock: #7d848a; --slower: #e08a4f } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem;
  color: var(--ink); background: var(--paper) }
h1 { font-size: 1.5rem; line-height: 1.3 } h2 { font-size: 1.15rem; margin-top: 2.5rem }
.plots { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 1.5rem 2.5rem }
figure { margin: 0 } figure.columns-2 { grid-column: 1 / -1 } figcaption { font-weight: 600 }
figure p, .conditions { color: var(--faint); font-size: .85rem; margin: .2rem 0 }
svg { width: 100%; height: auto; display: block }
@media (max-width: 44rem) { .plots { grid-template-columns: minmax(0, 1fr) } }
.scroll, .columns-2 { overflow-x: auto } .columns-2 svg { min-width: 44rem }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { padding: .35rem .6rem; text-align: right; border-bottom: 1px solid var(--line) }
th:first-child, td:first-child { text-align: left }
text { font: 13px system-ui, sans-serif; fill: var(--ink) } text.name { text-anchor: end }
.mine { fill: var(--mine) } .stock { fill: var(--stock) } .slower { fill: var(--slower) }
.unverified { fill: none; stroke: var(--slower); stroke-dasharray: 4 3 }
.axis { stroke: var(--line) } .whisker { stroke: var(--faint); fill: none }
"""


def _kind(row: Row) -> str:
    if row.unverified:
        return "unverified"
    return "stock" if row.name == STOCK else "mine"


def _latency(comparison: Comparison, row: Row) -> Bar:
    label = f"{row.least * 1e3:,.4g} ms, {comparison.ratio(row):.2f}x"
    end, reach = row.least, max(row.seconds)
    return Bar(name=row.name, end=end, label=label, kind=_kind(row), reach=reach)


def _throughput(comparison: Comparison, row: Row) -> Bar:
    speed = comparison.tokens_per_second(row)
    return Bar(name=row.name, end=speed, label=f"{speed:,.0f}", kind=_kind(row))


def _memory(row: Row) -> Bar:
    label = f"{row.peak_bytes / 1e6:,.0f} MB"
    return Bar(name=row.name, end=row.peak_bytes, label=label, kind=_kind(row))


def _error(row: Row) -> Bar:
    assert row.error is not None
    label = "stock itself" if row.name == STOCK else f"{row.error:.1e}"
    return Bar(name=row.name, end=on_decades(row.error), label=label, kind=_kind(row))


def _plots(comparison: Comparison) -> str:
    """Latency, throughput, memory and error, one bar a side that ran."""
    ran = [row for row in comparison.rows if row.ran]
    latency = "A pass over all the texts: the fastest run, and by the whisker the slowest."
    error = "‖out − stock‖ / ‖stock‖ over real tokens, on a logarithmic scale of 8 decades below 1."
    drawn = (
        plot("Latency, less is better", [_latency(comparison, r) for r in ran], note=latency),
        plot(
            "Throughput, more is better",
            [_throughput(comparison, r) for r in ran],
            note="Real tokens a second in the fastest run; padding is no work done.",
        ),
        plot(
            "Memory, less is better",
            [_memory(r) for r in ran],
            note="Peak resident size of the side's process, Python and torch included.",
        ),
        plot("Error, less is better", [_error(r) for r in ran], note=error, full=1.0),
    )
    return f'<section class="plots">{"".join(drawn)}</section>'


def _fall(fall: Fall) -> Bar:
    kind = "mine" if fall.gain >= 0 else "slower"
    label = f"{-fall.gain * 1e3:+,.4g} ms"
    return Bar(name=fall.swap, begin=fall.before, end=fall.after, label=label, kind=kind)


def _whole(name: str, seconds: float, kind: str) -> Bar:
    return Bar(name=name, end=seconds, label=f"{seconds * 1e3:,.4g} ms", kind=kind)


def _waterfall(found: Waterfall) -> str:
    """From stock down to the recipe, one bar a swap."""
    falls = found.falls
    if not falls:
        return ""
    bars = [_whole(STOCK, falls[0].before, "stock"), *map(_fall, falls)]
    bars.append(_whole(found.recipe, falls[-1].after, "mine"))
    runs = len(found.comparison.stock.seconds)
    note = (
        f"Swaps are added one kind after another, in the plan's order; fastest of {runs} runs, "
        "alternated among these sides. Another order would share the same gain differently."
    )
    drawn = plot(f"Latency of {found.recipe}, swap by swap", bars, note=note, wide=2)
    return f'<h2>Where the gain comes from</h2><section class="plots">{drawn}</section>'


def _line(cells: tuple[str, ...], *, tag: str) -> str:
    padded = cells + ("",) * (len(report.HEADINGS) - len(cells))
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in padded) + "</tr>"


def _table(comparison: Comparison) -> str:
    rows = "".join(_line(report.cells(comparison, r), tag="td") for r in comparison.rows)
    head = _line(report.headings(comparison), tag="th")
    return f'<h2>Figures</h2><div class="scroll"><table>{head}{rows}</table></div>'


def html(comparison: Comparison, waterfall: Waterfall | None = None) -> str:
    """The whole page, which is well-formed XML, too."""
    title = escape(report.title(comparison))
    notes = "".join(f"<p>{escape(note)}</p>" for note in report.notes(comparison))
    fallen = _waterfall(waterfall) if waterfall else ""
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width"/>'
        f"<title>{title}</title><style>{STYLE}</style></head><body>"
        f"<h1>{escape(report.verdict(comparison))}</h1><p>{title}</p>"
        f"{_plots(comparison)}{fallen}{_table(comparison)}{notes}"
        f'<p class="conditions">{escape(report.conditions(comparison))}</p></body></html>\n'
    )
