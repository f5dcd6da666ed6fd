"""The columns of a recipe's tables and plots, checked before anything is run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedsim.errors import UsageError, nearest
from fedsim.round_events import evaluates
from launch.results.columns import Column, column
from launch.runs.tables import SUMS
from launch.sweep.recipe import Differences, Part, Recipe, Table, Trial
from workers.storage.metrics_file import OPTIONAL_SCORES

EVERY_RUN = (
    *("test_accuracy", "test_nll", *OPTIONAL_SCORES),
    *("bytes_down", "bytes_up", "simulated_seconds", "joules", "seconds", "seconds_clients"),
)
"""Numbers that a line of metrics.jsonl may have for any algorithm."""


def check_columns(recipe: Recipe, trials: Sequence[Trial], where: str) -> None:
    """Check that the recipe's runs provide the numbers of every column and every plot."""
    for part, place, c in _columns(recipe, where):
        for trial in trials:
            if trial.row.fits(part):
                _check(c, trial, f"{place}: column {c.text!r}: {trial.row.name}")


def _columns(recipe: Recipe, where: str) -> Iterator[tuple[Part, str, Column]]:
    tables: tuple[Table | Differences, ...] = (*recipe.table, *recipe.differences)
    for table in tables:
        for text in table.columns:
            yield table, f"{where}: {table.title or 'a table'}", column(text)
    for plot in recipe.plot:
        place = f"{where}: plot {plot.file}"
        if plot.over_grid:
            yield plot, place, column(plot.y)
            continue
        for name in (plot.x, plot.y):
            if "@" in name or " to " in name:
                raise UsageError(f"{place}: {name!r} is one number; a line needs a METRIC, such as test_nll")
            if name != "round":
                yield plot, place, Column(name, "", name, None)


def _check(c: Column, trial: Trial, place: str) -> None:
    """Check that a run has the numbers of a column."""
    e, number = trial.experiment, c.round
    if number is not None and (number > e.rounds or not evaluates(number, e.rounds, e.eval_every, 1)):
        every = f", one in {e.eval_every} evaluated" if e.eval_every > 1 else ""
        raise UsageError(f"{place} has no evaluated round {number} ({e.rounds} rounds{every})")
    if c.metric in SUMS or c.metric in EVERY_RUN:
        return
    from fedsim.algorithm import Algorithm
    from fedsim.wire.schema import all_fields
    from protocols import find  # imports torch, for a metric of the algorithm or a misspelt one

    built = find(e.algo)()
    fields = [f for exchange in (*built.setup, *built.exchanges) for f in all_fields(exchange.up)]
    scalars = [m for f in fields for m in f.members or ((f,) if f.kind.name == "scalar" else ())]
    names = sorted({*EVERY_RUN, *(s.name for s in scalars if s.kind.over != "nothing")})
    if c.metric in names:
        return
    reports = type(built).report is not Algorithm.report  # numbers whose names are known only from a run
    near = nearest(c.metric, names, 0.85 if reports else None)  # dual_residual is 0.79 like primal_residual
    if near or not reports:
        hint = f"; did you mean {near!r}?" if near else f" (it has {', '.join(names)})"
        raise UsageError(f"{place} has no metric {c.metric!r}{hint}")
