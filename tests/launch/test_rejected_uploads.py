"""What must not be folded: a user's algorithm sends NaN, wrong shapes, negative precisions, absurd norms."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pandas
import pytest
from click.testing import CliRunner

from fedsim.participation import Participation
from fedsim.wire.state_file import encode_state
from launch.cli import main
from protocols import find
from protocols.fedlap_cov import FedLapCov
from tests.support.commands import ran
from tests.support.harness import listed, play, problem_of
from workers.storage.checkpoints import read_checkpoint
from workers.storage.journal import read_journal

ROOT = Path(__file__).resolve().parents[2]
REJECTED = """
from dataclasses import dataclass, replace
from typing import Literal
import torch
from protocols.fedlap_cov import FedLapCov

def with_entry(x, value):
    x = x.clone()
    x[3] = value
    return x

CHANGES = {
    "mean nan": lambda up: replace(up, mean=with_entry(up.mean, torch.nan)),
    "precision nan": lambda up: replace(up, precision=with_entry(up.precision, torch.nan)),
    "precision negative": lambda up: replace(up, precision=with_entry(up.precision, -1.0)),
    "loss nan": lambda up: replace(up, train_loss=float("nan")),
    "large": lambda up: replace(up, mean=1e6 * up.mean),
    "short": lambda up: replace(up, mean=up.mean[:-1]),
}
CHANGES["once"] = CHANGES["mean nan"]
seen = set()

@dataclass(frozen=True)
class Rejected(FedLapCov):
    how: str = ""

    def client_update(self, client, down, shard, task):
        draft, up = super().client_update(client, down, shard, task)
        fails = self.how and (task.round, task.client) == (2, 1) and self.how not in seen
        if fails and self.how == "once":
            seen.add(self.how)
        return draft, CHANGES[self.how](up) if fails else up
"""
UPLOAD = r"round 2 cannot be folded: upload of client 1 in round 2 from worker \d: "
WORKER = r"worker \d failed on client 1 in round 2:\s.*"
SAYS = {
    "mean nan": UPLOAD + "field 'mean' has 1 of 640 values NaN or Inf",
    "precision nan": UPLOAD + "field 'precision' has 1 of 640 values NaN or Inf",
    "precision negative": UPLOAD
    + r"precision 'precision' is not positive in 1 of 640 entries \(smallest -1\)",
    "loss nan": UPLOAD + "field 'train_loss' is nan",
    "large": UPLOAD + r"field 'mean' has the norm \d+; the limit is 10000",
    "short": WORKER + r"Up\.mean has shape \(639,\); its kind 'mean' says \(640,\)",
}
JOB = ("--clients", "3", "--rounds", "3", "--model", "logistic", "--set", "local.epochs=1")


@pytest.fixture(scope="module")
def brought(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the algorithm and a configuration, and what an undisturbed run leaves."""
    folder = tmp_path_factory.mktemp("brought")
    (folder / "rejected.py").write_text(REJECTED)
    (folder / "limit.toml").write_text("[experiment]\nmax_norm = 1e4\n")
    assert launch(folder, "sound", "").exit_code == 0
    return folder


def launch(folder: Path, name: str, how: str, *more: str) -> Any:
    selected = (
        *("--algo", f"{folder}/rejected.py:Rejected", "--set", f"how={how}", "--out"),
        str(folder / name),
    )
    limit = ("--config", str(folder / "limit.toml"))
    return CliRunner(catch_exceptions=False).invoke(
        main, ["launch", "--workers", "0", *JOB, *selected, *limit, *more]
    )


def checkpoints(run: Path) -> dict[str, tuple[Any, ...]]:
    """Versions and server of every round that stands."""
    read = {
        p.name: read_checkpoint(p, FedLapCov.server_type) for p in sorted((run / "checkpoints").iterdir())
    }
    return {name: (c.versions.tolist(), encode_state(c.server)) for name, c in read.items()}


