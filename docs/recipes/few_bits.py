"""Few bits for a posterior: accuracy and calibration against bits a parameter, codec by codec.

    python docs/recipes/few_bits.py [--data-dir DIR]      6 minutes; writes docs/results/few_bits.{png,md}

Digits among ten unlike clients; with --data-dir, which must have MNIST, also the bits of a convolutional
network. FashionMNIST with the papers' settings is docs/recipes/one_bit_fashion_mnist.toml.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

from matplotlib.axes import Axes
from report import BLACK, BLUE, GREEN, ORANGE, PURPLE, ROOT, SKY, VERMILION, Page, figure, table

import fedsim
from fedsim.wire.limits import divergence
from launch.runs.restored import RestoredRun

COLOURS = {
    "dense": BLACK,
    "csr": PURPLE,
    "best": ORANGE,
    "rounded": SKY,
    "dithered": GREEN,
    "both": VERMILION,
    "auto": BLUE,
}


@dataclass(frozen=True)
class Case:
    """An algorithm with its settings; steps: of sigma, the middle one also upwards only."""

    algorithm: str
    spread: str
    steps: tuple[float, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)


CASES = (
    Case("fedlap_cov", "precision", (0.005, 0.02, 0.05)),
    Case("ivon_admm", "precision", (0.02, 0.05, 0.1)),
    Case("fola", "curvature", (0.0005, 0.001, 0.002), {"local.lr": 0.5, "squares": "batch", "gamma": 1e-8}),
)
RATIO = 0.25


@dataclass(frozen=True)
class Way:
    """What is sent: codecs by field, and which family of lines it belongs to."""

    label: str
    family: str
    codecs: Mapping[str, str]


def ways(case: Case) -> list[Way]:
    """Dense, the paper's sparse rows, the best before, and the codecs of few bits."""
    spread, middle = case.spread, case.steps[1]

    def up(c: float | str, how: str) -> dict[str, str]:
        return {"up.mean": f"sigma:{c}{how}", f"up.{spread}": f"ratio:{RATIO}"}

    def both(c: float | str) -> dict[str, str]:
        return up(c, "+dither") | {
            "down.mean": f"sigma:{c}+dither+last",
            f"down.{spread}": f"ratio:{RATIO}+last",
        }

    return [
        Way("dense", "dense", {}),
        Way("csr:0.1", "csr", {spread: "csr:0.1"}),
        Way("best:0.1 up, bf16 mean", "best", {f"up.{spread}": "best:0.1", "mean": "bf16"}),
        Way(f"up {middle}, rounded", "rounded", up(middle, "")),
        Way(f"up {middle}", "dithered", up(middle, "+dither")),
        *(Way(f"both {c}", "both", both(c)) for c in case.steps),
        Way("both auto", "auto", both("auto")),
    ]


@dataclass(frozen=True)
class Row:
    """Means over the seeds. bits: a parameter and message, headers included. entropy: of the integers of the
    last round's broadcast and upload, bits a parameter, None where a direction has none; kl: of an upload
    behind the last round, bits a parameter, None where there is no precision."""

    case: Case
    way: Way
    down: float
    up: float
    scores: Mapping[str, tuple[float, float]]
    entropy: float | None
    kl: float | None


def run(case: Case, way: Way, out: Path, **how: Any) -> Any:
    """One run in this process."""
    return fedsim.run(
        algo=case.algorithm,
        hyperparameters=dict(case.settings),
        codecs=dict(way.codecs),
        clients=10,
        workers=0,
        out=out,
        **how,
    )


def bits(summary: Mapping[str, Any], side: str) -> float:
    """Bits a parameter and message."""
    return float(8 * summary[f"bytes_{side}"] / (summary["params"] * summary["participations"]))


def entropy(summary: Mapping[str, Any]) -> float | None:
    """Zeroth-order, of both directions and all fields, bits a parameter; None where a direction has none."""
    sides = [summary.get("limits", {}).get(side) for side in ("down", "up")]
    return sum(field["entropy"] for side in sides for field in side.values()) if all(sides) else None


