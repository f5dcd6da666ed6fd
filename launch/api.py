"""The Python interface: `fedsim.run` and related functions, which fedsim/__init__.py imports by name.

fedsim.run differs from the fedsim command in four ways:

- The fork server is always a new interpreter, because workers must not inherit the calling program's state.
- Ctrl-C raises KeyboardInterrupt, which ends the run but not the program. The run can be resumed.
- Outside the main thread, where Python allows no signal handlers, none is installed.
- Environment variables, torch's number of threads and its flushing of denormals are restored after a run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from fedsim.errors import Interrupted, UsageError
from fedsim.experiment import Experiment, dotted
from launch.calling_program import called, process_restored, with_defaults, without_main
from launch.configuration.arguments import (
    OBJECTS,
    ExperimentOptions,
    Options,
    check_keywords,
    check_objects,
    list_of,
    path_of,
    resolved,
    setting,
    text_in_file,
    text_of,
)
from launch.configuration.config import plain_numbers
from launch.configuration.execution import EXECUTION
from launch.configuration.presets import experiment_of, remarks
from launch.results.compared_runs import ComparedRuns
from launch.runs.folder import RunFolder
from launch.runs.resume import Resumption
from launch.session import run as runs

if TYPE_CHECKING:
    import numpy.typing
    from matplotlib.figure import Figure
    from torch import nn

    from launch.configuration.arguments import (
        AlgorithmChoice,
        DatasetChoice,
        ModelChoice,
        ParticipationChoice,
        PartitionChoice,
    )
    from launch.table import Table


class Run(RunFolder):
    """A run folder. Each file is read when it is first needed.

    Examples:
        >>> import fedsim, torch
        >>> run = fedsim.run(algo="fedavg", model="logistic", clients=4, rounds=2, quiet=True)
        >>> run.status, run.experiment["rounds"]
        ('done', 2)
        >>> list(run.metrics["round"]), int(run.ledger["bytes"].sum()) > 0
        ([0, 1, 2], True)
        >>> run.bytes_to(accuracy=0.0, direction="down"), run.bytes_to(accuracy=1.0)
        (10892, None)
        >>> run.model()(torch.zeros(1, 64)).shape
        torch.Size([1, 10])
        >>> sum(len(rows) for rows in run.client_rows())
        1440
        >>> run.report().name, run.trace().name
        ('report.html', 'trace.json')
    """

    def bytes_to(self, *, accuracy: float, direction: Literal["down", "up"] | None = None) -> int | None:
        """Return the algorithm's bytes up to the first evaluated round with at least this test accuracy.

        Args:
            accuracy: Between 0 and 1.
            direction: "down", "up", or None for the sum of both.

        Returns:
            The bytes, or None if no evaluated round reaches the accuracy.

        Raises:
            UsageError: for another direction, or if the run has no test accuracy (regression).
        """
        if isinstance(accuracy, bool) or not isinstance(accuracy, int | float):
            raise UsageError(f"bytes_to: the accuracy is a number, such as 0.75, not {accuracy!r}")
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

        The data set's files must be available, because they determine the shape of the inputs.

        Raises:
            UsageError: if the run has not ended, or its task cannot be set up here.
        """
        from launch.runs.restored import trained_model

        return trained_model(self)

    def client_rows(self) -> tuple[numpy.typing.NDArray[Any], ...]:
        """Return the rows of the data set's training examples that each client has, by client.

        The data set's files must be available, because the rows are divided again.

        Raises:
            UsageError: if the run's task cannot be set up here.
        """
        from launch.runs.restored import RestoredRun

        return RestoredRun.open(self.path).problem.split

    def report(self, path: str | Path | None = None) -> Path:
        """Write the run's report, one HTML file without external resources, and return its path.

        Args:
            path: The file to write; by default RUN/report.html.

        Raises:
            DataError: if data is missing or damaged.
            DiskError: if the report cannot be written.
        """
        from launch.results.report import report

        return report(self.path, _file("path", path))

    def trace(self, path: str | Path | None = None) -> Path:
        """Write the run's timeline for ui.perfetto.dev, and return its path.

        Args:
            path: The file to write; by default RUN/trace.json.

        Raises:
            UsageError: if no round is committed.
            DataError: if data is missing or damaged.
            DiskError: if the file cannot be written.
        """
        from launch.results.trace import write_trace

        return write_trace(self, _file("path", path) or self.path / "trace.json")

    def figure(self, label: str = "") -> Figure:
        """Return a figure of the run's report as a drawing of matplotlib, of the width of a paper's column.

        Args:
            label: A figure's label, such as "accuracy against round"; "" for the first.

        Raises:
            UsageError: if the report has no such figure.
        """
        from launch.results.report import page_of

        return page_of(self).figure(label).drawing()

    def table(self) -> Table:
        """Return the run's numbers as a table, which has markdown(), latex() and csv()."""
        from launch.results.report import numbers_of

        return numbers_of(self)

    def latex(self, caption: str = "", label: str = "") -> str:
        """Return the run's numbers as a table of LaTeX (booktabs).

        Args:
            caption: The caption, which makes the table float.
            label: The name for references, which makes the table float.
        """
        return self.table().latex(caption, label)

    def _repr_html_(self) -> str:
        """Return one line of HTML for a notebook's output cell."""
        from html import escape

        return f"<code>{escape(str(self.path))}</code>: {escape(self.label)}, {escape(self.status)}"


