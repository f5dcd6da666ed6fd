"""fedsim report: RUN/report.html."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import pandas

from fedsim.errors import UsageError
from fedsim.experiment import dotted
from fedsim.printable import printable
from launch.configuration.target_accuracy import percent
from launch.results import html
from launch.results.client_scores import client_scores
from launch.results.clients_section import clients
from launch.results.downloads import EMBEDDED, link
from launch.results.participation_grid import participation_grid
from launch.results.processes import processes
from launch.results.run_bill import bill, bytes_by_field, hops, units
from launch.results.run_curves import calibration, diagnostics, learning
from launch.results.staleness import staleness
from launch.results.tables import NONE
from launch.results.timeline import timeline
from launch.runs.folder import RunFolder
from launch.terminal import percentage
from workers.numerics import DRIFT
from workers.storage.metrics_file import LISTS


def report(folder: Path, out: Path | None = None) -> Path:
    """Write the page; returns its path.

    Raises:
        UsageError: if an argument is wrong.
        DataError: if data is missing or damaged.
        DiskError: if the disk cannot be read or written.
    """
    path = out or folder / "report.html"
    html.save(path, render(RunFolder.open(folder).checked()))
    return path


def render(run: RunFolder) -> str:
    """Render the page of a run.

    Raises:
        UsageError: if an argument is wrong.
        DataError: if data is missing or damaged.
    """
    summary = run.summary
    experiment, metrics, rows = run.experiment, _metrics(run), _own(run)
    title = f"{run.label} on {experiment['dataset']}"
    info = f"P = {run.params:,}, {experiment['clients']} clients, seed {experiment['seed']}"
    evaluated = len(metrics) > 0
    last = dict(metrics.iloc[-1]) if evaluated else {}
    return html.page(
        title,
        (
            f'<h1>{escape(title)}</h1><p class="soft">{escape(info)} · {escape(str(run.path))}</p>',
            _state(run, summary, metrics),
            html.tiles(_figures(run, summary, metrics)),
            html.soft(html.HINT) if evaluated else "",
            html.section(
                "Learning",
                learning(metrics, float(experiment.get("until") or 0))
                if evaluated
                else html.soft("No round was evaluated."),
            ),
            html.section("Calibration", *(calibration(metrics) if evaluated else ())),
            html.section("Scores by client", *(client_scores(metrics) if evaluated else ())),
            html.section("Diagnostics", *(diagnostics(metrics) if evaluated else ()), _mismatch(summary)),
            html.section("Bytes by field and layer", *(bytes_by_field(rows) if len(rows) else ())),
            html.section("Bill", *((*bill(rows), units(run), *hops(summary)) if len(rows) else ())),
            html.section("Participation", participation_grid(run, _rounds(summary, metrics))),
            html.section("Staleness", *staleness(summary)),
            html.section("Clients", *(clients(rows, experiment, summary, last) if len(rows) else ())),
            html.section("Timeline", timeline(run.path / "timeline.csv")),
            html.section("Processes", *processes(run)),
            html.section("Data", *_data(run, metrics)),
            html.section("Provenance", _provenance(run)),
            html.section("Settings", _settings(run)),
        ),
    )


def _metrics(run: RunFolder) -> pandas.DataFrame:
    try:
        return run.metrics
    except (UsageError, KeyError):  # no file, or an empty one
        return pandas.DataFrame()


def _own(run: RunFolder) -> pandas.DataFrame:
    """The algorithm's rows of the ledger."""
    try:
        rows = run.ledger
    except UsageError:
        return pandas.DataFrame()
    return rows[rows.kind == "algorithm"]


STATES = {
    "running": "is running",
    "interrupted": "was interrupted",
    "killed": "was killed",
    "damaged": "is damaged",
}
"""The page's text for a status."""


def _rounds(summary: Mapping[str, Any], metrics: pandas.DataFrame) -> int:
    """Return the number of rounds that have ended, as far as is known."""
    evaluated = int(metrics["round"].max()) if len(metrics) else 0
    return max(int(summary.get("rounds") or 0), evaluated)


def _state(run: RunFolder, summary: Mapping[str, Any], metrics: pandas.DataFrame) -> str:
    """The status, and that bits may differ; so that no one overlooks what is not as it should be."""
    drift = f'<p class="bad">{escape(DRIFT)}: {escape("; ".join(run.drift))}.</p>' if run.drift else ""
    return _ended(run, summary, metrics) + drift.replace("this run", "This run", 1)


def _ended(run: RunFolder, summary: Mapping[str, Any], metrics: pandas.DataFrame) -> str:
    """The status; an unfinished run's so that no one overlooks it."""
    rounds, asked = _rounds(summary, metrics), int(run.experiment["rounds"])
    after = f"{rounds} of {asked} rounds"
    if run.status == "done":
        until = run.experiment.get("until")
        why = f": it reached its target accuracy, {percent(until)}" if until and rounds < asked else ""
        return html.soft(f"done after {f'{asked} rounds' if rounds == asked else after}{why}")
    error = f": {summary['error']}" if summary.get("error") else ""
    state = escape(STATES.get(run.status, run.status))
    return (
        f'<p class="bad">This run {state}, after {after}{escape(error)}. '
        f"The numbers below are those of its last evaluated round.</p>"
    )


