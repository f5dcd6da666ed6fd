"""fedsim resume: the experiment of a run folder, and the options that may change it.

The execution (workers, transport, devices, reporting) and the target accuracy may change, and the number of
rounds may increase. Other options, other library versions and other data are refused, because the results
would differ. The error states both values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from fedsim.errors import MismatchError, UsageError, unknown
from fedsim.experiment import Experiment, convert, dotted
from launch.configuration.config import Overrides, check_execution
from launch.configuration.execution import Execution
from launch.configuration.target_accuracy import TargetAccuracy
from launch.numbers import counted, target as target_text
from launch.runs import manifest
from launch.runs.documents import Summary
from launch.runs.folder import SUMMARY, RunFolder, check_entries, document_or_empty
from workers.numerics import Difference
from workers.storage.growing_file import METRICS
from workers.storage.metrics_file import metrics_lines


@dataclass(frozen=True)
class Resumption:
    """A run to be resumed. With `drift`, versions and machine may differ from those at the start."""

    run: RunFolder
    drift: bool = False

    @staticmethod
    def open(folder: Path, drift: bool = False) -> Resumption:
        run = RunFolder.open(folder, begun=False)
        check_entries(folder)
        return Resumption(run, drift)

    @property
    def folder(self) -> Path:
        return self.run.path

    @property
    def manifest(self) -> Mapping[str, Any]:
        return self.run.manifest

    def configure(self, options: Mapping[str, Any]) -> tuple[Experiment, Execution]:
        """Return the run's configuration with these options; raise MismatchError for a refused change."""
        supplied, before = Overrides.of(options), self.experiment
        merged = {
            "hyperparameters": {**before.hyperparameters, **supplied.hyperparameters},
            "codecs": {**before.codecs, **supplied.codecs},
        }
        named = supplied.named("experiment")
        target = convert(
            Experiment,
            {**asdict(before), **supplied.experiment, **merged},
            supplied.where("experiment"),
            named,
        )
        for f in fields(Experiment):
            was, says = getattr(before, f.name), getattr(target, f.name)
            if f.name not in (*manifest.CHANGEABLE, "hyperparameters", "codecs") and was != says:
                raise self._mismatch(f.name, was, named(f.name, says))
        for name, codec in target.codecs.items():
            if before.codecs.get(name) != codec:
                raise self._mismatch(name, before.codecs.get(name, "dense"), named(f"codecs.{name}", codec))
        for key, value in supplied.hyperparameters.items():
            self._same_hyperparameter(key, value, named(f"hyperparameters.{key}", value))
        if target.rounds < before.rounds:
            raise self._mismatch("rounds", before.rounds, named("rounds", target.rounds))
        return target, self._execution(supplied)

    def _same_hyperparameter(self, key: str, value: Any, supplied: str) -> None:
        """Refuse another value of a hyperparameter (short or dotted name `key`), even for a complete run."""
        before, algo = self.experiment.hyperparameters, self.experiment.algo
        known = [name for name in before if name == key] or [n for n in before if n.endswith(f".{key}")]
        if not known:
            raise unknown(f"hyperparameter of {algo}:", key, before)
        if all(before[name] != value for name in known):
            raise self._mismatch(known[0], before[known[0]], supplied)

    def _mismatch(self, what: str, was: object, supplied: str) -> MismatchError:
        return MismatchError(
            f"{self.folder} was started with {what} = {was!r}; this command says {supplied}. A resumed run "
            "may have more rounds, another --until and another execution: start a new run"
        )

    @property
    def complete(self) -> bool:
        """True if the summary says that the run has ended by itself; False for a damaged summary."""
        ended = self._summary.get("rounds") == self.run.experiment["rounds"]
        return self._summary.get("status") == "done" and (ended or self._summary.get("reached") is not None)

    @cached_property
    def _summary(self) -> Mapping[str, Any]:
        return document_or_empty(self.folder / SUMMARY, Summary)

    def nothing_left(self, target: Experiment) -> str:
        """Return why there is nothing to resume; '' if there is something to do.

        A run that was killed after its last round still needs its summary. Raise UsageError if an incomplete
        run has already reached the new target accuracy.
        """
        lines = [line for line, _ in metrics_lines(self.folder / METRICS)]
        reached = TargetAccuracy(target.until).after(lines).reached
        if reached is not None:
            what = f"{self.folder} has reached {target_text(target.until)} after round {reached}"
            if self.complete:
                return f"{what}; a higher --until, or --until none, continues it"
            if target.until != self.experiment.until:
                raise UsageError(f"{what} already; give a higher --until")
        if self.complete and self._summary.get("rounds", target.rounds) >= target.rounds:
            return f"{self.folder} is complete: all {counted(target.rounds, 'round')}; --rounds gives it more"
        return ""

    @property
    def experiment(self) -> Experiment:
        """The experiment that the manifest describes."""
        return self.run.to_experiment()

    def _execution(self, supplied: Overrides) -> Execution:
        own = self.folder.resolve()
        for key, is_at in (("out", own), ("runs", own.parent)):
            path = supplied.execution.get(key)
            if path is not None and Path(path).resolve() != is_at:
                where = supplied.named("execution")(key, path)
                raise UsageError(f"{where}: a run continues in its own folder, {self.folder}")
        known = {f.name for f in fields(Execution)}
        values = {k: v for k, v in self.manifest.get("execution", {}).items() if k in known}
        remote, begun_with = values.get("remote_workers", 0), values.get("workers", 0)
        if "remote_workers" in supplied.execution:
            values.pop("workers", None)
        elif "workers" in supplied.execution or not remote:
            values |= {"remote_workers": 0, "bind": "", "keys": None}
        elif begun_with > remote:
            values["workers"] = begun_with - remote
        else:
            values.pop("workers")
        values.pop("runs", None)
        values.pop("allow_drift", None)  # must be given again for every start
        if {"workers", "devices"} & set(supplied.execution):
            values.pop("lanes", None)  # chosen for the earlier workers
        return check_execution({**values, **supplied.execution, "out": str(self.folder)}, supplied)

    def check(self, now: Mapping[str, Any]) -> None:
        """Compare versions, machine and data with those at the start; raise MismatchError for a change."""
        was, today = self.manifest["experiment"], now["experiment"]
        for key, value in dotted({"hyperparameters": today["hyperparameters"]}):
            name = key.partition(".")[2]
            if was["hyperparameters"].get(name, value) != value:
                raise self._mismatch(name, was["hyperparameters"][name], f"{name} = {value!r}")
        for key in ("device", "params", "client_sizes", "sources", "data"):
            if was.get(key, today[key]) != today[key]:
                raise MismatchError(
                    f"{self.folder} was started with {key} {was[key]}; now it is {today[key]}: "
                    "other data, other code or another machine"
                )
        for what, before, here in self.drifts(now):
            if not self.drift:
                raise MismatchError(
                    f"{self.folder} was started with {what} {before}; here it is {here}. The bits may "
                    "differ: resume it where it was started, or give --allow-drift"
                )

    def drifts(self, now: Mapping[str, Any]) -> list[Difference]:
        """Return the differences that may change bits. `now` is the manifest of the present process."""
        return manifest.computing(self.manifest, now, now["experiment"]["device"])
