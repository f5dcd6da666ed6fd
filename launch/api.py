"""The Python interface: `fedsim.run` and its companions, which fedsim/__init__.py imports by name.

A program that calls fedsim.run differs from the fedsim command in four ways:

- The fork server is always a new interpreter, because the program has state that workers must not inherit.
- Ctrl-C ends the run and not the program: it is a KeyboardInterrupt, and the run can be resumed.
- Outside the main thread, where Python has no signal handlers, none is installed.
- What a run changes in this process (environment variables, torch's number of threads, the flushing of
  denormals) is restored when it ends.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, Unpack

from fedsim.errors import Interrupted, UsageError
from fedsim.experiment import Experiment, dotted
from launch.configuration.arguments import (
    IN_PYTHON,
    OBJECTS,
    ExperimentOptions,
    Options,
    check_keywords,
    check_objects,
    resolved,
    setting,
    text_in_file,
    text_of,
)
from launch.configuration.config import plain_numbers
from launch.configuration.execution import Execution
from launch.configuration.presets import experiment_of, remarks
from launch.runs.folder import RunFolder
from launch.runs.resume import Resumption
from launch.session import run as runs

if TYPE_CHECKING:
    from torch import nn

    from launch.configuration.arguments import (
        AlgorithmChoice,
        DatasetChoice,
        ModelChoice,
        ParticipationChoice,
        PartitionChoice,
    )


class Run(RunFolder):
    """A run folder; every part is read when it is asked for."""

    def bytes_to(self, *, accuracy: float, direction: Literal["down", "up"] | None = None) -> int | None:
        """Return the algorithm's bytes until the first evaluated round with at least this test accuracy.

        Args:
            accuracy: Between 0 and 1.
            direction: "down", "up", or None for the sum of both.

        Returns:
            The bytes, or None if no evaluated round reaches the accuracy.

        Raises:
            UsageError: for another direction, or if the run has no test accuracy (regression).
        """
        if direction not in (None, "down", "up"):
            raise UsageError(f"bytes_to: the direction is 'down', 'up' or None for both, not {direction!r}")
        sides = ("down", "up") if direction is None else (direction,)
        lines = [line for line in self.lines if line["round"] > 0]
        if lines and all(line.get("test_accuracy") is None for line in lines):
            raise UsageError(f"{self.path} has no test accuracy: its targets are no classes")
        spent = sum(int(line[f"bytes_{side}"]) for line in self.lines if line["round"] <= 0 for side in sides)
        for line in lines:
            spent += sum(int(line[f"bytes_{side}"]) for side in sides)
            reached = line.get("test_accuracy")
            if reached is not None and reached >= accuracy:
                return spent
        return None

    def model(self) -> nn.Module:
        """Return the final model: a torch module with the weights of model.safetensors, in eval mode.

        Needs the data set's files only for its shape of inputs, as the run did.

        Raises:
            UsageError: if the run has not ended, or cannot be assembled here.
        """
        from launch.runs.restored import trained_model

        return trained_model(self)

    def report(self, path: str | Path | None = None) -> Path:
        """Write the run's page, one HTML file that loads nothing; returns its path.

        Args:
            path: Where to write it; None is RUN/report.html.

        Raises:
            DataError: if data is missing or damaged.
            DiskError: if the page cannot be written.
        """
        from launch.results.report import report

        return report(self.path, None if path is None else Path(path))

    def trace(self, path: str | Path | None = None) -> Path:
        """Write the run's timeline for ui.perfetto.dev; returns its path.

        Args:
            path: Where to write it; None is RUN/trace.json.

        Raises:
            UsageError: if no round is committed.
            DataError: if data is missing or damaged.
            DiskError: if the file cannot be written.
        """
        from launch.commands.trace import write_trace

        return write_trace(self, self.path / "trace.json" if path is None else Path(path))

    def _repr_html_(self) -> str:
        """One line for a notebook's output cell."""
        from html import escape

        return f"<code>{escape(str(self.path))}</code>: {escape(self.label)}, {escape(self.status)}"


