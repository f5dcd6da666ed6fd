"""Everything that reads a run's files compares them with their digests.

A change is one line that names the file, never another number.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fedsim.errors import ConnectionLost, DataError, Interrupted
from fedsim.experiment import Experiment
from fedsim.problem import Problem
from fedsim.wire.envelope import Envelope
from launch.commands.runs import listed
from launch.commands.watch import WatchedRun
from launch.configuration.execution import Execution
from launch.runs.folder import RunFolder
from launch.runs.writer import RunDir
from launch.session.run import launch, resume
from launch.tracking.follow import RunRows
from tests.support.kept_runs import Printed, command, files, flip
from tests.support.snapshots import at, snapshot
from workers.worker.runtime import WorkerRuntime

FILES = ("ledger.csv", "metrics.jsonl", "timeline.csv", "journal")
READERS = ("ledger", "report", "trace", "compare", "verify")
EXPERIMENT = Experiment(algo="fedavg", model="logistic", clients=2, rounds=4)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is done. Not to be changed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return launch(EXPERIMENT, Execution(workers=0, devices="cpu", out=str(folder)), quiet=True)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run's folder held in its fourth round. Not to be changed."""
    home = tmp_path_factory.mktemp("killed")

    with at("evaluated", 3, lambda: snapshot(home / "run", home / "left")):
        launch(EXPERIMENT, Execution(workers=0, devices="cpu", out=str(home / "run")), quiet=True)
    return home / "left"


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "run")


@pytest.fixture
def left(killed: Path, tmp_path: Path) -> Path:
    return shutil.copytree(killed, tmp_path / "left")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:300])


def another_digit(path: Path) -> None:
    """The last one that is not the first of a line."""
    data = bytearray(path.read_bytes())
    where = max(at for at, one in enumerate(data) if one in b"12345678")
    data[where] += 1
    path.write_bytes(data)


def one_more_line(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data + data.splitlines(keepends=True)[-1])


def read(reader: str, run: Path, folder: Path) -> Printed:
    out = ("--out", folder / "page.html") if reader in ("report", "trace", "compare") else ()
    return command(reader, run, *out)


@pytest.mark.parametrize("reader", READERS)
def test_a_changed_ledger_is_refused_by_every_reader(reader: str, run: Path, tmp_path: Path) -> None:
    assert read(reader, run, tmp_path).code == 0
    another_digit(run / "ledger.csv")
    output = read(reader, run, tmp_path)
    assert output.code == 2 and f"{run / 'ledger.csv'} was changed" in output.err
    assert len(output.err.splitlines()) == 1


@pytest.mark.parametrize("change", [cut, another_digit, one_more_line])
@pytest.mark.parametrize("file", FILES)
def test_each_file_of_a_run_has_a_digest(file: str, change: Callable[[Path], None], run: Path) -> None:
    assert RunFolder.open(run).checked()
    change(run / file)
    with pytest.raises(DataError, match=f"{file} was changed: .* summary.json"):
        RunFolder.open(run).checked()
    output = command("verify", run)
    codes = (1, 2) if file == "journal" else (2,)  # other commits are other tasks, which then differ: 1
    assert output.code in codes and f"{file} was changed" in output.err and f"{file}: differs" in output.out


def test_the_summary_has_rows_bytes_and_digests(run: Path) -> None:
    files = json.loads((run / "summary.json").read_text())["files"]
    assert set(files) == set(FILES)
    assert files["ledger.csv"]["rows"] == len(RunFolder.open(run).ledger)
    assert files["metrics.jsonl"]["rows"] == len(RunFolder.open(run).lines) == 5
    assert all(files[name]["bytes"] == (run / name).stat().st_size for name in FILES)


def test_sums_that_are_not_those_of_the_ledger_are_refused(run: Path) -> None:
    """Also where the summary has lost its digests."""
    path = run / "summary.json"
    summary = json.loads(path.read_text())
    summary["files"] = {}
    path.write_text(json.dumps(summary))
    assert len(RunFolder.open(run).ledger)
    summary["bytes"]["algorithm"]["up"]["mean"]["values"] += 1
    path.write_text(json.dumps(summary))
    with pytest.raises(
        DataError, match=r"do not belong together: algorithm, up, mean, values has [\d,]+ bytes"
    ):
        _ = RunFolder.open(run).ledger
    assert "do not belong together" in command("ledger", run).err
    assert "do not belong together" in command("verify", run).err


@pytest.mark.parametrize("file", ["ledger.csv", "metrics.jsonl"])
def test_a_run_that_has_not_ended_is_compared_with_its_newest_checkpoint(file: str, left: Path) -> None:
    path = left / file
    with path.open("a") as growing:
        growing.write("algorithm,3,1")  # a row that is being written
    assert len(RunFolder.open(left).checked().lines) and len(RunFolder.open(left).ledger)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:1], lines[1].replace(b"0", b"1", 1), *lines[2:]]))
    with pytest.raises(DataError, match=rf"{file} was changed: .* the sha256 in the checkpoint of round \d"):
        RunFolder.open(left).checked()
    cut(path)
    output = command("verify", left)
    assert output.code == 2 and f"{file} was changed: it has 300 bytes; the checkpoint of round" in output.err


