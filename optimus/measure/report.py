"""How a comparison is shown: a table, a sentence, JSON."""

from __future__ import annotations

import math
from pathlib import Path

from rich.table import Table

from optimus.measure.answers import AGREEMENT, PERPLEXITY
from optimus.measure.figures import Comparison, Row
from optimus.measure.side import STOCK

# Eight, because that is what a terminal of 80 columns holds; JSON has everything.
HEADINGS = ("side", "min ms", "spread", "x stock", "tokens/s", "error", "{judge}", "peak MB")

# Less than this in both the fastest and the median run is no difference on a shared machine.
CLEAR = 1.05


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.{0 if seconds >= 0.1 else 1}f}"


def headings(comparison: Comparison) -> tuple[str, ...]:
    """The table's headings; one is the name of what the answers are judged by."""
    return tuple(heading.format(judge=comparison.work.judge) for heading in HEADINGS)


def _quality(comparison: Comparison, row: Row) -> str:
    if comparison.work.judge == PERPLEXITY:
        return f"{row.quality:,.2f}"
    if comparison.work.judge == AGREEMENT:
        return f"{row.quality:.2%}"
    return f"{row.quality:.5f}"


def cells(comparison: Comparison, row: Row) -> tuple[str, ...]:
    """One row of the table, under its ``headings``."""
    if not row.ran:
        return (row.name, "unverified" if row.unverified else "refused")
    assert row.error is not None
    return (
        row.name,
        _milliseconds(row.least),
        f"{row.spread:.0%}",
        f"{comparison.ratio(row):.2f}",
        f"{comparison.tokens_per_second(row):,.0f}",
        "-" if row.name == STOCK else f"{row.error:.1e}",
        _quality(comparison, row),
        f"{row.peak_bytes / 1e6:,.0f}",
    )


def table(comparison: Comparison) -> Table:
    """The comparison as a rich table."""
    shown = Table(*headings(comparison), title=title(comparison))
    for column in shown.columns:
        column.overflow = "fold"  # a heading that is cut short is none
    for column in shown.columns[1:]:
        column.justify = "right"
    for row in comparison.rows:
        shown.add_row(*cells(comparison, row))
    return shown


def title(comparison: Comparison) -> str:
    """What was done in every run."""
    work = comparison.work
    name = "/".join(Path(work.model).parts[-2:])  # as much of a folder as a hub id has
    scored = comparison.stock.scored
    return (
        f"{name}: {work.texts} texts, {work.batch} a batch, {work.length} tokens at most, "
        f"{work.real_share:.0%} real" + (f", {scored:,} tokens scored" if scored else "")
    )


def conditions(comparison: Comparison) -> str:
    """What it was measured on."""
    stock = comparison.stock
    versions = comparison.machine["versions"]
    assert isinstance(versions, dict)
    return (
        f"{comparison.machine['processor']}, {stock.threads} threads, {stock.allocator}, "
        f"torch {versions['torch']}, transformers {versions['transformers']}; "
        f"fastest of {len(stock.seconds)} alternated runs"
    )


def notes(comparison: Comparison) -> list[str]:
    """Why sides have no figures, or figures that must not be used."""
    refused = [f"{row.name} refused: {row.refused}" for row in comparison.rows if row.refused]
    return refused + [
        f"{row.name} not verified: {row.unverified}" for row in comparison.rows if row.unverified
    ]


def verdict(comparison: Comparison) -> str:
    """One sentence: what to use."""
    best = comparison.best
    if best is None:
        return "Nothing ran beside stock."
    ratio, middle = comparison.ratio(best), comparison.stock.median / best.median
    if min(ratio, middle) < CLEAR:
        return (
            f"Nothing is clearly faster than stock here (best: {best.name}, {ratio:.2f}x by the "
            f"fastest run, {middle:.2f}x by the median): keep stock."
        )
    return f"{best.name} is {ratio:.2f}x as fast as stock, at a relative error of {best.error:.1e}."


def _judged(comparison: Comparison, row: Row) -> dict[str, object]:
    """JSON has no word for a quality that is not a number."""
    quality = row.quality if math.isfinite(row.quality) else None
    if comparison.work.judge != PERPLEXITY:
        return {comparison.work.judge: quality}
    change = row.quality / comparison.stock.quality - 1
    return {
        PERPLEXITY: quality,
        "perplexity_change": change if math.isfinite(change) else None,
        "scored_tokens": row.scored,
    }


def _row_data(comparison: Comparison, row: Row) -> dict[str, object]:
    if not row.ran:
        return {"side": row.name, "refused": row.refused, "unverified": row.unverified}
    return {
        "side": row.name,
        "seconds": list(row.seconds),
        "min_seconds": row.least,
        "median_seconds": row.median,
        "spread": row.spread,
        "times_stock": comparison.ratio(row),
        "tokens_per_second": comparison.tokens_per_second(row),
        "texts_per_second": comparison.sequences_per_second(row),
        "relative_error": row.error,
        **_judged(comparison, row),
        "loaded_bytes": row.loaded_bytes,
        "peak_bytes": row.peak_bytes,
        "threads": row.threads,
        "allocator": row.allocator,
        "facts": row.facts,
        "unverified": row.unverified,
    }


def data(comparison: Comparison) -> dict[str, object]:
    """The comparison as JSON-able data, every run's time included."""
    work = comparison.work
    return {
        "model": work.model,
        "texts": work.texts,
        "batch": work.batch,
        "length": work.length,
        "tokens": work.tokens,
        "real_share": work.real_share,
        "machine": comparison.machine,
        "sides": [_row_data(comparison, row) for row in comparison.rows],
        "verdict": verdict(comparison),
    }