def run(experiment: Experiment | None = None, /, *, quiet: bool = False, **options: Unpack[Options]) -> Run:
    """Run an experiment and write a run folder, as `fedsim launch` does, with bit-identical results.

    The arguments are the options of the command line: the fields of fedsim.Experiment, and execution options,
    which do not change the results. FILE.py:NAME may replace a name, and so may an object if workers=0.

    Args:
        experiment: The experiment, such as fedsim.preset(...). The other arguments override its fields.
        quiet: Print nothing.

    Keyword Args:
        algo (str | type | Algorithm): A name, a subclass of fedsim.Algorithm, or an instance of one. The
            fields of an instance are its hyperparameters; `hyperparameters` overrides them.
        dataset (str | Dataset | Callable): A name, a fedsim.Dataset, or a function without arguments that
            returns one.
        partition (str | Callable | Mapping): A name, a function (targets, clients, seed) that returns the
            rows of every client, or a mapping from clients to their rows.
        model (str | Callable): A name, or a class or function (shape, classes) that makes a new torch module.
        train (str): Patterns of the parameters to train, such as "head.*,*.bias"; "" means all.
        freeze (str): Patterns of the parameters that are not trained; they never cross the wire.
        statistics (str): The treatment of running statistics of batch normalisation: "average", "local" or
            "frozen"; "" (the default) refuses models that have them.
        until (float | str): The test accuracy (0.78, "78%") at which the run ends, after the first evaluated
            round that reaches it; 0 means none.
        participation (str | float | int | Callable): A schedule as on the command line, a share of the
            clients (float), a number of clients (int), or a function (population) that returns a function
            (round), which returns a fedsim.Participation or client ids.
        hyperparameters (Mapping): By short or dotted name, {"lr": 0.1} or {"local.lr": 0.1}, or nested.
        codecs (Mapping): Codecs by message field, {"up.precision": "log8"}.
        workers (int | str): Number of worker processes. 0 (the default) computes in this process; "auto" is
            as many as cores and memory allow.
        asynchronous (str): With "fedbuff:3", the server aggregates every three uploads on the virtual clock.
        tree (str): "4x25" for four edge servers, each between the server and 25 clients (fedsim.tree), or a
            TOML file.
        data_dir (str | Path): The folder of data files; by default $FEDSIM_DATA.
        out (str | Path): The run folder; by default RUNS/<time>-<algo>-<seed>, in the folder `runs` ("runs").

    Returns:
        The finished run.

    Raises:
        FedsimError: see fedsim.errors; UsageError for unknown names and for incompatible options.
        KeyboardInterrupt: after Ctrl-C; fedsim.resume continues the run.

    Examples:
        >>> import fedsim
        >>> run = fedsim.run(
        ...     algo="fedlap", model="logistic", clients=6, rounds=2, participation=0.5,
        ...     hyperparameters={"lr": 0.01}, codecs={"up.mean": "bf16"}, quiet=True,
        ... )
        >>> run.status
        'done'
    """
    with called():
        checked, execution = resolved(experiment, options)
        check_objects(checked, execution)
        lines = remarks(checked)
        return _finished(lambda: runs.launch(checked, execution, quiet=quiet, embedded=True, remarks=lines))