def measured(case: Case, way: Way, folder: Path, seeds: Sequence[int], **how: Any) -> Row:
    """A way with all seeds."""
    outs = [folder / f"{case.algorithm}-{way.family}-{len(way.label)}-{i}" for i in seeds]
    outs = [out.with_name(f"{out.name}-{abs(hash(way.label))}") for out in outs]
    runs = [run(case, way, out, seed=seed, **how) for seed, out in zip(seeds, outs, strict=True)]
    stored = RestoredRun.open(outs[0])
    summaries = [r.summary for r in runs]
    broadcast, upload, *_ = (m.value for m in stored.next_messages(stored.largest_participant()))
    scores = {
        name: (mean(values), pstdev(values))
        for name in ("test_accuracy", "test_nll", "test_ece", "test_brier")
        for values in [[s[name] for s in summaries]]
    }
    down, up = (mean(bits(s, side) for s in summaries) for side in ("down", "up"))
    entropies = [value for s in summaries if (value := entropy(s)) is not None]
    limit = mean(entropies) if entropies else None
    row = Row(case, way, down, up, scores, limit, divergence(upload, broadcast))
    print(f"{case.algorithm}, {way.label}: {down:.2f} / {up:.2f} bits", flush=True)
    return row


def cells(rows: Sequence[Row]) -> str:
    """The table."""

    def line(r: Row) -> list[str]:
        accuracy, nll, ece, brier = r.scores.values()
        return [
            r.case.algorithm,
            r.way.label,
            f"{r.down:.2f}",
            f"{r.up:.2f}",
            f"{100 * accuracy[0]:.1f}±{100 * accuracy[1]:.1f}",
            *(f"{value:.3f}±{sd:.3f}" for value, sd in (nll, ece, brier)),
            "-" if r.entropy is None else f"{r.entropy:.2f}",
            "-" if r.kl is None else f"{r.kl:.3f}",
        ]

    head = ["algorithm", "sent", "bits down", "bits up", "accuracy %", "NLL", "ECE", "Brier", "entropy", "KL"]
    return table(head, [line(r) for r in rows])


def draw(page: Page, rows: Sequence[Row]) -> None:
    """Accuracy and ECE against bits, an axis per algorithm."""
    drawn, axes = figure(10.5, 5.6, 2, len(CASES), sharex=True)
    for column, case in enumerate(CASES):
        own = [r for r in rows if r.case is case]
        for ax, name, scale in ((axes[0][column], "test_accuracy", 100), (axes[1][column], "test_ece", 1)):  # type: ignore[index]
            _panel(ax, own, name, scale)
        axes[0][column].set_title(case.algorithm)  # type: ignore[index]
        axes[1][column].set_xlabel("bits a parameter, down and up")  # type: ignore[index]
    axes[0][0].set_ylabel("test accuracy, %")  # type: ignore[index]
    axes[1][0].set_ylabel("ECE")  # type: ignore[index]
    lines, labels = axes[0][0].get_legend_handles_labels()  # type: ignore[index]
    drawn.legend(lines, labels, loc="outside lower center", ncols=4)
    page.picture(drawn, "Accuracy and calibration error against bits a parameter")


NAMES = {
    "dense": "dense",
    "csr": "csr:0.1",
    "best": "best:0.1, bf16",
    "rounded": "up, rounded",
    "dithered": "up, dithered",
    "both": "both ways, dithered",
    "auto": "both ways, auto",
}


def _panel(ax: Axes, rows: Sequence[Row], name: str, scale: float) -> None:
    for family, colour in COLOURS.items():
        of = [r for r in rows if r.way.family == family]
        x, y = [r.down + r.up for r in of], [scale * r.scores[name][0] for r in of]
        spread = [scale * r.scores[name][1] for r in of]
        ax.errorbar(x, y, spread, color=colour, marker="o", linestyle="-", label=NAMES[family], capsize=2)
    limited = [r for r in rows if r.entropy is not None]
    if limited:
        x, y = [r.entropy or 0.0 for r in limited], [scale * r.scores[name][0] for r in limited]
        ax.plot(
            x, y, "d", markerfacecolor="white", color="#888888", label="entropy of the integers", zorder=3
        )
    ax.axhline(scale * rows[0].scores[name][0], color=BLACK, linewidth=0.7, linestyle=":")
    if rows[0].kl is not None:
        ax.axvline(rows[0].kl, color="#888888", linewidth=1.0, linestyle="--", label="KL of an upload")
    ax.set_xscale("log")


