"""Run experiments from Python: fedsim.run, fedsim.resume, fedsim.open, and Experiment.run.

This module only says what can be asked for. What carries a run out is launch.api, two storeys above, which is
imported when the first run is asked for (docs/decisions/017-front-door.md).
"""

from __future__ import annotations

import importlib
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypedDict, Unpack, cast

from fedsim import live_objects
from fedsim.experiment import (
    Experiment,
    dotted,
    hyperparameter_names,
    plain_number,
    resolved_hyperparameters,
)

if TYPE_CHECKING:
    import numpy
    import numpy.typing
    import pandas
    from torch import nn

    from fedsim.algorithm import Algorithm
    from fedsim.data.datasets import Dataset
    from fedsim.participation import ClientPopulation, Participation

    IntArray = numpy.typing.NDArray[numpy.int64]
    AlgorithmChoice: TypeAlias = str | type[Algorithm[Any, Any, Any, Any]] | Algorithm[Any, Any, Any, Any]
    DatasetChoice: TypeAlias = str | Dataset | Callable[[], Dataset]
    ModelChoice: TypeAlias = str | Callable[[tuple[int, ...], int], nn.Module]
    PartitionChoice: TypeAlias = str | Callable[[numpy.typing.NDArray[Any], int, int], Sequence[IntArray]]
    ParticipationChoice: TypeAlias = (
        str | int | float | Callable[[ClientPopulation], Callable[[int], Participation | Iterable[int]]]
    )


class Run(Protocol):
    """A run folder; every part is read when it is asked for."""

    @property
    def path(self) -> Path:
        """The run folder."""

    @property
    def status(self) -> str:
        """done, failed, interrupted, or "not ended"."""

    @property
    def manifest(self) -> Mapping[str, Any]:
        """manifest.json: what was asked for, and what it was carried out with."""

    @property
    def experiment(self) -> Mapping[str, Any]:
        """The manifest's experiment, with every default resolved."""

    @property
    def summary(self) -> Mapping[str, Any]:
        """summary.json, which a run writes when it ends."""

    @property
    def metrics(self) -> pandas.DataFrame:
        """One row per evaluated round; MB_down, MB_up and MB are sums so far."""

    @property
    def ledger(self) -> pandas.DataFrame:
        """One row per message field and layer, with its bytes."""

    def bytes_to(self, *, accuracy: float, direction: Literal["down", "up"] | None = None) -> int | None:
        """The algorithm's bytes until the first evaluated round with at least this test accuracy.

        Args:
            accuracy: between 0 and 1.
            direction: "down", "up", or None for the sum of both.

        Returns:
            The bytes, or None if no evaluated round reaches the accuracy.

        Raises:
            UsageError: for another direction, or if the run has no test accuracy (regression).
        """

    def model(self) -> nn.Module:
        """The final model as a torch module in eval mode."""

    def report(self, path: str | Path | None = None) -> Path:
        """Write the run's page, one HTML file that loads nothing; returns its path.

        Args:
            path: where to write it; None is RUN/report.html.
        """


class ExecutionOptions(TypedDict, total=False):
    """The rarer options of execution (launch.configuration.config.Execution). None changes a bit."""

    remote_workers: int
    bind: str
    keys: str
    join_within: float
    verify_bytes: bool
    keep_uploads: bool
    edge_processes: bool
    track: str
    allow_drift: bool
    lease: float
    patience: float
    durability: Literal["", "process", "power", "none"]


class _Launcher(Protocol):
    """What launch.api offers to this module."""

    def run(self, experiment: Experiment, execution: Mapping[str, Any], quiet: bool) -> Run: ...

    def resume(self, folder: Path, options: Mapping[str, Any], quiet: bool) -> Run: ...

    def open(self, folder: Path) -> Run: ...

    def preset(self, name: str, algo: str, changes: Mapping[str, Any]) -> Experiment: ...