def _figures(run: RunFolder, summary: Mapping[str, Any], metrics: pandas.DataFrame) -> dict[str, str]:
    """Tiles; of a run without a summary, from the last line of metrics.jsonl."""
    last = dict(metrics.iloc[-1]) if len(metrics) else {}
    known: dict[str, Any] = {
        k: v for k, v in last.items() if str(k).startswith(("test_", "ensemble_", "client_"))
    }
    if len(metrics):
        known |= {f"bytes_{side}": float(metrics[f"bytes_{side}"].sum()) for side in ("down", "up")}
        known["rounds"] = _rounds(summary, metrics)
        later = [float(s) for s in metrics["seconds"][metrics["round"] > 1]] if "seconds" in metrics else []
        known["seconds_round_median"] = statistics.median(later) if later else None
    known |= {k: v for k, v in summary.items() if v is not None}
    known |= summary.get("devices") or {}

    def figure(key: str, form: str, scale: float = 1) -> str:
        value = known.get(key)
        if not isinstance(value, int | float) or value != value:  # NaN
            return NONE
        return percentage(value) if form == "%" else format(value * scale, form)

    if_there = {
        "ECE": figure("test_ece", ".4f"),
        "Brier score": figure("test_brier", ".4f"),
        "accuracy, worst client": figure("client_accuracy_worst", "%"),
        "accuracy, posterior samples": figure("ensemble_accuracy", "%"),
        "NLL, posterior samples": figure("ensemble_nll", ".4f"),
        "ECE, posterior samples": figure("ensemble_ece", ".4f"),
        "Brier, posterior samples": figure("ensemble_brier", ".4f"),
    }
    on_devices = {
        "s, simulated": figure("simulated_seconds", ",.1f"),
        "J, all clients": figure("client_joules_total", ",.4g"),
    }
    return {
        "accuracy": figure("test_accuracy", "%"),
        "NLL": figure("test_nll", ".4f"),
        **{key: text for key, text in if_there.items() if text != NONE},
        "rounds": figure("rounds", ",.0f"),
        "MB down": figure("bytes_down", ",.3f", 1e-6),
        "MB up": figure("bytes_up", ",.3f", 1e-6),
        "s per round": figure("seconds_round_median", ".2f"),
        **{key: text for key, text in on_devices.items() if text != NONE},
    }


def _mismatch(summary: Mapping[str, Any]) -> str:
    mismatch = summary.get("dual_mismatch")
    if mismatch is None:
        return ""
    return html.soft(
        f"Dual mismatch at the end (the server's sum against the clients' duals): {mismatch:.3g}."
    )


def _data(run: RunFolder, metrics: pandas.DataFrame) -> Iterator[str]:
    """Links to the numbers behind the charts: in the page where they are small, else the files' names."""
    if len(metrics):
        table = metrics.drop(columns=["participants", *LISTS], errors="ignore")
        yield _download(
            "metrics.csv", printable(table.to_csv(index=False)).encode(), "one line per evaluated round"
        )
    files = {
        "ledger.csv": "every byte by round, client, field and layer",
        "timeline.csv": "when each task ran",
    }
    for name, what in files.items():
        path = run.path / name
        if not path.is_file():
            continue
        if (size := path.stat().st_size) <= EMBEDDED:
            yield _download(name, path.read_bytes(), what)
        else:
            yield html.soft(f"{path}: {what}, {size / 1e6:.1f} MB")


def _download(name: str, content: bytes, what: str) -> str:
    if len(content) > EMBEDDED:
        return html.soft(f"{name} would have {len(content) / 1e6:.1f} MB; the run folder has the data.")
    return f'<p>{link(name, content)} <span class="soft">{what}</span></p>'


def _provenance(run: RunFolder) -> str:
    """When and how the run was begun, with what."""
    manifest = run.manifest
    command = [str(word) for word in manifest.get("command") or ()]
    if command:
        command[0] = "fedsim"
    values = {
        "command": shlex.join(command),
        "started": manifest.get("started"),
        "source commit": manifest.get("commit"),
        "run": manifest.get("run"),
    }
    return html.pairs({key: value for key, value in values.items() if value})


def _settings(run: RunFolder) -> str:
    experiment, without = run.experiment, ("hyperparameters", "client_sizes")
    tables = {
        "Experiment": {k: v for k, v in experiment.items() if k not in without},
        "Hyperparameters": experiment.get("hyperparameters") or {},
        "Execution": run.manifest.get("execution") or {},
        "Versions": run.manifest.get("versions") or {},
        "Platform": run.manifest.get("platform") or {},
    }
    return html.columns([(title, html.pairs(dict(_filled(values)))) for title, values in tables.items()])


def _filled(values: Mapping[str, Any]) -> Sequence[tuple[str, object]]:
    """Without what is empty."""
    return [(k, v) for k, v in dotted(values) if v not in ("", None, [], {})]
