"""The fedsim command. Heavy imports happen inside the commands, so that help is instant."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import click

from fedsim.errors import FedsimError


class _Group(click.Group):
    """Commands whose mistakes are one clear line and an exit code, never a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except FedsimError as e:
            click.echo(f"fedsim: {e}", err=True)
            sys.exit(e.exit_code)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="fedsim", message="fedsim %(version)s")
def main() -> None:
    """Measure what federated Bayesian and ADMM learning costs on the wire.

    A coordinator and K worker processes exchange typed messages over ZeroMQ; every byte is counted
    by its meaning: mean, precision, dual, header, framing.
    """


_EXPERIMENT = (
    click.option("--algo", metavar="NAME", help="Algorithm, or path/to/file.py:CLASS.  [fedlap_cov]"),
    click.option("--workers", type=int, metavar="K", help="Worker processes; 0: in process.  [10]"),
    click.option(
        "--clients",
        type=int,
        metavar="N",
        help="Clients.  [as many as workers, 10 with --workers 0]",
    ),
    click.option("--rounds", type=int, metavar="R", help="Rounds.  [20; bcm 1]"),
    click.option(
        "--dataset",
        metavar="NAME",
        help="Data set (fedsim list datasets), or path/to/file.py:NAME.  [digits]",
    ),
    click.option("--fraction", type=float, metavar="F", help="Share of the training data in use.  [1.0]"),
    click.option(
        "--inputs",
        type=click.Choice(["raw", "scaled"]),
        help="Features as stored, or scaled.  [per data set]",
    ),
    click.option("--data-dir", metavar="DIR", help="Folder of the data files.  [FEDSIM_DATA]"),
    click.option(
        "--partition", metavar="SPEC", help="Split over clients (fedsim list partitions).  [two_dirichlet]"
    ),
    click.option(
        "--model",
        metavar="NAME",
        help="Model (fedsim list models), or path/to/file.py:NAME.  [the algorithm's default]",
    ),
    click.option(
        "--participation", metavar="S", help="full, a share (0.3) or a count (3) per round.  [full]"
    ),
    click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="KEY=VALUE",
        help="A hyperparameter (fedsim describe ALGO); repeatable.",
    ),
    click.option(
        "--codec",
        "codecs",
        multiple=True,
        metavar="FIELD=CODEC",
        help="Encoding of a message field, or up.FIELD / down.FIELD; repeatable.",
    ),
    click.option(
        "--error-feedback",
        is_flag=True,
        default=None,
        help="Add to an upload what a lossy codec took from the client's last one.",
    ),
    click.option("--seed", type=int, metavar="S", help="Seed of all random streams.  [0]"),
    click.option(
        "--link", metavar="L", help="Virtual clock: up=10mbit,down=50mbit,rtt=40ms, or FILE.csv per client."
    ),
    click.option("--compute", metavar="T", help="Virtual clock: time per example, 5ms or 5ms,noise=0.3."),
    click.option("--deadline", metavar="T", help="Virtual clock: later uploads are paid for, not folded."),
    click.option(
        "--bad-uploads",
        type=click.Choice(["stop", "skip", "retry"]),
        help="An upload with NaN, Inf, a precision that is not positive or too large a norm.  [stop]",
    ),
    click.option(
        "--max-norm", type=float, metavar="X", help="Largest norm of an upload's tensor, 0: any.  [0]"
    ),
    click.option("--eval-every", type=int, metavar="N", help="Evaluate every N rounds.  [1]"),
    click.option(
        "--evaluate-on",
        metavar="ROWS",
        help="test, or held out: unused:N training rows, or fold:I/N of the clients' rows.  [test]",
    ),
    click.option(
        "--eval-samples",
        type=int,
        metavar="N",
        help="Posterior samples averaged beside the mean, 0: none.  [per algorithm]",
    ),
    click.option("--threads", type=int, metavar="T", help="Threads per task; may change bits.  [1]"),
    click.option(
        "--devices", metavar="LIST", help="auto, cpu, or cuda:0,cuda:1 (worker i on device i mod n).  [auto]"
    ),
    click.option(
        "--remote-workers",
        type=int,
        metavar="K",
        help="Start none here, wait for K (--bind).",
    ),
    click.option("--bind", metavar="URL", help="Where they come in: tcp://ADDRESS:PORT of this machine."),
    click.option(
        "--join-within", type=float, metavar="SECONDS", help="Stop if workers are missing after that.  [120]"
    ),
    click.option("--transport", type=click.Choice(["ipc", "tcp"]), help="How frames travel.  [ipc]"),
    click.option(
        "--verify-bytes",
        is_flag=True,
        default=None,
        help="Compare the ledger with the kernel's count of the streams (tcp).",
    ),
    click.option(
        "--keep-uploads", is_flag=True, default=None, help="Leave every upload in the run folder, for replay."
    ),
    click.option(
        "--lease", type=float, metavar="SECONDS", help="Replace a worker that hangs for so long.  [120]"
    ),
    click.option("--out", metavar="DIR", help="Run folder.  [runs/<time>-<algo>-<seed>]"),
    click.option(
        "--patience", type=float, metavar="SECONDS", help="Stop if nothing happens for so long.  [3600]"
    ),
    click.option(
        "--config",
        metavar="FILE",
        help="TOML file with [experiment], [hyperparameters], [codecs], [execution].",
    ),
)


