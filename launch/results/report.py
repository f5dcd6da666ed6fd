"""fedsim report: the page RUN/report.html."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas

from fedsim import event_rules
from fedsim.errors import FedsimError, UsageError
from fedsim.experiment import dotted
from fedsim.participation import Participation, schedule
from fedsim.printable import printable
from launch.configuration.target_accuracy import percent
from launch.results import html
from launch.results.card import EMPTY, card
from launch.results.clients_section import client_scores, clients
from launch.results.downloads import EMBEDDED, link, saved
from launch.results.field_bars import ordered, stack
from launch.results.figures import Bars, bar_chart
from launch.results.groups import ComparedRun, Group, settings_of
from launch.results.run_curves import calibration, diagnostics, learning
from launch.results.statistics import sides
from launch.results.tables import NONE
from launch.runs.folder import RunFolder
from launch.terminal import percentage
from workers.numerics import DRIFT
from workers.storage.metrics_file import LISTS


def report(folder: Path, out: Path | None = None) -> Path:
    """Write the page; return its path."""
    path = out or folder / "report.html"
    html.save(path, render(RunFolder.open(folder).checked()))
    return path


def render(run: RunFolder) -> str:
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
            html.section("Scores by client", *(client_scores(metrics, experiment) if evaluated else ())),
            html.section("Diagnostics", *(diagnostics(metrics) if evaluated else ()), _mismatch(summary)),
            html.section("Bytes by field and layer", *(bytes_by_field(rows) if len(rows) else ())),
            html.section("Bill", *((*bill(rows), units(run), *hops(summary)) if len(rows) else ())),
            html.section("Participation", participation_grid(run, _rounds(summary, metrics))),
            html.section("Staleness", *staleness(summary)),
            html.section("Clients", *(clients(rows, experiment, summary, last) if len(rows) else ())),
            html.section("Processes", *processes(run)),
            html.section("Data", *_data(run, metrics)),
            html.section("What a paper states", *_card(run)),
        ),
    )


def _metrics(run: RunFolder) -> pandas.DataFrame:
    try:
        return run.metrics
    except (UsageError, KeyError):  # no file, or an empty one
        return pandas.DataFrame()


def _own(run: RunFolder) -> pandas.DataFrame:
    """Return the algorithm's rows of the ledger."""
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
    """Return the number of completed rounds that the files show."""
    evaluated = int(metrics["round"].max()) if len(metrics) else 0
    return max(int(summary.get("rounds") or 0), evaluated)


def _state(run: RunFolder, summary: Mapping[str, Any], metrics: pandas.DataFrame) -> str:
    """Return the status, with a highlighted warning if the run's workers had different environments."""
    drift = f'<p class="bad">{escape(DRIFT)}: {escape("; ".join(run.drift))}.</p>' if run.drift else ""
    return _ended(run, summary, metrics) + drift.replace("this run", "This run", 1)


def _ended(run: RunFolder, summary: Mapping[str, Any], metrics: pandas.DataFrame) -> str:
    """Return the status, highlighted if the run is unfinished."""
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


TILES = {
    "accuracy": ("test_accuracy", "%"),
    "NLL": ("test_nll", ".4f"),
    "ECE": ("test_ece", ".4f"),
    "Brier score": ("test_brier", ".4f"),
    "accuracy, worst client": ("client_accuracy_worst", "%"),
    "accuracy, posterior samples": ("ensemble_accuracy", "%"),
    "NLL, posterior samples": ("ensemble_nll", ".4f"),
    "ECE, posterior samples": ("ensemble_ece", ".4f"),
    "Brier, posterior samples": ("ensemble_brier", ".4f"),
    "rounds": ("rounds", ",.0f"),
    "MB down": ("bytes_down", ",.3f"),
    "MB up": ("bytes_up", ",.3f"),
    "s per round": ("seconds_round_median", ".2f"),
    "s, simulated": ("simulated_seconds", ",.1f"),
    "J, all clients": ("client_joules_total", ",.4g"),
}
"""The key and the format of the number of each tile, by title."""
ALWAYS = ("accuracy", "NLL", "rounds", "MB down", "MB up", "s per round")
"""Tiles that are shown even without a number."""