def run(
    *,
    algo: AlgorithmChoice = "fedlap_cov",
    dataset: DatasetChoice = "digits",
    fraction: float = 1.0,
    inputs: Literal["", "raw", "scaled"] = "",
    partition: PartitionChoice = "two_dirichlet",
    model: ModelChoice = "",
    train: str = "",
    freeze: str = "",
    clients: int = 10,
    rounds: int = -1,
    until: float | str = 0.0,
    participation: ParticipationChoice = "full",
    seed: int = 0,
    eval_every: int = 1,
    eval_samples: int = -1,
    threads: int = 1,
    numerics: Literal["native", "portable"] = "native",
    hyperparameters: Mapping[str, Any] | None = None,
    codecs: Mapping[str, str] | None = None,
    error_feedback: bool = False,
    evaluate_on: str = "test",
    link: str = "",
    compute: str = "",
    deadline: str = "",
    asynchronous: str = "",
    tree: str = "",
    bad_uploads: Literal["stop", "skip", "retry"] = "stop",
    max_norm: float = 0.0,
    workers: int | Literal["auto"] = 0,
    transport: Literal["ipc", "tcp"] = "ipc",
    devices: str = "auto",
    data_dir: str | Path | None = None,
    out: str | Path | None = None,
    quiet: bool = False,
    **execution: Unpack[ExecutionOptions],
) -> Run:
    """Run an experiment and leave a run folder, as `fedsim launch` does, with the same bits.

    The defaults are those of fedsim.Experiment: rounds -1, model "" and eval_samples -1 are the algorithm's
    own. In the place of a name there may be FILE.py:NAME, for any number of workers, or with workers=0 an
    object.

    Args:
        algo: a name, or a subclass of fedsim.Algorithm, or an instance of one: its fields are
            hyperparameters, and those of `hyperparameters` go over them.
        dataset: a name, a fedsim.Dataset, or a function without arguments that returns one.
        partition: a name, or a function (targets, clients, seed) that returns the rows of every client.
        model: a name, or a class or function (shape, classes) that makes a new torch module.
        train: patterns of the parameters to train, "head.*,*.bias"; "" is all.
        freeze: patterns of parameters not to train, which never cross the wire.
        until: end with the first evaluated round of this test accuracy (0.78, "78%"); 0 is none.
        participation: as the command line has it; a float is a share of the clients, an int their number; or
            a function (population) that returns a function (round) to a fedsim.Participation or the ids.
        hyperparameters: by short or dotted names, {"lr": 0.1} or {"local.lr": 0.1}, or nested.
        codecs: by field, {"up.precision": "log8"}.
        workers: worker processes; 0 computes in this process; "auto": as cores and memory allow.
        asynchronous: "fedbuff:3" folds as soon as three uploads are there by the virtual clock.
        tree: "4x25": four edge servers between the server and 25 clients each (fedsim.tree), or a TOML file.
        data_dir: the folder of data files; None is $FEDSIM_DATA.
        out: the run folder; None is runs/<time>-<algo>-<seed>.
        quiet: print nothing.
        **execution: see ExecutionOptions.

    Returns:
        The finished run.

    Raises:
        FedsimError: as fedsim.errors says; UsageError for what does not exist or does not fit together.
        KeyboardInterrupt: after Ctrl-C; fedsim.resume goes on with the run.
    """
    algo, hyperparameters = _algorithm(algo, hyperparameters or {})
    experiment = Experiment(
        algo=algo,
        dataset=_choice(dataset, "dataset"),
        fraction=fraction,
        inputs=inputs,
        partition=_choice(partition, "partition"),
        model=_choice(model, "model"),
        train=train,
        freeze=freeze,
        clients=clients,
        rounds=rounds,
        until=cast(float, until),
        participation=_participation(participation),
        seed=seed,
        eval_every=eval_every,
        eval_samples=eval_samples,
        threads=threads,
        numerics=numerics,
        hyperparameters=hyperparameters,
        codecs=codecs or {},
        error_feedback=error_feedback,
        evaluate_on=evaluate_on,
        link=link,
        compute=compute,
        deadline=deadline,
        asynchronous=asynchronous,
        tree=tree,
        bad_uploads=bad_uploads,
        max_norm=max_norm,
    )
    return carry_out(
        experiment,
        quiet,
        workers=workers,
        transport=transport,
        devices=devices,
        data_dir=data_dir,
        out=out,
        **execution,
    )


def carry_out(experiment: Experiment, quiet: bool, **execution: Any) -> Run:
    """Run an experiment; execution: fields of launch.configuration.config.Execution.

    Raises:
        FedsimError: as run.
        KeyboardInterrupt: as run.
    """
    return _launcher().run(experiment, execution, quiet)


