"""fedsim report: the page RUN/report.html."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedsim import event_rules
from fedsim.experiment import dotted
from fedsim.printable import printable
from launch.numbers import NONE, percentage, ranges, target
from launch.results.card import EMPTY, card, title_of
from launch.results.clients_section import client_scores, clients
from launch.results.field_bars import bars, ordered
from launch.results.figures import COLOURS, FAINT, TWO_COLUMNS, Figure, bar_chart, write_figures
from launch.results.groups import Member, RunGroup, settings_of
from launch.results.html import File, Folded, Page, Part, Text, Tiles
from launch.results.run_curves import calibration, diagnostics, learning
from launch.runs.folder import RunFolder
from launch.runs.tables import part_of, sides
from launch.table import Table
from launch.terminal import write_text
from workers.numerics import DRIFT
from workers.storage.metrics_file import LISTS

EMBEDDED = 400_000
"""The maximum size in bytes of a file that the page contains."""


def report(folder: Path, out: Path | None = None, figures: Path | None = None) -> Path:
    """Write the page; return its path. figures: a folder for its figures."""
    path = out or folder / "report.html"
    run = RunFolder.open(folder).checked()
    run.check_numbers()
    page = page_of(run)
    write_text(path, page.html())
    if figures is not None:
        write_figures(figures, page.figures().values())
    return path


def page_of(folder: RunFolder) -> Page:
    """Return the page of a run."""
    run = Member(folder.path)
    info = f"P = {run.params:,}, {run.experiment['clients']} clients, seed {run.seed} · {run.path}"
    sections: dict[str, Iterable[Part]] = {}
    if run.evaluated:
        sections = {
            "Learning": [learning(run)],
            "Calibration": calibration(run),
            "Scores by client": client_scores(run),
            "Diagnostics": _diagnostics(run),
        }
    if len(run.own_ledger):
        sections |= {"Bytes": bill(run), "Clients": clients(run)}
    sections |= {
        "Participation": participation(run),
        "Staleness": staleness(run.summary),
        "Processes": processes(run),
        "Data": _data(run),
        "What a paper states": _card(run),
    }
    head = [Text(info), *_state(run), Tiles(_numbers(run))]
    if not run.evaluated:
        head.append(Text("No round was evaluated."))
    return Page.of(title_of(run), head, sections)


def numbers_of(run: RunFolder) -> Table:
    """Return the numbers at the top of the page as a table."""
    return Table.pairs(_numbers(Member(run.path)))


STATES = {
    "running": "is running",
    "interrupted": "was interrupted",
    "killed": "was killed",
    "damaged": "is damaged",
}
"""The page's text for a status."""


def _rounds(run: Member) -> int:
    """Return the number of completed rounds that the files show."""
    return max(int(run.summary.get("rounds") or 0), run.rounds)


def _state(run: Member) -> Iterator[Part]:
    """Yield the status, and warnings if the run is unfinished or its workers had different environments."""
    rounds, asked = _rounds(run), int(run.experiment["rounds"])
    after = f"after {rounds} of {asked} rounds"
    if run.status == "done":
        until = run.experiment.get("until")
        why = f": it reached its target accuracy, {target(until)}" if until and rounds < asked else ""
        yield Text(f"done after {asked} rounds" if rounds == asked else f"done {after}{why}")
    else:
        error = f": {run.summary['error']}" if run.summary.get("error") else ""
        state = f"This run {STATES.get(run.status, run.status)}, {after}{error}."
        yield Text(f"{state} The numbers below are those of its last evaluated round.", "warning")
    if run.drift:
        yield Text(f"{DRIFT}: {'; '.join(run.drift)}.".replace("this run", "This run", 1), "warning")


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


def _numbers(run: Member) -> dict[str, str]:
    """Return the tiles, from summary.json and, for numbers that it lacks, from metrics.jsonl."""
    summary, curve = run.summary, run.curve
    known = {k: v for k, v in run.last.items() if k.startswith(("test_", "ensemble_", "client_"))}
    if run.evaluated:
        known |= {f"bytes_{side}": float(curve[f"bytes_{side}"].sum()) for side in ("down", "up")}
        known["rounds"] = _rounds(run)
        later = [*curve["seconds"][curve.index > 1]] if "seconds" in curve else []
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


