"""Runs that earlier versions began and that were killed: this one goes on with them (F31).

tests/launch/earlier/*.tar.gz, each with run/ (killed after round 3 of 6) and expected.json (what an
undisturbed run gave where it was made); probes.json has the probe digest of the machine that made it. Where
this machine has another one, the digests are those of a second resume, by a worker process. A release adds
one and keeps the last two:

    fedsim launch --workers 1 --algo fedlap_cov --clients 2 --rounds 6 --model logistic \\
        --participation full+lost:0.2 --set local.epochs=2 --out run
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from launch.cli import main
from launch.runs import manifest
from launch.runs.folder import RunFolder
from launch.runs.restored import RestoredRun
from tests.support.commands import fedsim
from tests.support.kept_runs import command, files, kept_run
from tests.support.snapshots import at, snapshot
from workers.probe import probe_digest

EARLIER = sorted((Path(__file__).parent / "earlier").glob("*.tar.gz"))
OTHER_WIRE = {"before-0.1.0": 1, "0.1.0-wire-2": 2}
"""Begun with another wire format: messages, checkpoints and states were different in 1, headers in 2."""
PROBES = Path(__file__).parent / "earlier" / "probes.json"


def run_name(archive: Path) -> str:
    return archive.name.removesuffix(".tar.gz")


@pytest.mark.parametrize("name", OTHER_WIRE)
def test_a_run_of_another_wire_format_is_refused_in_one_line_and_left_as_it_is(
    name: str, tmp_path: Path
) -> None:
    (archive,) = (path for path in EARLIER if run_name(path) == name)
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    run = tmp_path / "run"
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for arguments in (
        ["resume", str(run)],
        ["verify", str(run)],
        ["codecs", str(run)],
        ["revoke", str(run), "0"],
    ):
        done = CliRunner(catch_exceptions=False).invoke(main, arguments)
        assert done.exit_code == 3 and done.stderr.count("\n") == 1
        assert (
            f"was started with wire format {OTHER_WIRE[name]}; this version of fedsim uses 3" in done.stderr
        )
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("created", [e for e in EARLIER if run_name(e) not in OTHER_WIRE], ids=run_name)
def test_a_run_of_an_earlier_version_goes_on(created: Path, tmp_path: Path) -> None:
    with tarfile.open(created) as packed:
        packed.extractall(tmp_path, filter="data")
    run, expected = tmp_path / "run", json.loads((tmp_path / "expected.json").read_text())
    # the last line is newer than the last commit, and its round is evaluated again
    *before, _ = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    done = CliRunner(catch_exceptions=False).invoke(
        main, ["resume", str(run), "--workers", "0", "--allow-drift"]
    )
    assert done.exit_code == 0, done.stderr
    assert "from the start" not in done.output  # it has taken up the last commit
    assert (run / "metrics.jsonl").read_bytes().startswith(b"".join(before))
    summary = json.loads((run / "summary.json").read_text())
    for key, value in expected.items():
        if not key.endswith("sha256"):
            assert summary[key] == pytest.approx(value, rel=0.02), key
    stored = RestoredRun.open(run)
    here, recorded = probe_digest(stored.problem), json.loads(PROBES.read_text())[run_name(created)]
    if stored.drift() or here != recorded:
        again = tmp_path / "again"
        with tarfile.open(created) as packed:
            packed.extractall(again, filter="data")
        fedsim("resume", str(again / "run"), "--workers", "1", "--allow-drift")
        expected = json.loads((again / "run" / "summary.json").read_text())
        expected = {
            key: value for key, value in expected.items() if key in ("model_sha256", "clients_sha256")
        }
        assert len(expected) == 2
    for key, value in expected.items():
        assert summary[key] == value, key


# ---- lanes as they were, which computed several clients in one launch


def written_with(lanes: int, home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of a version whose manifests said how many lanes a worker has, as it was in its fourth round."""
    described = manifest.described
    with monkeypatch.context() as earlier:
        earlier.setattr(manifest, "described", lambda problem: described(problem) | {"lanes": lanes})
        with at("evaluated", 3, lambda: snapshot(home / "run", home / "left")):
            kept_run(home / "run", algo="fedavg", rounds=4)
    return home / "left"


def test_a_run_of_several_lanes_is_read_and_not_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where compare leaves its page
    left = written_with(3, tmp_path, monkeypatch)
    for run in (left, tmp_path / "run"):
        before = files(run)
        for name in ("resume", "verify", "codecs"):
            done = command(name, run)
            assert done.code == 3 and done.err.count("\n") == 1, name
            assert f"{run} has lanes = 3: lanes are no longer computed on CPUs" in done.err
        assert files(run) == before
    run, plain = tmp_path / "run", kept_run(tmp_path / "plain", algo="fedavg", rounds=4)
    for name, others in {"ledger": (), "report": (), "trace": (), "watch": (), "compare": (plain,)}.items():
        assert command(name, run, *others).code == 0, name
    assert command("runs", tmp_path).out.count(" fedavg ") == 3
    assert RunFolder.open(run).checked().summary["status"] == "done"


def test_a_run_of_one_lane_goes_on_as_one_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = written_with(1, tmp_path, monkeypatch)
    plain = RunFolder.open(kept_run(tmp_path / "plain", algo="fedavg", rounds=4))
    assert command("resume", left).code == 0
    run = RunFolder.open(left).checked()
    assert run.experiment == RunFolder.open(tmp_path / "run").experiment == {**plain.experiment, "lanes": 1}
    for digest in ("model_sha256", "clients_sha256"):
        assert run.summary[digest] == plain.summary[digest]
    for name in ("verify", "report", "ledger"):
        assert command(name, left).code == 0, name
    again = CliRunner().invoke(main, ["launch", "--config", str(left), "--out", str(tmp_path / "again")])
    assert again.exit_code == 0, again.stderr
    assert (
        RunFolder.open(tmp_path / "again").summary["experiment_sha256"] == plain.summary["experiment_sha256"]
    )


def test_lanes_are_no_part_of_a_new_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, recipe, earlier = tmp_path / "job.toml", tmp_path / "recipe.toml", tmp_path / "run"
    job.write_text("[experiment]\nlanes = 2\n")
    recipe.write_text('title = "t"\n[[variant]]\nlabel = "a"\nexperiment = {algo = "fedavg", lanes = 2}\n')
    written_with(2, tmp_path, monkeypatch)
    for arguments, code, why in (
        (("launch", "--lanes", 2, "--devices", "cpu"), 2, "--lanes 2: lanes are streams of a worker's GPU"),
        (("launch", "--config", job), 2, f"unknown key in [experiment] of {job}: 'lanes'"),
        (("launch", "--config", f"{recipe}:a"), 2, f"unknown key in [experiment] of {recipe}:a: 'lanes'"),
        (("sweep", recipe), 2, "'lanes'"),
        (("launch", "--config", earlier), 3, f"{earlier / 'manifest.json'} has lanes = 2: lanes are no"),
    ):
        done = CliRunner().invoke(main, [*map(str, arguments), "--out", str(tmp_path / "new")])
        assert done.exit_code == code and done.stderr.count("\n") == 1 and why in done.stderr, done.stderr
        assert not (tmp_path / "new").exists()


def test_there_is_one() -> None:
    assert EARLIER
