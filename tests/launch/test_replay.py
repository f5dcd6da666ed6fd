"""fedsim replay: the uploads that a run has kept give its model again, or it is said why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.session.run import resume
from tests.support.kept_runs import RUNS, algorithm_file, command, files, flip, kept_run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", RUNS)
def test_the_uploads_give_the_model(name: str, tmp_path: Path) -> None:
    run = kept_run(tmp_path / "run", **RUNS[name])
    before = files(run)
    output = command("replay", run)
    assert output.code == 0 and not output.err, output
    assert output.out.endswith("model_sha256 is identical: these uploads give the run's model\n")
    assert "its checkpoint is identical" in output.out
    assert files(run) == before


def test_a_line_per_round_and_a_file_per_upload(tmp_path: Path) -> None:
    run = kept_run(tmp_path / "run", algo="mime", rounds=5)
    names = {str(p.relative_to(run / "uploads")) for p in (run / "uploads").rglob("*.envelope")}
    assert names == {f"{r:06d}/{e}-{k:06d}.envelope" for r in range(1, 6) for e in (1, 2) for k in range(3)}
    lines = command("replay", run).out.splitlines()
    assert lines[:2] == [f"round {r}  6 uploads read again" for r in (1, 2)]
    assert lines[2:5] == [f"round {r}  6 uploads read again; its checkpoint is identical" for r in (3, 4, 5)]


def test_no_client_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = kept_run(tmp_path / "run")
    monkeypatch.setattr("protocols.fedlap_cov.FedLapCov.client_update", None)
    monkeypatch.setattr("workers.worker.runtime.WorkerRuntime.handle", None)
    assert command("replay", run).code == 0


def test_more_rounds_after_a_resume(tmp_path: Path) -> None:
    run = kept_run(tmp_path / "run", rounds=1)
    resume(run, {"rounds": 3}, quiet=True)
    assert command("replay", run).code == 0
    assert command("verify", run).code == 0


def test_rounds_that_are_computed_again_keep_the_same_frames(tmp_path: Path) -> None:
    run = kept_run(tmp_path / "run")
    before = files(run)
    newest = run / "checkpoints" / "000003.checkpoint"
    flip(newest)
    (run / "summary.json").unlink()  # or else it is complete
    resume(run, {"rounds": 3}, quiet=True)
    second = files(run)
    for path in (p for p in before if p.parts[-3] == "uploads" and "000003" in p.parts):
        assert len(before[path]) == len(second[path])
        assert before[path][-1000:] == second[path][-1000:]
    assert command("replay", run).code == 0


@pytest.mark.parametrize("at", [0.0, 0.003, 0.1, 0.5, 1.0])
def test_one_bit_of_an_upload(at: float, tmp_path: Path) -> None:
    run = kept_run(tmp_path / "run")
    flip(run / "uploads" / "000002" / "1-000001.envelope", at)
    output = command("replay", run)
    assert output.code == 1 and "round 1" in output.out and "round 2" not in output.out
    assert "the upload of client 1 in round 2" in output.err and "1-000001.envelope" in output.err
    assert "damaged" in output.err


def test_an_upload_in_anothers_place(tmp_path: Path) -> None:
    run = kept_run(tmp_path / "run")
    folder = run / "uploads" / "000002"
    (folder / "1-000001.envelope").write_bytes((folder / "1-000002.envelope").read_bytes())
    assert "is not what this task gave" in command("replay", run).err


def test_an_upload_that_is_not_there(tmp_path: Path) -> None:
    run = kept_run(tmp_path / "run")
    (run / "uploads" / "000002" / "1-000001.envelope").unlink()
    output = command("replay", run)
    assert output.code == 2 and "1-000001.envelope: not kept" in output.err


def test_a_run_without_uploads(tmp_path: Path) -> None:
    run = kept_run(tmp_path / "run", keep=False)
    output = command("replay", run)
    assert output.code == 2 and output.err.count("\n") == 1 and "--keep-uploads" in output.err
    assert "is not a run folder" in command("replay", tmp_path).err


def test_a_server_that_folds_in_another_way(tmp_path: Path) -> None:
    spec = algorithm_file(tmp_path, "    ...\n")
    run = kept_run(tmp_path / "run", algo=spec)
    body = (
        "    def server_update(self, server, down, ups, ctx):\n"
        "        made = super().server_update(server, down, ups, ctx)\n"
        "        return replace(made, mean=made.mean * (1.5 if ctx.round > 1 else 1))\n"
    )
    algorithm_file(tmp_path, body)
    output = command("replay", run)
    assert output.code == 1
    assert "round 1  3 uploads read again; its checkpoint is identical" in output.out
    assert "round 2  3 uploads read again; its checkpoint is different" in output.out
    assert "round 2: field 'mean' of the server's state differs" in output.err
    assert "model_sha256 is different" in output.out and "summary.json says" in output.err
