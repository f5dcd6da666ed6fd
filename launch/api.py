"""Carries out what fedsim.python_api is asked for.

A program that calls fedsim.run differs from the fedsim command in four ways:

- The fork server is always a new interpreter, because the program has state that workers must not inherit.
- Ctrl-C ends the run and not the program: it is a KeyboardInterrupt, and the run can be resumed.
- Outside the main thread, where Python has no signal handlers, none is installed.
- What a run changes in this process (environment variables, torch's number of threads, the flushing of
  denormals) is put back when it ends.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsim import live_objects
from fedsim.errors import Interrupted, UsageError, nearest, unknown
from fedsim.experiment import Experiment, convert
from fedsim.python_api import plain_hyperparameters
from launch.configuration import names
from launch.configuration.config import (
    EXECUTION,
    Execution,
    Overrides,
    absolute_choice,
    absolute_paths,
    check_execution,
    general_first,
    plain_numbers,
)
from launch.configuration.origins import PYTHON, Origins
from launch.configuration.presets import experiment_of, remarks
from launch.runs.resume import Stored
from launch.session import run as runs

if TYPE_CHECKING:
    from launch.opened_run import OpenedRun

WHERE = "the arguments"
IN_PYTHON = Origins(file=PYTHON)


class Launcher:
    """The implementation of fedsim.python_api."""

    def run(self, experiment: Experiment, execution: Mapping[str, Any], quiet: bool) -> OpenedRun:
        """Run an experiment.

        Raises:
            FedsimError: any FedsimError.
            KeyboardInterrupt: after Ctrl-C.
        """
        _check_keywords(execution, (f.name for f in fields(experiment)))
        with IN_PYTHON.own_words():
            values = absolute_paths(
                plain_numbers({f.name: getattr(experiment, f.name) for f in fields(experiment)})
            )
            values["hyperparameters"] = plain_hyperparameters(values["hyperparameters"])
            codecs = general_first(values["codecs"])
            values["codecs"] = {field: absolute_choice(codec) for field, codec in codecs.items()}
            checked = convert(Experiment, values, WHERE, Overrides(origins=IN_PYTHON).named("experiment"))
            names.check(checked)
            names.check_once(checked.algo, checked.hyperparameters, "hyperparameters=")
            carried = _execution(execution)
            _check_objects(checked, carried)
            lines = remarks(checked)
            return self._carry_out(
                lambda: runs.launch(checked, carried, quiet=quiet, embedded=True, remarks=lines)
            )

    def resume(self, folder: Path, options: Mapping[str, Any], quiet: bool) -> OpenedRun:
        """Go on with a run.

        Raises:
            FedsimError: any FedsimError.
            KeyboardInterrupt: after Ctrl-C.
        """
        _check_keywords(options, (f.name for f in fields(Experiment)))
        with IN_PYTHON.own_words():
            _check_objects(*Stored.open(folder).configure(options))
            return self._carry_out(lambda: runs.resume(folder, options, quiet=quiet, embedded=True))

    def open(self, folder: Path) -> OpenedRun:
        """A run that is there.

        Raises:
            UsageError: if the folder is no run.
            DataError: if its manifest is damaged.
        """
        from launch.opened_run import OpenedRun
        from launch.runs.reader import Run

        return OpenedRun(Run.open(folder.resolve()).path)

    def preset(self, name: str, algo: str, changes: Mapping[str, Any]) -> Experiment:
        """The experiment of a preset.

        Raises:
            UsageError: for an unknown preset or field.
        """
        _check_keywords(changes, (f.name for f in fields(Experiment)))
        with IN_PYTHON.own_words():
            return experiment_of(name, algo, plain_numbers(changes))

    def _carry_out(self, job: Callable[[], Path]) -> OpenedRun:
        try:
            with _process_restored():
                path = job()
        except Interrupted as e:  # a FedsimError is an Exception, which a loop over experiments may catch
            raise KeyboardInterrupt(str(e)) from e
        return self.open(path)


def _execution(values: Mapping[str, Any]) -> Execution:
    """How the run is carried out.

    Raises:
        UsageError: if parts of it do not go together.
    """
    texts = {key: str(value) if isinstance(value, Path) else value for key, value in values.items()}
    if texts.get("remote_workers") and not texts.get("workers"):
        texts.pop("workers", None)  # the default of Python users, not a choice
    return check_execution(texts, Overrides(execution=texts, origins=IN_PYTHON))


def _check_keywords(keywords: Mapping[str, Any], others: Iterable[str]) -> None:
    """Refuse an argument that there is none of.

    Args:
        keywords: The arguments that Python has not checked.
        others: The names of those that it has.

    Raises:
        UsageError: with the nearest name, or the place where a hyperparameter is set.
    """
    known = {*EXECUTION, *others}
    for key, value in keywords.items():
        if key in known:
            continue
        hyperparameters = set(names.hyperparameters())
        if nearest(key, known) is None and (name := nearest(key, hyperparameters, 0.9)):
            raise UsageError(
                f"{key}= is no argument; a hyperparameter is set by hyperparameters={{{name!r}: {value!r}}} "
                "(fedsim describe ALGO lists them)"
            )
        raise unknown("argument", key, known, command="help(fedsim.run)")


def _check_objects(experiment: Experiment, execution: Execution) -> None:
    """Refuse objects of this process where other processes compute.

    Raises:
        UsageError: saying what to write.
    """
    for key in ("algo", "dataset", "partition", "model"):
        spec = getattr(experiment, key)
        if execution.workers and live_objects.is_live(spec):
            raise live_objects.refuse_workers(spec, f"{key}=")


@contextmanager
def _process_restored() -> Iterator[None]:
    """Put back what a run changes in the process that it runs in."""
    environment = dict(os.environ)
    threads = sys.modules["torch"].get_num_threads() if "torch" in sys.modules else None
    flushes = _flushes_denormals()
    try:
        yield
    finally:
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        if "torch" in sys.modules:
            torch = sys.modules["torch"]
            torch.set_flush_denormal(flushes)
            if threads is not None:
                torch.set_num_threads(threads)


def _flushes_denormals() -> bool:
    """Whether this thread takes denormal numbers for zero."""
    smallest_normal = sys.float_info.min
    return smallest_normal / 2.0 == 0.0


LAUNCHER = Launcher()
"""What fedsim.python_api imports."""
