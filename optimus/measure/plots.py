"""Horizontal bars as inline SVG: all that the page of a comparison needs of a plotting library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

# Pixels; a letter of the page's 13 is on average not as wide in any font that browsers bring.
BAR, GAP, LETTER, WIDTH = 20, 9, 7.8, 460
DECADES = 8  # an error below 1e-8 is that of the sum's own order


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar from ``begin`` to ``end``, in the plot's unit, with ``label`` behind it.

    ``kind`` is the CSS class, ``reach`` the far end of a whisker.
    """

    name: str
    end: float
    label: str
    begin: float = 0.0
    kind: str = "mine"
    reach: float = 0.0


def on_decades(error: float) -> float:
    """Where an error stands between 1e-8 and 1, by its logarithm: 0 to 1.

    >>> [on_decades(error) for error in (0.0, 1e-8, 1e-4, 1.0)]
    [0.0, 0.0, 0.5, 1.0]
    """
    if not error > 0:  # NaN, too, has no place
        return 0.0
    return min(max(1 + math.log10(error) / DECADES, 0.0), 1.0)


def _drawn(bar: Bar, *, y: float, left: float, scale: float) -> str:
    low, high = sorted((bar.begin, bar.end))
    begin, width = left + low * scale, (high - low) * scale
    far = left + max(high, bar.reach) * scale
    middle = y + BAR / 2
    whisker = (
        f'<path class="whisker" d="M{begin + width:.1f} {middle}H{far:.1f}m0 -4v8"/>'
        if bar.reach > high
        else ""
    )
    name, label = escape(bar.name), escape(bar.label)
    return (
        f'<text class="name" x="{left - 8:.1f}" y="{y + 15}">{name}</text>'
        f'<rect class="{bar.kind}" x="{begin:.1f}" y="{y}" width="{width:.1f}" height="{BAR}">'
        f"<title>{name}: {label}</title></rect>{whisker}"
        f'<text x="{far + 7:.1f}" y="{y + 15}">{label}</text>'
    )


def plot(title: str, bars: Sequence[Bar], *, note: str, full: float = 0.0, wide: int = 1) -> str:
    """A figure of one bar a line; the axis goes to ``full`` where that is more than the bars do.

    ``note`` says what is drawn, below. ``wide`` is how many columns of the page it takes.
    """
    left = LETTER * max(len(bar.name) for bar in bars) + 12
    room = LETTER * max(len(bar.label) for bar in bars) + 12
    most = max(full, *(max(bar.begin, bar.end, bar.reach) for bar in bars)) or 1.0
    width = WIDTH * wide
    scale = (width - left - room) / most
    drawn = "".join(
        _drawn(bar, y=GAP + n * (BAR + GAP), left=left, scale=scale) for n, bar in enumerate(bars)
    )
    height = GAP + len(bars) * (BAR + GAP)
    return (
        f'<figure class="columns-{wide}"><figcaption>{escape(title)}</figcaption>'
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">'
        f'<path class="axis" d="M{left:.1f} 0V{height}"/>{drawn}</svg>'
        f"<p>{escape(note)}</p></figure>"
    )
