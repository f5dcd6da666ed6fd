"""The fedsim command. Heavy imports happen inside the commands, so that help is instant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fedsim.version import __version__
from launch import PROGRAM_START
from launch.commands.devices import devices
from launch.commands.errors import Commands
from launch.commands.watch_commands import trace, watch
from launch.commands.worker_commands import (
    FILE,
    FOLDER,
    PATH,
    edge,
    node,
    prepare_torch,
    revoke,
    run_argument,
    worker,
)
from launch.configuration import names
from launch.configuration.completion import named, run_folders
from launch.configuration.options import (
    PLANNED,
    RESUMED,
    Configured,
    configuration,
    configuration_of,
    sweep_configuration,
)
from launch.engines import options as engine_options


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(version=__version__, message="fedsim %(version)s")
def main() -> None:
    """Measure what federated Bayesian and ADMM learning costs on the wire.

    A coordinator and K worker processes exchange typed messages over ZeroMQ; every byte is counted
    by its meaning: mean, precision, dual, header, framing.
    """


_quiet = click.option("--quiet", "-q", is_flag=True, help="Print nothing but what was made: its path.")
_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of tables.")
_data_dir = click.option("--data-dir", **FOLDER, help="Folder of the data files.  [the run's]")


def _say(path: Path | None, quiet: bool) -> None:
    """With --quiet the one line of stdout: what a script goes on with."""
    if quiet and path is not None:
        click.echo(path)


def _numerics_of(run: Path | None) -> str:
    """What a run's manifest says; native where there is no run.

    Raises:
        UsageError, DataError, MismatchError: as RunFolder.check_states, before torch is imported.
    """
    from launch.runs.folder import RunFolder

    if run is None:
        return "native"
    opened = RunFolder.open(run)
    opened.check_states()
    return str(opened.experiment.get("numerics", "native"))


@main.command(cls=Configured, short_help="Run an experiment with real worker processes.")
@_quiet
@configuration
@engine_options.of_launch
def launch(quiet: bool, **options: Any) -> None:
    """Run an experiment and leave a run folder.

    \b
    The main job, on data that ships with a dependency:
        fedsim launch --workers 10 --algo fedlap_cov

    Precedence: this command line, then --config, then the defaults in brackets. The result is the
    same, bit for bit, for any number of workers and either transport.
    """
    from launch.configuration.config import Overrides

    engine = engine_options.EngineOptions.taken(options)
    overrides = Overrides.of(options)
    if engine is not None:
        from launch.engines.submit import say

        return say(overrides, engine)
    experiment, execution = overrides.resolve()
    from launch.session import run

    remarks = overrides.remarks(experiment)
    with overrides.origins.own_words():
        path = run.launch(experiment, execution, quiet=quiet, started=PROGRAM_START, remarks=remarks)
    _say(path, quiet)


@main.command(cls=Configured, short_help="Go on with a run that was ended, however it was ended.")
@click.argument("run", type=click.Path(file_okay=False, path_type=Path), shell_complete=run_folders)
@_quiet
@configuration_of(RESUMED, default="the run's")
def resume(run: Path, quiet: bool, **options: Any) -> None:
    """Go on after the last committed round; the results are bit-identical to an uninterrupted run.

    Options may change how it is carried out and give it more --rounds, or another --until. Anything that the
    bits depend on stays as it was begun. A run that is complete stays as it is.
    """
    from launch.session.run import resume

    _say(resume(run, options, quiet=quiet, started=PROGRAM_START), quiet)


@main.command(short_help="Compute a run's last rounds again and compare the bits.")
@run_argument
@click.option("--rounds", type=click.IntRange(min=1), metavar="N", help="The last N that can be.  [all]")
@click.option("--clients", metavar="IDS", help="Of these clients, such as 0,4.  [all]")
@click.option("--twice", is_flag=True, help="Compute every task twice, and compare these, too.")
@_data_dir
@_json
def verify(run: Path, **options: Any) -> None:
    """Compute tasks of RUN again, in this process, and compare their digests with the run's.

    Finds client code that is not deterministic and names it. The rounds that can be computed again are those
    whose predecessor's checkpoint is kept, the last ones, and the first. Compares the digests of the summary
    with the files, too. Exit code 1 if anything differs; nothing in the folder is changed.
    """
    prepare_torch(_numerics_of(run))
    from launch.commands.verify import verify

    verify(run, **options)


@main.command(short_help="Fold a run's kept uploads again, without clients.")
@run_argument
@_data_dir
def replay(run: Path, data_dir: Path | None) -> None:
    """Fold the uploads of RUN again, from the start to the end, and compare the results.

    For runs that were launched with --keep-uploads. Every broadcast is made again, no client computes. Exit
    code 1 if a checkpoint or the final model differs; nothing in the folder is changed.
    """
    prepare_torch(_numerics_of(run))
    from launch.commands.replay import replay

    replay(run, data_dir)


for joined in (worker, node, edge, revoke):
    main.add_command(joined)


@main.command("list", short_help="Show what there is to choose from.")
@click.argument(
    "what",
    type=click.Choice(["algorithms", "datasets", "models", "partitions", "codecs", "schedules", "presets"]),
)
@_json
def list_(what: str, as_json: bool) -> None:
    """List algorithms, datasets, models, partitions, codecs, schedules or presets."""
    from launch.commands.lists import show

    show(what, as_json)


@main.command(short_help="Show an algorithm's messages, cost and hyperparameters, or a model's parameters.")
@click.argument("algo", required=False, shell_complete=named("algorithms"))
@click.option("--model", metavar="NAME", help="Describe this model instead, or path/to/file.py:NAME.")
@click.option("--dataset", metavar="NAME", default="digits", help="The data it is for.  [digits]")
@click.option("--train", metavar="PATTERNS", default="", help="As in launch.")
@click.option("--freeze", metavar="PATTERNS", default="", help="As in launch.")
@_data_dir
@_json
def describe(
    algo: str | None, model: str | None, data_dir: Path | None, as_json: bool, **choices: str
) -> None:
    """Describe an algorithm: its box, its messages and their cost in P, its hyperparameters.

    With --model, the parameters of a model: which are trained and travel, and which are frozen.
    """
    if (algo is None) == (model is None):
        raise click.UsageError("name an algorithm (fedsim describe fedlap_cov), or a model with --model")
    if algo is None:
        from fedsim.experiment import Experiment
        from launch.configuration.config import absolute_paths

        selected = absolute_paths({"algo": "fedavg", "clients": 1, "model": model, **choices})
        experiment = Experiment(**selected)
        names.check(experiment)
        prepare_torch()
        from launch.commands.model_parameters import describe_model

        return describe_model(experiment, data_dir, as_json)
    names.check_name("algorithms", algo)
    from launch.commands.catalogue import describe

    return describe(algo, as_json)


@main.command(short_help="Compare all codecs on the messages of a run.")
@click.argument("run", required=False, type=PATH, shell_complete=run_folders)
@_data_dir
@click.option(
    *("--keep", "fractions"),
    type=click.FloatRange(min=0, min_open=True, max=1),
    multiple=True,
    default=(0.1,),
    show_default=True,
    metavar="P",
    help="Fraction that csr, bitmap, best and topk keep; repeatable.",
)
@click.option("--csv", "file", **FILE, help="Write the figures there, too.")
@_json
def codecs(run: Path | None, fractions: tuple[float, ...], **options: Any) -> None:
    """Show bytes, speed and error of every codec on the messages that RUN would send next.

    One client, the largest of the next round's, computes its next task here from its committed state;
    nothing in the folder is changed. Without RUN, the main job is trained for 3 rounds first.
    """
    prepare_torch(_numerics_of(run))
    from launch.commands.codecs import codecs

    codecs(run, fractions=fractions, **options)


@main.command(cls=Configured, short_help="Run a grid of experiments side by side and tabulate them.")
@click.argument("recipe", required=False, type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--over",
    multiple=True,
    metavar="KEY=V,V",
    help="Values to combine, of an option, a hyperparameter, or codec.FIELD; repeatable.",
)
@click.option("--seeds", metavar="S,S", help="Seeds, 0,1,2 or 0-2.  [0]")
@click.option("--out", **FOLDER, help="Write NAME.md, its tables, plots and archive there.")
@click.option("--runs", **FOLDER, default="runs/sweep", show_default=True, help="Folder of the runs.")
@click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="Runs side by side.  [one per core]")
@click.option("--data-dir", metavar="DIR", help="Folder of the data files.  [FEDSIM_DATA]")
@click.option("--dry-run", is_flag=True, help="List the runs and do nothing.")
@click.option("--no-run", is_flag=True, help="Show and write what the runs that are there give.")
@click.option("--archived", is_flag=True, help="Do not run what NAME_runs.jsonl in --out has.")
@click.option("--remove-states", is_flag=True, help="Remove clients' states from a run that is done.")
@engine_options.of_sweep
@_quiet
@sweep_configuration
def sweep(
    recipe: Path | None,
    over: tuple[str, ...],
    seeds: str | None,
    out: Path | None,
    runs: Path,
    jobs: int | None,
    data_dir: str | None,
    dry_run: bool,
    no_run: bool,
    archived: bool,
    remove_states: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Run a grid of experiments, each an ordinary run folder: of a RECIPE file, or of --over.

    \b
    Which algorithm reaches 78 % with the fewest bytes?
        fedsim sweep --preset fashion_mnist --over algo=fedavg,ivon_admm --seeds 0,1,2 --runs runs/which
        fedsim compare runs/which --to 0.78

    The options of launch hold for all runs; with a RECIPE (docs/recipes/*.toml), which says them itself, they
    are refused. A configuration that is in --runs already is not run again, so an interrupted sweep goes on
    where it was. Tables show mean and standard deviation over the seeds. With --on, all machines see --runs.
    """
    engine = engine_options.EngineOptions.taken(options)
    from launch.sweep.command import sweep
    from launch.sweep.from_options import select_recipe

    selected = select_recipe(recipe, options, over, seeds)
    page = sweep(
        selected,
        recipe or Path("sweep.toml"),
        out=out,
        runs=runs,
        side_by_side=jobs,
        data_dir=data_dir,
        dry=dry_run,
        run=not no_run,
        quiet=quiet,
        engine=engine,
        keeps_states=not remove_states,
        archived=archived,
    )
    _say(page, quiet)


