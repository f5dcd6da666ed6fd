"""fedsim codecs: a run's real messages end to end, and what may be wrong with it."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from fedsim.errors import DataError
from fedsim.experiment import Experiment
from fedsim.learning.gaussian import kl_divergence
from fedsim.wire.envelope import encode
from launch.cli import main
from launch.configuration.execution import Execution
from launch.results.codecs import errors, fastest
from launch.runs.restored import RestoredRun
from launch.session.run import launch
from workers.storage.journal import read_journal

# ---- the pieces


def test_errors_are_relative_to_what_is_not_zero() -> None:
    x = torch.tensor([3.0, -4.0, 0.0])
    assert errors(x, x) == (0, 0)
    assert errors(torch.tensor([3.0, -2.0, 0.0]), x) == (0.5, 0.4)
    assert errors(torch.tensor([3.0, -4.0, 5.0]), x) == (0, 1)
    assert errors(torch.zeros(2), torch.zeros(2)) == (0, 0)


def test_fastest_runs_at_least_three_times() -> None:
    ran: list[int] = []
    assert fastest(lambda: ran.append(1), budget=0) > 0
    assert len(ran) == 3


# ---- a run's own messages


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Three clients, two rounds, with codecs."""
    folder = tmp_path_factory.mktemp("codec-table")
    codecs = {"up.precision": "best:0.2", "up.mean": "delta+zstd"}
    hyperparameters = {"local.epochs": 1}
    experiment = Experiment(clients=3, rounds=2, codecs=codecs, hyperparameters=hyperparameters)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDSIM_CACHE", str(folder / "cache"))
        yield launch(experiment, Execution(workers=0, devices="cpu", out=str(folder / "run")), quiet=True)


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of one's own to damage."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def invoke(*arguments: object) -> Result:
    return CliRunner(catch_exceptions=False).invoke(main, ["codecs", *map(str, arguments)])


def contents(folder: Path) -> dict[Path, bytes]:
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_the_table_of_a_run(run: Path) -> None:
    before = contents(run)
    done = invoke(run, "--keep", "0.1", "--keep", "0.5")
    assert done.exit_code == 0, done.stderr
    assert contents(run) == before
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 110
    assert lines[0].startswith("fedlap_cov on digits, mlp_small, P = 7,510: messages of round 3 with client")
    for words in (
        *("down.mean", "up.precision", "> best:0.2", "> delta+zstd", "csr:0.5 *"),
        "KL(q_k || q_g) of the upload: ",
    ):
        assert words in done.stdout
    document = json.loads(invoke(run, "--json", "--keep", "0.1", "--keep", "0.5").stdout)
    rows = document["codecs"]
    by = {(r["direction"], r["field"], r["codec"]): r for r in rows}
    assert len(by) == len(rows)
    assert {k[:2] for k in by} == {(d, f) for d in ("down", "up") for f in ("mean", "precision")}
    assert {c for d, f, c in by if (d, f) == ("up", "mean")} == {
        *("dense", "bf16", "f16", "zstd", "delta+zstd", "qsgd:2", "qsgd:4", "qsgd:8"),
        *(f"sigma:{step}" for step in (0.005, 0.02, 0.25, "5.0%+random", "10.0%")),
    }
    assert not [k for k in by if k[0] == "down" and k[2] == "delta+zstd"]
    csr = by["up", "precision", "csr:0.1"]
    assert csr["bytes"] == 6488 and csr["sent"] == "csr:0.1"
    assert by["up", "precision", "csr:0.5"]["sent"] == "dense"
    assert by["up", "precision", "zstd"]["max_relative_error"] is None
    assert {k[2] for k, r in by.items() if r["of_the_run"]} == {"dense", "best:0.2", "delta+zstd"}
    for r in rows:
        assert r["bytes"] == r["indices_bytes"] + r["values_bytes"]
        assert r["ratio"] == pytest.approx(r["dense_bytes"] / r["bytes"])
        assert (r["encode_mb_s"] is None) == (r["codec"] == "dense")
        assert r["bits"] == 8 * r["bytes"] / 7510
    stored = RestoredRun.open(run)
    down, up = (m.value for m in stored.next_messages(stored.largest_participant()))
    kl = kl_divergence(up.mean, up.precision, down.mean, down.precision) / math.log(2)
    assert document["kl"] == [{"exchange": 1, "bits": pytest.approx(kl)}]


