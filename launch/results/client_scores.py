"""The section of a run's page on scores by client (fedsim.learning.client_scores)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas

from fedsim.learning.client_scores import HISTOGRAM_BINS
from launch.results import html
from launch.results.bars import Bars, bar_chart
from launch.results.figures import Line, chart
from launch.results.run_curves import numbers
from launch.results.statistics import Values

HISTOGRAM = "client_accuracy_histogram"
NAMES = ("mean of the clients", "worst client")
EXPLAINED = (
    "A client's score is that of the test set with the classes weighted as in the client's training rows. "
    "It measures label skew, no feature skew; no client computes or sends anything for it. The band is one "
    "standard deviation over the clients to either side of their mean."
)


def client_scores(metrics: pandas.DataFrame) -> Iterator[str]:
    """Mean and worst score over rounds, and how the clients' accuracies are distributed after the last round.

    Nothing for a run of an earlier fedsim, or without classes.
    """
    if not np.isfinite(numbers(metrics, "client_accuracy_mean")).any():
        return
    yield html.key(dict(enumerate(NAMES)))
    x, labels = numbers(metrics, "round"), {"accuracy": "accuracy", "nll": "NLL (nats)"}
    drawn = [
        chart(_lines(metrics, x, key), "round", label, share=key == "accuracy")
        for key, label in labels.items()
    ]
    last = metrics[HISTOGRAM].iloc[-1] if HISTOGRAM in metrics else None
    if isinstance(last, list):
        drawn.append(histogram(np.array(last, dtype=np.float64), int(x[-1])))
    yield html.charts(*drawn, across=3)
    yield html.soft(EXPLAINED)


def _lines(metrics: pandas.DataFrame, x: Values, key: str) -> list[Line]:
    mean, worst, spread = (numbers(metrics, f"client_{key}_{what}") for what in ("mean", "worst", "spread"))
    low, high = mean - spread, mean + spread
    if key == "accuracy":
        low, high = np.clip(low, 0, 1), np.clip(high, 0, 1)
    return [
        Line(NAMES[0], x, mean, low, high, slot=0),
        Line(NAMES[1], x, worst, slot=1),
    ]


def histogram(counts: Values, round: int) -> str:
    """Return a histogram of the clients' accuracies; '' if no client has a score."""
    there = np.flatnonzero(counts)
    if not len(there):
        return ""
    edges = np.arange(HISTOGRAM_BINS + 1) * 100 / HISTOGRAM_BINS
    width = 100 / HISTOGRAM_BINS
    return bar_chart(
        "clients by accuracy",
        (f"accuracy after round {round} (%)", "clients"),
        edges[:-1] + 0.04 * width,
        edges[1:] - 0.04 * width,
        [Bars("clients", counts)],
        said=lambda n: f"accuracy {edges[n]:g} to {edges[n + 1]:g} %",
        limits=(max(0.0, width * (there[0] - 1)), min(100.0, width * (there[-1] + 2))),
    )
