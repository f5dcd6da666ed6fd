"""The clients section of a run's page: bytes and scores of each client, as bars and as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fedsim.learning.client_scores import HISTOGRAM_BINS
from fedsim.learning.score_names import CLIENT_LISTS
from launch.numbers import optional, percentage
from launch.results.figures import Figure, Line, Values, bar_chart, chart
from launch.results.groups import Member
from launch.results.html import Beside, Folded, Part, Text
from launch.results.run_curves import numbers
from launch.runs.tables import sides
from launch.session.display import on_the_clock
from launch.table import Table

SPENT = {
    "seconds, simulated": "client_seconds",
    "waits, s": "client_waits",
    "holds up, s": "client_holds",
    "J": "client_joules",
}
"""Keys of summary.json's `devices` whose lists become columns, by column heading."""
SCORES = dict(zip(("accuracy", "NLL"), CLIENT_LISTS, strict=True))
"""Keys of metrics.jsonl whose lists become columns, by column heading."""
MOST_CLIENTS = 60
"""The table's maximum number of rows; with more clients, it has those with the most and fewest bytes."""
DIRECTIONS = ("down", "up")


def clients(run: Member) -> Iterator[Part]:
    """Yield charts and a table with a row per client: examples, rounds with participation, rounds with a
    folded upload, bytes, scores and, with a virtual clock, simulated costs. For an unfinished run, the rounds
    with participation come from the ledger."""
    rows, count, summary, last = run.own_ledger, run.clients, run.summary, run.last
    by = sides(rows[rows.client >= 0], ["client"]).reindex(range(count), fill_value=0)
    sent = rows[(rows["round"] > 0) & (rows.direction == "down") & (rows.client >= 0)]
    counted = sent.groupby("client")["round"].nunique().reindex(range(count), fill_value=0)
    devices = summary.get("devices") or {}
    columns: dict[str, tuple[Any, str]] = {
        "examples": (run.experiment.get("client_sizes"), ","),
        "took part in rounds": (summary.get("took_part") or counted.tolist(), ","),
        "upload folded": (summary.get("folded"), ","),
        "bytes down": (by["down"].tolist(), ","),
        "bytes up": (by["up"].tolist(), ","),
    }
    scores = {title: of for title, key in SCORES.items() if _one_each(of := last.get(key), count)}
    columns |= {title: (of, "%" if "accuracy" in title else ".4f") for title, of in scores.items()}
    spent = {title: of for title, key in SPENT.items() if _one_each(of := devices.get(key), count)}
    columns |= {title: (of, ",.4g") for title, of in spent.items()}
    total, shown, cut = by.sum(axis=1), list(range(count)), ""
    if count > MOST_CLIENTS:
        ranked, half = np.argsort(-total.to_numpy(), kind="stable").tolist(), MOST_CLIENTS // 2
        shown = [*ranked[:half], *ranked[-half:]]
        cut = f", the {half} with the most and the {half} with the fewest bytes"
    lines = [[str(k), *(_cell(values, k, form) for values, form in columns.values())] for k in shown]
    yield Text(
        f"{count:,} clients; bytes of a client, both directions: {int(total.min()):,} to "
        f"{int(total.max()):,}, {total.mean():,.0f} on average."
    )
    if devices:
        yield Text(f"On the {on_the_clock(devices)}.{_waits(devices)}")
    drawn = _by_client("bytes", {side: by[side].to_numpy(dtype=np.float64) for side in DIRECTIONS})
    for title, values in scores.items():
        heights = {title: np.array(values, dtype=np.float64)}
        drawn += _by_client(f"{title} after round {last['round']}", heights, share="accuracy" in title)
    yield Beside(drawn)
    table = Table(["client", *columns], lines, 0)
    yield Folded(f"Table of clients{cut}", [table], opened=count <= 20)


def _one_each(values: object, count: int) -> bool:
    return isinstance(values, list) and len(values) == count


