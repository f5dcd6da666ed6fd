"""What event-triggered messages save: paired differences from full participation, and their picture.

    fedsim sweep docs/recipes/events_digits_10.toml --out docs/results
    python docs/recipes/events.py      2 seconds; writes docs/results/events.md and events.png

Nothing is run: the numbers are those of the archives docs/results/events_*. A difference is one of the same
seed, so of the same split and start (launch.results.significance).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import report
from matplotlib.ticker import LogLocator
from report import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION

from launch.results.significance import LEAST, Difference, differences, half_width
from launch.sweep.command import one_row
from launch.sweep.recipe import Recipe

SOURCES = {
    "events_digits_10": ("digits, 10 clients", 7_510 * 10 * 40),
    "events_digits_100": ("digits, 100 clients", 7_510 * 100 * 40),
    "events_fashion_mnist_10": ("FashionMNIST 10 %, 10 clients", 178_110 * 10 * 30),
    "events_fashion_mnist_100": ("FashionMNIST 10 %, 100 clients", 178_110 * 100 * 30),
}
"""The title, and parameters times clients times rounds."""
WINDOW = 3
"""Evaluated rounds whose scores are averaged."""
KINDS = {
    "full": BLACK,
    "0.3": PURPLE,
    "event": BLUE,
    "event and quiet": GREEN,
    "few bits": ORANGE,
    "event, few bits": VERMILION,
}
ABOUT = """\
Measured: bytes, accuracy and NLL of algorithms that send only what has changed, on digits and FashionMNIST
10 %, with ten and with a hundred clients.

**Answer.** With ten clients fedadmm sends 40 % fewer bytes at +0.6 points on digits and 17 % fewer at +0.2 on
FashionMNIST; with a hundred clients of FashionMNIST 17 % fewer cost it 1.0 points. Drawing three of ten
clients saves more (70 %).

This page is made from the archives of four recipes:

```
{commands}
```

