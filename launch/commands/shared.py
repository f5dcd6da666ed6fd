"""Arguments and options that commands share, and the preparation of torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

PATH = click.Path(path_type=Path)
FOLDER: dict[str, Any] = {"metavar": "DIR", "type": PATH}
FILE: dict[str, Any] = {"metavar": "FILE", "type": PATH}
run_argument = click.argument("run", type=PATH)


def prepare_torch(numerics: str = "native") -> None:
    """Set the environment that torch reads when it is imported. numerics: --numerics of the run."""
    from launch.processes.fork_server import ENVIRONMENT
    from workers.portable import environment_for

    os.environ.update({**ENVIRONMENT, **environment_for(numerics)})


quiet_option = click.option(
    "--quiet", "-q", is_flag=True, help="Print nothing but the path of what was made."
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document instead of tables."
)
figures_option = click.option("--figures", **FOLDER, help="Write figures there, as SVG and PDF.")
latex_option = click.option("--latex", **FILE, help="Write the table there for LaTeX.")
data_dir_option = click.option("--data-dir", **FOLDER, help="Folder of the data files.  [the run's]")


def print_path(path: Path | None, quiet: bool) -> None:
    """Print the path if --quiet is given; it is then the only output, for use in scripts."""
    if quiet and path is not None:
        click.echo(path)


def numerics_of(run: Path) -> str:
    """Return --numerics from a run's manifest."""
    from launch.runs.folder import RunFolder

    return str(RunFolder.open(run).experiment.get("numerics", "native"))
