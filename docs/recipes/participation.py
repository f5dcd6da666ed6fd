"""What partial participation costs: the page of four sweeps.

    for r in digits_10 digits_100 fashion_mnist_10 fashion_mnist_100; do
        fedsim sweep docs/recipes/participation_$r.toml --runs runs/sweep; done
    python docs/recipes/participation.py --runs runs/sweep      writes docs/results/participation.md

Accuracy and traffic are read off the runs; who took part and which bytes were wasted, off their ledgers and
schedules; the invariant of the duals, off their summaries. A section whose runs are not all there stays as
the page has it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev

import numpy as np
from report import BLACK, BLUE, GREEN, ORANGE, PURPLE, ROOT, SKY, VERMILION, figure, table

from fedsim.participation import schedule
from launch.results.pictures import write_picture
from launch.runs.folder import RunFolder
from launch.runs.tables import Curve
from launch.sweep.finished import SUFFIX, FinishedRun, read_archive
from launch.sweep.pool import Pool
from launch.sweep.recipe import Recipe, Trial

KEY = "experiment.participation"
RECIPES = ("digits_10", "digits_100", "fashion_mnist_10", "fashion_mnist_100")
COLOURS = (BLACK, SKY, BLUE, ORANGE, VERMILION, GREEN, PURPLE)


ANSWERS = """\
# What partial participation costs

Eleven configurations of seven algorithms under eight schedules; accuracy, traffic, waste, and the invariant
of the duals, on digits and on FashionMNIST 10 %, with ten and with a hundred clients, each with five seeds.
With five seeds instead of three, three statements on digits changed:
ivon_admm with ten of a hundred clients loses 19 points (it was 11), `+lost` costs fedavg nothing measurable
(it was 3 points), and with 1/|S| fedlap_cov is as good with thirty of a hundred clients as with ten.
What was read off FashionMNIST is on its own pages ([ten](participation_fashion_mnist_10.md),
[a hundred](participation_fashion_mnist_100.md)) and in the last section of the answers. Tables without words
are in [participation_digits_10.md](participation_digits_10.md) and
[participation_digits_100.md](participation_digits_100.md).

## Who suffers

- **fedlap and fedlap_cov with rho = 1/K suffer most**: with 3 of 10 clients a round they have 54 and 82 %
  where all clients give 93 %, with one of ten 19 and 45 %; of a hundred clients, 26 and 28 % under 0.3. The
  dual step of a participant is damped as if all K took part, so what a round moves is |S|/K of what it
  should be. **rho = 1/|S| mends it**: 87 and 90 % (ten clients), 63 and 69 % (a hundred).
- The finding of the independent reading (3 of 10 clients, 20 rounds: fedlap .59/.50/.59, fedavg
  .81/.87/.92, ivon_admm .96/.95/.96) is **confirmed**, and its cause is the default of rho: here fedlap has
  53.8 ± 9.5 % with 1/K and 86.6 ± 4.5 % with 1/|S|, fedavg 86.3 ± 3.9 % and ivon_admm 94.0 ± 1.3 %.
- **fedpa, fola and fedlap with 1/|S| lose least with a hundred clients, ten a round** (5, 6 and 6 points;
  ivon_admm 19). With 30 a round fedpa, ivon_admm and fola lose about one point.
- With a hundred clients 1/|S| = 1/30 is still slow: one of ten clients a round (1/10) gives fedlap 68 and
  fedlap_cov 70 %, no less than three of ten do in the same rounds (63 and 69 %), at a third of the bytes.
- Markov chains (a client is away for ten rounds on average) cost no accuracy on the mean where the step is
  right (ten clients: 88, 90, 95 and 94 % for fedlap and fedlap_cov with 1/|S|, ivon_admm and fedadmm, as
  under 0.3); with 1/K they cost 6 and 8 points. The worst client pays for those who were away: 2 to 7
  points of fedlap_cov (1/|S|), ivon_admm and fedadmm.
- The worst client loses about twice as much as the mean: fedavg under 0.3 loses 8 points on average
  and 15 on its worst client (ten clients).

## What to set

- `rho = "1/|S|"` for fedlap, fedlap_cov and their relatives, whenever not all clients take part. With all
  clients it is 1/K.
- `silent = "participants"` (the default) for fedadmm, ivon_admm and the other members with an averaging
  server. `last`, which counts a silent client's last upload, is what the augmented Lagrangian says and is
  worse in every column where somebody is silent: fedadmm 59 against 86 % (0.1, ten clients), and ivon_admm
  learns little if few take part (21 ± 22 %), because K stale posteriors outvote the participants.
- rho = 20/K and gamma = 2/K for ivon_admm, its defaults. With the fixed values 2 and 0.2, which are the
  same at K = 10, a hundred clients learned nothing (7 to 11 % on clients alike, 90 with a tenth of both;
  [decision 022](../decisions/022-ivon-admm-defaults.md)).
- `size:N` (participants in proportion to their rows) is better than uniform thirds in 10 of 11 rows with ten
  clients, for no additional byte.

## What a lost upload costs

- `+gone` saves the upload's bytes and `+lost` pays for them; for learning they are the same within a
  deviation or two. Under 0.3 with three of ten lost, fedavg stays at 86 % (with `+gone` 81 ± 6), fedlap_cov
  (1/|S|) goes from 90 to 87 %, fedpa from 92 to 88 %; 31 % of the bytes are spent for nothing (20 % with
  `+gone`).