def _cell(values: Sequence[float | None] | None, k: int, form: str) -> str:
    """Return the number of client k; an unfinished run has shorter lists, or none."""
    value = values[k] if values and k < len(values) else None
    return percentage(value) if form == "%" and value is not None else optional(value, form.strip("%"))


def _by_client(what: str, heights: Mapping[str, Values], share: bool = False) -> list[Figure]:
    """Draw a bar for every client; more than MOST_CLIENTS bars have no gaps."""
    places: Values = np.arange(len(next(iter(heights.values()))), dtype=np.float64)
    bars = places, 0.88 if len(places) <= MOST_CLIENTS else 1.0
    title, axis = f"{what} by client", ("client", what)
    return bar_chart(title, axis, bars, heights, shares="y" * share, tabulated=False)


def _waits(devices: Mapping[str, Any]) -> str:
    """Describe how long clients waited, and for which client the others waited the longest."""
    holds = devices.get("client_holds") or []
    if not holds and devices.get("client_waits_total"):
        return f" Uploads lay in the buffer for {devices['client_waits_total']:,.4g} s in all."
    if not any(holds):
        return ""
    most = max(range(len(holds)), key=lambda k: holds[k])
    return (
        f" Clients that had answered waited for {devices.get('client_waits_total', 0):,.4g} s in all. "
        f"For {devices.get('client_holds_total', 0):,.4g} s of the run one client alone was waited for, of "
        f"which for client {most} {holds[most]:,.4g} s."
    )


HISTOGRAM = "client_accuracy_histogram"
NAMES = ("mean of the clients", "worst client")
WEIGHTED = (
    "A client's score is that of the test set with the classes weighted as in the client's training rows. "
    "It measures label skew, no feature skew"
)
OWN = "A client's score is that of its own test rows"
EXPLAINED = (
    "; no client computes or sends anything for it. The band is one standard deviation over the clients to "
    "either side of their mean."
)


def client_scores(run: Member) -> Iterator[Part]:
    """Yield charts of the mean and the worst score over rounds, and of all accuracies after the last round.
    Yield nothing if the data have no classes."""
    if not np.isfinite(numbers(run, "client_accuracy_mean")).any():
        return
    x, drawn = numbers(run, "round"), []
    for key, label in {"accuracy": "accuracy", "nll": "NLL (nats)"}.items():
        drawn += chart(_lines(run, x, key), "round", f"{label} of clients", shares="y" * (key == "accuracy"))
    if isinstance(last := run.last.get(HISTOGRAM), list):
        drawn += histogram(np.array(last, dtype=np.float64), int(x[-1]))
    yield Beside(drawn)
    yield Text((OWN if run.experiment.get("client_scores") else WEIGHTED) + EXPLAINED)


def _lines(run: Member, x: Values, key: str) -> list[Line]:
    mean, worst, spread = (numbers(run, f"client_{key}_{what}") for what in ("mean", "worst", "spread"))
    low, high = mean - spread, mean + spread
    if key == "accuracy":
        low, high = np.clip(low, 0, 1), np.clip(high, 0, 1)
    return [Line(NAMES[0], x, mean, low, high, slot=0), Line(NAMES[1], x, worst, slot=1)]


def histogram(counts: Values, round: int) -> list[Figure]:
    """Draw a histogram of the clients' accuracies; no figure if no client has a score."""
    there = np.flatnonzero(counts)
    if not len(there) or len(counts) != HISTOGRAM_BINS:
        return []
    width = 100 / HISTOGRAM_BINS
    middle: Values = width * (np.arange(HISTOGRAM_BINS, dtype=np.float64) + 0.5)
    axis = f"accuracy after round {round} (%)", "clients"
    limits = max(0.0, width * (there[0] - 1)), min(100.0, width * (there[-1] + 2))
    bars = middle, 0.92 * width
    return bar_chart("clients by accuracy", axis, bars, {"clients": counts}, xlimits=limits)
