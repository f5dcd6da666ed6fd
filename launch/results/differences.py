"""Tables and figures of the differences between configurations (launch.results.significance)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from launch.numbers import NONE, optional, p_value, signed
from launch.results.columns import Column
from launch.results.figures import INK, Figure, plain, style
from launch.results.significance import ALPHA, LEAST, Difference, Key, best, differences
from launch.table import Table

WORDS = {"test_accuracy": ("more accurate", "less accurate")}
BETTER = ("better", "worse")
GREY = "#999999"
HOW_TO_READ = (
    "A row is a configuration, a small mark a seed's difference from the reference (◆), and a disc the "
    "mean; the line is its 95 % interval, which holds for all comparisons of the panel together (by "
    "Bonferroni; verdicts are by Holm, which is a little less strict). Filled: distinguishable from the "
    "reference, blue if better. Black and hollow: not distinguishable. Grey without a disc: the range of "
    f"fewer than {LEAST} seeds, which is no ranking."
)


@dataclass(frozen=True)
class Compared:
    """One score of several configurations, each compared with the reference.

    means: the mean over all seeds of each configuration. selected: whether the reference was selected by the
    data as the best configuration. without: by index, the reason why a configuration has no scores.
    """

    column: Column
    labels: tuple[str, ...]
    means: tuple[float, ...]
    differences: tuple[Difference, ...]
    reference: int
    selected: bool
    without: Mapping[int, str] = field(default_factory=dict)

    @staticmethod
    def of(
        column: Column,
        labels: Sequence[str],
        scores: Sequence[Mapping[Key, float]],
        against: int | None = None,
        without: Mapping[int, str] | None = None,
    ) -> Compared | None:
        """Compare scores by seed; None if there are fewer than two configurations with scores.

        against: the index of the reference; None for the best configuration. without: the reasons why
        configurations have no scores, by index.
        """
        reference = best(scores, least=column.least) if against is None else against
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
        words = BETTER if self.column.level is not None else WORDS.get(self.column.metric, BETTER)
        more, less = words[::-1] if self.column.least else words
        missing = "diverged" if self.column.level is None else "do not reach it"
        return self.differences[n].verdict(more, less, missing)

    def table(self, title: str = "") -> Table:
        """Return the differences as a table, in the order of the configurations."""
        permuted = any(not math.isnan(d.permuted) for d in self.differences)
        tests = ["p (Holm)", *(["p (permutation)"] if permuted else [])]
        rows = []
        for n, (label, d) in enumerate(zip(self.labels, self.differences, strict=True)):
            mean = optional(self.column.scale * self.means[n], f",.{self.column.fine_digits}f")
            cells = [NONE] * (2 + len(tests)) if n == self.reference else self._cells(d, len(tests))
            rows.append((label, str(d.n), mean.replace("-", "\N{MINUS SIGN}"), *cells, self.verdict(n)))
        heading = f"{title or f'Differences from {self.labels[self.reference]}'}: {self.column.heading}"
        heads = ("", "n", self.column.head, "difference", "95 % interval", *tests, "verdict")
        return Table(heads, rows, title=heading)

    def _cells(self, d: Difference, tests: int) -> list[str]:
        """Return the difference, its interval, and the p-values."""
        if math.isnan(d.mean):
            return [NONE] * (2 + tests)
        scale, digits = self.column.scale, self.column.fine_digits
        visible = scale * max(map(abs, d.values))
        low, mean, high = (signed(scale * x, digits, visible) for x in (d.low, d.mean, d.high))
        ends = f"{low} to {high}" if d.ranked else f"range {low} to {high}"
        return [mean, ends, *map(p_value, (d.holm, d.permuted)[:tests])]

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
            f"Differences are paired by seed, n = {count}; intervals are Student's t, 95 %"
            + (", for all comparisons together (Bonferroni)" if family > 1 else "")
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
        return {"column": self.column.text, "reference": reference, "best": self.selected, "rows": finite}


def forest(compared: Sequence[Compared], title: str = "") -> Figure:
    """Return a figure with a row per configuration and a panel per score.

    A small mark is a seed. A disc is the mean, filled if the difference is distinguishable; the line is the
    95 % interval for all comparisons together. Without a ranking, there is only a thin grey line for the
    range of the seeds.
    """

    def draw(drawing: Any) -> None:
        panels = drawing.subplots(1, len(compared), sharey=True, squeeze=False)[0]
        for axes, c in zip(panels, compared, strict=True):
            axes.axvline(0.0, color=INK, linewidth=0.9)
            for n, d in enumerate(c.differences):
                if n == c.reference:
                    axes.plot(0.0, -n, marker="D", markersize=5, color=INK)
                elif not math.isnan(d.mean):
                    better = (d.mean > 0) != c.column.least
                    _draw_row(axes, -n, d, c.column.scale, style(0 if better else 1)[0])
            axes.set_yticks([-n for n in range(len(c.labels))], c.labels)
            axes.set_ylim(-len(c.labels) + 0.4, 0.6)
            unit = " (points)" if c.column.percent else ""
            axes.set_xlabel(f"{c.column.heading}, difference{unit}")
            plain(axes)
        drawing.suptitle(title, fontsize=11)

    size = 3.4 + 2.7 * len(compared), 1.0 + 0.24 * len(compared[0].labels)
    return Figure(title or "differences from the reference", draw, size=size)


def _draw_row(axes: Any, y: float, d: Difference, scale: float, colour: str) -> None:
    """Draw one difference, in `colour` if it is distinguishable."""
    colour = colour if d.distinguishable else INK
    seeds: Any = {"linestyle": "", "marker": "|", "markersize": 5, "color": colour, "alpha": 0.55}
    axes.plot([scale * v for v in d.values], [y - 0.25] * d.n, **seeds)
    line: Any = {"color": colour, "linewidth": 2.0} if d.ranked else {"color": GREY, "linewidth": 1.2}
    axes.hlines(y, scale * d.low, scale * d.high, **line)
    if d.ranked:
        inner: Any = {"markeredgecolor": colour, "markerfacecolor": colour if d.distinguishable else "white"}
        axes.plot(scale * d.mean, y, marker="o", markersize=6, **inner)