def test_a_manifest_with_another_experiment_is_refused(run: Path, left: Path, tmp_path: Path) -> None:
    for folder in (run, left):
        path = folder / "manifest.json"
        manifest = json.loads(path.read_text())
        manifest["experiment"]["hyperparameters"]["local.lr"] = 0.5
        path.write_text(json.dumps(manifest))
        for name in ("resume", "ledger", "verify", "codecs"):
            output = command(name, folder)
            assert output.code == 2 and f"{path} was changed: its experiment_sha256" in output.err
        del manifest["experiment_sha256"]
        path.write_text(json.dumps(manifest))
        with pytest.raises(DataError, match="has the sha256 of another experiment"):
            RunFolder.open(folder).checked()
        assert "describes another experiment than" in command("verify", folder).err
    output = command("resume", left, "--allow-drift")
    assert output.code == 3 and "describes another experiment than the checkpoint of round" in output.err


def test_a_run_of_another_wire_format_is_refused_in_one_line_and_left_as_it_is(run: Path) -> None:
    path = run / "manifest.json"
    manifest = json.loads(path.read_text()) | {"wire": 2}
    path.write_text(json.dumps(manifest | {"versions": {"fedsim": "0.0.9"}}))
    before = files(run)
    for name in ("resume", "verify", "codecs", "ledger", "report", "compare"):
        output = command(name, run)
        assert output.code == 3 and output.err.count("\n") == 1
        assert f"{run} was started by fedsim 0.0.9 with wire format 2; this version of" in output.err
    assert "wire format 2" in command("runs", run).out + command("runs", run).err
    assert files(run) == before


def test_what_is_no_json_is_said_with_its_line(run: Path) -> None:
    (run / "summary.json").write_text('{\n "status": ')
    assert f"{run / 'summary.json'} is damaged: line 2 is not JSON" in command("ledger", run).err
    (run / "manifest.json").write_bytes(b'{"format": "\xff"}')
    assert "manifest.json is damaged: it is not text" in command("ledger", run).err


@pytest.mark.parametrize("row", ["algorithm,1\n", "a,b,c,d,e,f,g,h,i,j,k,l\n", "\n"])
def test_a_row_that_is_none_is_named(row: str, tmp_path: Path) -> None:
    rundir = RunDir(tmp_path / "run")
    with (tmp_path / "run" / "ledger.csv").open("a") as file:
        file.write(row)
    with pytest.raises(DataError, match=r"ledger\.csv is damaged: line [12] or the one after it is no row"):
        list(rundir.ledger_rows())
    rundir.close()


# ---- resume


def test_rows_after_the_last_sound_checkpoint_are_computed_again(left: Path, whole: Path) -> None:
    ledger = left / "ledger.csv"
    newest = max((left / "checkpoints").glob("*.checkpoint"))
    begun = (
        f"\nalgorithm,{int(newest.stem) + 1},".encode()
    )  # rows of a later round belong to no checkpoint yet
    ledger.write_bytes(ledger.read_bytes().split(begun)[0] + b"\n")
    another_digit(ledger)  # in the newest checkpoint's rows
    resume(left, {}, quiet=True)
    one, other = RunFolder.open(left).checked().summary, RunFolder.open(whole).summary
    assert one["bytes"]["algorithm"] == other["bytes"]["algorithm"]
    for part in ("model_sha256", "clients_sha256", "took_part", "folded"):
        assert one[part] == other[part]
    assert newest.with_suffix(".damaged").exists()


def test_a_change_before_the_kept_checkpoints_is_refused_with_file_and_round(left: Path) -> None:
    (left / "checkpoints" / "000001.checkpoint").unlink()
    flip(left / "ledger.csv", 0.1)
    before = {path: path.read_bytes() for path in left.rglob("*") if path.is_file() and path.name != "lock"}
    output = command("resume", left)
    assert output.code == 2 and len(output.err.splitlines()) == 1
    assert f"{left / 'ledger.csv'} is not what it was when round 2 was committed" in output.err
    assert {p: p.read_bytes() for p in left.rglob("*") if p.is_file() and p.name != "lock"} == before


def test_a_damaged_timeline_says_that_the_run_goes_on_without_it(left: Path, whole: Path) -> None:
    (left / "checkpoints" / "000001.checkpoint").unlink()
    flip(left / "timeline.csv", 0.1)
    assert (
        "timeline.csv is not what it was when round 2 was committed (if this file"
        in command("resume", left).err
    )
    (left / "timeline.csv").unlink()
    output = command("resume", left)
    assert output.code == 0
    assert re.search(r"timeline.csv was not there: it begins again with round [45]\b", output.out)
    assert (
        RunFolder.open(left).checked().summary["model_sha256"]
        == RunFolder.open(whole).summary["model_sha256"]
    )


