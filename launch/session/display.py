"""A run's output: a header, progress while it runs, and its traffic at the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.text import Text

from fedsim import plugins
from fedsim.learning.score_names import EXTRA
from fedsim.partition_specs import split_of
from launch.configuration.execution import Execution
from launch.configuration.names import names
from launch.configuration.target_accuracy import TargetAccuracy
from launch.numbers import counted, percentage
from launch.progress_display import ProgressDisplay
from launch.runs.tables import parts_of
from launch.table import Table

if TYPE_CHECKING:
    from fedsim.problem import Problem

TOO_WIDE = (
    "  far worse than at the mean: the posterior is too wide where the data say little. A larger prior "
    "precision narrows it; --eval-samples 0 leaves the average out"
)


def too_wide(nll: float | None, ensemble_nll: float | None) -> bool:
    """Return True if averaging over posterior samples spoils predictions: ensemble_nll > 2 nll + 1 (nats).

    None is an NLL that is not finite.
    """
    return nll is not None and (ensemble_nll is None or not ensemble_nll <= 2 * nll + 1)


class Display(ProgressDisplay):
    """The progress of a run, and its traffic at the end."""

    def traffic(self, summary: Mapping[str, Any]) -> None:
        """Print the algorithm's bytes on the wire for each message field, with totals."""
        most = ", at most" if summary.get("exact") is False else ""  # of a plan
        totals = {d: summary[f"bytes_{d}"] for d in ("down", "up")}
        rows: list[list[str]] = []
        parts = parts_of(summary["bytes"].get("algorithm", {}))
        fields = dict.fromkeys([*parts["down"], *parts["up"]])
        last = ("header", "framing")
        for name in sorted(fields, key=lambda name: last.index(name) if name in last else -1):
            rows.append([name])
            for direction, total in totals.items():
                n = parts[direction][name]
                rows[-1] += [f"{n:,}", f"{n / total:.1%}" if n and total else ""]
        best = {(len(rows), n) for n in range(5)}
        rows.append(["total bytes", f"{totals['down']:,}", "", f"{totals['up']:,}", ""])
        each = [f"{summary[f'units_of_p_{direction}']:.3f} P" for direction in ("down", "up")]
        rows.append(["per client and round", each[0], "", each[1], ""])
        once = [summary[f"units_of_p_once_{direction}"] for direction in ("down", "up")]
        if any(once):
            rows.append(["once per client", f"{once[0]:.3f} P", "", f"{once[1]:.3f} P", ""])
        if edge := summary["bytes"].get("edge"):
            down, up = (f"{_total(edge.get(side, {})):,}" for side in ("down", "up"))
            rows.append(["edge servers and root", down, "", up, ""])
        self.console.print()
        heads = ("algorithm traffic", f"down{most}", "share", f"up{most}", "share")
        Table(heads, rows, best=best).print(self.console)

    def traffic_summary(self, summary: Mapping[str, Any], out: str, target: TargetAccuracy) -> None:
        """Print the end of a run: its traffic, its results, and when the target accuracy was reached."""
        self.stop()
        self.traffic(summary)
        other = ", ".join(
            f"{kind} {sum(_total(sides) for sides in directions.values()):,}"
            for kind, directions in summary["bytes"].items()
            if kind != "algorithm"
        )
        self.console.print(f"P = {summary['params']:,} parameters; other bytes: {other}", soft_wrap=True)
        accuracy = summary["test_accuracy"]  # None for regression
        if accuracy is not None or summary["test_nll"] is not None:
            first = ("test accuracy ", (percentage(accuracy), "bold"), ", ") if accuracy is not None else ()
            scores = [f"NLL {_number(summary['test_nll'])}", *_calibration(summary, "test")]
            self.console.print(
                Text.assemble(
                    (summary["status"], "bold"),
                    f" after {counted(summary['rounds'], 'round')}: ",
                    *first,
                    ", ".join(scores),
                ),
                soft_wrap=True,
            )
            if more := [f"{key} {_share(summary[key])}" for key in EXTRA if key in summary]:
                self.console.print(", ".join(more), soft_wrap=True)
            if summary.get("client_accuracy_worst") is not None:
                self.console.print(
                    f"scores by client: mean accuracy {percentage(summary['client_accuracy_mean'])}, "
                    f"worst {percentage(summary['client_accuracy_worst'])}"
                )
        if summary.get("ensemble_accuracy") is not None:
            scores = [f"NLL {_number(summary['ensemble_nll'])}", *_calibration(summary, "ensemble")]
            self.console.print(
                Text.assemble(
                    "average over posterior samples: accuracy ",
                    (percentage(summary["ensemble_accuracy"]), "bold"),
                    f", {', '.join(scores)}",
                ),
                soft_wrap=True,
            )
            if too_wide(summary["test_nll"], summary["ensemble_nll"]):
                self.note(TOO_WIDE)
        if steps := summary.get("asynchronous"):
            self.console.print(
                f"asynchronous: {steps['simulated_seconds']:,.1f} simulated seconds; staleness "
                f"{steps['staleness_mean']:.1f} on average, {len(steps['staleness']) - 1} at most"
            )
        if devices := summary.get("devices"):
            self.console.print(on_the_clock(devices), soft_wrap=True)
        if summary["seconds_round_median"] is not None:
            self.console.print(
                f"first round {summary['seconds_to_first_round']:.1f} s after the start, "
                f"{summary['seconds_imports']:.1f} s of it imports; "
                f"then {summary['seconds_round_median']:.3f} s a round"
            )
        self.console.print(f"run folder: {out}", soft_wrap=True)
        if target.until:
            spent = summary["bytes_to_until"]
            self.console.print(target.outcome(sum(spent.values()) if spent else None), soft_wrap=True)