def _diagnostics(run: Member) -> Iterator[Part]:
    yield from diagnostics(run)
    if (mismatch := run.summary.get("dual_mismatch")) is not None:
        yield Text(f"Dual mismatch at the end (the server's sum against the clients' duals): {mismatch:.3g}.")


def _data(run: Member) -> Iterator[Part]:
    """Yield the numbers as files in the page if they are small, otherwise as file names."""
    if run.evaluated:
        table = run.metrics.drop(columns=["participants", *LISTS], errors="ignore").to_csv(index=False)
        if len(table) <= EMBEDDED:
            yield File("metrics.csv", printable(table), "one line per evaluated round")
    rows = "every byte by round, client, field and layer"
    for name, what in (("ledger.csv", rows), ("timeline.csv", "when each task ran")):
        if not run.has(name):
            continue
        content = run.checked_bytes(name)
        if len(content) <= EMBEDDED:
            yield File(name, content.decode(errors="replace"), what)
        else:
            yield Text(f"{run.path / name}: {what}, {len(content) / 1e6:.1f} MB")


def _card(run: Member) -> Iterator[Part]:
    """Yield the card of fedsim card, and how the run was started."""
    yield from card(RunGroup.of(run.label, settings_of(run), [run])).parts()
    execution = {k: v for k, v in dotted(run.manifest.get("execution") or {}) if v not in EMPTY}
    yield Folded("Execution", [Table.pairs(execution)])


# ---- sections


def bill(run: Member) -> Iterator[Part]:
    """Yield the bytes by field, layer and codec, with the size of the values without a codec, and the costs
    in units of P."""
    keys, rows = ["field", "layer", "codec"], run.own_ledger
    by = sides(rows, keys)
    yield from bars(run.traffic)
    by["dense"] = rows.groupby(keys)["dense_bytes"].sum()
    places = {name: n for n, name in enumerate(ordered({part_of(*key[:2]) for key in by.index}))}
    lines, compressed = [], False
    for (field, layer, codec), row in sorted(by.iterrows(), key=lambda item: places[part_of(*item[0][:2])]):
        dense = f"{row['dense']:,}" if layer == "values" else NONE
        compressed = compressed or codec not in ("", "dense")
        cells = (f"{n:,}" for n in (row["down"], row["up"], row["down"] + row["up"]))
        lines.append([field or NONE, layer, codec or NONE, *cells, dense])
    down, up = int(by["down"].sum()), int(by["up"].sum())
    other = int(by[by.index.get_level_values("field") == ""][["down", "up"]].sum().sum())
    plain = int(by["dense"].sum()) + other
    lines.append(["total", "", "", f"{down:,}", f"{up:,}", f"{down + up:,}", f"{plain:,}"])
    yield Table([*keys, "bytes down", "bytes up", "bytes", "dense would be"], lines, 3)
    if compressed and down + up:
        yield Text(
            f"Dense would be the values as they are, with today's headers and framing: "
            f"{plain / (down + up):.2f} times as much."
        )
    yield Text(units(run))
    yield from hops(run.summary)


def hops(summary: Mapping[str, Any]) -> Iterator[Part]:
    """Yield the bytes of each hop of a run with edge servers; nothing for other runs."""
    spent = summary.get("bytes") or {}
    if "edge" not in spent:
        return
    lines = []
    for name, kind in (("clients and edge servers", "algorithm"), ("edge servers and server", "edge")):
        by = [spent.get(kind, {}).get(side, {}) for side in ("down", "up")]
        both = [sum(sum(of.values()) for of in fields.values()) for fields in by]
        lines.append([name, *(f"{n:,}" for n in (*both, sum(both)))])
    yield Table(["between", "bytes down", "bytes up", "bytes"], lines)
    yield Text("The bytes above and the sums of this page are of the hop of the clients.")


def units(run: Member) -> str:
    """Return a text with the cost per client and round and the one-time cost per client, in units of P."""

    def both(once: bool) -> str:
        return ", ".join(f"{run.units(side, once):.3f} P {side}" for side in ("down", "up"))

    once = any(run.units(side, once=True) for side in ("down", "up"))
    return f"Per client and round: {both(False)}." + (f" Once per client: {both(True)}." * once)