def _experiment(command: Callable[..., None]) -> Callable[..., None]:
    """The options of launch, which plan has, too."""
    for option in reversed(_EXPERIMENT):
        command = option(command)
    return command


@main.command(short_help="Run an experiment with real worker processes.")
@_experiment
def launch(**options: Any) -> None:
    """Run an experiment and leave a run folder.

    \b
    The main job, on data that ships with a dependency:
        fedsim launch --workers 10 --algo fedlap_cov

    Precedence: this command line, then --config, then the defaults in brackets. The result is the
    same, bit for bit, for any number of workers and either transport.
    """
    from launch.options import resolve

    experiment, execution = resolve(options)
    from launch.run import launch as run

    run(experiment, execution)


@main.command(short_help="Go on with a run that was ended, however it was ended.")
@click.argument("run", type=click.Path(file_okay=False))
@click.option("--allow-drift", is_flag=True, help="Go on although other versions compute; bits may differ.")
@_experiment
def resume(run: str, allow_drift: bool, **options: Any) -> None:
    """Go on after the last committed round, with the bits of the undisturbed run.

    Options of launch may change how it is carried out (--workers, --transport, --devices, ...) and give it
    more --rounds. Anything that the bits depend on stays as it was begun.
    """
    from pathlib import Path

    from launch.run import resume as go_on

    go_on(Path(run), options, drift=allow_drift)


@main.command(short_help="Compute a run's last rounds again and compare the bits.")
@click.argument("run", type=click.Path())
@click.option(
    "--rounds", type=click.IntRange(min=1), metavar="N", help="The last N that can be.  [all of them]"
)
@click.option("--clients", metavar="IDS", help="Of these clients, such as 0,4.  [all]")
@click.option("--twice", is_flag=True, help="Compute every task twice, and compare these, too.")
@click.option("--data-dir", metavar="DIR", help="Folder of the data files.  [the run's]")
def verify(run: str, rounds: int | None, clients: str | None, twice: bool, data_dir: str | None) -> None:
    """Compute tasks of RUN again, in this process, and compare their digests with the run's.

    Finds client code that is not deterministic and names it. The rounds that can be computed again are those
    whose predecessor's checkpoint is kept, the last ones, and the first. Compares the digests of the summary
    with the files, too. Exit code 1 if anything differs; nothing in the folder is changed.
    """
    import os
    from pathlib import Path

    from launch.processes.server import ENVIRONMENT

    os.environ.update(ENVIRONMENT)  # before torch is imported
    from launch.commands.verify import verify as retry

    retry(Path(run), rounds, clients, twice=twice, data_dir=Path(data_dir) if data_dir else None)


@main.command(short_help="Fold a run's kept uploads again, without clients.")
@click.argument("run", type=click.Path())
@click.option("--data-dir", metavar="DIR", help="Folder of the data files.  [the run's]")
def replay(run: str, data_dir: str | None) -> None:
    """Fold the uploads of RUN again, from the start to the end, and compare what comes of them.

    For runs that were launched with --keep-uploads. Every broadcast is made again, no client computes. Exit
    code 1 if a checkpoint or the final model differs; nothing in the folder is changed.
    """
    import os
    from pathlib import Path

    from launch.processes.server import ENVIRONMENT

    os.environ.update(ENVIRONMENT)  # before torch is imported
    from launch.commands.replay import replay as retry

    retry(Path(run), Path(data_dir) if data_dir else None)


