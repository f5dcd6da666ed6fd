"""Runs that earlier versions began and that were killed: this one goes on with them (F31).

tests/launch/earlier/*.tar.gz, each with run/ (killed after round 3 of 6) and expected.json (what an
undisturbed run gave where it was made). A release adds one and keeps the last two:

    fedsim launch --workers 1 --algo fedlap_cov --clients 2 --rounds 6 --model logistic \\
        --participation full+lost:0.2 --set local.epochs=2 --out run
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from launch import manifest
from launch.cli import main

EARLIER = sorted((Path(__file__).parent / "earlier").glob("*.tar.gz"))


@pytest.mark.parametrize("made", EARLIER, ids=lambda path: path.name.removesuffix(".tar.gz"))
def test_a_run_of_an_earlier_version_goes_on(made: Path, tmp_path: Path) -> None:
    with tarfile.open(made) as packed:
        packed.extractall(tmp_path, filter="data")
    run, expected = tmp_path / "run", json.loads((tmp_path / "expected.json").read_text())
    before = (run / "metrics.jsonl").read_bytes()
    done = CliRunner(catch_exceptions=False).invoke(
        main, ["resume", str(run), "--workers", "0", "--allow-drift"]
    )
    assert done.exit_code == 0, done.stderr
    assert "from the start" not in done.output  # it has taken up the last commit
    assert (run / "metrics.jsonl").read_bytes().startswith(before)
    summary = json.loads((run / "summary.json").read_text())
    exact = all(was == now for _, was, now in manifest.computing(manifest.read(run), today(tmp_path)))
    for key, value in expected.items():
        if exact or not key.endswith("sha256"):
            assert summary[key] == (value if exact else pytest.approx(value, rel=0.02)), key


def today(folder: Path) -> dict[str, object]:
    """The manifest of a run that is begun here."""
    job = ("--workers", "0", "--clients", "1", "--rounds", "0", "--model", "logistic")
    CliRunner(catch_exceptions=False).invoke(main, ["launch", *job, "--out", str(folder / "today")])
    return manifest.read(folder / "today")


def test_there_is_one() -> None:
    assert EARLIER