@pytest.mark.parametrize("how", SAYS)
def test_it_is_refused_and_the_last_round_stands(how: str, brought: Path) -> None:
    """Client, round and field are named; server and states are those of the round before."""
    name = how.replace(" ", "-")
    done = launch(brought, name, how)
    assert done.exit_code == 1
    assert re.search(SAYS[how], done.stderr, re.DOTALL), done.stderr
    assert "Traceback" not in done.stderr
    run, sound = brought / name, checkpoints(brought / "sound")
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["rounds"]) == ("failed", 1)
    assert re.search(SAYS[how], summary["error"], re.DOTALL)
    left = checkpoints(run)
    assert max(left) == "000001.checkpoint"
    assert left["000001.checkpoint"] == sound["000001.checkpoint"]
    assert not (run / "model.safetensors").exists()


@pytest.mark.parametrize("how", ["mean nan", "precision negative", "large"])
def test_it_may_be_skipped_instead(how: str, brought: Path, tmp_path: Path) -> None:
    """The run goes on as if the schedule had lost that upload: server and the client's state."""
    done = launch(brought, f"skips-{how}", how, "--bad-uploads", "skip")
    assert done.exit_code == 0, done.stderr
    run = brought / f"skips-{how}"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("refused") for line in lines] == [None, None, [1], None]
    assert lines[2]["folded"] == [0, 2] and lines[2]["bytes_up"] == lines[1]["bytes_up"]
    everybody = (0, 1, 2)
    participations = listed(
        Participation(everybody), Participation(everybody, frozenset({1})), Participation(everybody)
    )
    lost = play(problem_of(find("fedlap_cov"), rounds=3), tmp_path / "lost", participations)
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["model_sha256"], summary["clients_sha256"]) == lost.bits[:2]
    again = CliRunner(catch_exceptions=False).invoke(main, ["verify", str(run)])
    assert again.exit_code == 0, again.output


def test_it_may_be_computed_once_more(brought: Path) -> None:
    """What was wrong once is made good, and paid for as a retry; what is wrong again stops the run."""
    done = launch(brought, "once", "once", "--bad-uploads", "retry")
    assert done.exit_code == 0, done.stderr
    sound, once = (json.loads((brought / n / "summary.json").read_text()) for n in ("sound", "once"))
    for key in ("model_sha256", "clients_sha256", "bytes_up", "bytes_down"):
        assert once[key] == sound[key]
    assert once["bytes"]["algorithm"] == sound["bytes"]["algorithm"]
    upload, broadcast = (once["bytes"]["retry"][d]["mean"]["values"] for d in ("up", "down"))
    assert upload == broadcast == 4 * 640
    lines = (brought / "once" / "metrics.jsonl").read_text().splitlines()
    spans = pandas.read_csv(brought / "once" / "timeline.csv").query("round == 2 and what == 'task'")
    assert sorted(spans.client) == [0, 1, 1, 2]
    used = spans.sort_values("arrived").drop_duplicates("client", keep="last")
    assert json.loads(lines[2])["seconds_clients"] == pytest.approx(used.computing.sum(), abs=1e-6)
    second = launch(brought, "again", "mean nan", "--bad-uploads", "retry")
    assert second.exit_code == 1
    assert re.search(SAYS["mean nan"], second.stderr), second.stderr
    tried = [r for r in read_journal(brought / "again" / "journal") if r["what"] == "retried"]
    assert [(r["round"], r["client"]) for r in tried] == [(2, 1)]


def test_a_limit_that_is_kept_changes_no_bit(brought: Path) -> None:
    """The undisturbed run had one."""
    plain = ("--algo", "fedlap_cov", "--out", str(brought / "plain"))
    done = CliRunner(catch_exceptions=False).invoke(main, ["launch", "--workers", "0", *JOB, *plain])
    assert done.exit_code == 0, done.stderr
    digests = [
        json.loads((brought / n / "summary.json").read_text())["model_sha256"] for n in ("plain", "sound")
    ]
    assert digests[0] == digests[1]


@pytest.mark.process
def test_workers_and_all(brought: Path) -> None:
    selected = ("--algo", "rejected.py:Rejected", "--set", "how=mean nan", "--out", "real")
    done = ran(
        [sys.executable, "-m", "launch", "launch", "--workers", "2", *JOB, *selected],
        cwd=brought,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 1, done.stderr
    assert re.search(SAYS["mean nan"], done.stderr)
    assert max(checkpoints(brought / "real")) == "000001.checkpoint"