def on_the_clock(devices: Mapping[str, Any]) -> str:
    """Describe the run's cost for its clients on the virtual clock."""
    text = f"virtual clock: {devices['simulated_seconds']:,.1f} s"
    for key, verb, unit in (("client_seconds", "is busy for", "s"), ("client_joules", "spends", "J")):
        if devices.get(key) and f"{key}_total" in devices:  # also in the summary of somebody else's run
            low, high, total = min(devices[key]), max(devices[key]), devices[f"{key}_total"]
            text += f"; a client {verb} {low:,.4g} to {high:,.4g} {unit}, all of them {total:,.4g} {unit}"
    return text


def header(problem: Problem, execution: Execution, sent: str) -> list[str]:
    """Return lines about a run: data, clients, model, bytes `sent` a round, and why examples are unused."""
    e, workers = problem.experiment, execution.workers
    model, partition = plugins.short(e.model), plugins.short(e.partition)
    data, sizes, clients = problem.dataset, problem.sizes, len(problem.clients)
    lanes = f"; {execution.lanes} lanes a worker" if execution.lanes > 1 else ""
    lines = [
        f"{sum(sizes):,} of {len(data.train_targets):,} training examples, {len(data.test_targets):,} test; "
        f"{population(problem)} ({partition}, {min(sizes)} to {max(sizes)} examples)",
        f"model {model}, P = {problem.net.layout.size:,}; {sent}{lanes}",
    ]
    if sum(sizes) < len(data.train_targets):
        unused = counted(len(data.train_targets) - sum(sizes), "training example")
        lines.append(f"{unused} unused: {', '.join(_why_unused(problem))}")
    if problem.evaluation.test_clients is not None:
        scored = len(set(problem.evaluation.test_clients.tolist()) - {-1})
        lines.append(f"{counted(scored, 'client')} of {len(problem.split)} scored on test rows of their own")
    if data.dropped:
        lines.append(f"{counted(data.dropped, 'row')} without a value left out (missing=drop)")
    if workers > clients:
        useful = f"{counted(workers, 'worker')} for {counted(clients, 'client')}"
        lines.append(f"{useful}: {workers - clients} can only evaluate")
    return lines


def compressed(word: str, problem: Problem) -> list[str]:
    """Return a line with the codecs that --compress stands for in this run, and their measured loss."""
    if word == "none":
        return []
    codecs = ", ".join(f"{field}={name}" for field, name in sorted(problem.experiment.codecs.items()))
    return [f"--compress {word}: {codecs}; measured loss: {names('compress')[word].cells[-1]}"]


def population(problem: Problem) -> str:
    """Describe the clients and edge servers, or the clients whose data is pooled."""
    many = counted(problem.experiment.clients, "client")
    if problem.rounds.tree is not None:
        many += f" behind {counted(len(problem.rounds.tree.names), 'edge server')}"
    return f"the data of {many} in one place" if problem.algorithm.centralised else many


def _why_unused(problem: Problem) -> list[str]:
    """Return the settings that leave training examples out of the clients' data."""
    e = problem.experiment
    name = split_of(e.partition).partition(":")[0]
    reasons = [f"fraction {e.fraction:g}"] if e.fraction < 1 else []
    if e.evaluate_on != "test":
        reasons.append(f"evaluation on {e.evaluate_on}")
    if len(problem.public):
        reasons.append(counted(len(problem.public), "public input"))
    if name == "two_dirichlet":
        reasons.append("two_dirichlet rounds per client and class")
    elif name == "natural":
        reasons.append(f"{e.partition} takes the first {counted(e.clients, 'client')} of the data set")
    elif not reasons:
        reasons.append(f"partition {plugins.short(e.partition)} leaves them out")
    return reasons


def _total(fields: Mapping[str, Mapping[str, int]]) -> int:
    return sum(sum(layers.values()) for layers in fields.values())


def _calibration(summary: Mapping[str, Any], what: str) -> list[str]:
    """Return texts with ECE and Brier score, if the run has them."""
    names = {f"{what}_ece": "ECE", f"{what}_brier": "Brier score"}
    return [f"{name} {_number(summary[key])}" for key, name in names.items() if key in summary]


def _share(x: float | None) -> str:
    return "nan" if x is None else percentage(x)


def _number(x: float | None) -> str:
    """Format a number. None, which is null in JSON, is nan."""
    return "nan" if x is None else f"{x:.4f}"
