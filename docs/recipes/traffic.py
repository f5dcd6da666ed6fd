"""The picture and the two tables of docs/traffic.md: which algorithm reaches how much with a given traffic.

    python docs/recipes/traffic.py      2 seconds; writes docs/traffic.md and docs/assets/traffic.png

Nothing is run: the numbers are those of the archives of comparison, one_bit_fashion_mnist (the same data,
clients, model and seeds) and participation_digits_10 in docs/results.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, pstdev

import report

from launch.results.figures import write_picture

DOCS = Path(__file__).resolve().parents[1]
PAGE, PICTURE = "traffic.md", "assets/traffic.png"
PARAMS, CLIENTS = 178_110, 10
"""Of the runs on FashionMNIST: the model's parameters, and the clients."""
BUDGETS = (1, 2, 3, 5, 10, 20, 50, 200)
"""In P: numbers per parameter that a client sends and receives in a whole run."""
SOURCES = ("comparison", "one_bit_fashion_mnist")
RENAMED = {
    ("comparison", "fola"): "fola (Adam) dense",
    ("comparison", "fedavg"): "fedavg dense",
    ("comparison", "fedlap"): "fedlap dense",
    ("comparison", "ivon_admm"): "ivon_admm dense",
    ("one_bit_fashion_mnist", "fedlap_cov both"): "fedlap_cov few bits",
    ("one_bit_fashion_mnist", "ivon_admm both"): "ivon_admm few bits",
    ("one_bit_fashion_mnist", "fola both"): "fola few bits",
}
"""The names of this page, where they differ from those of the recipes."""
SHOWN = {
    "fedavg dense": (report.BLACK, "-"),
    "fedlap_cov dense": (report.BLUE, "-"),
    "ivon_admm dense": (report.VERMILION, "-"),
    "fola dense": (report.GREEN, "-"),
    "fedlap_cov log8, bf16 mean": (report.BLUE, ":"),
    "fedlap_cov few bits": (report.BLUE, "--"),
    "ivon_admm few bits": (report.VERMILION, "--"),
    "fola few bits": (report.GREEN, "--"),
}
SCHEDULES = {"full": "all of 10", "0.3": "3 of 10", "0.1": "1 of 10"}
ABSENT = {
    "fedavg": report.BLACK,
    "fedlap, rho 1/K": report.SKY,
    "fedlap, rho 1/|S|": report.BLUE,
    "fedlap_cov, rho 1/K": "#b9b9b9",
    "fedlap_cov, rho 1/|S|": report.PURPLE,
    "ivon_admm": report.VERMILION,
    "fedpa": report.ORANGE,
    "fola": report.GREEN,
}

Curve = list[tuple[float, list[float]]]
"""Traffic in P per client, and the accuracy (%) of every seed."""