- The sum of the duals survives everything: commit-on-fold moves a client's dual only when its upload was
  folded.

## What of this holds on FashionMNIST

- rho = 1/|S| for fedlap: yes, with ten clients (69 against 61 % under 0.3, 55 against 32 with one of ten)
  and with a hundred (71, 40; 69, 24). For fedlap_cov: with a hundred clients (74, 66; 72, 49), not with ten,
  where 1/K is level or better.
- silent = "participants" for ivon_admm: yes, everywhere. For fedadmm: with a hundred clients (by 3 to 12
  points); with ten, `last` is better by 2 to 6.
- Of the recommended settings fedpa loses most there, 19 points with ten clients and 8 with a hundred under
  0.3; ivon_admm least, 2.4 and 0.3.
- size:N is as good as uniform thirds or better in nine of eleven rows with ten clients, and in all with a
  hundred.
- With ten clients, three lost uploads of ten cost more there than on digits for fedavg (5 points, 0), fedadmm
  (5, 2), ivon_admm (3, 2) and fola (4, 2), and less, with 1/|S|, for fedlap (3, 6) and fedlap_cov (2, 3).
"""
"""What follows from the tables, as it was read off them."""


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
    curves: tuple[Curve, ...]

    def mean(self, name: str) -> str:
        """Mean and deviation of the last line's number, in per cent."""
        values = [100 * curve.metric(name)[-1] for curve in self.curves]
        return f"{fmean(values):.1f}±{pstdev(values):.1f}"

    def megabytes(self) -> str:
        """Of the algorithm's traffic, mean over the runs."""
        mean = fmean(curve.metric("MB")[-1] for curve in self.curves)
        return f"{mean:,.0f}" if mean >= 100 else f"{mean:.3g}"


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
    """The sections of an earlier page, by their titles; none, if there is no page."""
    if not page.exists():
        return {}
    _, *parts = page.read_text(encoding="utf-8").split("\n## ")
    return {part.partition("\n")[0]: f"## {part}" for part in parts}


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
            along = np.asarray(cell.curves[0].metric(x), dtype=float)
            heights = 100 * np.mean([curve.metric("test_accuracy") for curve in cell.curves], axis=0)
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


LEDGERS = "Share of the bytes that was wasted on gone clients and lost uploads (%"
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
    seeds, rounds = len(recipe.seeds), lines[0].curves[0].rounds()[-1]
    parts = [f"## {title}", ""]
    parts += [f"![Accuracy of {title} over rounds and megabytes](participation_{name}.png)", ""]
    parts += ["Solid and dashed: 0.3 of the clients; dotted, the same colours: all of them.", ""]
    parts += [f"Test accuracy after {rounds} rounds (%), mean and deviation over {seeds} seeds:", ""]
    parts += [pivot(lines, {(c.label, c.schedule): c.mean("test_accuracy") for c in lines}), ""]
    parts += ["Accuracy of the worst client (%):", ""]
    parts += [pivot(lines, {(c.label, c.schedule): c.mean("client_accuracy_worst") for c in lines}), ""]
    parts += ["Megabytes of the algorithm:", ""]
    parts += [pivot(lines, {(c.label, c.schedule): c.megabytes() for c in lines}), ""]
    if all(map(pool.done, recipe.trials())):
        return parts + of_ledgers(lines, pool)
    print(f"{title}: run folders are missing in {pool.path}; what needs their ledgers stays as it is")
    of_an_earlier_page = earlier.get(title, "").partition(LEDGERS)[2]
    return [*parts, LEDGERS + of_an_earlier_page] if of_an_earlier_page else parts


def of_ledgers(lines: Sequence[Cell], pool: Pool) -> list[str]:
    """Waste, participation counts and the duals' invariant, which need the run folders."""
    runs = {(c.label, c.schedule): [RunFolder.open(pool.folder(trial)) for trial in c.trials] for c in lines}
    waste = {at: [Waste.of(run) for run in own] for at, own in runs.items()}
    parts = [f"{LEDGERS}), over {len(lines[0].trials)} seeds:", ""]
    wasted = {
        at: f"{100 * sum(w.gone + w.lost for w in own) / sum(w.total for w in own):.1f}"
        for at, own in waste.items()
        if any(w.gone + w.lost for w in own)
    }
    some = [c for c in lines if (c.label, c.schedule) in wasted]
    parts += [pivot(some, wasted), ""] if some else ["none", ""]
    one = {c.schedule: waste[c.label, c.schedule] for c in lines}
    parts += ["Rounds in which the least and the most frequent client were folded:", ""]
    counts = {s: f"{min(w.least for w in own)} to {max(w.most for w in own)}" for s, own in one.items()}
    parts += [table(["schedule", *counts], [["rounds", *counts.values()]]), ""]
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
    parts, earlier = [ANSWERS], sections(page)
    for name in RECIPES:
        parts += section(name, pool, chosen.out, earlier)
    page.write_text("\n".join(parts).rstrip() + "\n", encoding="utf-8")
    print(f"{page} written")


if __name__ == "__main__":
    sys.exit(main())