def test_the_timeline_has_each_span_once_after_a_resume(left: Path) -> None:
    resume(left, {}, quiet=True)
    rows = [row.split(",")[:3] for row in (left / "timeline.csv").read_text().splitlines() if ",task," in row]
    assert len(rows) == len({tuple(row) for row in rows}) == 8


def test_a_run_that_goes_on_has_no_summary_of_before(run: Path, tmp_path: Path) -> None:
    """A run that was done and was killed with more rounds can be resumed."""

    def look() -> None:
        assert not (run / "summary.json").exists() and RunFolder.open(run).status == "running"
        RunFolder.open(run).checked()
        snapshot(run, tmp_path / "again")
        raise Interrupted("seen")

    with at("committed", 6, look), pytest.raises(Interrupted):
        resume(run, {"rounds": 8}, quiet=True)
    output = command("resume", tmp_path / "again")
    assert output.code == 0 and "done after 8 rounds" in output.out


# ---- a round that was under way


def ended_in_round_3(how: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of six rounds that ends while two of four clients have answered in round 3; or whose rows of
    round 3 are written, and its commit is not."""
    experiment = Experiment(algo="fedavg", model="logistic", clients=4, rounds=6)
    execution = Execution(workers=0, devices="cpu", out=str(home / "run"))
    if how == "killed":
        with at("committed", 3, lambda: snapshot(home / "run", home / "left")):
            launch(experiment, execution, quiet=True)
        return home / "left"
    train = WorkerRuntime._train

    def disturbed(self: WorkerRuntime, envelope: Envelope, problem: Problem) -> Envelope:
        if (envelope.header.round, envelope.header.client) == (3, 2):
            raise Interrupted("now") if how == "interrupted" else ConnectionLost("now")
        return train(self, envelope, problem)

    monkeypatch.setattr(WorkerRuntime, "_train", disturbed)
    with pytest.raises(Interrupted if how == "interrupted" else ConnectionLost):
        launch(experiment, execution, quiet=True)
    monkeypatch.undo()
    return home / "run"


@pytest.mark.parametrize("how", ["interrupted", "failed", "killed"])
def test_a_round_that_was_under_way_is_nowhere_in_the_numbers(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ended_in_round_3(how, tmp_path, monkeypatch)
    run = RunFolder.open(folder)
    own = run.ledger[run.ledger.kind == "algorithm"]
    total, broadcasts = int(own.bytes.sum()), len(own[(own.message == "task") & (own.layer == "header")])
    assert (sorted(set(own["round"])), broadcasts) == ([1, 2], 8)
    assert "retry" not in set(run.ledger.kind)
    (line,) = listed([folder])
    assert (line.state, line.rounds_done) == (how, 2)
    assert line.bytes_down is not None and line.bytes_up is not None
    assert line.bytes_down + line.bytes_up == total
    scored = int(own.bytes[own["round"] <= run.lines[-1]["round"]].sum())  # not all committed rounds are
    assert round(run.metrics["MB"].iloc[-1] * 1e6) == scored
    watched = WatchedRun(folder)
    watched.update(0.0)
    *_, (_, numbers) = RunRows(folder).new()
    assert watched.spent == numbers["bytes/so_far"] == scored
    if how != "killed":
        assert run.summary["rounds"] == 2 and run.summary["participations"] == broadcasts
        assert run.summary["took_part"] == run.summary["folded"] == [2, 2, 2, 2]
        assert run.summary["bytes_down"] + run.summary["bytes_up"] == total
    page, as_json = command("report", folder), command("ledger", folder, "--json")
    assert page.code == as_json.code == 0
    by_kind = {of["kind"]: of["down"] + of["up"] for of in json.loads(as_json.out)["by_kind"]}
    assert by_kind["algorithm"] == total
    compared = json.loads(command("compare", folder, "--json").out)["groups"][0]
    assert compared["bytes_mean"] == total
    out = command("trace", folder, "--out", "-")
    events = json.loads(out.out)["traceEvents"]
    assert {e["args"]["round"] for e in events if "round" in e.get("args", {})} == {0, 1, 2}
    resume(folder, {}, quiet=True)
    ended = RunFolder.open(folder).checked()
    own = ended.ledger[ended.ledger.kind == "algorithm"]
    assert (
        ended.summary["participations"] == 24 == len(own[(own.message == "task") & (own.layer == "header")])
    )


def test_a_resume_removes_what_a_killed_start_has_left(left: Path) -> None:
    """Join files, and what workers share."""
    for name in ("join.json", "join-here.json", "frozen", "start"):
        (left / name).write_text("{}")
    resume(left, {}, quiet=True)
    names = {path.name for path in left.iterdir()}
    assert not names & {"join.json", "join-here.json", "frozen", "start"}, names