@main.command(short_help="Print a participation schedule as a grid.")
@click.argument("spec", metavar="SCHEDULE", shell_complete=named("schedules"))
@click.option("--clients", type=click.IntRange(min=1), metavar="N", default=10, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), metavar="R", default=20, show_default=True)
@click.option("--seed", type=int, metavar="S", default=0, show_default=True)
@_json
def schedule(spec: str, clients: int, **options: Any) -> None:
    """Print which client takes part when, as --participation SCHEDULE with these clients and this seed.

    size:N is drawn here as if client k had k + 1 examples.
    """
    names.check_schedule(spec)
    from launch.commands.schedule import show

    show(spec, clients=clients, sizes=tuple(range(1, clients + 1)), **options)


@main.command(short_help="Show where a run's bytes went.")
@run_argument
@click.option(
    "--by",
    type=click.Choice(["kind", "field", "round", "client", "hop"]),
    help="One table, in full; hop: between edge servers and the root.  [all, cut]",
)
@click.option("--all", "everything", is_flag=True, help="Control and simulation traffic too.  [algorithm]")
@click.option("--cumulative", is_flag=True, help="Sums so far, by round.")
@click.option("--csv", "export", **FILE, help="Write round,sender,receiver,bytes; no tables without --by.")
@click.option("--parquet", is_flag=True, help="Write all rows to RUN/ledger.parquet; needs pyarrow.")
@_json
def ledger(run: Path, by: str | None, **options: Any) -> None:
    """Show a run's ledger: by kind, field, round, client and hop; broadcasts per recipient and once."""
    from launch.commands.ledger import show

    show(run, by=by or "", **options)


