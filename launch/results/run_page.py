"""fedsim report: RUN/report.html."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas

from fedsim.errors import FedsimError, UsageError
from fedsim.experiment import dotted
from fedsim.participation import schedule
from launch.results import html
from launch.results.field_bars import stack
from launch.results.figures import Line, chart
from launch.results.statistics import Values, sides
from launch.results.timeline import timeline
from launch.runs.reader import Run, every_round

MOST_CLIENTS, MOST_ROUNDS = 60, 200
MEASURES = {"test_accuracy": "accuracy", "test_nll": "NLL (nats)"}


def report(folder: Path, out: Path | None = None) -> Path:
    """Write the page; returns its path.

    Raises:
        UsageError: if an argument is wrong.
        DataError: if data is missing or damaged.
        DiskError: if the disk cannot be read or written.
    """
    path = out or folder / "report.html"
    html.save(path, render(Run.open(folder).checked()))
    return path


def render(run: Run) -> str:
    """Render the page of a run.

    Raises:
        UsageError: if an argument is wrong.
        DataError: if data is missing or damaged.
    """
    summary = run.summary if (run.path / "summary.json").is_file() else {}
    experiment = run.experiment
    title = f"{run.label} on {experiment['dataset']}"
    info = f"P = {run.params:,}, {experiment['clients']} clients, seed {experiment['seed']}"
    return html.page(
        title,
        (
            f'<h1>{escape(title)}</h1><p class="soft">{escape(info)} · {escape(str(run.path))}</p>',
            _state(summary),
            html.tiles(_figures(summary)),
            html.section("Learning", _curves(run)),
            html.section("Bytes by field and layer", *_bytes(run)),
            html.section("Participation", _participation(run, int(summary.get("rounds", 0)))),
            html.section("Timeline", timeline(run.path / "timeline.csv")),
            html.section("Bill", _traffic_summary(run)),
            html.section(
                "Experiment",
                html.pairs(
                    dict(
                        dotted(
                            {
                                k: v
                                for k, v in experiment.items()
                                if k not in ("hyperparameters", "client_sizes")
                            }
                        )
                    )
                ),
            ),
            html.section(
                "Hyperparameters", html.pairs(dict(dotted(experiment.get("hyperparameters") or {})))
            ),
            html.section("Execution", html.pairs(dict(dotted(run.manifest.get("execution") or {})))),
            html.section("Versions", html.pairs(dict(dotted(run.manifest.get("versions") or {})))),
        ),
    )


def numbers(frame: pandas.DataFrame, name: str) -> Values:
    """A column as floats; null and a column that is not there are nan."""
    if name not in frame:
        return np.full(len(frame), np.nan)
    return np.asarray(pandas.to_numeric(frame[name], errors="coerce"), dtype=np.float64)


def _state(summary: Mapping[str, Any]) -> str:
    status = summary.get("status", "not ended")
    if status == "done":
        return ""
    error = f": {summary['error']}" if summary.get("error") else ""
    return f'<p class="bad">This run is {escape(str(status))}{escape(error)}</p>'


def _figures(summary: Mapping[str, Any]) -> dict[str, str]:
    def figure(key: str, form: str, scale: float = 1) -> str:
        value = summary.get(key)
        return format(value * scale, form) if isinstance(value, int | float) else "–"

    return {
        "accuracy": figure("test_accuracy", ".2%"),
        "NLL": figure("test_nll", ".4f"),
        "rounds": figure("rounds", ",d"),
        "MB down": figure("bytes_down", ",.3f", 1e-6),
        "MB up": figure("bytes_up", ",.3f", 1e-6),
        "s per round": figure("seconds_round_median", ".2f"),
    }


def _curves(run: Run) -> str:
    none = '<p class="soft">No round was evaluated.</p>'
    try:
        metrics = run.metrics
    except (UsageError, KeyError):  # no file, or an empty one
        return none
    if not len(metrics):
        return none
    axes = {"round": numbers(metrics, "round"), "megabytes, both directions": numbers(metrics, "MB")}
    if every_round(metrics["round"].tolist()):  # else the seconds of the others are in no line
        axes["seconds, wall"] = numbers(metrics, "seconds").cumsum()
        if "simulated_seconds" in metrics:  # the start has none
            axes["seconds, simulated"] = np.nan_to_num(numbers(metrics, "simulated_seconds")).cumsum()
    across = 3 if len(axes) == 3 else 2  # rows are measures, or axes
    pairs = [(key, axis) for key in MEASURES for axis in axes]
    if across == 2:
        pairs.sort(key=lambda pair: list(axes).index(pair[1]))
    drawn = [
        chart([Line(MEASURES[key], axes[axis], numbers(metrics, key))], axis, MEASURES[key])
        for key, axis in pairs
    ]
    return html.charts(*drawn, across=across) or none


def _own(run: Run) -> pandas.DataFrame:
    try:
        rows = run.ledger
    except UsageError:
        return pandas.DataFrame()
    return rows[rows.kind == "algorithm"]


def _bytes(run: Run) -> Iterator[str]:
    rows = _own(run)
    if not len(rows):
        return
    by = sides(rows, ["field", "layer"])
    for side, title in (("down", "Down"), ("up", "Up")):
        parts = {" ".join(filter(None, key)): int(n) for key, n in by[side].items() if n}
        yield stack(title, parts)


def _traffic_summary(run: Run) -> str:
    rows = _own(run)
    if not len(rows):
        return ""
    by = sides(rows, ["field", "layer"])
    lines = [
        [field or "–", layer, f"{row['down']:,}", f"{row['up']:,}", f"{row['down'] + row['up']:,}"]
        for (field, layer), row in by.iterrows()
    ]
    down, up = int(by["down"].sum()), int(by["up"].sum())
    lines.append(["total", "", f"{down:,}", f"{up:,}", f"{down + up:,}"])
    return html.table(["field", "layer", "bytes down", "bytes up", "bytes"], lines, 2)


def _participation(run: Run, rounds: int) -> str:
    """As the run's schedule says, which decides it; what is cut is said below."""
    experiment = run.experiment
    clients = int(experiment["clients"])
    try:
        participations = schedule(
            str(experiment["participation"]),
            clients=clients,
            seed=int(experiment["seed"]),
            sizes=tuple(experiment.get("client_sizes") or ()),
        )
        shown = [participations(r) for r in range(1, min(rounds, MOST_ROUNDS) + 1)]
    except FedsimError:  # a trace file that has gone
        return '<p class="soft">The schedule of this run can no longer be read.</p>'
    if not shown:
        return ""
    many, side = min(clients, MOST_CLIENTS), 10
    cells = []
    for x, participation in enumerate(shown):
        participants, unfolded = (
            set(participation.participants),
            participation.lost_uploads | participation.dropouts,
        )
        for k in range(many):
            kind = "away" if k not in participants else "lost" if k in unfolded else "took"
            cells.append(f'<rect class="{kind}" x="{x * side}" y="{k * side}" width="9" height="9"/>')
    width, height = len(shown) * side, many * side
    drawn = (
        f'<div class="wide"><svg class="grid" role="img" aria-label="participation" '
        f'viewBox="0 0 {width} {height}" style="max-width: {width * 1.4:.0f}px">{"".join(cells)}</svg></div>'
    )
    key = "".join(
        f'<span class="key"><i style="background: var(--{colour})"></i>{what}</span>'
        for colour, what in (("c0", "folded"), ("c1", "took part, not folded"), ("line", "away"))
    )
    cut = [f"clients 0 to {many - 1} of {clients:,} downwards, rounds 1 to {len(shown)} of {rounds:,} across"]
    return f'{drawn}<p>{key}</p><p class="soft">{cut[0]}</p>'