def resume(run: RunFolder | str | Path, *, quiet: bool = False, **options: Unpack[Options]) -> Run:
    """Continue a run after its last committed round, with the bit-identical results of an uninterrupted run.

    Args:
        run: The run, or its folder.
        quiet: Print nothing.

    Keyword Args:
        rounds (int): The new total number of rounds, not below the old one.
        until (float | str): A new accuracy at which to end; 0 for none.
        workers (int | str): As in fedsim.run, like the other execution options; options that are left out
            keep their earlier values.
        algo (str | type | Algorithm): The algorithm again, if an earlier process started the run with
            an object. The same applies to dataset, partition, model and participation.

    Raises:
        FedsimError: as in run; MismatchError for a change that is not allowed.
        KeyboardInterrupt: as in run.

    Examples:
        >>> import fedsim
        >>> run = fedsim.run(algo="fedavg", model="logistic", clients=4, rounds=1, quiet=True)
        >>> list(fedsim.resume(run, rounds=2, quiet=True).metrics["round"])
        [0, 1, 2]
    """
    folder = _folder(run)
    check_keywords(options)
    changes = {key: value for key, value in options.items() if value is not None}
    changes |= {key: text_of(key, changes[key]) for key in OBJECTS if key in changes}
    changes |= {key: str(changes[key]) for key in ("data_dir", "out", "runs") if key in changes}
    with called():
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
        run: The run folder.
        algo: The algorithm again, if an earlier process started the run with an object. Only `model()` needs
            it. The same applies to dataset, partition, model and participation.
        dataset: See algo.
        partition: See algo.
        model: See algo.
        participation: See algo.

    Raises:
        UsageError: if there is no run folder.
        DataError: if the run's manifest is damaged.

    Examples:
        >>> import fedsim
        >>> run = fedsim.run(
        ...     algo="fedavg", model="logistic", clients=4, rounds=1, out="runs/first", quiet=True
        ... )
        >>> fedsim.open("runs/first").status
        'done'
    """
    passed = (algo, dataset, partition, model, participation)
    for key, value in zip(OBJECTS, passed, strict=True):
        if value is not None:
            text_of(key, value)
    with called():
        return Run.open(_folder(run).resolve())


def preset(name: str, algo: str = "fedlap_cov", **changes: Any) -> Experiment:
    """Return the experiment of a preset: fedsim.run(fedsim.preset("fashion_mnist", "ivon_admm", seed=1)).

    Args:
        name: The preset's name, as in `fedsim list presets`.
        algo: An algorithm's name. An algorithm without settings in the preset has its own defaults.
        **changes: Fields of Experiment that override the preset's; `hyperparameters` overrides key by key.

    Raises:
        UsageError: for an unknown preset or field.

    Examples:
        >>> import fedsim
        >>> experiment = fedsim.preset("fashion_mnist", "ivon_admm", seed=1)
        >>> experiment.dataset, experiment.algo, experiment.seed
        ('fashion_mnist', 'ivon_admm', 1)
    """
    check_keywords(changes)
    for key, value in (("name", name), ("algo", algo)):
        if not isinstance(value, str):
            raise UsageError(f"{key}={value!r}: give a name, such as fedsim.preset('mnist', 'fedlap')")
    with called():
        return experiment_of(name, algo, plain_numbers(changes))


def plan(experiment: Experiment | None = None, /, **options: Unpack[Options]) -> dict[str, Any]:
    """Compute the traffic of a run without running it; return the document of `fedsim plan --json`.

    Args:
        experiment: As in run. The options are also those of run.

    Raises:
        FedsimError: as in run.

    Examples:
        >>> import fedsim
        >>> bill = fedsim.plan(algo="fedlap", clients=1000, rounds=20)
        >>> bill["params"], bill["bytes_down"]
        (7510, 604060000)
    """
    with called(), process_restored():
        from launch.results.plan import planned, to_json
        from launch.terminal import plain

        result: dict[str, Any] = plain(to_json(*planned(*resolved(experiment, options))))
    return result


def sweep(
    recipe: str | Path | None = None,
    /,
    *,
    over: Mapping[str, Iterable[Any]] | None = None,
    seeds: Iterable[int] | None = None,
    runs: str | Path = "runs/sweep",
    out: str | Path | None = None,
    jobs: int | None = None,
    data_dir: str | Path | None = None,
    quiet: bool = False,
    **options: Unpack[ExperimentOptions],
) -> list[Run]:
    """Run a grid of experiments in parallel, as `fedsim sweep` does; return the runs in the grid's order.

    A configuration that already has a run in the folder `runs` is not run again.

    Args:
        recipe: A recipe file that defines all runs; None if `over`, `seeds` and the options define them.
        over: The values to combine, by name of an option, of a hyperparameter, or codec.FIELD:
            {"algo": ["fedavg", "ivon_admm"], "participation": [1.0, 0.3]}.
        seeds: The seeds of every configuration; None is (0,).
        runs: The folder of the runs.
        out: The folder for the page with its tables and plots; None writes no page.
        jobs: Number of parallel runs; by default one per core.
        data_dir: The folder of data files; by default $FEDSIM_DATA.
        quiet: Print nothing.
        **options: Options of all runs, as in run; objects must be given as FILE.py:NAME.

    Raises:
        UsageError: for a grid that cannot be run.
        TaskError: if a run failed, after the others have ended.
        KeyboardInterrupt: after Ctrl-C; the same call continues the sweep.

    Examples:
        >>> import fedsim
        >>> runs = fedsim.sweep(
        ...     over={"algo": ["fedavg", "fedprox"]}, model="logistic", clients=4, rounds=1, quiet=True
        ... )
        >>> [run.experiment["algo"] for run in runs]
        ['fedavg', 'fedprox']
    """
    with called():
        from launch.sweep.command import sweep as run_sweep
        from launch.sweep.from_options import recipe_of
        from launch.sweep.pool import Pool
        from launch.sweep.recipe import Recipe

        check_keywords(options)
        if extra := [key for key in options if key in EXECUTION]:
            raise UsageError(
                f"{extra[0]}= is no argument of sweep, whose runs have no workers; jobs= is how many of them "
                "are computed side by side, and a recipe's [execution] says more"
            )
        pool = Pool(path_of("runs", runs))
        if over is not None and not isinstance(over, Mapping):
            raise UsageError(f"over={over!r}: write a dictionary, {{'algo': ['fedavg', 'ivon_admm']}}")
        numbers = None if seeds is None else list_of("seeds", seeds, int, "[0, 1, 2]")
        if isinstance(jobs, bool) or not isinstance(jobs, int | None) or (jobs is not None and jobs < 1):
            raise UsageError(f"jobs={jobs!r}: give the number of parallel runs")
        if recipe is None and not over and not numbers:
            raise UsageError("name a grid: over={'algo': ['fedavg', 'ivon_admm']}, or a recipe file")
        if recipe is None:
            texts: dict[str, Any] = {key: text_in_file(key, value) for key, value in options.items()}
            for table in ("hyperparameters", "codecs"):
                settings = dict(dotted(texts.pop(table, {})))
                texts[table] = tuple(f"{key}={setting(value)}" for key, value in settings.items())
            axes = dict(_axis(key, values) for key, values in (over or {}).items())
            if unset := [key for key, values in axes.items() if not values]:
                raise UsageError(f"over={{{unset[0]!r}: ...}} names no value; give all values to combine")
            selected = recipe_of(texts, axes, (0,) if numbers is None else tuple(numbers))
        elif options or over or numbers is not None:
            raise UsageError(
                f"recipe {recipe} defines all of its runs; leave out over=, seeds= and the options"
            )
        else:
            selected = Recipe.read(path_of("recipe", recipe))
        try:
            with process_restored(), without_main():
                run_sweep(
                    selected,
                    Path(recipe or "sweep.toml"),
                    out=_file("out", out),
                    runs=pool.path,
                    side_by_side=jobs,
                    data_dir=None if data_dir is None else str(path_of("data_dir", data_dir)),
                    quiet=quiet,
                )
        except Interrupted as e:
            raise KeyboardInterrupt(str(e)) from e
    return [Run.open(pool.folder(trial).resolve()) for trial in selected.trials()]


def compare(
    *runs: RunFolder | str | Path | Iterable[RunFolder | str | Path],
    to: Iterable[float | str] = (),
    where: Iterable[str] = (),
    against: str | None = None,
    out: str | Path | None = None,
    markdown: str | Path | None = None,
    csv: str | Path | None = None,
    latex: str | Path | None = None,
    figures: str | Path | None = None,
) -> ComparedRuns:
    """Compare the costs at which runs reach accuracies; return the document of `fedsim compare --json`.

    Its methods figure(), table() and latex() return what a paper needs.

    Args:
        *runs: Runs, run folders, or folders of them, alone or in lists: fedsim.compare(fedsim.sweep(...)).
        to: Accuracies, as 0.75 or "75%"; by default the runs' targets, or accuracies that separate the runs.
        where: Conditions KEY=VALUE on the experiment; other runs are left out.
        against: The label, or part of it, of the group to compare the others with; by default the best.
        out: The file for the page; None writes no page.
        markdown: The file for the tables as Markdown.
        csv: The file for the tables as CSV.
        latex: The file for the table of results as LaTeX.
        figures: The folder for the figures as SVG and PDF.

    Raises:
        UsageError: if an argument is wrong.
        DataError: if data is missing or damaged.
        DiskError: if a file cannot be written.

    Examples:
        >>> import fedsim
        >>> some = dict(model="logistic", clients=4, rounds=2, quiet=True)
        >>> runs = [fedsim.run(algo=name, **some) for name in ("fedavg", "fedlap")]
        >>> [group["algo"] for group in fedsim.compare(*runs, to=[0.3])["groups"]]
        ['fedavg', 'fedlap']
        >>> "tabular" in fedsim.compare(*runs).latex()
        True
    """
    with called():
        from launch.results.compare import Comparison
        from launch.terminal import plain

        alone = (RunFolder, str, os.PathLike)
        many = [
            [run] if isinstance(run, alone) else list_of("runs", run, alone, "[RUN, RUN]") for run in runs
        ]
        folders = [_folder(run) for listed in many for run in listed]
        if not folders:
            raise UsageError("name the runs to compare: fedsim.compare(RUN, RUN), or a list of runs")
        levels = [str(level) for level in list_of("to", to, int | float | str, "[0.75, '80%']")]
        if not isinstance(against, str | None):
            raise UsageError(f"against={against!r}: give the label of a group")
        conditions = tuple(list_of("where", where, str, "['seed=0']"))
        comparison = Comparison.of(folders, levels, conditions, against)
        named = {"out": out, "markdown": markdown, "csv": csv, "latex": latex, "figures": figures}
        written = comparison.write(**{name: _file(name, path) for name, path in named.items()})
        result = ComparedRuns(plain(comparison.to_json(written)))
        result._comparison = comparison
    return result


def algorithms() -> dict[str, dict[str, Any]]:
    """Return all algorithms by name, with cost per client and round, and paper, as `fedsim list` does.

    Examples:
        >>> import fedsim
        >>> fedsim.algorithms()["fedavg"]["paper"]
        'McMahan et al. 2017, Algorithm 1'
    """
    from launch.commands.lists import to_json

    return {row["name"]: row for row in to_json("algorithms")}


def _folder(run: RunFolder | str | Path) -> Path:
    return run.path if isinstance(run, RunFolder) else path_of("run", run)


def _file(name: str, path: str | Path | None) -> Path | None:
    return None if path is None else path_of(name, path)


def _axis(key: Any, values: Any) -> tuple[str, list[str]]:
    """Return a key and the values of `over`, as text for --over."""
    if not isinstance(key, str):
        raise UsageError(f"over={{{key!r}: ...}}: a key is the name of an option, such as 'algo'")
    listed = list_of("over", values, object, "{'algo': ['fedavg', 'fedlap']}")
    return key, [setting(value) for value in listed]


def _finished(job: Callable[[], Path]) -> Run:
    """Run a job that writes a run folder, and return the run."""
    try:
        with process_restored():
            path = job()
    except Interrupted as e:  # a FedsimError is an Exception, which a loop over experiments may catch
        raise KeyboardInterrupt(str(e)) from e
    return Run.open(path.resolve())


run.__signature__ = with_defaults(run)  # type: ignore[attr-defined]
plan.__signature__ = with_defaults(plan)  # type: ignore[attr-defined]