def run(experiment: Experiment | None = None, /, *, quiet: bool = False, **options: Unpack[Options]) -> Run:
    """Run an experiment and leave a run folder, as `fedsim launch` does, with the same bits.

    The arguments are the options of the command line: first the fields of fedsim.Experiment, then those of
    its execution, which change no bit. In the place of a name there may be FILE.py:NAME, for any number of
    workers, or with workers=0 an object.

    Args:
        experiment: What to run, such as fedsim.preset(...); the other arguments override its fields.
        quiet: Print nothing.

    Keyword Args:
        algo (str | type | Algorithm): A name, or a subclass of fedsim.Algorithm, or an instance of one: its
            fields are hyperparameters, and those of `hyperparameters` override them.
        dataset (str | Dataset | Callable): A name, a fedsim.Dataset, or a function without arguments that
            returns one.
        partition (str | Callable | Mapping): A name, a function (targets, clients, seed) that returns the
            rows of every client, or these rows by client.
        model (str | Callable): A name, or a class or function (shape, classes) that makes a new torch module.
        train (str): Patterns of the parameters to train, "head.*,*.bias"; "" is all.
        freeze (str): Patterns of parameters not to train, which never cross the wire.
        statistics (str): What happens to running statistics of batch normalisation: "average", "local" or
            "frozen"; "", the default, refuses them.
        personalise (int): At the end, so many local epochs per client, whose models are scored by client.
        until (float | str): End with the first evaluated round of this test accuracy (0.78, "78%"); 0 is
            none.
        participation (str | float | int | Callable): As on the command line; a float is a share of the
            clients, an int their number; or a function (population) that returns a function (round) to a
            fedsim.Participation or the ids.
        hyperparameters (Mapping): By short or dotted names, {"lr": 0.1} or {"local.lr": 0.1}, or nested.
        codecs (Mapping): By field, {"up.precision": "log8"}.
        workers (int | str): Worker processes; 0, the default, computes in this process; "auto": as cores and
            memory allow.
        asynchronous (str): "fedbuff:3" folds as soon as three uploads are there by the virtual clock.
        tree (str): "4x25": four edge servers between the server and 25 clients each (fedsim.tree), or a TOML
            file.
        data_dir (str | Path): The folder of data files; None is $FEDSIM_DATA.
        out (str | Path): The run folder; None is runs/<time>-<algo>-<seed>.

    Returns:
        The finished run.

    Raises:
        FedsimError: as fedsim.errors says; UsageError for what does not exist or does not fit together.
        KeyboardInterrupt: after Ctrl-C; fedsim.resume continues the run.
    """
    with IN_PYTHON.own_words():
        checked, execution = resolved(experiment, options)
        check_objects(checked, execution)
        lines = remarks(checked)
        return _finished(lambda: runs.launch(checked, execution, quiet=quiet, embedded=True, remarks=lines))


def resume(run: RunFolder | str | Path, *, quiet: bool = False, **options: Unpack[Options]) -> Run:
    """Continue a run after its last committed round, with the bits of an uninterrupted run.

    Args:
        run: The run, or its folder.
        quiet: Print nothing.

    Keyword Args:
        rounds (int): More rounds than before.
        until (float | str): Another accuracy to end at than before, 0 for none.
        workers (int | str): As of fedsim.run, like the other options of execution; what is left out is as
            before.
        algo (str | type | Algorithm): Only for a run with an object of an earlier process: the object again.
            The same holds for dataset, partition, model and participation.

    Raises:
        FedsimError: as run; MismatchError for what must not change.
        KeyboardInterrupt: as run.
    """
    folder = _folder(run)
    check_keywords(options)
    changes = {key: value for key, value in options.items() if value is not None}
    changes |= {key: text_of(key, changes[key]) for key in OBJECTS if key in changes}
    changes |= {key: str(changes[key]) for key in ("data_dir", "out") if key in changes}
    with IN_PYTHON.own_words():
        check_objects(*Resumption.open(folder).configure(changes))
        return _finished(lambda: runs.resume(folder, changes, quiet=quiet, embedded=True))


