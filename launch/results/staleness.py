"""The section of a run's page on the staleness of uploads in asynchronous rounds (fedsim.asynchrony)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from launch.results import html
from launch.results.bars import Bars, bar_chart

EXPLAINED = (
    "The staleness of an upload is how many steps the server has taken since the broadcast that it answers. "
    "Which uploads are folded in which step follows from the virtual clock."
)


def staleness(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table of uploads by staleness; nothing for a synchronous run."""
    steps = summary.get("asynchronous")
    if not steps:
        return
    counts = steps["staleness"]
    yield html.charts(histogram(counts))
    yield html.soft(
        f"mean {steps['staleness_mean']:.2f}, largest {len(counts) - 1}; {steps['simulated_seconds']:,.1f} "
        f"simulated seconds. {EXPLAINED}"
    )


def histogram(counts: list[int]) -> str:
    """Uploads by staleness, from 0; the numbers may be saved."""
    steps = np.arange(len(counts), dtype=np.float64)
    return bar_chart(
        "uploads by staleness",
        ("steps of the server since the broadcast", "uploads"),
        np.subtract(steps, 0.46),
        np.add(steps, 0.46),
        [Bars("uploads", np.array(counts, dtype=np.float64))],
        said=lambda n: f"staleness {n}",
    )