def test_the_messages_are_those_that_the_run_sends_next(trained: Path, tmp_path: Path) -> None:
    """The same experiment with one round more sends them, bit for bit."""
    stored = RestoredRun.open(trained)
    client = stored.largest_participant()
    assert stored.round == 2 and stored.problem.sizes[client] == max(stored.problem.sizes)
    down, up = stored.next_messages(client)
    assert (down.side, up.side, down.exchange) == ("down", "up", 1)
    experiment = Experiment(
        clients=3, rounds=3, codecs=stored.problem.experiment.codecs, hyperparameters={"local.epochs": 1}
    )
    longer = launch(experiment, Execution(workers=0, devices="cpu", out=str(tmp_path / "run")), quiet=True)
    problem = stored.problem
    encoded = encode(
        up.value, problem.messages.codecs["up"], problem.messages.dims, up.context, problem.net.layout
    )
    journal = read_journal(longer / "journal")
    (sent,) = (e for e in journal if (e["what"], e.get("round"), e.get("client")) == ("upload", 3, client))
    assert [p.digest for f in encoded.fields for p in f.parts] == sent["xxh3"]
    assert torch.equal(up.context.fields["mean"], down.value.mean)


def test_every_exchange_of_a_round_has_its_messages(tmp_path: Path) -> None:
    experiment = Experiment(algo="mime", clients=2, rounds=1, model="logistic", participation="1")
    out = launch(experiment, Execution(workers=0, devices="cpu", out=str(tmp_path / "run")), quiet=True)
    stored = RestoredRun.open(out)
    messages = list(stored.next_messages(stored.largest_participant()))
    assert [(m.side, m.exchange) for m in messages] == [("down", 1), ("up", 1), ("down", 2), ("up", 2)]
    assert "exchange 2" in invoke(out).stdout


# ---- what may be wrong


def manifest(run: Path, **changes: Any) -> None:
    """Change the manifest; a key whose value is None is removed."""
    path = run / "manifest.json"
    changed = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in changed.items() if value is not None}))


def output(*arguments: object) -> str:
    done = invoke(*arguments)
    assert done.exit_code == 2 and not done.stdout and done.stderr.startswith("fedsim: ")
    assert len(done.stderr.splitlines()) == 1
    return done.stderr


def test_an_experiment_that_this_version_cannot_carry_out(run: Path) -> None:
    described = json.loads((run / "manifest.json").read_text())["experiment"]
    manifest(run, experiment=described | {"algo": "fedlap_cow"})
    assert "was changed: its experiment_sha256 does not match its experiment" in output(run)
    manifest(run, experiment_sha256=None)
    assert "did you mean 'fedlap_cov'" in output(run)
    manifest(run, experiment=described | {"clients": 0})
    assert "clients Expected `int` >= 1" in output(run)
    manifest(run, experiment=described | {"params": 1})
    assert "its params was 1; with this data it is 7510" in output(run)


def test_no_checkpoint_and_damaged_ones(run: Path) -> None:
    names = sorted((run / "checkpoints").iterdir())
    newest = names[-1]
    newest.write_bytes(newest.read_bytes()[:-1])
    assert RestoredRun.open(run).round == 1
    for path in names:
        path.write_bytes(b"nonsense")
    assert "has no checkpoint that can be read" in output(run)
    for path in names:
        path.unlink()
    assert "has no checkpoint; no round of it was committed" in output(run)


def test_a_state_that_is_gone(run: Path) -> None:
    shutil.rmtree(run / "state")
    assert "the state of client" in output(run)
    with pytest.raises(DataError):
        RestoredRun.open(run).state(0)


def test_options(run: Path) -> None:
    assert "--keep 1.5: must be a number above 0 and at most 1" in output(run, "--keep", "1.5")


def test_the_data_folder_of_a_run_may_be_elsewhere(run: Path) -> None:
    described = json.loads((run / "manifest.json").read_text())["experiment"]
    other = described | {"dataset": "mnist"}
    manifest(run, experiment=other, experiment_sha256=None, execution={"data_dir": "/nowhere"})
    assert "/nowhere" in output(run)
    assert "/elsewhere" in output(run, "--data-dir", "/elsewhere")