def open(
    run: str | Path,
    *,
    algo: AlgorithmChoice | None = None,
    dataset: DatasetChoice | None = None,
    partition: PartitionChoice | None = None,
    model: ModelChoice | None = None,
    participation: ParticipationChoice | None = None,
) -> Run:
    """Open an existing run.

    Args:
        run: Its folder.
        algo: Only for `model()` of a run with an object of an earlier process: the object again. The same
            holds for dataset, partition, model and participation.
        dataset: See algo.
        partition: See algo.
        model: See algo.
        participation: See algo.

    Raises:
        UsageError: if it is no run folder.
        DataError: if its manifest is damaged.
    """
    passed = (algo, dataset, partition, model, participation)
    for key, value in zip(OBJECTS, passed, strict=True):
        if value is not None:
            text_of(key, value)
    return Run.open(_folder(run).resolve())


def preset(name: str, algo: str = "fedlap_cov", **changes: Any) -> Experiment:
    """Return the experiment of a preset: fedsim.run(fedsim.preset("fashion_mnist", "ivon_admm", seed=1)).

    Args:
        name: As in `fedsim list presets`.
        algo: An algorithm's name; one that the preset does not know has its own defaults.
        **changes: Fields of Experiment, which override the preset's; `hyperparameters` by key.

    Raises:
        UsageError: for an unknown preset or field.
    """
    check_keywords(changes)
    with IN_PYTHON.own_words():
        return experiment_of(name, algo, plain_numbers(changes))


def plan(experiment: Experiment | None = None, /, **options: Unpack[Options]) -> dict[str, Any]:
    """Return what a run would send, without running it: the document of `fedsim plan --json`.

    Args:
        experiment: As of run; so are the options.

    Raises:
        FedsimError: as run.
    """
    from launch.results.plan import planned, to_json
    from launch.terminal import plain

    with IN_PYTHON.own_words(), _process_restored():
        result: dict[str, Any] = plain(to_json(*planned(*resolved(experiment, options))))
    return result


def sweep(
    recipe: str | Path | None = None,
    /,
    *,
    over: Mapping[str, Iterable[Any]] | None = None,
    seeds: Iterable[int] = (0,),
    runs: str | Path = "runs/sweep",
    out: str | Path | None = None,
    jobs: int | None = None,
    data_dir: str | Path | None = None,
    quiet: bool = False,
    **options: Unpack[ExperimentOptions],
) -> list[Run]:
    """Run a grid of experiments side by side, as `fedsim sweep` does; returns its runs, in the grid's order.

    A configuration that is in `runs` already is not run again.

    Args:
        recipe: A recipe file, which defines all of its runs; None: `over`, `seeds` and options do.
        over: The values to combine, by option, hyperparameter, or codec.FIELD:
            {"algo": ["fedavg", "ivon_admm"], "participation": [1.0, 0.3]}.
        seeds: The seeds of every configuration.
        runs: The folder of the runs.
        out: Where to write the page with its tables and plots; None: nowhere.
        jobs: Runs side by side; None is one per core.
        data_dir: The folder of data files; None is $FEDSIM_DATA.
        quiet: Print nothing.
        **options: For all runs, as in run; objects must be in files, FILE.py:NAME.

    Raises:
        UsageError: for a grid that cannot be run.
        TaskError: if a run failed, after the others have ended.
        KeyboardInterrupt: after Ctrl-C; the same call continues.
    """
    from launch.sweep.command import sweep as run_sweep
    from launch.sweep.from_options import recipe_of
    from launch.sweep.pool import Pool
    from launch.sweep.recipe import Recipe

    check_keywords(options)
    pool = Pool(Path(runs))
    with IN_PYTHON.own_words():
        if recipe is None and not over:
            raise UsageError("name a grid: over={'algo': ['fedavg', 'ivon_admm']}, or a recipe file")
        if recipe is None:
            texts: dict[str, Any] = {key: text_in_file(key, value) for key, value in options.items()}
            for table in ("hyperparameters", "codecs"):
                settings = dict(dotted(texts.pop(table, {})))
                texts[table] = tuple(f"{key}={setting(value)}" for key, value in settings.items())
            axes = {key: [setting(value) for value in values] for key, values in (over or {}).items()}
            selected = recipe_of(texts, axes, tuple(seeds))
        elif options or over:
            raise UsageError(f"recipe {recipe} says all of its runs itself; leave out over= and the options")
        else:
            selected = Recipe.read(Path(recipe))
        try:
            with _process_restored(), _without_main():
                run_sweep(
                    selected,
                    Path(recipe or "sweep.toml"),
                    out=None if out is None else Path(out),
                    runs=pool.path,
                    side_by_side=jobs,
                    data_dir=None if data_dir is None else str(data_dir),
                    quiet=quiet,
                )
        except Interrupted as e:
            raise KeyboardInterrupt(str(e)) from e
    return [Run.open(pool.folder(trial).resolve()) for trial in selected.trials()]