def resume(
    run: Run | str | Path,
    *,
    rounds: int | None = None,
    until: float | str | None = None,
    workers: int | Literal["auto"] | None = None,
    transport: Literal["ipc", "tcp"] | None = None,
    devices: str | None = None,
    data_dir: str | Path | None = None,
    quiet: bool = False,
    algo: AlgorithmChoice | None = None,
    dataset: DatasetChoice | None = None,
    partition: PartitionChoice | None = None,
    model: ModelChoice | None = None,
    participation: ParticipationChoice | None = None,
    **execution: Unpack[ExecutionOptions],
) -> Run:
    """Go on after the last committed round, with the bits of an uninterrupted run.

    Args:
        run: the run, or its folder.
        rounds: more rounds than before; None is as many.
        until: another accuracy to end at than before, 0 for none; None is as before.
        workers: worker processes; None, here and below, is as before.
        transport: how frames travel.
        devices: where tasks are computed.
        data_dir: the folder of data files.
        quiet: print nothing.
        algo: only for a run with an object of an earlier process: the object again. The same holds for
            dataset, partition, model and participation.
        dataset: see algo.
        partition: see algo.
        model: see algo.
        participation: see algo.
        **execution: see ExecutionOptions.

    Raises:
        FedsimError: as run; MismatchError for what must not change.
        KeyboardInterrupt: as run.
    """
    options: dict[str, Any] = {
        "rounds": rounds,
        "until": until,
        "workers": workers,
        "transport": transport,
        "devices": devices,
        "data_dir": None if data_dir is None else str(data_dir),
        **execution,
        **_objects(algo, dataset, partition, model, participation),
    }
    return _launcher().resume(_folder(run), options, quiet)


def open(
    run: str | Path,
    *,
    algo: AlgorithmChoice | None = None,
    dataset: DatasetChoice | None = None,
    partition: PartitionChoice | None = None,
    model: ModelChoice | None = None,
    participation: ParticipationChoice | None = None,
) -> Run:
    """A run that is there already.

    Args:
        run: its folder.
        algo: only for `model()` of a run with an object of an earlier process: the object again. The same
            holds for dataset, partition, model and participation.
        dataset: see algo.
        partition: see algo.
        model: see algo.
        participation: see algo.

    Raises:
        UsageError: if it is no run folder.
        DataError: if its manifest is damaged.
    """
    _objects(algo, dataset, partition, model, participation)
    return _launcher().open(_folder(run))


def preset(name: str, algo: str = "fedlap_cov", **changes: Any) -> Experiment:
    """The experiment of a preset: fedsim.preset("fashion_mnist", "ivon_admm", seed=1).run(workers=2).

    Args:
        name: as in `fedsim list presets`.
        algo: an algorithm's name; one that the preset does not know has its own defaults.
        **changes: fields of Experiment, which go over the preset's; `hyperparameters` by key.

    Raises:
        UsageError: for an unknown preset or field.
    """
    return _launcher().preset(name, algo, changes)


def _launcher() -> _Launcher:
    return cast(_Launcher, importlib.import_module("launch.api").LAUNCHER)


def _folder(run: Run | str | Path) -> Path:
    return Path(run) if isinstance(run, str | Path) else run.path


def _choice(value: Any, option: str) -> str:
    """The text of a choice: an object gets a name (fedsim.live_objects)."""
    return value if isinstance(value, str) else live_objects.register(value, option)


def _algorithm(choice: Any, hyperparameters: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The text of an algorithm, by its name if it is one of ours, and all hyperparameters."""
    supplied = dict(plain_hyperparameters(hyperparameters))
    if isinstance(choice, str):
        return choice, supplied
    if is_dataclass(choice) and not isinstance(choice, type):
        names = hyperparameter_names(type(choice))
        over = {names.get(key, key): value for key, value in supplied.items()}
        choice, supplied = type(choice), resolved_hyperparameters(choice) | over
    ours = isinstance(choice, type) and choice.__module__.startswith("protocols.")
    return (str(choice.name) if ours else live_objects.register(choice, "algo")), supplied


def plain_hyperparameters(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """By dotted name; numbers of numpy become Python's."""
    return {key: plain_number(value) for key, value in dotted(values)}


def _participation(choice: Any) -> str:
    """As --participation has it: a share has a point, a number of clients has none."""
    if isinstance(choice, numbers.Integral):
        return str(int(choice))
    if isinstance(choice, numbers.Real):
        text = repr(float(choice))
        return text if "e" not in text else f"{float(choice):.20f}".rstrip("0")
    return _choice(choice, "participation")


def _objects(algo: Any, dataset: Any, partition: Any, model: Any, participation: Any) -> dict[str, Any]:
    """The texts of those that were passed again."""
    options: dict[str, Any] = {}
    if algo is not None:
        options["algo"] = _algorithm(algo, {})[0]
    for name, value in (("dataset", dataset), ("partition", partition), ("model", model)):
        if value is not None:
            options[name] = _choice(value, name)
    if participation is not None:
        options["participation"] = _participation(participation)
    return options
