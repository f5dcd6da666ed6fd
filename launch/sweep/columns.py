"""The columns of a recipe's tables and plots, checked before anything is run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from fedsim.errors import UsageError, nearest
from fedsim.round_events import evaluates
from launch.results.columns import Column, column as parsed
from launch.runs.tables import SUMS
from launch.sweep.recipe import Differences, Recipe, Table, Trial
from workers.storage.metrics_file import OPTIONAL_SCORES

if TYPE_CHECKING:
    from protocols import AnyAlgorithm

EVERY_RUN = (
    *("test_accuracy", "test_nll", *OPTIONAL_SCORES),
    *("bytes_down", "bytes_up", "simulated_seconds", "joules", "seconds", "seconds_clients"),
)
"""Numbers that a line of metrics.jsonl may have for any algorithm."""


def check_columns(recipe: Recipe, trials: Sequence[Trial], where: str) -> None:
    """Check that the recipe's runs provide the numbers of every column and every plot."""
    tables: tuple[Table | Differences, ...] = (*recipe.table, *recipe.differences)
    for table in tables:
        selected = [t for t in trials if t.row.fits(table.only, table.at)]
        for text in table.columns:
            _check(parsed(text), text, selected, f"{where}: {table.title or 'a table'}")
    for plot in recipe.plot:
        selected, place = [t for t in trials if t.row.fits(plot.only, plot.at)], f"{where}: plot {plot.file}"
        if "." in plot.x:
            _check(parsed(plot.y), plot.y, selected, place)
            continue
        for name in (plot.x, plot.y):
            if "@" in name or " to " in name:
                raise UsageError(f"{place}: {name!r} is one number; a line needs a METRIC, such as test_nll")
            if name != "round":
                _check(Column(name, "", name, None), name, selected, place)


def _check(column: Column, text: str, trials: Iterable[Trial], place: str) -> None:
    """Check that every run has the numbers of a column."""
    for trial in trials:
        e, number = trial.experiment, column.round
        if number is not None and (number > e.rounds or not evaluates(number, e.rounds, e.eval_every, 1)):
            every = f", one in {e.eval_every} evaluated" if e.eval_every > 1 else ""
            raise UsageError(
                f"{place}: column {text!r}: {trial.row.name} has no evaluated round {number} "
                f"({e.rounds} rounds{every})"
            )
        if column.metric in SUMS or column.metric in EVERY_RUN:
            continue
        from protocols import find  # imports torch, for a metric of the algorithm or a misspelt one

        algorithm = find(trial.experiment.algo)
        known = sorted({*EVERY_RUN, *_scalars(algorithm)})
        if column.metric in known:
            continue
        own = _reports(algorithm)  # stricter: dual_residual is 0.79 similar to primal_residual
        near = nearest(column.metric, known, 0.85 if own else None)
        if near or not own:
            hint = f"; did you mean {near!r}?" if near else f" (it has {', '.join(known)})"
            raise UsageError(
                f"{place}: column {text!r}: {trial.row.name} has no metric {column.metric!r}{hint}"
            )


def _scalars(algorithm: type[AnyAlgorithm]) -> Iterator[str]:
    """Yield the names of the scalars in an algorithm's uploads, which are summed in metrics.jsonl."""
    from fedsim.wire.schema import all_fields

    built = algorithm()
    for exchange in (*built.setup, *built.exchanges):
        for field in all_fields(exchange.up):
            scalars = field.members or ((field,) if field.kind.name == "scalar" else ())
            yield from (scalar.name for scalar in scalars if scalar.kind.over != "nothing")


def _reports(algorithm: type[AnyAlgorithm]) -> bool:
    """Return True if the algorithm reports further numbers, whose names are known only from a run."""
    from fedsim.algorithm import Algorithm

    return algorithm.report is not Algorithm.report