def curves() -> dict[str, Curve]:
    """Every configuration's accuracy over its traffic. An accuracy is the mean of three rounds."""
    runs: dict[str, dict[int, list[tuple[float, float]]]] = {}
    for source in SOURCES:
        found: dict[str, dict[int, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
        for score in report.archived(source):
            name = RENAMED.get((source, score.row), score.row)
            traffic = 1e6 * (score.down + score.up) / (4 * PARAMS * CLIENTS)
            found[name][score.seed].append((traffic, 100 * score.accuracy))
        runs = dict(found) | runs  # what both have is the same configuration
    result: dict[str, Curve] = {}
    for variant, seeds in runs.items():
        lines = list(seeds.values())
        result[variant] = [
            (
                fmean(line[n][0] for line in lines),
                [fmean(a for _, a in line[n - 2 : n + 1]) for line in lines],
            )
            for n in range(3, min(map(len, lines)))
        ]
    return result


def within(curve: Curve, budget: float) -> list[float] | None:
    """The seeds' accuracies at the last round within the traffic, None before the third round."""
    reached = [accuracies for traffic, accuracies in curve if traffic <= budget * 1.01]
    return reached[-1] if reached else None


def budget_table() -> str:
    """For every traffic the best configuration, that of another algorithm, and that without codecs."""
    lines = []
    everything = curves()
    for budget in BUDGETS:
        found = [(within(curve, budget), name) for name, curve in everything.items()]
        ranked = sorted(((a, name) for a, name in found if a), key=lambda entry: -fmean(entry[0]))
        best = ranked[0][1]
        others = [entry for entry in ranked if entry[1].split()[0] != best.split()[0]]
        dense = [entry for entry in ranked if entry[1].endswith("dense")]
        megabytes = budget * 4 * PARAMS * CLIENTS / 1e6
        cells = [
            f"{entry[0][1]}: {_spread(entry[0][0])}" if entry else "–" for entry in (ranked, others, dense)
        ]
        lines.append((f"{budget} P ({megabytes:,.0f} MB)", *cells))
    head = (
        "traffic of a client (of all ten)",
        "best here",
        "best of another algorithm",
        "best without a codec",
    )
    return report.table(head, lines).replace("---:", "---")


def participation() -> dict[str, dict[str, list[float]]]:
    """Return every seed's accuracy (%) after 20 rounds on digits, by configuration and schedule."""
    last: dict[str, dict[int, float]] = defaultdict(dict)
    for score in report.archived("participation_digits_10"):  # rounds ascend
        last[score.row][score.seed] = 100 * score.accuracy

    def accuracies(variant: str, schedule: str) -> list[float]:
        name = f"{variant} (participation {schedule})"
        # with all clients, 1/K and 1/|S| are the same runs, which the archive has once
        return list((last.get(name) or last[name.replace("1/K", "1/|S|")]).values())

    return {variant: {s: accuracies(variant, s) for s in SCHEDULES} for variant in ABSENT}


def participation_table() -> str:
    """A line a configuration, a column a schedule."""
    lines = [
        (name, *(_spread(accuracies) for accuracies in by.values())) for name, by in participation().items()
    ]
    return report.table(("", *SCHEDULES.values()), lines)


def _spread(accuracies: Sequence[float]) -> str:
    return f"{fmean(accuracies):.1f}±{pstdev(accuracies):.1f}"


def files() -> dict[str, str]:
    """The page with its tables, by its path in docs/."""
    text = (DOCS / PAGE).read_text(encoding="utf-8")
    for name, table in (("budgets", budget_table()), ("participation", participation_table())):
        pattern = rf"(<!-- {name}: written.*?-->\n).*?(<!-- end of {name} -->)"
        text = re.sub(pattern, lambda m, t=table: f"{m[1]}\n{t}\n\n{m[2]}", text, flags=re.DOTALL)
    return {PAGE: text}


def draw(file: Path) -> None:
    """Accuracy over traffic with all clients, and accuracy when some are away."""
    figure, (left, right) = report.figure(10.4, 4.6, 1, 2, width_ratios=(1.7, 1))  # type: ignore[misc]
    everything = curves()
    for name, (colour, style) in SHOWN.items():
        curve = everything[name]
        x = [traffic for traffic, _ in curve]
        left.plot(x, [fmean(a) for _, a in curve], color=colour, ls=style, label=name)
        left.fill_between(
            x, [min(a) for _, a in curve], [max(a) for _, a in curve], color=colour, alpha=0.13, lw=0
        )
    ticks = (0.5, 1, 2, 5, 10, 20, 50, 100, 200)
    left.set(
        xscale="log",
        xlim=(0.4, 230),
        ylim=(55, 85),
        xlabel="traffic of one client in the whole run, in P",
        ylabel="test accuracy (%)",
        title="All clients take part (FashionMNIST 10 %)",
    )
    left.set_xticks(ticks, [str(n) for n in ticks])
    left.minorticks_off()
    left.legend(loc="lower right", fontsize=8.5)
    for name, by in participation().items():
        right.plot(
            list(SCHEDULES.values()), [fmean(a) for a in by.values()], "o-", color=ABSENT[name], label=name
        )
    right.set(xlabel="clients per round", ylim=(0, 100), title="Some are away (digits, 20 rounds)")
    right.margins(x=0.12)
    right.legend(loc="lower left", fontsize=8)
    write_picture(figure, file)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=DOCS, help="folder of the pages")
    out = parser.parse_args(argv).out
    for name, text in files().items():
        (out / name).write_text(text, encoding="utf-8")
    (out / PICTURE).parent.mkdir(exist_ok=True)
    draw(out / PICTURE)


if __name__ == "__main__":
    main()
