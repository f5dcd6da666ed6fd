"""What partial participation costs: the page of four sweeps.

    for r in digits_10 digits_100 fashion_mnist_10 fashion_mnist_100; do
        fedsim sweep docs/recipes/participation_$r.toml --runs runs/sweep; done
    python docs/recipes/participation.py --runs runs/sweep      writes docs/results/participation.md

The accuracy is read off the runs; who took part and which bytes were wasted, off their ledgers and schedules;
the invariant of the duals, off their summaries. The script writes a section for each sweep and
leaves the rest of the page as it is. A section whose runs are not all there stays as the page has it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev

import numpy as np
import pandas
from report import BLACK, BLUE, GREEN, ORANGE, PURPLE, ROOT, SKY, VERMILION, figure, table

from fedsim.participation import schedule
from launch.results.figures import write_picture
from launch.runs.folder import RunFolder
from launch.sweep.command import one_row
from launch.sweep.finished import SUFFIX, FinishedRun, read_archive
from launch.sweep.pool import Pool
from launch.sweep.recipe import Recipe, Trial

KEY = "experiment.participation"
RECIPES = ("digits_10", "digits_100", "fashion_mnist_10", "fashion_mnist_100")
COLOURS = (BLACK, SKY, BLUE, ORANGE, VERMILION, GREEN, PURPLE)


@dataclass(frozen=True)
class Waste:
    """A run's traffic in bytes, what of it was spent on clients that were gone or whose upload was lost, and
    how often the least and the most frequent client was folded."""

    total: int
    gone: int
    lost: int
    least: int
    most: int

    @staticmethod
    def of(run: RunFolder) -> Waste:
        """Read it off a run's ledger and schedule."""
        own = run.ledger[run.ledger.kind == "algorithm"]
        e = run.experiment
        who_takes_part = schedule(
            str(e["participation"]), clients=int(e["clients"]), seed=int(e["seed"]), sizes=e["client_sizes"]
        )
        gone, lost = 0, 0
        folded = np.zeros(int(run.experiment["clients"]), dtype=int)
        spent = own.groupby(["round", "client"])["bytes"].sum().to_dict()
        for number in range(1, int(run.experiment["rounds"]) + 1):
            who = who_takes_part(number)
            unfolded = who.dropouts | who.lost_uploads
            folded[[k for k in who.participants if k not in unfolded]] += 1
            gone += sum(spent.get((number, k), 0) for k in who.dropouts)
            lost += sum(spent.get((number, k), 0) for k in who.lost_uploads - who.dropouts)
        return Waste(int(own["bytes"].sum()), gone, lost, int(folded.min()), int(folded.max()))


@dataclass(frozen=True)
class Cell:
    """The runs of one line of a recipe: an algorithm under one schedule, a run a seed."""

    label: str
    schedule: str
    trials: tuple[Trial, ...]
    curves: tuple[pandas.DataFrame, ...]

    def mean(self, name: str) -> str:
        """Mean and deviation of the last line's number, in per cent."""
        values = [100 * curve[name].iloc[-1] for curve in self.curves]
        return f"{fmean(values):.1f}±{pstdev(values):.1f}"


def cells(recipe: Recipe, pool: Pool, archive: Mapping[str, FinishedRun]) -> list[Cell]:
    """Every line of the recipe, from the run folders or, where one is no more, from the archive."""
    trials: dict[str, list[Trial]] = {}
    for trial in recipe.trials():
        trials.setdefault(trial.row.name, []).append(trial)
    return [
        Cell(
            own[0].row.variant.label,
            str(own[0].row.point[KEY]),
            tuple(own),
            tuple(pool.run(trial).curve if pool.done(trial) else archive[trial.id].curve for trial in own),
        )
        for own in trials.values()
    ]


def sections(page: Path) -> dict[str, str]:
    """The parts of an earlier page by their headings: its title, then every section."""
    text = page.read_text(encoding="utf-8") if page.exists() else "# What partial participation costs\n"
    parts = re.split(r"^(?=## |<!-- section: )", text, flags=re.MULTILINE)
    return {part.partition("\n")[0].removeprefix("## "): part for part in parts}


def pivot(lines: Sequence[Cell], value: Mapping[tuple[str, str], str]) -> str:
    """A line an algorithm, a column a schedule."""
    labels, schedules = dict.fromkeys(c.label for c in lines), dict.fromkeys(c.schedule for c in lines)
    rows = [[label, *(value.get((label, s), "–") for s in schedules)] for label in labels]
    return table(["", *schedules], rows)


