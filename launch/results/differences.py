"""Tables and pictures of the differences between configurations (launch.results.significance)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from launch.results.figures import INK, figure, plain, style
from launch.results.html import Figure
from launch.results.pictures import write_picture
from launch.results.significance import ALPHA, LEAST, Difference, Key, best, differences
from launch.results.statistics import heading, less_is_better, parsed, percent, scale_of
from launch.results.tables import NONE, Grid

WORDS = {"test_accuracy": ("more accurate", "less accurate")}
BETTER = ("better", "worse")
MOST_DECIMALS = 6
GREY = "#999999"
HOW_TO_READ = (
    "A row is a configuration, a small mark a seed's difference from the reference (◆), and a disc the "
    "mean; the thick line is its 95 % interval, the thin one is wider and holds for all comparisons (by "
    "Bonferroni; verdicts are by Holm, which is a little less strict). Filled: distinguishable from the "
    "reference, blue if better. Black and hollow: not distinguishable. Grey without a disc: the range of "
    f"fewer than {LEAST} seeds, which is no ranking."
)


@dataclass(frozen=True)
class Compared:
    """One score of several configurations, each compared with the reference.

    column: an expression of launch.results.statistics. means: the mean over all seeds of each configuration.
    selected: whether the reference was selected by the data as the best configuration. without: by index, the
    reason why a configuration has no scores.
    """

    column: str
    labels: tuple[str, ...]
    means: tuple[float, ...]
    differences: tuple[Difference, ...]
    reference: int
    selected: bool
    without: Mapping[int, str] = field(default_factory=dict)

    @staticmethod
    def of(
        column: str,
        labels: Sequence[str],
        scores: Sequence[Mapping[Key, float]],
        against: int | None = None,
        without: Mapping[int, str] | None = None,
    ) -> Compared | None:
        """Compare scores by seed; None if there are fewer than two configurations with scores.

        against: the index of the reference; None for the best configuration. without: the reasons why
        configurations have no scores, by index.
        """
        reference = best(scores, least=less_is_better(column)) if against is None else against
        if reference is None or not scores[reference] or sum(map(bool, scores)) < 2:
            return None
        means = tuple(fmean(s.values()) if s else math.nan for s in scores)
        result = differences(scores, reference, all_pairs=against is None)
        return Compared(
            column, tuple(labels), means, tuple(result), reference, against is None, dict(without or {})
        )

    def verdict(self, n: int) -> str:
        """Return the result of configuration n in words."""
        if n == self.reference:
            return "reference"
        if n in self.without:
            return self.without[n]
        column = parsed(self.column)
        words = BETTER if column.level is not None else WORDS.get(column.metric, BETTER)
        more, less = words[::-1] if less_is_better(self.column) else words
        missing = "diverged" if column.level is None else "do not reach it"
        return self.differences[n].verdict(more, less, missing)

    def grid(self, title: str = "") -> Grid:
        """Return the differences as a table, in the order of the configurations."""
        permuted = any(not math.isnan(d.permuted) for d in self.differences)
        head = heading(self.column) + (" %" if percent(self.column) else "")
        reference = self.labels[self.reference]
        lines = []
        for n, (label, d) in enumerate(zip(self.labels, self.differences, strict=True)):
            cells = [_number(self.means[n], self.column), *_cells(d, self.column, permuted)]
            if n == self.reference:
                cells[1:] = [NONE] * (len(cells) - 1)
            lines.append((label, str(d.n), *cells, self.verdict(n)))
        tests = ["p (Holm)", *(["p (permutation)"] if permuted else [])]
        return Grid(
            f"{title or f'Differences from {reference}'}: {heading(self.column)}",
            ("", "n", head, "difference", "95 % interval", *tests, "verdict"),
            tuple(lines),
        )

    def note(self) -> str:
        """Return the sentences below the table, which say what was tested."""
        others = [d for n, d in enumerate(self.differences) if n != self.reference and d.n]
        counts = sorted({d.n for d in others})
        if not counts:
            return "No two configurations have a seed with the same split: nothing is paired."
        family = others[0].family
        count = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        few = (
            f"n = {count}: no ranking, which takes {LEAST} seeds; intervals are the range of the differences."
        )
        if not family:
            return f"Differences are paired by seed. {few}"
        pairs = f"all {family} pairs, because the data select the best" if self.selected else f"{family} rows"
        return (
            f"Differences are paired by seed, n = {count}; intervals are Student's t, 95 %, each by itself"
            + (f", and the range for n < {LEAST}" if counts[0] < LEAST else "")
            + "; p is that of the paired t-test"
            + (f", corrected for {pairs} of this table (Holm)" if family > 1 else "")
            + f"; a verdict needs p < {ALPHA:g}."
        )

    def to_json(self) -> dict[str, Any]:
        """Return column, reference, and one object per configuration, with null for a missing number."""
        rows = [
            {"group": label, "n": d.n, "mean": d.mean, "verdict": self.verdict(n), **asdict(d)}
            for n, (label, d) in enumerate(zip(self.labels, self.differences, strict=True))
        ]
        finite = [{k: None if v != v else v for k, v in row.items()} for row in rows]
        reference = self.labels[self.reference]
        return {"column": self.column, "reference": reference, "best": self.selected, "rows": finite}


def forest(compared: Sequence[Compared]) -> Figure:
    """Draw a row per configuration and a panel per score."""
    title = "differences from the reference"
    return figure(title, lambda drawing: _draw(drawing, compared), None, _size(compared))


def forest_picture(path: Path, compared: Sequence[Compared], title: str = "") -> Path:
    """Write the picture of `forest` to a file in the format of its suffix; return the path."""
    from matplotlib.figure import Figure as Drawing

    drawing = Drawing(figsize=_size(compared), dpi=120, layout="constrained")
    _draw(drawing, compared)
    drawing.suptitle(title, fontsize=11)
    write_picture(drawing, path)
    return path


def _size(compared: Sequence[Compared]) -> tuple[float, float]:
    return 3.4 + 2.7 * len(compared), 1.0 + 0.24 * len(compared[0].labels)


def _draw(drawing: Any, compared: Sequence[Compared]) -> None:
    """Draw differences and their intervals.

    A small mark is a seed. A disc is the mean, filled if the difference is distinguishable. The thick line is
    the 95 % interval of this row alone; the thin line is the interval for all comparisons together. Without a
    ranking, there is only a thin grey line for the range of the seeds.
    """
    panels = drawing.subplots(1, len(compared), sharey=True, squeeze=False)[0]
    for axes, c in zip(panels, compared, strict=True):
        scale, _ = scale_of(c.column)
        axes.axvline(0.0, color=INK, linewidth=0.9)
        for n, d in enumerate(c.differences):
            if n == c.reference:
                axes.plot(0.0, -n, marker="D", markersize=5, color=INK)
            elif not math.isnan(d.mean):
                better = (d.mean > 0) != less_is_better(c.column)
                _draw_row(axes, -n, d, scale, style(0 if better else 1)[0])
        axes.set_yticks([-n for n in range(len(c.labels))], c.labels)
        axes.set_ylim(-len(c.labels) + 0.4, 0.6)
        unit = " (points)" if percent(c.column) else ""
        axes.set_xlabel(f"{heading(c.column)}, difference{unit}")
        plain(axes)


def _draw_row(axes: Any, y: float, d: Difference, scale: float, colour: str) -> None:
    """Draw one difference, in `colour` if it is distinguishable."""
    colour = colour if d.distinguishable else INK
    low, high, wide_low, wide_high = (scale * x for x in (d.low, d.high, d.wide_low, d.wide_high))
    seeds: Any = {"linestyle": "", "marker": "|", "markersize": 5, "color": colour, "alpha": 0.55}
    axes.plot([scale * v for v in d.values], [y - 0.25] * d.n, **seeds)
    if not d.ranked:
        axes.hlines(y, low, high, color=GREY, linewidth=1.2)
        return
    axes.hlines(y, wide_low, wide_high, color=colour, linewidth=0.9)
    axes.hlines(y, low, high, color=colour, linewidth=2.6)
    inner: Any = {"markeredgecolor": colour, "markerfacecolor": colour if d.distinguishable else "white"}
    axes.plot(scale * d.mean, y, marker="o", markersize=6, **inner)


def _cells(d: Difference, column: str, permuted: bool) -> list[str]:
    if not d.values or math.isnan(d.mean):
        return [NONE] * (4 if permuted else 3)
    low, mean, high = (_number(x, column, True, max(map(abs, d.values))) for x in (d.low, d.mean, d.high))
    ends = f"{low} to {high}" if d.ranked else f"range {low} to {high}"
    return [mean, ends, _p(d.holm), *([_p(d.permuted)] if permuted else [])]


def _number(x: float, column: str, sign: bool = False, visible: float = 0.0) -> str:
    """Return a score as text, with enough decimals to show `visible`, but at most MOST_DECIMALS."""
    scale, digits = scale_of(column)
    digits = max(digits, 3) if scale == 1.0 and "nll" in column else digits
    while visible and not round(scale * visible, digits) and digits < MOST_DECIMALS:
        digits += 1
    if math.isnan(x):
        return NONE
    text = f"{scale * x:+,.{digits}f}" if sign else f"{scale * x:,.{digits}f}"
    return text.replace("-", "\N{MINUS SIGN}")


def _p(p: float) -> str:
    return NONE if math.isnan(p) else "< 0.001" if p < 0.001 else f"{p:.3f}"
