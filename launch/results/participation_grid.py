"""Who took part when, as a grid of clients and rounds, by the run's schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from fedsim.errors import FedsimError
from fedsim.participation import Participation, schedule
from launch.results import html
from launch.results.downloads import saved
from launch.runs.folder import RunFolder

ACROSS, DOWN = 200, 60
"""Most cells of the grid; the larger of clients and rounds goes across."""
CELL, WIDEST, HIGHEST = 14.0, 1000.0, 420.0
"""Pixels of a cell at most, and of the whole picture."""


def participation_grid(run: RunFolder, rounds: int) -> str:
    """Draw participation from the run's schedule, and note what is left out. rounds: how many have ended."""
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
        turned = clients > rounds  # clients go across
        shown = [participations(r) for r in range(1, min(rounds, DOWN if turned else ACROSS) + 1)]
    except FedsimError:  # a trace file that has gone
        return html.soft("The schedule of this run can no longer be read.")
    if not shown:
        return ""
    many = min(clients, ACROSS if turned else DOWN)
    width, height = (many, len(shown)) if turned else (len(shown), many)
    widest = min(CELL * width, WIDEST, HIGHEST * width / height)
    cells = "".join(_cells(shown, many, turned))
    key = "".join(
        f'<span class="key"><i style="background: var(--{colour})"></i>{what}</span>'
        for colour, what in (("c0", "folded"), ("c1", "took part, not folded"), ("line", "away"))
    )
    data = saved("participation", ("round", "client", "state"), _states(shown, clients))
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
    """Participants of an asynchronous run, by its ledger: the clients that got a round's broadcast."""
    rows = run.ledger
    down = rows[(rows.kind == "algorithm") & (rows.direction == "down")]
    by_round = {int(r): tuple(sorted({int(k) for k in ks})) for r, ks in down.groupby("round").client}
    return lambda round: by_round.get(round, ())


def _range(first: int, last: int, of: int) -> str:
    return f"{first} to {last} of {of:,}" if last > first else f"{first} of {of:,}"


def _state(participation: Participation, client: int) -> str:
    """A class of report.css."""
    if client not in participation.participants:
        return "away"
    return "lost" if client in participation.lost_uploads | participation.dropouts else "took"


def _states(shown: Sequence[Participation], clients: int) -> Iterator[tuple[int, int, str]]:
    """Yield the clients that took part in each round of the grid."""
    names = {"took": "folded", "lost": "not folded"}
    for number, participation in enumerate(shown, 1):
        for k in sorted(participation.participants):
            if k < clients:
                yield number, k, names[_state(participation, k)]


def _cells(shown: Sequence[Participation], many: int, turned: bool) -> Iterator[str]:
    for n, participation in enumerate(shown):
        for k in range(many):
            kind = _state(participation, k)
            x, y = (k, n) if turned else (n, k)
            yield f'<rect class="{kind}" x="{10 * x}" y="{10 * y}" width="9" height="9"/>'