@main.command(short_help="Take part in a run on another machine.")
@click.option("--join", "file", metavar="FILE", required=True, help="The run's join.json.")
@click.option("--connect", "url", metavar="URL", help="The coordinator as seen from here.  [the file's]")
@click.option("--data-dir", metavar="DIR", help="Folder of the data files on this machine.  [FEDSIM_DATA]")
@click.option("--worker", type=int, metavar="I", help="As which worker.  [the first that is missing]")
@click.option(
    "--patience",
    type=float,
    metavar="SECONDS",
    default=60.0,
    show_default=True,
    help="Give up if no coordinator answers.",
)
def worker(file: str, url: str | None, data_dir: str | None, worker: int | None, patience: float) -> None:
    """Join a run that `fedsim launch --remote-workers K --bind tcp://ADDRESS:PORT` has opened.

    The file holds this run's keys: copy it over a channel that you trust, and keep it to yourself (0600).
    """
    from launch.join import join

    join(file, url=url, data_dir=data_dir, worker=worker, patience=patience)


@main.command("revoke", short_help="Shut a worker on another machine out of a run.")
@click.argument("run", type=click.Path())
@click.argument("workers", nargs=-1, required=True, type=int, metavar="WORKER...")
def revoke_(run: str, workers: tuple[int, ...]) -> None:
    """Take the keys of RUN's remote workers back, while it goes on: WORKER is 0, 1, ...

    A connection that is open ends within a second, others take over what the worker was at (the bits of the
    result stay the same), and with this key nobody comes in again. The keys of another worker are
    others: whoever has the whole join.json has them all.
    """
    from pathlib import Path

    from launch.revoke import revoke

    revoke(Path(run), workers)


@main.command("list", short_help="Show what there is to choose from.")
@click.argument(
    "what", type=click.Choice(["algorithms", "datasets", "models", "partitions", "codecs", "schedules"])
)
def list_(what: str) -> None:
    """List algorithms, datasets, models, partitions, codecs or schedules."""
    from launch.commands.catalogue import show

    show(what)


@main.command(short_help="Show an algorithm's messages, cost and hyperparameters.")
@click.argument("algo")
def describe(algo: str) -> None:
    """Describe an algorithm: its box, its messages and their cost in P, its hyperparameters."""
    from launch.commands.catalogue import describe as show

    show(algo)


@main.command(short_help="Compare all codecs on the messages of a run.")
@click.argument("run", required=False, type=click.Path())
@click.option("--data-dir", metavar="DIR", help="Folder of the data files.  [the run's]")
@click.option(
    "--keep",
    "fractions",
    type=float,
    multiple=True,
    default=(0.1,),
    show_default=True,
    metavar="P",
    help="Fraction that csr, bitmap, best and topk keep; repeatable.",
)
@click.option("--csv", "file", metavar="FILE", help="Write the figures there, too.")
def codecs(run: str | None, data_dir: str | None, fractions: tuple[float, ...], file: str | None) -> None:
    """Show bytes, speed and error of every codec on the messages that RUN would send next.

    One client, the largest of the next round's, computes its next task here from its committed state;
    nothing in the folder is changed. Without RUN, the main job is trained for 3 rounds first.
    """
    import os
    from pathlib import Path

    from launch.processes.server import ENVIRONMENT

    os.environ.update(ENVIRONMENT)  # before torch is imported
    from launch.commands.codecs import codecs as show

    paths = [Path(supplied) if supplied else None for supplied in (run, data_dir, file)]
    show(paths[0], paths[1], fractions, paths[2])


@main.command(short_help="Run a recipe's experiments side by side and tabulate them.")
@click.argument("recipe", type=click.Path(dir_okay=False))
@click.option("--out", metavar="DIR", help="Write NAME.md, NAME.csv and the plots there.")
@click.option("--runs", metavar="DIR", default="runs/sweep", show_default=True, help="Folder of the runs.")
@click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="Runs side by side.  [one per core]")
@click.option("--data-dir", metavar="DIR", help="Folder of the data files.  [FEDSIM_DATA]")
@click.option("--dry-run", is_flag=True, help="List the runs and do nothing.")
@click.option("--no-run", is_flag=True, help="Show and write what the runs that are there give.")
def sweep(
    recipe: str,
    out: str | None,
    runs: str,
    jobs: int | None,
    data_dir: str | None,
    dry_run: bool,
    no_run: bool,
) -> None:
    """Run a grid of experiments (docs/recipes/*.toml), each an ordinary run folder.

    A configuration that is in --runs already is not run again, so an interrupted sweep goes on where it
    was. Tables show mean and standard deviation over the recipe's seeds.
    """
    from pathlib import Path

    from launch.sweep.command import cores
    from launch.sweep.command import sweep as run

    folder = Path(out) if out else None
    jobs = jobs or cores()
    run(
        Path(recipe),
        out=folder,
        runs=Path(runs),
        side_by_side=jobs,
        data_dir=data_dir,
        dry=dry_run,
        run=not no_run,
    )