def compare(
    *runs: RunFolder | str | Path,
    to: Iterable[float | str] = (),
    where: Iterable[str] = (),
    out: str | Path | None = None,
    markdown: str | Path | None = None,
    csv: str | Path | None = None,
) -> dict[str, Any]:
    """Return what runs cost for which accuracy: the document of `fedsim compare --json`.

    Args:
        *runs: Runs, run folders, or folders of them.
        to: Accuracies, as 0.75 or "75%"; by default the runs' own targets, or some that tell them apart.
        where: KEY=VALUE of the experiment; others are left out.
        out: Where to write the page; None: nowhere.
        markdown: Where to write the tables as Markdown.
        csv: Where to write them as CSV.

    Raises:
        UsageError: if an argument is wrong.
        DataError: if data is missing or damaged.
        DiskError: if a file cannot be written.
    """
    from launch.results.compare import Comparison
    from launch.terminal import plain

    with IN_PYTHON.own_words():
        comparison = Comparison.of([_folder(run) for run in runs], [str(level) for level in to], tuple(where))
        files = [None if path is None else Path(path) for path in (out, markdown, csv)]
        result: dict[str, Any] = plain(comparison.to_json(comparison.write(*files)))
    return result


def algorithms() -> dict[str, dict[str, Any]]:
    """Return every algorithm by name, with its cost per client and round, and its paper: `fedsim list`."""
    from launch.commands.lists import to_json

    return {row["name"]: row for row in to_json("algorithms")}


def _folder(run: RunFolder | str | Path) -> Path:
    return Path(run) if isinstance(run, str | Path) else run.path


@contextmanager
def _process_restored() -> Iterator[None]:
    """Put back what a run changes in the process that it runs in."""
    environment = dict(os.environ)
    threads = sys.modules["torch"].get_num_threads() if "torch" in sys.modules else None
    flushes = sys.float_info.min / 2.0 == 0.0  # this thread flushes denormal numbers to zero
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


@contextmanager
def _without_main() -> Iterator[None]:
    """Keep new processes from importing the program that calls: it needs no `if __name__ == "__main__"`."""
    program = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = program


def _finished(job: Callable[[], Path]) -> Run:
    """The run that a job leaves."""
    try:
        with _process_restored():
            path = job()
    except Interrupted as e:  # a FedsimError is an Exception, which a loop over experiments may catch
        raise KeyboardInterrupt(str(e)) from e
    return Run.open(path.resolve())


def _with_defaults(function: Callable[..., Any]) -> inspect.Signature:
    """The signature of a function with the keywords of Options, each with its default, for help()."""
    own = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    known = {f.name: f.default for kind in (Experiment, Execution) for f in fields(kind)}
    known |= {"hyperparameters": None, "codecs": None, "workers": 0, "data_dir": None, "out": None}
    types = {**ExperimentOptions.__annotations__, **Options.__annotations__}
    more = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=known[name],
            annotation=getattr(hint, "__forward_arg__", hint),
        )
        for name, hint in types.items()
    ]
    return inspect.Signature([*own, *more], return_annotation=function.__annotations__["return"])


run.__signature__ = _with_defaults(run)  # type: ignore[attr-defined]
plan.__signature__ = _with_defaults(plan)  # type: ignore[attr-defined]
