"""The timeline of a run: a lane per worker and one for the coordinator, from RUN/timeline.csv.

Each start of a run counts seconds from 0. Here, as in the trace, the part of each start follows the part of
the one before it, because the time between them is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

import pandas

from launch.results.trace import batches, committed_rounds
from launch.runs.folder import RunFolder
from workers.coordinator.task_timeline import COLUMNS
from workers.storage.growing_file import TIMELINE

ALL = 8
"""The maximum number of rounds in one picture. A longer run has pictures of its FIRST and LAST rounds."""
FIRST = LAST = 3
MOST_WORKERS, MOST_BARS = 32, 2000
LEFT, RIGHT, LANE, BAR = 86.0, 914.0, 24.0, 16.0
"""Sizes in a picture 1000 units wide: start and length of the time axis, heights of a lane and a bar."""
THIN = 4.5
"""The height cut off a bar, above and below, while its worker is not known to compute."""
TICKS = 8


@dataclass(frozen=True)
class Bar:
    """An interval in a lane, in seconds of the time axis. kind: a class of report.css."""

    lane: int
    begin: float
    end: float
    kind: str
    said: str


def timeline(run: RunFolder) -> str:
    """Return the pictures with their key; '' if the run has no timeline.csv or no committed task in it."""
    if not run.has(TIMELINE):
        return ""
    rows = pandas.DataFrame(_rows(run), columns=[*COLUMNS, "start"])
    if not len(rows):
        return ""
    numbers = sorted(rows["round"][rows.what != "evaluate"].unique())
    parts = [numbers] if len(numbers) <= ALL else [numbers[:FIRST], numbers[-LAST:]]
    fitting = [_fitting(rows, part, from_end=n > 0) for n, part in enumerate(parts)]
    drawn = [_picture(rows, part) for part in fitting if part]
    workers, resumes = rows.worker.nunique(), rows.start.max()
    notes = [f"workers 0 to {MOST_WORKERS - 1} of {workers}"] if workers > MOST_WORKERS else []
    if resumes:
        last = ", ".join(str(rows["round"][rows.start == n].max()) for n in range(resumes))
        notes.append(f"resumed after round {last}: the time until it went on is left out")
    return "".join(drawn) + _KEY + (f'<p class="soft">{escape("; ".join(notes))}</p>' if notes else "")


_KEY = "<p>{}</p>".format(
    " ".join(
        f'<span class="key"><i class="{kind}"></i>{said}</span>'
        for kind, said in (
            ("odd", "training, odd rounds"),
            ("even", "even rounds"),
            ("scoring", "evaluation"),
            (
                "holding",
                "assigned, not yet computing: in a queue or on the wire (thin and coloured: unknown)",
            ),
            ("folding", "coordinator: from the last upload to the next broadcast"),
        )
    )
)


def _rows(run: RunFolder) -> Iterator[tuple[object, ...]]:
    """Yield the committed rows of timeline.csv in seconds of one axis, with the number of their start."""
    start, begin, end = 0, 0.0, 0.0
    for batch in batches(run.timeline_rows(), committed_rounds(run)):
        if batch.resumed:
            start, begin = start + 1, end
        for span in batch.spans:
            end = max(end, begin + span.arrived)
            yield (*span[:5], begin + span.given, begin + span.arrived, span.computing, start)


def _fitting(rows: pandas.DataFrame, numbers: Sequence[int], from_end: bool) -> list[int]:
    """Drop rounds at one end until MOST_BARS tasks or one round are left; return the remaining rounds."""
    kept = [int(n) for n in numbers]
    while len(kept) > 1 and rows["round"].isin(kept).sum() > MOST_BARS:
        kept = kept[1:] if from_end else kept[:-1]
    return kept


def _picture(rows: pandas.DataFrame, numbers: Sequence[int]) -> str:
    """Draw a picture of these rounds and of the evaluations during them."""
    own = rows[rows["round"].isin(numbers) & (rows.what != "evaluate")]
    begin, end = float(own.given.min()), float(own.arrived.max())
    if numbers[-1] == rows["round"].max():  # include the last evaluation
        end = float(rows.arrived.max())
    shown = rows[(rows.arrived > begin) & (rows.given < end)]
    workers = sorted(rows.worker.unique())[:MOST_WORKERS]
    lanes = {int(worker): n + 1 for n, worker in enumerate(workers)}
    bars = [*_folding(rows, begin, end), *_working(shown[shown.worker.isin(lanes)], lanes)]
    height = LANE * (len(lanes) + 1)
    names = ["coordinator", *(f"worker {worker}" for worker in lanes)]
    scale = RIGHT / max(end - begin, 1e-9)
    made = [
        *(
            f'<text x="0" y="{LANE * n + BAR:.0f}">{name}</text>'
            f'<path class="rule" d="M{LEFT:.0f} {LANE * (n + 1) - 2:.0f}H1000"/>'
            for n, name in enumerate(names)
        ),
        *_ticks(begin, end, scale, height),
        *(_rectangle(bar, begin, end, scale) for bar in bars),
    ]
    return (
        f"<p>{escape(_title(numbers, shown[shown.worker.isin(lanes)], len(lanes), begin, end))}</p>"
        f'<div class="wide"><svg class="timeline" role="img" aria-label="timeline" '
        f'viewBox="0 0 1000 {height + 24:.0f}">{"".join(made)}</svg></div>'
    )


def _title(numbers: Sequence[int], shown: pandas.DataFrame, workers: int, begin: float, end: float) -> str:
    which = f"Round {numbers[0]}" if len(numbers) == 1 else f"Rounds {numbers[0]} to {numbers[-1]}"
    said = f"{which}: {_seconds(end - begin)}"
    tasks = shown[shown.what != "evaluate"]
    if (tasks.computing >= 0).all() and end > begin:
        spent = tasks.arrived.clip(upper=end) - (tasks.arrived - tasks.computing).clip(lower=begin)
        share = spent.clip(lower=0).sum() / (end - begin) / workers
        said += f", of which a worker trained {share:.0%}"
    return said


def _working(rows: pandas.DataFrame, lanes: dict[int, int]) -> Iterator[Bar]:
    """Yield two bars for every task: from sending to answer and, drawn over it, the computation."""
    held, computed = [], []
    for row in rows.itertuples(index=False):
        lane, whole = lanes[int(row.worker)], float(row.arrived - row.given)
        if row.what == "evaluate":
            kind, task = "scoring", f"evaluation after round {row.round}, chunk {row.exchange}"
        else:
            kind, task = "odd" if row.round % 2 else "even", f"round {row.round}, client {row.client}"
            task += f", exchange {row.exchange}" if row.exchange > 1 else ""
            task += ", gone after the download" if row.what == "gone" else ""
        said = f"{task}: {_seconds(whole)} from giving it out to its answer"
        if row.computing >= 0:
            said += f", {_seconds(row.computing)} computing"
            start = max(float(row.given), float(row.arrived - row.computing))
            computed.append(Bar(lane, start, float(row.arrived), kind, said))
        thin = "holding" if row.computing >= 0 else f"{kind} unsaid"
        held.append(Bar(lane, float(row.given), float(row.arrived), thin, said))
    yield from held
    yield from computed


def _folding(rows: pandas.DataFrame, begin: float, end: float) -> Iterator[Bar]:
    """Yield the times from the last answer of an exchange to the first task of the next one of its start."""
    tasks, keys = rows[rows.what != "evaluate"], ["start", "round", "exchange"]
    steps = tasks.groupby(keys).agg(given=("given", "min"), arrived=("arrived", "max"))
    ordered = [(*key, row.given, row.arrived) for key, row in steps.sort_values("given").iterrows()]
    for (start, number, _, _, last), (same, after, _, first, _) in pairwise(ordered):
        if start == same and last < first and last < end and first > begin:
            what = f"between rounds {number} and {after}" if after != number else f"in round {number}"
            yield Bar(0, float(last), float(first), "folding", f"{what}: {_seconds(first - last)}")


def _rectangle(bar: Bar, begin: float, end: float, scale: float) -> str:
    left, right = max(bar.begin, begin), min(bar.end, end)
    inset = THIN if bar.kind == "holding" or bar.kind.endswith("unsaid") else 0.0
    return (
        f'<rect class="{bar.kind}" x="{LEFT + scale * (left - begin):.2f}" '
        f'y="{LANE * bar.lane + 3 + inset:.1f}" width="{max(0.6, scale * (right - left)):.2f}" '
        f'height="{BAR - 2 * inset:.0f}"><title>{escape(bar.said)}</title></rect>'
    )


def _ticks(begin: float, end: float, scale: float, height: float) -> Iterator[str]:
    rough = max(end - begin, 1e-9) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    for n in range(math.ceil(begin / step), math.floor(end / step) + 1):
        x = LEFT + scale * (n * step - begin)
        unit = " s" if n == math.ceil(begin / step) else ""
        yield f'<path class="rule" d="M{x:.1f} 0V{height + 4:.0f}"/>'
        said = f"{n * step:,.{digits}f}{unit}"
        yield f'<text x="{x:.1f}" y="{height + 18:.0f}" text-anchor="middle">{said}</text>'


def _seconds(x: float) -> str:
    return f"{1000 * x:.3g} ms" if x < 1 else f"{x:.3g} s"