@main.command("schedule", short_help="Print a participation schedule as a grid.")
@click.argument("spec", metavar="SCHEDULE")
@click.option("--clients", type=click.IntRange(min=1), metavar="N", default=10, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), metavar="R", default=20, show_default=True)
@click.option("--seed", type=int, metavar="S", default=0, show_default=True)
def schedule_(spec: str, clients: int, rounds: int, seed: int) -> None:
    """Print who takes part when, as --participation SCHEDULE with these clients and this seed.

    size:N is drawn here as if client k had k + 1 examples.
    """
    from launch.commands.schedule import show

    show(spec, clients=clients, rounds=rounds, seed=seed, sizes=tuple(range(1, clients + 1)))


@main.command(short_help="Show where a run's bytes went.")
@click.argument("run", type=click.Path())
@click.option(
    "--by",
    type=click.Choice(["kind", "field", "round", "client"]),
    help="One table, in full.  [all four, cut]",
)
@click.option("--all", "everything", is_flag=True, help="Control and simulation traffic too.  [algorithm]")
@click.option("--cumulative", is_flag=True, help="Sums so far, by round.")
@click.option("--csv", "export", metavar="FILE", help="Write round,sender,receiver,bytes.")
def ledger(run: str, by: str | None, everything: bool, cumulative: bool, export: str | None) -> None:
    """Show a run's ledger: by kind, field and layer, round, client; broadcasts per recipient and once."""
    from pathlib import Path

    from launch.commands.ledger import show

    out = Path(export) if export else None
    show(Path(run), by=by or "", everything=everything, cumulative=cumulative, export=out)


@main.command(short_help="Cost an experiment on the wire without running it.")
@_experiment
def plan(**options: Any) -> None:
    """Say what the same launch would send, from its schedule and its messages' sizes, without training.

    Equal to the ledger of the run to the byte where no codec's size depends on the values; at most that
    elsewhere. Costs a million clients, too: fedsim plan --clients 1000000 --rounds 1000 --participation 0.001
    """
    from launch.options import resolve

    experiment, execution = resolve(options)
    from launch.commands.plan import show

    show(experiment, execution)


@main.command("report", short_help="Write a run's page, RUN/report.html.")
@click.argument("run", type=click.Path())
@click.option("--out", metavar="FILE", help="Write the page there.  [RUN/report.html]")
def report_(run: str, out: str | None) -> None:
    """Write one HTML file that loads nothing: curves, bytes, participation, timeline, configuration."""
    from pathlib import Path

    from launch.results.run_page import report

    click.echo(report(Path(run), Path(out) if out else None))


@main.command("compare", short_help="Compare runs: accuracy against bytes, tables, one page.")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path())
@click.option(
    "--out", metavar="FILE", default="compare.html", show_default=True, help="Write the page there."
)
@click.option(
    "--to",
    multiple=True,
    metavar="ACCURACY",
    help="Bytes to reach it (0.75 or 75%); repeatable.  [some that tell the runs apart]",
)
@click.option("--where", multiple=True, metavar="KEY=VALUE", help="Only runs with it; repeatable.")
@click.option("--markdown", metavar="FILE", help="Write the tables there, too.")
@click.option("--csv", "csv_", metavar="FILE", help="Write one line per group of runs there, too.")
def compare_(
    runs: tuple[str, ...],
    out: str,
    to: tuple[str, ...],
    where: tuple[str, ...],
    markdown: str | None,
    csv_: str | None,
) -> None:
    """Compare runs, or folders of runs such as runs/sweep.

    Runs that differ only in their seed are one line, with their mean and range.
    """
    from pathlib import Path

    from launch.results.compare import compare

    files = [Path(supplied) if supplied else None for supplied in (markdown, csv_)]
    paths = [Path(run) for run in runs]
    compare(paths, out=Path(out), to=to, where=where, markdown=files[0], csv=files[1])
