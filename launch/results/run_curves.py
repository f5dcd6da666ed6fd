"""The charts of one run: accuracy, NLL, calibration, and every other number of metrics.jsonl that varies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from fedsim.learning.score_names import CLIENT_NUMBERS, EXTRA
from launch.numbers import percentage
from launch.results.figures import Figure, Line, Values, chart, wide
from launch.results.groups import Member
from launch.results.html import Beside, Part, Text
from launch.results.reliability_diagram import TABLES, diagram, table_of
from launch.runs.tables import LIMITS, SUMS, every_round
from workers.storage.metrics_file import EDGE_BYTES

ACCURACIES = {"test_accuracy": "at the mean", "ensemble_accuracy": "averaged over posterior samples"}
NLLS = {"test_nll": "at the mean", "ensemble_nll": "averaged over posterior samples"}
ECES = {"test_ece": "at the mean", "ensemble_ece": "averaged over posterior samples"}
BRIERS = {"test_brier": "at the mean", "ensemble_brier": "averaged over posterior samples"}
EXPLAINED = (
    "On the dashed diagonal a model is right as often as it says; below it, it is overconfident. ECE is the "
    "mean distance of the 15 bins from the diagonal, weighted with their predictions; the area of a point "
    "grows with them."
)
NO_CURVE = ("round", "bytes_down", "bytes_up", *EDGE_BYTES, *SUMS, *LIMITS)
SECONDS = ("seconds", "seconds_clients", "simulated_seconds")


def numbers(run: Member, name: str) -> Values:
    """Return a number of every evaluated round, or a sum so far (Member.curve); NaN for a missing number."""
    return np.asarray(run.curve.reindex(columns=[name])[name], dtype=np.float64)


def learning(run: Member) -> Beside:
    """Draw accuracy over rounds, megabytes and, if known, seconds; NLL over rounds and megabytes; and the
    train loss over rounds."""
    level = float(run.experiment.get("until") or 0)
    axes = {"round": numbers(run, "round"), "megabytes, both directions": numbers(run, "MB")}
    timed = dict(axes)
    if every_round(list(run.curve.index)):  # otherwise the seconds of some rounds are missing
        if "simulated_seconds" in run.curve:
            timed["seconds, simulated"] = numbers(run, "simulated")
        else:
            timed["seconds, wall"] = numbers(run, "seconds").cumsum()
    levels = [level] if level else []
    drawn = []
    for axis, x in timed.items():
        drawn += chart(_lines(run, x, ACCURACIES), axis, "accuracy", levels=levels, shares="y")
    for axis, x in axes.items():
        drawn += chart(_lines(run, x, NLLS), axis, "NLL (nats)")
    loss = _lines(run, axes["round"], {"train_loss": "train loss"})
    return Beside([*drawn, *chart(loss, "round", "train loss")])


def calibration(run: Member) -> Iterator[Part]:
    """Yield ECE and Brier score over rounds, and the reliability diagram of the last evaluated round. Yield
    nothing if the data have no classes."""
    x = numbers(run, "round")
    tables = {
        slot: (text, table)
        for slot, (key, text) in enumerate(TABLES.items())
        if (table := table_of(run.last, key)) is not None
    }
    drawn = [
        *chart(_lines(run, x, ECES), "round", "ECE", limits=(0, None)),
        *chart(_lines(run, x, BRIERS), "round", "Brier score", limits=(0, None)),
        *diagram(tables),
    ]
    if drawn:
        yield Beside(drawn)
    if tables:
        yield Text(f"The reliability diagram is of round {x[-1]:.0f}. {EXPLAINED}")


def _lines(run: Member, x: Values, names: Mapping[str, str]) -> list[Line]:
    return [
        Line(text, x, y, slot=slot)
        for slot, (key, text) in enumerate(names.items())
        if np.isfinite(y := numbers(run, key)).any()
    ]


def diagnostics(run: Member) -> Iterator[Part]:
    """Yield charts of the other numbers of metrics.jsonl that vary, and a text with the constant ones."""
    x, constant = numbers(run, "round"), []
    drawn: list[Figure] = []
    for name in _others(run):
        y = numbers(run, name)
        values, share = np.unique(y[np.isfinite(y)]), name in EXTRA
        if len(values) > 1:
            logy = bool((values > 0).all()) and wide([values]) and not share
            drawn += chart([Line(title(name), x, y)], "round", title(name), logy=logy, shares="y" * share)
        elif len(values):
            constant.append(f"{title(name)} {percentage(values[0]) if share else format(values[0], 'g')}")
    if drawn:
        yield Beside(drawn)
    if constant:
        yield Text(f"The same in every round: {', '.join(constant)}.")


def _others(run: Member) -> list[str]:
    drawn = {*NO_CURVE, *SECONDS, *ACCURACIES, *NLLS, *ECES, *BRIERS, *CLIENT_NUMBERS, "train_loss"}
    names = [str(name) for name in run.curve.columns if name not in drawn]
    return sorted(names, key=lambda name: name not in EXTRA)


def title(name: str) -> str:
    """Return a readable form of a name of metrics.jsonl, such as primal residual."""
    return name.removeprefix("test_").replace("_", " ")