def _figures(run: RunFolder, summary: Mapping[str, Any], metrics: pandas.DataFrame) -> dict[str, str]:
    """Return the tiles, from summary.json and, for numbers that it lacks, from metrics.jsonl."""
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

    tiles: dict[str, str] = {}
    for title, (key, form) in TILES.items():
        value, scale = known.get(key), 1e-6 if title.startswith("MB") else 1
        if not isinstance(value, int | float) or value != value:  # NaN
            tiles |= {title: NONE} if title in ALWAYS else {}
        else:
            tiles[title] = percentage(value) if form == "%" else format(value * scale, form)
    return tiles


def _mismatch(summary: Mapping[str, Any]) -> str:
    mismatch = summary.get("dual_mismatch")
    if mismatch is None:
        return ""
    return html.soft(
        f"Dual mismatch at the end (the server's sum against the clients' duals): {mismatch:.3g}."
    )


def _data(run: RunFolder, metrics: pandas.DataFrame) -> Iterator[str]:
    """Yield links to the numbers of the charts: embedded files if they are small, otherwise file names."""
    if len(metrics):
        table = metrics.drop(columns=["participants", *LISTS], errors="ignore")
        yield _download(
            "metrics.csv", printable(table.to_csv(index=False)).encode(), "one line per evaluated round"
        )
    rows = "every byte by round, client, field and layer"
    for name, what in (("ledger.csv", rows), ("timeline.csv", "when each task ran")):
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


def _card(run: RunFolder) -> Iterator[str]:
    """Yield the card of fedsim card, and how the run was started."""
    yield from card(Group(run.label, settings_of(run), (ComparedRun(run),))).html()
    execution = {k: v for k, v in dotted(run.manifest.get("execution") or {}) if v not in EMPTY}
    yield html.columns([("Execution", html.pairs(execution))])


# ---- sections


def bytes_by_field(rows: pandas.DataFrame) -> Iterator[str]:
    """Yield a bar per direction, from the algorithm's rows of the ledger."""
    by = sides(rows, ["field", "layer"])
    for side, title in (("down", "Down"), ("up", "Up")):
        yield stack(title, {" ".join(filter(None, key)): int(n) for key, n in by[side].items() if n})


def bill(rows: pandas.DataFrame) -> Iterator[str]:
    """Yield a table of bytes by field, layer and codec, with the size of the values without a codec."""
    keys = ["field", "layer", "codec"]
    by = sides(rows, keys)
    by["dense"] = rows.groupby(keys)["dense_bytes"].sum()
    places = {name: n for n, name in enumerate(ordered({_part(*key[:2]) for key in by.index}))}
    lines, compressed = [], False
    for (field, layer, codec), row in sorted(by.iterrows(), key=lambda item: places[_part(*item[0][:2])]):
        dense = f"{row['dense']:,}" if layer == "values" else NONE
        compressed = compressed or codec not in ("", "dense")
        cells = (f"{n:,}" for n in (row["down"], row["up"], row["down"] + row["up"]))
        lines.append([field or NONE, layer, codec or NONE, *cells, dense])
    down, up = int(by["down"].sum()), int(by["up"].sum())
    other = int(by[by.index.get_level_values("field") == ""][["down", "up"]].sum().sum())
    plain = int(by["dense"].sum()) + other
    lines.append(["total", "", "", f"{down:,}", f"{up:,}", f"{down + up:,}", f"{plain:,}"])
    heads = ["field", "layer", "codec", "bytes down", "bytes up", "bytes", "dense would be"]
    yield html.table(heads, lines, 3)
    if compressed and down + up:
        yield html.soft(
            f"Dense would be the values as they are, with today's headers and framing: "
            f"{plain / (down + up):.2f} times as much."
        )


