"""fedsim sweep: run a grid of experiments side by side and tabulate them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from launch.commands.shared import FOLDER, figures_option, latex_option, print_path, quiet_option
from launch.configuration.options import Configured, configuration_of
from launch.engines import options as engine_options


@click.command(cls=Configured)
@click.argument("recipe", required=False, type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--over",
    multiple=True,
    metavar="KEY=V,V",
    help="Values to combine, of an option, a hyperparameter, or codec.FIELD; repeatable.",
)
@click.option("--seeds", metavar="S,S", help="Seeds, 0,1,2 or 0-2.  [the recipe's; else 0]")
@click.option("--only", multiple=True, metavar="LABEL", help="Only this variant of the recipe; repeatable.")
@click.option("--out", **FOLDER, help="Write NAME.md, tables, plots and archive there.")
@latex_option
@figures_option
@click.option("--runs", **FOLDER, default="runs/sweep", show_default=True, help="Folder of the runs.")
@click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="Runs side by side.  [one per core]")
@click.option("--data-dir", metavar="DIR", help="Folder of the data files.  [FEDSIM_DATA]")
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    metavar="M",
    help="Stop then; RUNS/*.tar continue elsewhere.",
)
@click.option("--dry-run", is_flag=True, help="List the runs and do nothing.")
@click.option("--no-run", is_flag=True, help="Show and write what the runs that are there give.")
@click.option("--archived", is_flag=True, help="Do not run what *_runs.jsonl.zst in --out have.")
@click.option("--remove-states", is_flag=True, help="Remove clients' states from a run that is done.")
@engine_options.of_sweep
@quiet_option
@configuration_of("sweep")
def sweep(
    recipe: Path | None,
    over: tuple[str, ...],
    seeds: str | None,
    only: tuple[str, ...],
    out: Path | None,
    latex: Path | None,
    figures: Path | None,
    runs: Path,
    jobs: int | None,
    data_dir: str | None,
    minutes: float | None,
    dry_run: bool,
    no_run: bool,
    archived: bool,
    remove_states: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Run a grid of experiments of a RECIPE file or --over, each a run folder.

    \b
    Which algorithm reaches 78 % with the fewest bytes?
        fedsim sweep --preset fashion_mnist --over algo=fedavg,ivon_admm --seeds 0,1,2 --runs runs/which
        fedsim compare runs/which --to 0.78

    The options of launch apply to all runs; a RECIPE (docs/recipes/*.toml) sets them itself, and --only and
    --seeds select a part of it. What has a run in --runs is not run again. Tables show mean and standard
    deviation over the seeds. With --on, all machines see --runs.
    """
    engine = engine_options.EngineOptions.taken(options)
    from launch.sweep.command import sweep
    from launch.sweep.from_options import select_recipe

    if recipe and out and (only or seeds):
        raise click.UsageError("--out writes the page and archive of all rows: leave out --only and --seeds")
    selected = select_recipe(recipe, options, over, seeds, only)
    page = sweep(
        selected,
        recipe or Path("sweep.toml"),
        out=out,
        latex=latex,
        figures=figures,
        runs=runs,
        side_by_side=jobs,
        data_dir=data_dir,
        minutes=minutes,
        dry=dry_run,
        run=not no_run,
        quiet=quiet,
        engine=engine,
        keeps_states=not remove_states,
        archived=archived,
    )
    print_path(page, quiet)
