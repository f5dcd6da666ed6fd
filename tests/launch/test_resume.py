"""fedsim resume: a run that was killed goes on with the bits of an undisturbed one."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pandas
import pytest

from launch.runs.folder import RunFolder
from launch.runs.resume import Resumption
from tests.support.commands import Command, fedsim, start
from tests.support.reproducible import without_seconds

pytestmark = pytest.mark.process

RUN = ("--clients", "4", "--rounds", "8", "--model", "logistic")
OVERTAKING = (*RUN, "--async", "fedbuff:1", "--compute", "1ms,noise=1")
"""Asynchronous, on a virtual clock on which clients overtake each other."""


def same(one: RunFolder, other: RunFolder) -> None:
    """Model, every client's state, metrics and the algorithm's ledger, bit for bit."""
    for key in ("status", "rounds", "model_sha256", "clients_sha256", "took_part", "folded", "bytes_up"):
        assert one.summary[key] == other.summary[key], key
    for key in ("units_of_p_down", "units_of_p_up", "participations"):
        assert one.summary[key] == other.summary[key], key
    assert metrics(one) == metrics(other)
    assert rows(one).equals(rows(other))


def metrics(run: RunFolder) -> list[dict[str, object]]:
    lines = map(json.loads, (run.path / "metrics.jsonl").read_text().splitlines())
    return without_seconds(lines)


def rows(run: RunFolder) -> pandas.DataFrame:
    key = [c for c in run.ledger.columns if c != "worker"]
    return run.ledger[run.ledger.kind == "algorithm"][key].sort_values(key).reset_index(drop=True)


def killed(folder: Path, after: str, *options: str) -> None:
    """A run that is killed -9 when it has printed `after`."""
    running = start("launch", "--out", str(folder), *options)
    running.wait_for(after)
    running.kill()


@pytest.mark.parametrize(
    ("after", "options", "more"),
    [
        ("round 3/8", ("--algo", "fedlap_cov", *RUN, "--workers", "2"), ("--workers", "3")),
        ("round 6/8", ("--algo", "fedlap_cov", *OVERTAKING, "--workers", "2"), ("--workers", "3")),
        ("round 2/8", ("--algo", "precond_admm", *RUN, "--workers", "0"), ("--transport", "tcp")),
        (
            "round 5/8",
            ("--algo", "mime", *RUN, "--workers", "2", "--participation", "0.5+lost:0.3+gone:0.2"),
            (),
        ),
        (
            "round 4/8",
            ("--algo", "ivon_admm", *RUN, "--workers", "0", "--eval-every", "2"),
            ("--workers", "2"),
        ),
    ],
)
def test_a_killed_run_goes_on_with_the_same_bits(
    after: str,
    options: tuple[str, ...],
    more: tuple[str, ...],
    undisturbed: Callable[..., RunFolder],
    tmp_path: Path,
) -> None:
    """Whatever the workers before and after: set-up, two exchanges, losses, rounds not evaluated."""
    killed(tmp_path / "run", after, *options)
    output = fedsim("resume", str(tmp_path / "run"), *more)
    assert "continues after round" in output or "continues from the start" in output
    at = options.index("--workers")
    same(RunFolder.open(tmp_path / "run"), undisturbed(*options[:at], *options[at + 2 :]))


def test_an_interrupted_run_says_how_it_goes_on(
    undisturbed: Callable[..., RunFolder], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    running = start("launch", "--out", str(folder), "--workers", "2", *RUN)
    running.wait_for("round 2/8")
    running.process.send_signal(signal.SIGINT)
    assert "continues" in running.rest(130)
    assert RunFolder.open(folder).summary["status"] == "interrupted"
    fedsim("resume", str(folder))
    same(RunFolder.open(folder), undisturbed(*RUN))


def test_more_rounds(undisturbed: Callable[..., RunFolder], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    few = tuple("3" if o == "8" else o for o in RUN)
    fedsim("launch", "--workers", "0", "--out", str(folder), *few)
    fedsim("resume", str(folder), "--rounds", "8")
    same(RunFolder.open(folder), undisturbed(*RUN))
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert "is complete: all 8 rounds; --rounds gives it more" in fedsim("resume", str(folder))
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_a_damaged_checkpoint_falls_back_and_says_so(
    undisturbed: Callable[..., RunFolder], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    killed(folder, "round 5/8", "--workers", "2", *RUN)
    newest = max((folder / "checkpoints").glob("*.checkpoint"))
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    output = fedsim("resume", str(folder))
    assert "not used" in output and newest.name in output
    same(RunFolder.open(folder), undisturbed(*RUN))


def test_what_must_not_change_is_refused_with_both_values(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    fedsim("launch", "--workers", "0", "--out", str(folder), "--clients", "3", "--rounds", "2", *RUN[4:])

    def refused(*options: str, code: int = 3) -> str:
        output = fedsim("resume", str(folder), *options, code=code)
        assert "Traceback" not in output
        return output

    assert "seed = 0; this command says --seed 5" in refused("--seed", "5")
    assert "rounds = 2; this command says --rounds 1" in refused("--rounds", "1")
    assert "lr = 0.001; this command says --set lr=0.5" in refused("--set", "lr=0.5", "--rounds", "3")
    # the run is complete, and yet nothing that was asked for is passed over
    assert "lr = 0.001; this command says --set lr=0.5" in refused("--set", "lr=0.5")
    assert "lr = 0.001; this command says --set local.lr=0.5" in refused("--set", "local.lr=0.5")
    assert "mean = 'dense'; this command says --codec mean=bf16" in refused("--codec", "mean=bf16")
    assert "'lrr'; did you mean 'local.lr'" in refused("--set", "lrr=0.5", code=2)
    assert "--out elsewhere: a run continues in its own folder" in refused("--out", "elsewhere", code=2)
    assert "is complete" in fedsim("resume", str(folder), "--set", "lr=0.001", "--out", str(folder))
    manifest = folder / "manifest.json"
    kept = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(kept | {"versions": kept["versions"] | {"torch": "1.0"}}))
    assert "was started with torch 1.0" in refused("--rounds", "3", "--workers", "0")
    fedsim("resume", str(folder), "--rounds", "3", "--workers", "0", "--allow-drift")
    assert Resumption.open(folder).experiment.rounds == 3


def test_one_coordinator_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    running: Command = start("launch", "--out", str(folder), "--rounds", "100000", "--workers", "0", *RUN[4:])
    running.wait_for("accuracy")
    output = fedsim("resume", str(folder), "--workers", "0", code=2)
    running.kill()
    assert f"process {running.process.pid}" in output
