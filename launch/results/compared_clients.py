"""The section of a comparison on clients: how bytes and accuracies are spread over them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from launch.results import html
from launch.results.figures import Line, chart
from launch.results.groups import Group
from launch.results.statistics import Values
from launch.results.tables import name

EXPLAINED = (
    "Each run's clients are sorted, the smallest first; lines are means over the seeds, bands their range. "
    "Accuracies are those after the last evaluated round, on the test set with the label shares of a client; "
    "runs of more than 100 clients have none."
)


def compared_clients(groups: Mapping[int, Group], key: str) -> Iterator[str]:
    """Two pictures; nothing for runs of one client. groups: by their slots."""
    spent = {slot: [m.client_bytes / 1e6 for m in g.members] for slot, g in groups.items()}
    scores = {slot: [m.client_accuracies for m in g.members] for slot, g in groups.items()}
    drawn = [
        chart(_lines(groups, values), "client, sorted", label, marks=True, share=values is scores)
        for values, label in ((spent, "megabytes of a client"), (scores, "accuracy of a client"))
    ]
    if any(drawn):
        yield key
        yield html.charts(*drawn, across=2)
        yield html.soft(EXPLAINED)


def _lines(groups: Mapping[int, Group], values: Mapping[int, Sequence[Values]]) -> list[Line]:
    """Return lines for the groups whose runs all have the same number of values."""
    lines = []
    for slot, members in values.items():
        count = len(members[0])
        if count < 2 or any(len(m) != count for m in members):
            continue
        rows = np.sort(np.array(members), axis=1)
        x: Values = np.arange(1, count + 1, dtype=np.float64)
        lines.append(Line(name(groups[slot]), x, rows.mean(0), rows.min(0), rows.max(0), slot))
    return lines
