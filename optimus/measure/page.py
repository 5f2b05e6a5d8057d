"""A comparison as one HTML file that needs nothing else: no script, no font, no request."""

from __future__ import annotations

from html import escape

from optimus.measure import report
from optimus.measure.figures import Comparison, Row

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem;
  color: #1a1c1e; background: #fff }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { padding: .35rem .6rem; text-align: right; border-bottom: 1px solid #ddd }
th:first-child, td:first-child { text-align: left }
text { font: 13px system-ui, sans-serif; fill: currentColor }
rect { fill: #2a6fb0 }
@media (prefers-color-scheme: dark) {
  body { color: #e6e6e6; background: #17191b } th, td { border-color: #3a3d40 }
  rect { fill: #62a5e0 }
}
"""

BAR, GAP, NAMES, WIDTH = 22, 10, 150, 720  # pixels


def _bar(comparison: Comparison, row: Row, *, place: int, full: float) -> str:
    ratio = comparison.ratio(row)
    y = place * (BAR + GAP)
    width = ratio / full * (WIDTH - NAMES - 60)
    return (
        f'<text x="0" y="{y + 16}">{escape(row.name)}</text>'
        f'<rect x="{NAMES}" y="{y}" width="{width:.1f}" height="{BAR}" rx="3"/>'
        f'<text x="{NAMES + width + 8:.1f}" y="{y + 16}">{ratio:.2f}x</text>'
    )


def _bars(comparison: Comparison) -> str:
    """One bar a side, its length the speed against stock."""
    ran = [row for row in comparison.rows if row.ran]
    full = max(comparison.ratio(row) for row in ran)
    bars = (_bar(comparison, row, place=n, full=full) for n, row in enumerate(ran))
    height = len(ran) * (BAR + GAP)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="speed against stock">'
        f"{''.join(bars)}</svg>"
    )


def _line(cells: tuple[str, ...], *, tag: str) -> str:
    padded = cells + ("",) * (len(report.HEADINGS) - len(cells))
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in padded) + "</tr>"


def _table(comparison: Comparison) -> str:
    rows = "".join(_line(report.cells(comparison, r), tag="td") for r in comparison.rows)
    return f"<table>{_line(report.headings(comparison), tag='th')}{rows}</table>"


def html(comparison: Comparison) -> str:
    """The whole page."""
    title = escape(report.title(comparison))
    notes = "".join(f"<p>{escape(note)}</p>" for note in report.notes(comparison))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{STYLE}</style></head><body>"
        f"<h1>{escape(report.verdict(comparison))}</h1><p>{title}</p>"
        f"{_bars(comparison)}{_table(comparison)}{notes}"
        f"<p>{escape(report.conditions(comparison))}</p></body></html>\n"
    )
