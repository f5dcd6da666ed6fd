"""fedsim verify: the bits of a run are found again, and what does not give them is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.kept_runs import RUNS, algorithm_file, command, files, flip, kept_run
from workers.storage.atomic_files import RunLock

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose files nobody changes."""
    return kept_run(tmp_path_factory.mktemp("plain") / "run", algo="fedlap_cov", rounds=6)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_found_again_bit_for_bit(name: str, tmp_path: Path) -> None:
    run = kept_run(tmp_path / "run", **RUNS[name])
    before = files(run)
    output = command("verify", run, "--twice")
    assert output.code == 0 and not output.err, output
    assert "different" not in output.out and "left out" not in output.out
    assert "the server's state is identical" in output.out
    assert "model_sha256 is identical" in output.out and "clients_sha256 is identical" in output.out
    assert files(run) == before


def test_rounds_that_can_be_computed_again(plain: Path) -> None:
    lines = command("verify", plain).out.splitlines()
    assert [line.split()[:5] for line in lines if line.startswith("round")] == [
        ["round", str(r), "3", "tasks", "compared,"] for r in (1, 5, 6)
    ]
    (line,) = (x for x in command("verify", plain, "--rounds", 1).out.splitlines() if "round" in x)
    assert line.startswith("round 6") and "identical" in line


def test_chosen_clients(plain: Path, tmp_path: Path) -> None:
    assert (
        "round 6  2 tasks compared, 2 identical, 1 left out\n"
        in command("verify", plain, "--clients", "0, 2").out
    )
    both = kept_run(tmp_path / "run", algo="mime", rounds=1)
    out = command("verify", both, "--clients", "1").out
    assert "round 1  4 tasks compared, 4 identical, 2 left out\n" in out  # all of exchange 1


def test_one_client_whose_code_reads_the_clock(tmp_path: Path) -> None:
    body = (
        "    def client_update(self, client, down, shard, task):\n"
        "        client, up = super().client_update(client, down, shard, task)\n"
        "        noise = time.time_ns() % 10**9 + 1 if task.client == 1 else 0\n"
        "        return client, replace(up, train_loss=up.train_loss + noise)\n"
    )
    run = kept_run(tmp_path / "run", algo=algorithm_file(tmp_path, body))
    output = command("verify", run)
    assert output.code == 1
    assert "round 1  3 tasks compared, 2 identical, 1 different\n" in output.out
    assert "    client 1, round 1, exchange 1: field 'train_loss' differs\n" in output.out
    assert (
        "3 of 9 tasks" in output.err
        and "first: client 1, round 1, exchange 1: field 'train_loss'" in output.err
    )
    assert "the client code of mine:Mine is not deterministic" in output.err
    assert "model_sha256 is identical" in output.out


def test_what_differs_only_the_second_time_is_found_by_computing_twice(tmp_path: Path) -> None:
    body = (
        "    def client_update(self, client, down, shard, task):\n"
        "        client, up = super().client_update(client, down, shard, task)\n"
        "        seen.append((task.round, task.client))\n"
        "        return client, replace(up, train_loss=float(seen.count(seen[-1])))\n\nseen = []\n"
    )
    spec = algorithm_file(tmp_path, body)
    run = kept_run(tmp_path / "run", algo=spec, rounds=1)
    source = tmp_path / "mine.py"
    source.write_text(source.read_text() + "\n")  # another file is executed anew, as in another process
    assert "3 identical;" in command("verify", run).out
    source.write_text(source.read_text() + "\n")
    output = command("verify", run, "--twice")
    assert output.code == 1 and "computed twice here, field 'train_loss' is not the same" in output.err


def test_what_depends_on_the_process_or_on_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = (
        "    def client_update(self, client, down, shard, task):\n"
        "        client, up = super().client_update(client, down, shard, task)\n"
        "        return client, replace(up, mean=up.mean * float(os.environ.get('MINE', 1)))\n"
    )
    run = kept_run(tmp_path / "run", algo=algorithm_file(tmp_path, body))
    monkeypatch.setenv("MINE", "2")
    output = command("verify", run)
    assert output.code == 1 and "9 of 9 tasks" in output.err and "field 'mean' differs" in output.err
    assert "Here it is the same each time, with the run's versions" in output.err
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["versions"]["torch"] = "1.0"
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert "what computes has changed: torch was 1.0, here it is 2" in command("verify", run).err
    manifest["versions"].pop("torch")
    (run / "manifest.json").write_text(json.dumps(manifest))
    source = tmp_path / "mine.py"
    source.write_text(source.read_text() + "# changed\n")
    assert f"the sha256 of {source} was " in command("verify", run).err


def test_a_difference_in_the_first_exchange_leaves_the_second_out(tmp_path: Path) -> None:
    run = kept_run(tmp_path / "run", algo="mime", rounds=1)
    journal = (run / "journal").read_bytes()
    (run / "journal").write_bytes(journal[: len(journal) // 3])
    output = command("verify", run)
    assert output.code == 1 and "the journal has no record of its upload" in output.err
    assert ", 3 left out" in output.out


def test_a_server_that_is_not_deterministic(tmp_path: Path) -> None:
    body = (
        "    def server_update(self, server, down, arrivals, ctx):\n"
        "        made = super().server_update(server, down, arrivals, ctx)\n"
        "        return replace(made, mean=made.mean + time.time_ns() % 1000)\n"
    )
    run = kept_run(tmp_path / "run", algo=algorithm_file(tmp_path, body), rounds=1)
    output = command("verify", run)
    assert output.code == 1 and "3 tasks compared, 3 identical\n" in output.out
    assert (
        "round 1: field 'mean' of the server's state differs, although all uploads are the same" in output.err
    )
    assert "the server's code of mine:Mine is not deterministic" in output.err


@pytest.mark.parametrize(
    ("file", "at", "says"),
    [
        ("model.safetensors", 1.0, "model_sha256 is "),
        ("state/000001/000003.state", 0.9, "client 1, round 3, exchange 1: "),
        ("checkpoints/000002.checkpoint", 0.9, "000002.checkpoint: the checksum does not match"),
        ("checkpoints/000003.checkpoint", 0.9, "the checkpoint of round 3 cannot be read"),
        ("summary.json", 0.0, "summary.json is damaged"),
    ],
)
def test_one_bit_of_a_file(file: str, at: float, says: str, tmp_path: Path) -> None:
    run = kept_run(tmp_path / "run", algo="fedlap_cov")
    flip(run / file, at)
    output = command("verify", run)
    assert output.code in (1, 2) and says in output.err, output


def test_a_run_that_was_not_finished_has_no_digests(tmp_path: Path) -> None:
    run = kept_run(tmp_path / "run", rounds=1)
    (run / "summary.json").unlink()
    output = command("verify", run)
    assert output.code == 0 and "has no digests" in output.out


def test_mistakes(plain: Path, tmp_path: Path) -> None:
    for options, says in (
        (("--clients", "0,x"), "'x' is no client; they are 0 to 2"),
        (("--clients", "3"), "'3' is no client"),
        (("--rounds", "0"), "--rounds 0: must be a whole number of at least 1"),
    ):
        output = command("verify", plain, *options)
        assert output.code == 2 and says in output.err
    assert "is not a run folder" in command("verify", tmp_path).err
    lock = RunLock(plain)
    assert "is being run by process" in command("verify", plain).err
    lock.release()
