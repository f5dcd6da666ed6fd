"""The charts of one run: accuracy, NLL, calibration, and every other number of metrics.jsonl that varies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from fedsim.learning.score_names import CLIENT_NUMBERS, EXTRA
from launch.numbers import percentage
from launch.results.figures import Figure, Line, Values, chart, wide
from launch.results.html import Beside, Part, Text
from launch.results.reliability_diagram import TABLES, diagram, last_table
from launch.runs.tables import every_round
from workers.storage.metrics_file import EDGE_BYTES, LISTS

if TYPE_CHECKING:
    import pandas

ACCURACIES = {"test_accuracy": "at the mean", "ensemble_accuracy": "averaged over posterior samples"}
NLLS = {"test_nll": "at the mean", "ensemble_nll": "averaged over posterior samples"}
ECES = {"test_ece": "at the mean", "ensemble_ece": "averaged over posterior samples"}
BRIERS = {"test_brier": "at the mean", "ensemble_brier": "averaged over posterior samples"}
EXPLAINED = (
    "On the dashed diagonal a model is right as often as it says; below it, it is overconfident. ECE is the "
    "mean distance of the 15 bins from the diagonal, weighted with their predictions; the area of a point "
    "grows with them."
)
NO_CURVE = ("round", "participants", "bytes_down", "bytes_up", "MB", "MB_down", "MB_up", *EDGE_BYTES, *LISTS)
SECONDS = ("seconds", "seconds_clients", "simulated_seconds")


def numbers(frame: pandas.DataFrame, name: str) -> Values:
    """Return a column as floats; NaN for null and for a missing column."""
    if name not in frame:
        return np.full(len(frame), np.nan)
    import pandas

    return np.asarray(pandas.to_numeric(frame[name], errors="coerce"), dtype=np.float64)


def learning(metrics: pandas.DataFrame, level: float = 0.0) -> Beside:
    """Draw accuracy over rounds, megabytes and, if known, seconds; NLL over rounds and megabytes; and the
    train loss over rounds. level: the target accuracy of the run; 0 for none."""
    axes = {"round": numbers(metrics, "round"), "megabytes, both directions": numbers(metrics, "MB")}
    timed = dict(axes)
    if every_round(metrics["round"].tolist()):  # otherwise the seconds of some rounds are missing
        if "simulated_seconds" in metrics:  # NaN before round 1
            timed["seconds, simulated"] = np.nan_to_num(numbers(metrics, "simulated_seconds")).cumsum()
        else:
            timed["seconds, wall"] = numbers(metrics, "seconds").cumsum()
    levels = [level] if level else []
    drawn = []
    for axis, x in timed.items():
        drawn += chart(_lines(metrics, x, ACCURACIES), axis, "accuracy", levels=levels, shares="y")
    for axis, x in axes.items():
        drawn += chart(_lines(metrics, x, NLLS), axis, "NLL (nats)")
    loss = _lines(metrics, axes["round"], {"train_loss": "train loss"})
    return Beside([*drawn, *chart(loss, "round", "train loss")])


def calibration(metrics: pandas.DataFrame) -> Iterator[Part]:
    """Yield ECE and Brier score over rounds, and the reliability diagram of the last evaluated round. Yield
    nothing if the data have no classes."""
    x, last = numbers(metrics, "round"), [dict(metrics.iloc[-1])]
    tables = {
        slot: (text, table)
        for slot, (key, text) in enumerate(TABLES.items())
        if (table := last_table(last, key)) is not None
    }
    drawn = [
        *chart(_lines(metrics, x, ECES), "round", "ECE", limits=(0, None)),
        *chart(_lines(metrics, x, BRIERS), "round", "Brier score", limits=(0, None)),
        *diagram(tables),
    ]
    if drawn:
        yield Beside(drawn)
    if tables:
        yield Text(f"The reliability diagram is of round {x[-1]:.0f}. {EXPLAINED}")


def _lines(metrics: pandas.DataFrame, x: Values, names: Mapping[str, str]) -> list[Line]:
    return [
        Line(text, x, y, slot=slot)
        for slot, (key, text) in enumerate(names.items())
        if np.isfinite(y := numbers(metrics, key)).any()
    ]


def diagnostics(metrics: pandas.DataFrame) -> Iterator[Part]:
    """Yield charts of the other numbers of metrics.jsonl that vary, and a text with the constant ones."""
    x, constant = numbers(metrics, "round"), []
    drawn: list[Figure] = []
    for name in _others(metrics):
        y = numbers(metrics, name)
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


def _others(metrics: pandas.DataFrame) -> list[str]:
    drawn = {*NO_CURVE, *SECONDS, *ACCURACIES, *NLLS, *ECES, *BRIERS, *CLIENT_NUMBERS, "train_loss"}
    names = [str(name) for name in metrics.columns if name not in drawn]
    return sorted(names, key=lambda name: name not in EXTRA)


def title(name: str) -> str:
    """Return a readable form of a name of metrics.jsonl, such as primal residual."""
    return name.removeprefix("test_").replace("_", " ")
