"""fedsim schedule: preview a participation schedule as a grid of clients and rounds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from launch import terminal
from launch.commands.errors import Command
from launch.commands.shared import json_option
from launch.configuration import names

if TYPE_CHECKING:
    from fedsim.participation import Participation, Schedule

FOLDED, LOST, GONE, ABSENT = "█", "x", "o", "·"
MOST_LINES = 40


@click.command(cls=Command)
@click.argument("spec", metavar="SCHEDULE")
@click.option("--clients", type=click.IntRange(min=1), metavar="N", default=10, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), metavar="R", default=20, show_default=True)
@click.option("--seed", type=int, metavar="S", default=0, show_default=True)
@json_option
def schedule(spec: str, clients: int, rounds: int, seed: int, as_json: bool) -> None:
    """Print which clients take part in which rounds of a run with --participation SCHEDULE.

    size:N is drawn here as if client k had k + 1 examples.
    """
    names.check_schedule(spec)
    from rich.text import Text

    from fedsim import event_rules
    from fedsim.participation import schedule

    _, up, down = event_rules.split(spec)
    created = schedule(spec, clients=clients, seed=seed, sizes=tuple(range(1, clients + 1)))
    if as_json:
        return terminal.print_json(
            {"schedule": spec, "clients": clients, "seed": seed, "rounds": to_json(created, rounds)}
        )
    console = terminal.console()
    for line in lines(created, clients, rounds, max(20, console.width - 22)):
        console.print(Text(line), soft_wrap=True)
    if up or down:
        console.print("A message is sent only if it changes enough (+event, +quiet).")
    return None


def to_json(created: Schedule, rounds: int) -> list[dict[str, Any]]:
    """Return the grid for --json, one object per round; `lost` and `gone` are subsets of `participants`."""
    participations = [(r, created(r)) for r in range(1, rounds + 1)]
    return [
        {
            "round": r,
            "participants": list(p.participants),
            "lost": sorted(p.lost_uploads),
            "gone": sorted(p.dropouts),
        }
        for r, p in participations
    ]


def lines(created: Schedule, clients: int, rounds: int, width: int) -> Iterator[str]:
    """Yield the lines of the grid and a summary. The grid is cut to `width` rounds and MOST_LINES clients."""
    participations = [created(r) for r in range(1, rounds + 1)]
    columns, many = participations[:width], min(clients, MOST_LINES)
    label = len(str(max(clients - 1, 0))) + 8
    yield f"{'round':<{label}}{_projection(len(columns))}"
    for k in range(many):
        took = sum(k in t.participants for t in participations)
        cells = "".join(cell(t, k) for t in columns)
        yield f"{f'client {k}':<{label}}{cells}  {took:>{len(str(rounds))}} of {rounds}"
    if many < clients:
        yield f"... and {clients - many:,} more clients"
    if len(columns) < rounds:
        yield f"... and {rounds - len(columns):,} more rounds"
    yield f"{FOLDED} folded  {LOST} upload lost  {GONE} gone after the download  {ABSENT} absent"
    yield from _totals(participations, clients)


def cell(participation: Participation, k: int) -> str:
    if k not in participation.participants:
        return ABSENT
    return GONE if k in participation.dropouts else LOST if k in participation.lost_uploads else FOLDED


def _projection(columns: int) -> str:
    """Return the line with the numbers of rounds 1, 10, 20, ... above their columns."""
    out = [" "] * (columns + 4)
    for r in (1, *range(10, columns + 1, 10)):
        out[r - 1 : r - 1 + len(str(r))] = str(r)
    return "".join(out).rstrip()


def _totals(participations: list[Participation], clients: int) -> Iterator[str]:
    counts = [len(t.participants) for t in participations]
    times = [0] * clients
    for t in participations:
        for k in t.participants:
            times[k] += 1
    mean = sum(counts) / len(counts)
    empty = counts.count(0)
    yield (
        f"per round {min(counts):,} to {max(counts):,} clients, {mean:,.1f} on average ({mean / clients:.1%})"
        + (f"; {empty} empty rounds" if empty else "")
    )
    yield (
        f"per client {min(times):,} to {max(times):,} of {len(participations):,} rounds"
        + (f"; {times.count(0):,} clients never take part" if 0 in times else "")
    )
    lost, gone = (sum(len(getattr(t, name)) for t in participations) for name in ("lost_uploads", "dropouts"))
    if lost or gone:
        yield f"of {sum(counts):,} broadcasts {gone:,} get no answer and {lost:,} uploads are lost"
