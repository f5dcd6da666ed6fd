"""The start of the command line: what it imports when, and from where its time is measured."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

from fedsim.experiment import Experiment
from launch.cli import main
from launch.configuration.execution import Execution
from tests.support.commands import ran

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "numpy", "pandas", "zmq")


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return ran([sys.executable, *arguments], cwd=ROOT)


def test_every_field_of_the_configuration_has_an_option_or_says_that_it_has_none() -> None:
    generated = {parameter.name for parameter in main.commands["launch"].params}
    known = {field.name for kind in (Experiment, Execution) for field in fields(kind)}
    engine = {"on", "nodes", "gpus_per_worker", "image", "engine_options", "dry_run"}
    assert generated == known - {"device"} | {"config", "preset", "quiet"} | engine


def test_the_fork_server_is_made_by_a_process_that_has_imported_nothing_heavy() -> None:
    program = (
        f"import sys, launch.session.run\nprint([name for name in {HEAVY[:2]!r} if name in sys.modules])"
    )
    assert _python("-c", program).stdout == "[]\n"


def test_the_first_round_is_measured_from_the_program_start_when_a_shell_execs(tmp_path: Path) -> None:
    """A shell that executes its last command leaves the process its own start time."""
    options = "--workers 0 --clients 2 --rounds 1 --model logistic --set local.epochs=1"
    command = f"{sys.executable} -m launch launch {options} --out {tmp_path / 'run'}"
    script = f"sleep 4; date +%s.%N > {tmp_path / 'began'}; exec {command}"
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True)
    whole = time.time() - float((tmp_path / "began").read_text())
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert 0 < summary["seconds_imports"] <= summary["seconds_to_first_round"] <= whole
    imports = f"{summary['seconds_imports']:.1f} s of it imports"
    assert f"first round {summary['seconds_to_first_round']:.1f} s after the start, {imports}" in done.stdout