def networks(folder: Path, mnist: bool) -> str:
    """Bits of the same steps on other networks."""
    logistic: tuple[str, dict[str, Any]] = ("logistic, digits", {"model": "logistic", "rounds": 20})
    how = [(logistic, case) for case in CASES]
    if mnist:  # ivon_admm's default step, chosen on digits, diverges there
        data = {"model": "cnn_mcmahan", "dataset": "mnist", "fraction": 0.02, "rounds": 3}
        how.append((("cnn_mcmahan, 2 % of MNIST, 3 rounds", data), CASES[0]))
    lines = []
    for (label, options), case in how:
        dense, *_, both = ways(case)
        pair = [
            run(
                case, way, folder / f"{options['model']}-{case.algorithm}-{way.family}", seed=0, **options
            ).summary
            for way in (dense, both)
        ]
        lines.append(
            [
                f"{case.algorithm}, {label}",
                f"{pair[0]['params']:,}",
                both.label,
                f"{bits(pair[1], 'down'):.2f}",
                f"{bits(pair[1], 'up'):.2f}",
                *(f"{100 * s['test_accuracy']:.1f}" for s in pair),
                *(f"{s[name]:.3f}" for name in ("test_ece", "test_brier") for s in pair),
            ]
        )
    scores = [f"{score}, {how}" for score in ("accuracy %", "ECE", "Brier") for how in ("dense", "coded")]
    return table(["", "P", "sent", "bits down", "bits up", *scores], lines)


ANSWER = """\
**Answer.** Under 3 bits a parameter in each direction keep accuracy, NLL and ECE of fedlap_cov and
ivon_admm. fola has them with 3.9 bits up (`sigma:auto`), and loses 0.4 points with 2.1. Rounding without
dither raises fedlap_cov's ECE by 18 %.
"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results", help="folder of the results")
    parser.add_argument("--quick", action="store_true", help="a few seconds' worth; shows that it runs")
    parser.add_argument("--data-dir", type=Path, help="folder of the data files")
    options = parser.parse_args(argv)
    if options.data_dir is not None:
        os.environ["FEDSIM_DATA"] = str(options.data_dir)
    seeds, rounds = ((0,), 1) if options.quick else ((0, 1, 2, 3, 4), 20)
    page = Page("few_bits", "Few bits for a posterior", options)
    page.add(ANSWER)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        rows = [
            measured(case, way, folder, seeds, rounds=rounds, model="mlp_small")
            for case in CASES
            for way in ways(case)
        ]
        others = "" if options.quick else networks(folder, options.data_dir is not None)
    page.add(
        f"Digits, `mlp_small` (P = 7,510), ten unlike clients, {rounds} rounds, {len(seeds)} seeds (mean and "
        "standard deviation; the test set has 355 rows, so one of them is 0.3 points). Bits are those of the "
        "whole message, headers included, for each parameter, of which a dense message sends two float32. "
        "`up c` rounds the upload's mean to steps of c standard deviations and its precision or curvature to "
        f"steps of {RATIO} of its logarithm (`sigma:c+dither`, `ratio:{RATIO}`); `rounded` has no dither; "
        "`both c` sends the broadcast so, too, as a change of the last one (`+last`); with `auto` every "
        "message has a step of its own, with which the rounding is a tenth of its change. KL is that of one "
        "upload from its broadcast, in bits a parameter: what a sample of the client's posterior would cost; "
        "entropy is the zeroth-order one of the integers of both directions, in the last round: what no "
        "coder of independent integers can go below. Both are drawn in the picture."
    )
    page.add(cells(rows))
    draw(page, rows)
    if others:
        page.add("## Other networks")
        page.add(others)
    page.write()


if __name__ == "__main__":
    main()
