"""The section of a run's page on the staleness of uploads in asynchronous rounds (fedsim.asynchrony)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from launch.results import html
from launch.results.figures import drawing, plain, style

EXPLAINED = (
    "The staleness of an upload is how many steps the server has taken since the broadcast that it answers. "
    "Which uploads are folded in which step follows from the virtual clock."
)


def staleness(summary: Mapping[str, Any]) -> Iterator[str]:
    """How many uploads had which staleness; nothing for a synchronous run."""
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
    """An <svg> element: uploads by staleness, from 0."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.bar(np.arange(len(counts)), counts, 0.92, color=style(0)[0])
        axes.locator_params(axis="both", nbins=6, integer=True)
        axes.set_xlabel("steps of the server since the broadcast")
        axes.set_ylabel("uploads")
        plain(axes)

    return drawing("uploads by staleness", [], draw)
