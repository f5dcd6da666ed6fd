"""Write the table of docs/what-a-number-is-worth.md: the difference that n seeds can tell.

    python docs/recipes/statistics_page.py      2 seconds; rewrites the table between the markers

Nothing is run: the scores are those of the archives in docs/results. For two rows of a sweep, s is the sample
deviation of the differences of equal seeds; the table has the median of s over all pairs of rows, and the
half width of the 95 % interval of a mean of n differences, t(n - 1, 0.975) s / sqrt(n).
"""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import combinations
from pathlib import Path
from statistics import fmean, median, stdev

import report
from scipy.stats import t

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "what-a-number-is-worth.md"
BEGIN, END = "<!-- resolution: docs/recipes/statistics_page.py -->", "<!-- end of resolution -->"
SWEEPS = {
    "events_digits_10": ("digits, 10 clients", "events.md#digits-10-clients-5-seeds"),
    "events_digits_100": ("digits, 100 clients", "events.md#digits-100-clients-5-seeds"),
    "events_fashion_mnist_10": (
        "FashionMNIST 10 %, 10 clients",
        "events.md#fashionmnist-10--10-clients-5-seeds",
    ),
    "events_fashion_mnist_100": (
        "FashionMNIST 10 %, 100 clients",
        "events.md#fashionmnist-10--100-clients-5-seeds",
    ),
    "uci_credit_het": (
        "UCI Credit, 10 heterogeneous clients",
        "uci_credit.md#uci-credit-10-clients-heterogeneous",
    ),
}
COUNTS = (3, 5, 10)
WINDOW = 3
"""Evaluated rounds at the end whose mean is the score."""
BROKEN = 0.1
"""Rows whose accuracy is further below the best are left out: a run that breaks has other variances."""

Scores = dict[int, float]


def scores(sweep: str, column: str, scale: float) -> list[Scores]:
    """Return the scores of every row of a sweep, by seed, without broken rows. column: accuracy or nll."""
    curves: dict[str, dict[int, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for score in report.archived(sweep):
        curves[score.row][score.seed].append((score.accuracy, getattr(score, column)))
    accuracy = {n: fmean(fmean(a for a, _ in c[-WINDOW:]) for c in by.values()) for n, by in curves.items()}
    kept = [by for n, by in curves.items() if accuracy[n] > max(accuracy.values()) - BROKEN]
    return [{seed: scale * fmean(v for _, v in c[-WINDOW:]) for seed, c in by.items()} for by in kept]


def deviations(rows: list[Scores]) -> tuple[float, float]:
    """Median over pairs of rows of the deviation of a difference: paired by seed, and as if it were not."""
    paired, alone = [], []
    for a, b in combinations(rows, 2):
        common = sorted(a.keys() & b.keys())
        paired.append(stdev(a[s] - b[s] for s in common))
        alone.append(math.hypot(*(stdev(x[s] for s in common) for x in (a, b))))
    return median(paired), median(alone)


def half_width(s: float, n: int) -> float:
    return float(t.ppf(0.975, n - 1)) * s / math.sqrt(n)


def table() -> str:
    """The Markdown table."""
    heads = ["sweep", "seeds", "s, not paired", "s, paired", *(f"n = {n}" for n in COUNTS), "NLL, n = 5"]
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)]]
    for name, (title, place) in SWEEPS.items():
        rows = scores(name, "accuracy", 100.0)
        paired, alone = deviations(rows)
        nll, _ = deviations(scores(name, "nll", 1.0))
        cells = [f"{alone:.2f}", f"{paired:.2f}", *(f"{half_width(paired, n):.1f}" for n in COUNTS)]
        lines.append([f"[{title}](results/{place})", str(len(rows[0])), *cells, f"{half_width(nll, 5):.3f}"])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def files() -> dict[str, str]:
    """The page with a new table, by its name."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return {PAGE.name: f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"}


if __name__ == "__main__":
    for name, text in files().items():
        (ROOT / "docs" / name).write_text(text, encoding="utf-8")