@main.command(cls=Configured, short_help="Cost an experiment on the wire without running it.")
@_json
@configuration_of(PLANNED)
def plan(as_json: bool, **options: Any) -> None:
    """Say what the same launch would send, from its schedule and its messages' sizes, without training.

    Equal to the ledger of the run to the byte where no codec's size depends on the values; at most that
    elsewhere. Costs a million clients, too: fedsim plan --clients 1000000 --rounds 1000 --participation 0.001
    """
    from launch.configuration.config import Overrides

    overrides = Overrides.of(options)
    experiment, execution = overrides.resolve()
    from launch.commands.plan import show

    with overrides.origins.own_words():
        show(experiment, execution, as_json)


@main.command(short_help="List runs: their state, rounds, accuracy and bytes.")
@click.argument("folders", nargs=-1, metavar="[DIR]...", type=PATH, shell_complete=run_folders)
@_json
def runs(folders: tuple[Path, ...], as_json: bool) -> None:
    """List the runs in DIR, or in runs/, in the order in which they were begun.

    A run is running, done, interrupted (by a signal), failed (with an error), or killed: its coordinator is
    gone and has left no summary. `fedsim resume` goes on with the last three.
    """
    from launch.commands.runs import show

    show(folders, as_json)


main.add_command(devices)
main.add_command(watch)


@main.command(short_help="Write a run's page, RUN/report.html.")
@run_argument
@click.option("--out", **FILE, help="Write the page there.  [RUN/report.html]")
def report(run: Path, out: Path | None) -> None:
    """Write one HTML file that loads nothing: curves, bytes, participation, timeline, configuration."""
    from launch.results.run_page import report

    click.echo(report(run, out))


main.add_command(trace)


@main.command(short_help="Compare runs: accuracy against bytes, tables, one page.")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=PATH, shell_complete=run_folders)
@click.option("--out", **FILE, help="Write the page there.  [comparisons/TIME.html, a new one each time]")
@click.option(
    "--to", multiple=True, metavar="ACCURACY", help="Show the bytes until it (0.75 or 75%); repeatable."
)
@click.option("--where", multiple=True, metavar="KEY=VALUE", help="Only runs with it; repeatable.")
@click.option("--markdown", **FILE, help="Write the tables there, too.")
@click.option("--csv", **FILE, help="Write one line per group of runs there, too.")
@_json
def compare(runs: tuple[Path, ...], **options: Any) -> None:
    """Compare runs, or folders of runs such as runs/sweep.

    Runs that differ only in their seed are one line, with their mean and range.
    """
    from launch.results.compare import compare

    compare(runs, **options)