def picture(lines: Sequence[Cell], title: str, path: Path) -> None:
    """Accuracy over rounds and over megabytes, under 0.3 of the clients; thin and dotted: all of them."""
    fig, axes = figure(9.6, 3.8, 1, 2, sharey=True)
    assert isinstance(axes, np.ndarray)
    shown = [c for c in lines if c.schedule in ("full", "0.3") and not c.label.endswith("silent last")]
    labels = list(dict.fromkeys(c.label for c in shown))
    for cell in shown:
        full = cell.schedule == "full"
        colour = COLOURS[labels.index(cell.label) % len(COLOURS)]
        dashes = "-" if labels.index(cell.label) < len(COLOURS) else "--"
        for axis, x in zip(axes, ("round", "MB"), strict=True):
            along = np.asarray(cell.curves[0][x], dtype=float)
            heights = 100 * np.mean([curve["test_accuracy"] for curve in cell.curves], axis=0)
            drawn = along > 0 if x == "MB" else along >= 0  # a logarithm has no place for round 0
            axis.plot(
                along[drawn],
                heights[drawn],
                color=colour,
                linestyle=":" if full else dashes,
                linewidth=1.0 if full else 1.8,
                label=None if full else cell.label,
            )
    axes[0].set_xlabel("round")
    axes[1].set_xlabel("MB of the algorithm")
    axes[1].set_xscale("log")
    axes[0].set_ylabel("test accuracy (%)")
    axes[0].set_title(title)
    axes[1].legend(fontsize=7.5, loc="lower right")
    write_picture(fig, path)


LEDGERS = "Bytes that were wasted on gone clients and lost uploads"
"""The first line of what an archive does not have."""


def section(name: str, pool: Pool, out: Path, earlier: Mapping[str, str]) -> list[str]:
    """The tables and the picture of one recipe; if runs are missing, what the page had by its title."""
    recipe = Recipe.read(ROOT / "docs" / "recipes" / f"participation_{name}.toml")
    title = recipe.title.removeprefix("Partial participation: ")
    archive = read_archive(out / f"participation_{name}{SUFFIX}")
    if not all(pool.done(trial) or trial.id in archive for trial in recipe.trials()):
        print(f"{title}: runs are missing in {pool.path}; its section stays as it is")
        return [earlier[title]] if title in earlier else []
    lines = cells(recipe, pool, archive)
    picture(lines, title, out / f"participation_{name}.png")
    seeds, rounds = len(recipe.seeds), lines[0].curves[0].index[-1]
    parts = [f"## {title}", ""]
    parts += [f"![Accuracy of {title} over rounds and megabytes](participation_{name}.png)", ""]
    parts += ["Solid and dashed: 0.3 of the clients; dotted, the same colours: all of them.", ""]
    parts += [f"Test accuracy after {rounds} rounds (%), mean and deviation over {seeds} seeds:", ""]
    parts += [one_row(Path(f"docs/recipes/participation_{name}.toml"), next(recipe.trials())), ""]
    parts += [pivot(lines, {(c.label, c.schedule): c.mean("test_accuracy") for c in lines}), ""]
    if all(map(pool.done, recipe.trials())):
        return parts + of_ledgers(lines, pool)
    print(f"{title}: run folders are missing in {pool.path}; what needs their ledgers stays as it is")
    of_an_earlier_page = earlier.get(title, "").partition(LEDGERS)[2]
    return [*parts, LEDGERS + of_an_earlier_page] if of_an_earlier_page else parts


def of_ledgers(lines: Sequence[Cell], pool: Pool) -> list[str]:
    """Waste, participation counts and the duals' invariant, which need the run folders."""
    runs = {(c.label, c.schedule): [RunFolder.open(pool.folder(trial)) for trial in c.trials] for c in lines}
    waste = {at: [Waste.of(run) for run in own] for at, own in runs.items()}
    wasted: dict[str, list[float]] = defaultdict(list)
    for (_, name), own in waste.items():
        if any(w.gone + w.lost for w in own):
            wasted[name].append(100 * sum(w.gone + w.lost for w in own) / sum(w.total for w in own))
    shares = [f"{min(s):.1f} to {max(s):.1f} % under {name}" for name, s in wasted.items()]
    parts = [f"{LEDGERS}, by algorithm: {', '.join(shares) or 'none'}.", ""]
    one = {c.schedule: waste[c.label, c.schedule] for c in lines}
    counts = [f"{s} {min(w.least for w in own)} to {max(w.most for w in own)}" for s, own in one.items()]
    folded = "Rounds in which the least and the most frequent client were folded"
    parts += [f"{folded}: {'; '.join(counts)}.", ""]
    mismatch = [
        (float(run.summary["dual_mismatch"]), *at)
        for at, own in runs.items()
        for run in own
        if run.summary.get("dual_mismatch") is not None
    ]
    if mismatch:
        worst, label, schedule = max(mismatch)
        parts += [
            f"Sum of duals: in {len(mismatch)} runs the server's sum and that of the clients' states differ "
            f"by at most {worst:.0e} of its norm ({label}, {schedule}).",
            "",
        ]
    return parts


def main(argv: Sequence[str] | None = None) -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description="What partial participation costs.")
    parser.add_argument(
        "--runs", type=Path, default=ROOT / "runs" / "sweep", help="folder of the sweeps' runs"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results", help="folder of the results")
    chosen = parser.parse_args(argv)
    chosen.out.mkdir(parents=True, exist_ok=True)
    pool = Pool(chosen.runs)
    page = chosen.out / "participation.md"
    parts = sections(page)
    for name in RECIPES:
        text = "\n".join(section(name, pool, chosen.out, parts)).strip()
        if text:
            parts[text.partition("\n")[0].removeprefix("## ")] = text
    page.write_text("\n\n".join(part.strip() for part in parts.values()) + "\n", encoding="utf-8")
    print(f"{page} written")


if __name__ == "__main__":
    sys.exit(main())