def staleness(summary: Mapping[str, Any]) -> Iterator[Part]:
    """Yield the uploads by staleness; nothing for a synchronous run."""
    steps = summary.get("asynchronous")
    if not steps:
        return
    counts = np.array(steps["staleness"], dtype=np.float64)
    axis, places = ("steps of the server since the broadcast", "uploads"), np.arange(len(counts), dtype=float)
    yield from bar_chart("uploads by staleness", axis, (places, 0.92), {"uploads": counts})
    yield Text(
        f"mean {steps['staleness_mean']:.2f}, largest {len(counts) - 1}; {steps['simulated_seconds']:,.1f} "
        "simulated seconds. The staleness of an upload is how many steps the server has taken since the "
        "broadcast that it answers. Which uploads are folded in which step follows from the virtual clock."
    )


SHOWN = {"node": "machine", "device": "computes on", "gpu": "GPU", "engine": "engine", "pid": "process id"}
"""Keys of processes.json and their headings; a key that no process has is left out."""
OPEN = 20
"""The table is open if it has at most this many processes."""


def processes(run: RunFolder) -> Iterator[Part]:
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
    yield Folded(title, [Table(heads, lines, len(heads))], opened=len(rows) <= OPEN)
    if reasons := run.not_recorded:
        yield Text(f"Training steps that were not recorded on a GPU: {'; '.join(reasons)}.")


# ---- who took part

ACROSS, DOWN = 200, 60
"""The largest numbers of rounds and of clients in the figure."""
STATES_OF_CLIENTS = {
    "away": FAINT,
    "folded": COLOURS[0],
    "sent nothing (+event)": COLOURS[2],
    "took part, not folded": COLOURS[1],
}
"""What a client did in a round, with its colour."""


def participation(run: Member) -> Iterator[Part]:
    """Yield a figure of rounds and clients, and a table of the same rounds, from the journal's commits."""
    commits = {r: commit for r, commit in sorted(run.commits.items()) if r > 0}
    shown, silent = dict(list(commits.items())[:ACROSS]), _silent(run)
    if not shown:
        return
    clients = min(run.clients, DOWN)
    states, lines = np.zeros((clients, len(shown)), dtype=np.int64), []
    for n, (r, commit) in enumerate(shown.items()):
        took, folded = set(commit["participants"]), set(commit["folded"])
        nothing = {k for k in folded if (r, k) in silent}
        for state, ids in enumerate((folded - nothing, nothing, took - folded), 1):
            states[[k for k in ids if k < clients], n] = state
        lines.append(
            [str(r), f"{len(took):,}", *(ranges(list(ids)) for ids in (folded, nothing, took - folded))]
        )

    def draw(drawing: Any) -> None:
        from matplotlib.colors import ListedColormap
        from matplotlib.patches import Patch

        axes, colours = drawing.subplots(), list(STATES_OF_CLIENTS.values())
        ends = (min(shown) - 0.5, max(shown) + 0.5, clients - 0.5, -0.5)
        look: Any = {"cmap": ListedColormap(colours), "vmin": 0, "vmax": len(colours) - 1}
        axes.imshow(states, aspect="auto", interpolation="nearest", extent=ends, **look)
        axes.locator_params(integer=True)
        axes.set_xlabel(f"round, of {max(commits):,}")
        axes.set_ylabel(f"client, of {run.clients:,}")
        handles = [Patch(color=colour, label=name) for name, colour in STATES_OF_CLIENTS.items()]
        drawing.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8)

    yield Figure("participation", draw, None, (TWO_COLUMNS, 1.2 + 0.05 * clients))
    heads = ["round", "took part", "clients folded", "sent nothing", "not folded"]
    yield Folded("numbers", [Table(heads, lines, 5)])


def _silent(run: Member) -> frozenset[tuple[int, int]]:
    """Return the (round, client) pairs whose upload, according to the ledger, has no fields."""
    if event_rules.split(str(run.experiment["participation"]))[1] is None:
        return frozenset()
    rows = run.own_ledger
    up = rows[(rows.message == "upload") & (rows["round"] > 0)]
    all_of, sent = (
        {(int(r), int(k)) for r, k in zip(part["round"], part.client, strict=True)}
        for part in (up, up[up.layer == "values"])
    )
    return frozenset(all_of - sent)