def hops(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield the bytes of each hop of a run with edge servers; nothing for other runs."""
    spent = summary.get("bytes") or {}
    if "edge" not in spent:
        return
    lines = []
    for name, kind in (("clients and edge servers", "algorithm"), ("edge servers and server", "edge")):
        both = [sum(sum(of.values()) for of in spent[kind].get(side, {}).values()) for side in ("down", "up")]
        lines.append([name, *(f"{n:,}" for n in (*both, sum(both)))])
    yield html.table(["between", "bytes down", "bytes up", "bytes"], lines)
    yield html.soft("The bill above and the sums of this page are of the hop of the clients.")


def _part(field: str, layer: str) -> str:
    return " ".join(filter(None, (field, layer)))


def units(run: RunFolder) -> str:
    """Return a text with the cost per client and round and the one-time cost per client, in units of P."""
    own = ComparedRun(run)

    def both(once: bool) -> str:
        return ", ".join(f"{own.units(side, once):.3f} P {side}" for side in ("down", "up"))

    once = any(own.units(side, once=True) for side in ("down", "up"))
    return html.soft(f"Per client and round: {both(False)}." + (f" Once per client: {both(True)}." * once))


def staleness(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table of uploads by staleness; nothing for a synchronous run."""
    steps = summary.get("asynchronous")
    if not steps:
        return
    counts = steps["staleness"]
    yield html.charts(histogram(counts))
    yield html.soft(
        f"mean {steps['staleness_mean']:.2f}, largest {len(counts) - 1}; {steps['simulated_seconds']:,.1f} "
        "simulated seconds. The staleness of an upload is how many steps the server has taken since the "
        "broadcast that it answers. Which uploads are folded in which step follows from the virtual clock."
    )


def histogram(counts: list[int]) -> str:
    """Draw the number of uploads by staleness, from 0, with a link to the numbers."""
    steps = np.arange(len(counts), dtype=np.float64)
    return bar_chart(
        "uploads by staleness",
        ("steps of the server since the broadcast", "uploads"),
        np.subtract(steps, 0.46),
        np.add(steps, 0.46),
        [Bars("uploads", np.array(counts, dtype=np.float64))],
        said=lambda n: f"staleness {n}",
    )


SHOWN = {"node": "machine", "device": "computes on", "gpu": "GPU", "engine": "engine", "pid": "process id"}
"""Keys of processes.json and their headings; a key that no process has is left out."""
OPEN = 20
"""The table is open if it has at most this many processes."""


def processes(run: RunFolder) -> Iterator[str]:
    """Yield a table of RUN/processes.json; nothing if the file does not exist."""
    rows = run.processes
    keys = [key for key in SHOWN if any(row.get(key) for row in rows)]
    if not keys:
        return
    heads = ["", *(SHOWN[key] for key in keys), "from", "to"]
    lines = []
    for row in rows:
        role = str(row.get("role", ""))
        name = f"{role} {row.get('index')}" if role.endswith("worker") else role
        times = (str(row.get(key) or "").partition("T")[2][:8] for key in ("started", "ended"))
        lines.append([name, *(str(row.get(key) or "") for key in keys), *times])
    last = " of the last start" if len(run.starts) > 1 else ""
    title = f"Table of processes{last}"
    yield html.folded(title, html.table(heads, lines, len(heads)), opened=len(rows) <= OPEN)
    if reasons := run.not_recorded:
        yield html.soft(f"Training steps that were not recorded on a GPU: {'; '.join(reasons)}.")


# ---- the grid of clients and rounds

ACROSS, DOWN = 200, 60
"""Maximum numbers of columns and rows. The larger of clients and rounds is the horizontal axis."""
CELL, WIDEST, HIGHEST = 14.0, 1000.0, 420.0
"""Maximum pixels of a cell, and of the picture's width and height."""


def participation_grid(run: RunFolder, rounds: int) -> str:
    """Draw the run's schedule, and note which part is shown. rounds: the number of completed rounds."""
    experiment = run.experiment
    clients = run.clients
    try:
        participations = schedule(
            str(experiment["participation"]),
            clients=clients,
            seed=int(experiment["seed"]),
            sizes=tuple(experiment.get("client_sizes") or ()),
            decided=_by_the_clock(run) if experiment.get("asynchronous") else None,
        )
        turned = clients > rounds  # clients are on the horizontal axis
        shown = [participations(r) for r in range(1, min(rounds, DOWN if turned else ACROSS) + 1)]
    except FedsimError:  # a trace file no longer exists
        return html.soft("The schedule of this run can no longer be read.")
    if not shown:
        return ""
    many = min(clients, ACROSS if turned else DOWN)
    width, height = (many, len(shown)) if turned else (len(shown), many)
    widest = min(CELL * width, WIDEST, HIGHEST * width / height)
    silent = _silent(run)
    cells = "".join(_cells(shown, many, turned, silent))
    rules = [("c2", "sent nothing (+event)")] if silent else []
    key = "".join(
        f'<span class="key"><i style="background: var(--{colour})"></i>{what}</span>'
        for colour, what in (("c0", "folded"), *rules, ("c1", "took part, not folded"), ("line", "away"))
    )
    data = saved("participation", ("round", "client", "state"), _states(shown, clients, silent))
    which = (
        f"clients {_range(0, many - 1, clients)} {'across' if turned else 'downwards'}, "
        f"rounds {_range(1, len(shown), rounds)} {'downwards' if turned else 'across'}"
    )
    return (
        f'<div class="wide"><svg class="grid" role="img" aria-label="participation" '
        f'viewBox="0 0 {10 * width} {10 * height}" style="max-width: {widest:.0f}px">{cells}</svg></div>'
        f"<p>{key} {data}</p>{html.soft(which)}"
    )


def _by_the_clock(run: RunFolder) -> Callable[[int], tuple[int, ...]]:
    """Return a function from a round to the clients that, according to the ledger, got its broadcast."""
    rows = run.ledger
    down = rows[(rows.kind == "algorithm") & (rows.direction == "down")]
    by_round = {int(r): tuple(sorted({int(k) for k in ks})) for r, ks in down.groupby("round").client}
    return lambda round: by_round.get(round, ())


def _silent(run: RunFolder) -> frozenset[tuple[int, int]]:
    """Return the (round, client) pairs whose upload, according to the ledger, has no fields."""
    if event_rules.split(str(run.experiment["participation"]))[1] is None:
        return frozenset()
    rows = run.ledger
    up = rows[(rows.kind == "algorithm") & (rows.message == "upload") & (rows["round"] > 0)]
    all_of, sent = (
        {(int(r), int(k)) for r, k in zip(part["round"], part.client, strict=True)}
        for part in (up, up[up.layer == "values"])
    )
    return frozenset(all_of - sent)


def _range(first: int, last: int, of: int) -> str:
    return f"{first} to {last} of {of:,}" if last > first else f"{first} of {of:,}"


def _mark(participation: Participation, client: int, silent: bool) -> str:
    """Return the CSS class (report.css) of a client's cell in a round."""
    if client not in participation.participants:
        return "away"
    if client in participation.lost_uploads | participation.dropouts:
        return "lost"
    return "silent" if silent else "took"


def _states(
    shown: Sequence[Participation], clients: int, silent: frozenset[tuple[int, int]]
) -> Iterator[tuple[int, int, str]]:
    """Yield the round, client and state of all clients that took part in the grid's rounds."""
    names = {"took": "folded", "lost": "not folded", "silent": "sent nothing"}
    for number, participation in enumerate(shown, 1):
        for k in sorted(participation.participants):
            if k < clients:
                yield number, k, names[_mark(participation, k, (number, k) in silent)]


def _cells(
    shown: Sequence[Participation], many: int, turned: bool, silent: frozenset[tuple[int, int]]
) -> Iterator[str]:
    for n, participation in enumerate(shown):
        for k in range(many):
            kind = _mark(participation, k, (n + 1, k) in silent)
            x, y = (k, n) if turned else (n, k)
            yield f'<rect class="{kind}" x="{10 * x}" y="{10 * y}" width="9" height="9"/>'
