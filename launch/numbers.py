"""Numbers as text. Every command, table and figure formats its numbers with these functions.

This module imports nothing heavy, because a run prints "starting" before it imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from statistics import fmean, pstdev

NONE = "–"
"""The text of a number that is not known."""
FIRM = "\N{NO-BREAK SPACE}"
MOST_DECIMALS = 6


def counted(n: int, noun: str) -> str:
    """Return a number and its noun: 1 worker, 1,000 workers."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def percentage(share: float) -> str:
    """Format a share, such as an accuracy, for display: 91.8 % for 0.91834. Data files have 0.91834."""
    return f"{100 * share:.1f} %"


def target(accuracy: float) -> str:
    """Format a target accuracy: 78 % for 0.78, 78.25 % for 0.7825."""
    return f"{float(100 * Decimal(str(accuracy))):.6g} %"


def below_target(accuracy: float) -> str:
    """Format an accuracy, rounded down, so that less than 78 % is never shown as 78.0 %."""
    return percentage(math.floor(1000 * accuracy + 1e-9) / 1000)


def size(n: float) -> str:
    """Format a number of bytes: 640 B, 21.4 kB, 1.21 MB, 2.50 GB."""
    for unit, one, digits in (("GB", 1e9, 2), ("MB", 1e6, 2), ("kB", 1e3, 1)):
        if n >= one / 10 and n >= 1000:
            return f"{n / one:,.{digits}f} {unit}"
    return f"{n:.0f} B"


def megabytes(counts: Sequence[float], least: int = 1, deviation: bool = True) -> str:
    """Return mean ± population standard deviation in MB, to three figures and at least `least` decimals."""
    mean, sd = fmean(counts) / 1e6, pstdev(counts) / 1e6
    digits = max(least, 2 - math.floor(math.log10(mean))) if mean else least
    exact = not deviation or len(counts) < 2 or sd < 0.5 * 10**-digits
    return f"{mean:,.{digits}f}" + ("" if exact else f"±{sd:.{digits}f}")


def duration(seconds: float) -> str:
    """Format seconds as minutes and seconds, or hours, minutes and seconds: 0:12, 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def span(seconds: float) -> str:
    """Format an estimate: 40 s, 12 min, 1.5 h."""
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"


def number(value: float) -> str:
    """Format a point of a figure: a whole number in full, another one with four digits; '' for NaN."""
    if math.isnan(value):
        return ""
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e15 else f"{value:.4g}"


def optional(value: float | None, form: str, missing: str = NONE) -> str:
    """Format a number that may be missing, which is None or NaN."""
    return missing if value is None or value != value else format(value, form)


def setting(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def signed(value: float, digits: int, visible: float = 0.0) -> str:
    """Format a difference, with enough decimals to show `visible`, but at most MOST_DECIMALS."""
    while visible and not round(visible, digits) and digits < MOST_DECIMALS:
        digits += 1
    return optional(value, f"+,.{digits}f").replace("-", "\N{MINUS SIGN}")


def p_value(p: float) -> str:
    return "< 0.001" if p < 0.001 else optional(p, ".3f")


def between(low: str, high: str) -> str:
    """Return a range as text; only one end if both ends are equal."""
    return low if low == high else f"{low} to {high}"


def extent(values: Sequence[float], form: str = ",.0f") -> str:
    """Return the smallest and the largest value as text, such as 3 to 5; NONE without values."""
    return between(format(min(values), form), format(max(values), form)) if values else NONE


def ranges(numbers: Sequence[int]) -> str:
    """Return whole numbers as text, such as 62–64, 70 for 62, 63, 64, 70."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(f"{r[0]}–{r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in runs)