full: every client, every round. 0.3: three of ten, drawn anew in every round. event B: every client computes,
and uploads only the larger changes, by a threshold for which an upload costs B of its bytes on average
(`full+event:budget:B`). quiet C: a broadcast goes to a client only if it has moved by C, a norm, or nats a
parameter (`+quiet:C`, `+quiet:kl:C`). few bits: the codecs in the recipe. fedadmm and ivon_admm have
`silent = "last"` under event, as event-based ADMM has it, and `participants` else. B = 20 % and further quiet
rules are in the picture and the archives.
"""
LEFT_OUT = ("event 20%", "quiet 0.6", "kl:0.002", "quiet 0.1", "kl:0.00003")
"""Rows that the table leaves to the archive."""
PICTURE = ("fedavg", "fedadmm", "ivon_admm", "fedlap_cov")


@dataclass(frozen=True)
class Line:
    """One variant of a sweep: its name without the algorithm, and by seed accuracy (%), NLL, and megabytes in
    all, down and up."""

    algorithm: str
    name: str
    scores: Mapping[int, tuple[float, ...]]

    @property
    def kind(self) -> str:
        if "few bits" in self.name:
            return "event, few bits" if "event" in self.name else "few bits"
        return "event and quiet" if "quiet" in self.name else self.name.split()[0]

    @property
    def megabytes(self) -> float:
        return fmean(of[2] for of in self.scores.values())

    def bits(self, count: int) -> str:
        """Bits down and up per parameter, client and round; count: how many of these there are."""
        down, up = (8e6 * fmean(of[i] for of in self.scores.values()) / count for i in (3, 4))
        return f"{down:.2f}, {up:.2f}"

    def less(self, full: Line) -> float:
        """The share of bytes saved, both directions together."""
        return 1 - self.megabytes / full.megabytes


def command(sweep: str) -> str:
    """Return the command that makes the archive of a sweep."""
    data = "" if "digits" in sweep else " --data-dir DIR"
    return f"fedsim sweep docs/recipes/{sweep}.toml{data} --out results"


def read(sweep: str) -> list[Line]:
    """Return the lines of a sweep, in its order."""
    curves: dict[str, dict[int, list[tuple[float, ...]]]] = defaultdict(lambda: defaultdict(list))
    for score in report.archived(sweep):
        numbers = (100 * score.accuracy, score.nll, score.down + score.up, score.down, score.up)
        curves[score.row][score.seed].append(numbers)
    lines = []
    for variant, seeds in curves.items():
        algorithm, _, name = variant.partition(" ")
        last = {
            seed: (*(fmean(r[i] for r in rounds[-WINDOW:]) for i in (0, 1)), *rounds[-1][2:])
            for seed, rounds in seeds.items()
        }
        lines.append(Line(algorithm, name, last))  # type: ignore[arg-type]
    return lines


def from_full(lines: Sequence[Line], which: int) -> dict[tuple[str, str], Difference]:
    """The differences of a score from `full` of the same algorithm, by algorithm and name; Holm within it."""
    result = {}
    for algorithm in dict.fromkeys(line.algorithm for line in lines):
        own = [line for line in lines if line.algorithm == algorithm]
        scores = [{seed: s[which] for seed, s in line.scores.items()} for line in own]
        reference = [line.name for line in own].index("full")
        compared = differences(scores, reference, all_pairs=False)
        result |= {(algorithm, line.name): d for line, d in zip(own, compared, strict=True)}
    return result


def text(d: Difference, digits: int) -> str:
    """The mean difference and its interval; the range of too few seeds."""
    half = half_width(d.values) if d.ranked else math.nan
    low, high = (d.mean - half, d.mean + half) if d.ranked else (d.low, d.high)
    return f"{d.mean:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"


def cells(lines: Sequence[Line], count: int) -> str:
    """The table: bytes saved, and what they cost."""
    full = {line.algorithm: line for line in lines if line.name == "full"}
    accuracies, nlls = from_full(lines, 0), from_full(lines, 1)
    rows = []
    for line in (line for line in lines if not any(word in line.name for word in LEFT_OUT)):
        base, key = full[line.algorithm], (line.algorithm, line.name)
        d = accuracies[key]
        changes = ("–",) * 3 if line is base else (text(d, 1), d.verdict(), text(nlls[key], 3))
        accuracy, nll = (fmean(s[i] for s in line.scores.values()) for i in (0, 1))
        saved = "–" if line is base else f"{100 * line.less(base):.0f} %"
        spent = (f"{line.megabytes:.1f}", line.bits(count), saved)
        rows.append([line.algorithm, line.name, *spent, f"{accuracy:.1f}", *changes, f"{nll:.3f}"])
    cost = ("MB", "bits down, up", "fewer bytes")
    head = ["algorithm", "sends", *cost, "accuracy %", "from full", "verdict", "NLL from full", "NLL"]
    return report.table(head, rows)


def draw(page: report.Page, lines: Sequence[Line]) -> None:
    """Accuracy against megabytes, an axis per algorithm."""
    drawn, axes = report.figure(11.0, 3.4, 1, len(PICTURE))
    for ax, algorithm in zip(axes, PICTURE, strict=True):  # type: ignore[call-overload]
        for kind, colour in KINDS.items():
            of = [line for line in lines if line.algorithm == algorithm and line.kind == kind]
            x = [line.megabytes for line in of]
            values = [[s[0] for s in line.scores.values()] for line in of]
            y = [fmean(v) for v in values]
            spread = [[fmean(v) - min(v) for v in values], [max(v) - fmean(v) for v in values]]
            if of:
                ax.errorbar(x, y, spread, color=colour, marker="o", linestyle="-", label=kind, capsize=2)
        base = next(line for line in lines if line.algorithm == algorithm and line.name == "full")
        level = fmean(s[0] for s in base.scores.values())
        ax.axhline(level, color=BLACK, linewidth=0.7, linestyle=":")
        ax.axvline(0.65 * base.megabytes, color=SKY, linewidth=1.0, linestyle="--", label="35 % fewer bytes")
        ax.set_title(algorithm)
        ax.set_xlabel("MB, down and up")
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.xaxis.set_major_formatter("{x:g}")
        ax.xaxis.set_minor_formatter("")
    axes[0].set_ylabel("test accuracy, %")  # type: ignore[index]
    handles = {label: h for ax in axes for h, label in zip(*ax.get_legend_handles_labels(), strict=True)}  # type: ignore[attr-defined]
    drawn.legend(handles.values(), handles, loc="outside lower center", ncols=7)
    page.picture(drawn, "Accuracy against megabytes: full, partial and event-triggered participation")


def main(argv: Sequence[str] | None = None) -> None:
    options = report.options((__doc__ or "").splitlines()[0], argv)
    page = report.Page("events", "What event-triggered messages save", options)
    page.add(ABOUT.format(commands="\n".join(map(command, SOURCES))))
    page.add(
        "Who sends when is described in [participation.md](../participation.md). Bytes are those of both "
        "directions, headers included, and bits those of a parameter, client and round; scores are means of "
        "the last three evaluated rounds. `from full` is the mean difference from `full` of the same "
        "algorithm, paired by seed, with its 95 % interval (Student's t), or the range of fewer than "
        f"{LEAST} seeds. The verdict is that of the paired t-test, corrected by Holm for the rows of an "
        "algorithm ([what a number is worth](../what-a-number-is-worth.md#is-it-a-difference))."
    )
    for name, (title, count) in SOURCES.items():
        lines = read(name)
        page.add(f"## {title[0].upper()}{title[1:]}, {max(len(line.scores) for line in lines)} seeds")
        recipe = Path(f"docs/recipes/{name}.toml")
        page.add(one_row(recipe, next(Recipe.read(report.ROOT / recipe).trials())))
        page.add(cells(lines, count))
        if name == "events_digits_10":
            draw(page, lines)
    page.write()


if __name__ == "__main__":
    main()
