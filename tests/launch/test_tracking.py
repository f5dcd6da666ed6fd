"""--track: what trackers are told, that a resume goes on with it, and that none of them can change a run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, strategies as st

from fedsim.errors import UsageError
from launch import tracking
from launch.cli import main
from launch.configuration.config import Overrides
from launch.runs.growing import GrowingLines
from launch.tracking import TRACKERS, Tracking, follow as module, selected
from launch.tracking.adapters import ADAPTERS, Tracker, Value
from launch.tracking.follow import RunRows, config, follow
from tests.support.commands import fedsim, ran, start
from tests.support.kept_runs import kept_run
from tests.support.reproducible import without_seconds

ROOT = Path(__file__).resolve().parents[2]
LOSSES = "coin:0.8+lost:0.3+gone:0.3"
OPTIONS = ("--workers", "0", "--clients", "4", "--rounds", "3", "--model", "logistic", "--algo", "fedavg")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with losses that is done. Not to be changed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    options = {"algo": "ivon_admm", "clients": 5, "rounds": 6, "eval_every": 2, "participation": LOSSES}
    return kept_run(folder, **options)


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "run")


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


# ---- names and packages


def test_names_are_split_and_each_is_taken_once() -> None:
    assert selected("wandb, tensorboard,wandb") == ("wandb", "tensorboard")
    assert selected("") == selected("none") == ()


@pytest.mark.parametrize("options", [{"track": "mlflow,tensorbord"}, {"config": "file"}])
def test_an_unknown_tracker_is_one_line_with_the_names(options: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('[execution]\ntrack = "tensorbord"\n')
    with pytest.raises(UsageError) as error:
        Overrides.of(
            {key: str(tmp_path / "a.toml") if key == "config" else x for key, x in options.items()}
        ).resolve()
    assert str(error.value) == (
        "unknown tracker 'tensorbord'; did you mean 'tensorboard'? "
        "(known: mlflow, tensorboard, trackio, wandb)"
    )


def test_a_missing_package_is_one_line_with_its_extra_and_nothing_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    options = ["launch", *OPTIONS, "--track", "mlflow", "--out", str(tmp_path / "run")]
    done = CliRunner(catch_exceptions=False).invoke(main, options)
    assert done.exit_code == 2 and list(tmp_path.iterdir()) == []
    assert done.stderr.count("\n") == 1
    assert "--track mlflow needs the package mlflow: pip install 'fedsim-wire[mlflow]'" in done.stderr


def test_a_folder_of_a_trackers_name_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb leaves one where it is used."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(UsageError, match="needs the package wandb"):
        tracking.check_installed(selected("wandb"))


def test_every_tracker_has_an_extra() -> None:
    extras = (ROOT / "setup.cfg").read_text().partition("[options.extras_require]")[2].splitlines()
    assert {f"{name} =" for name in TRACKERS} <= set(extras) and [*TRACKERS] == [*ADAPTERS]


# ---- what a round is


@given(st.lists(st.binary(max_size=9), max_size=9), st.integers(1, 5))
def test_lines_of_a_growing_file_are_read_once_and_whole(parts: list[bytes], every: int) -> None:
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"growing-{os.getpid()}"
    path.unlink(missing_ok=True)
    lines, read = GrowingLines(path), []
    for n, part in enumerate(parts):
        with path.open("ab") as file:
            file.write(part)
        if n % every == 0:
            read += lines.new()
    read += lines.new()
    path.unlink(missing_ok=True)
    assert read == b"".join(parts).split(b"\n")[:-1]


def test_a_round_has_every_number_of_its_line(run: Path) -> None:
    rows = [*RunRows(run).new()]
    assert [round for round, _ in rows] == [0, 2, 4, 6]
    for line, (_, numbers) in zip(lines_of(run), rows, strict=True):
        plain = {k: v for k, v in line.items() if isinstance(v, int | float) and k != "round"}
        sides = {f"bytes_{side}": plain.pop(f"bytes_{side}") for side in ("down", "up")}
        assert plain == {key: numbers[key] for key in plain}
        assert sides == {f"bytes_{side}": numbers[f"bytes/{side}"] for side in ("down", "up")}
        if line["round"]:
            assert numbers["limits/kl"] == line["limits"]["kl"]
            assert {"primal_residual", "dual_residual"} <= numbers.keys()


def test_participation_is_the_length_of_the_lists_of_clients(run: Path) -> None:
    line = {"participants": [1, 2, 5], "folded": [1], "late": [2, 5], "round": 7, "staleness": [1, 2]}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    *_, (_, numbers) = RunRows(run).new()
    shown = {key: x for key, x in numbers.items() if not key.startswith("bytes/")}
    assert shown == {"participation/asked": 3, "participation/folded": 1, "participation/late": 2}


def test_the_configuration_has_hyperparameters_data_and_digest(run: Path) -> None:
    manifest = json.loads((run / "manifest.json").read_text())
    known = config(manifest)
    for key in ("algo", "dataset", "data", "seed", "experiment_sha256", "versions.torch"):
        assert key in known
    assert known["hyperparameters.local.lr"] == manifest["experiment"]["hyperparameters"]["local.lr"]
    assert known["experiment_sha256"] == manifest["experiment_sha256"]
    assert "client_sizes" not in known and None not in known.values()


# ---- a tracker's process, with trackers that tests can look into


@dataclass
class Memory:
    """A tracker that keeps what it is told. fails: the method that raises."""

    starts: list[tuple[str, Path, Mapping[str, Value]]] = field(default_factory=list)
    rows: list[tuple[int, Mapping[str, float]]] = field(default_factory=list)
    status: str = ""
    fails: str = ""

    def start(self, name: str, folder: Path, config: Mapping[str, Value]) -> None:
        self._fail("start")
        assert [*folder.iterdir()] == []
        (folder / "data").touch()
        self.starts.append((name, folder, config))

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        self._fail("log")
        self.rows.append((round, numbers))

    def finish(self, status: str) -> None:
        self._fail("finish")
        self.status = status

    def _fail(self, method: str) -> None:
        if self.fails == method:
            raise ValueError(f"no {method}\nand a second line")


def whole_run(run: Path, tracker: Tracker) -> None:
    follow(run, "mlflow", tracker, lambda seconds: True)


def test_all_rounds_and_the_end_are_written(run: Path) -> None:
    memory = Memory()
    whole_run(run, memory)
    *rows, (round, final) = memory.rows
    assert rows == [*RunRows(run).new()] and [number for number, _ in rows] == [0, 2, 4, 6]
    summary = json.loads((run / "summary.json").read_text())
    assert (memory.status, round) == ("done", 6)
    assert final["summary/test_accuracy"] == summary["test_accuracy"]
    ((name, folder, known),) = memory.starts
    assert (name, folder) == ("run", run / "tracking/mlflow") and known["algo"] == "ivon_admm"
    (run / "summary.json").unlink()
    whole_run(run, again := Memory())  # in an empty folder
    assert again.rows == [*rows, (6, {})] and again.status == "killed"


def test_rounds_are_written_as_they_come(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text(lines[0])
    memory, written = Memory(), list[int]()

    def ended(seconds: float) -> bool:
        written.append(len(memory.rows))
        (run / "metrics.jsonl").write_text("".join(lines[: 1 + len(written)]))
        return len(written) == 3

    follow(run, "mlflow", memory, ended)
    assert written == [0, 2, 3] and [round for round, _ in memory.rows] == [0, 2, 4, 6, 6]


@pytest.mark.parametrize("method", ["start", "log", "finish"])
def test_a_tracker_that_raises_is_one_line(
    method: str, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "ADAPTERS", {"mlflow": lambda: Memory(fails=method)})
    monkeypatch.setattr(module, "input_closed", lambda seconds: True)
    assert module.main(run, "mlflow") == 1
    assert capsys.readouterr().err.splitlines()[-1] == f"ValueError: no {method} and a second line"


def test_a_start_waits_for_the_process_of_an_earlier_one(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[str] = []

    def look(file: Any, how: int) -> None:
        locked.append(Path(file.name).relative_to(run).as_posix())
        assert how == module.fcntl.LOCK_EX and not (run / "tracking/mlflow").exists()

    monkeypatch.setattr(module.fcntl, "flock", look)
    monkeypatch.setattr(module, "ADAPTERS", {"mlflow": Memory})
    monkeypatch.setattr(module, "input_closed", lambda seconds: True)
    assert module.main(run, "mlflow") == 0 and locked == ["tracking/mlflow.lock"]


# ---- real processes


def package(folder: Path, name: str, source: str) -> None:
    """A package in the place of a tracker's."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(source)


def outcome(run: Path) -> tuple[Any, ...]:
    summary = json.loads((run / "summary.json").read_text())
    keys = ("status", "rounds", "model_sha256", "clients_sha256", "bytes_up", "bytes_down")
    return (*(summary[key] for key in keys), without_seconds(lines_of(run)))


@pytest.mark.process
def test_trackers_that_fail_are_a_line_each_and_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "packages"
    package(packages, "mlflow", "raise RuntimeError('not today')")
    package(packages, "wandb", "import os\nprint('noise')\nos._exit(3)")
    package(packages, "trackio", "import sys\nsys.exit('gone')")
    fedsim("launch", *OPTIONS, "--out", str(tmp_path / "without"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")]))
    tracked = tmp_path / "tracked"
    output = fedsim("launch", *OPTIONS, "--out", str(tracked), "--track", "mlflow,wandb,trackio")
    lines = sorted(line for line in output.splitlines() if "--track" in line)
    assert [line.partition(" (/")[0] for line in lines] == [
        "--track mlflow is off, and the run continues: RuntimeError: not today",
        "--track trackio is off, and the run continues: SystemExit: gone",
        "--track wandb is off, and the run continues: its process has ended with 3",
    ]
    assert outcome(tracked) == outcome(tmp_path / "without")
    assert "Traceback" in (tracked / "logs" / "track-mlflow.log").read_text()


@pytest.mark.process
def test_a_tracker_that_hangs_is_ended(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path / "packages", "trackio", "import time\ntime.sleep(1000)")
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    trackers = Tracking(run, selected("trackio"))
    assert list(trackers.notes()) == []
    (note,) = trackers.finish(seconds=0.5)
    assert note.startswith("--track trackio has not ended within 0.5 s")
    assert list(trackers.notes()) == list(trackers.finish()) == []


def events(run: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows: steps and values by name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(run / "tracking" / "tensorboard"), size_guidance={"scalars": 0})
    shown.Reload()
    return {tag: [(e.step, e.value) for e in shown.Scalars(tag)] for tag in shown.Tags()["scalars"]}


def agrees(series: dict[str, list[tuple[int, float]]], run: Path, precision: float) -> None:
    """Every evaluated round once, with the numbers of metrics.jsonl."""
    lines = lines_of(run)
    for key, name in (("test_nll", "test_nll"), ("bytes_up", "bytes/up"), ("train_loss", "train_loss")):
        due = [(line["round"], line[key]) for line in lines if line.get(key) is not None]
        assert [step for step, _ in series[name]] == [round for round, _ in due], name
        assert [x for _, x in series[name]] == pytest.approx([x for _, x in due], rel=precision), name


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_killed_run_has_each_round_once_in_tensorboard(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = [*OPTIONS, "--workers", "2", "--rounds", "12"]
    running = start("launch", "--out", str(folder), *options, "--track", "tensorboard")
    running.wait_for("round  7/12")
    running.kill()
    assert "--track" not in fedsim("resume", str(folder))  # the manifest has it
    series = events(folder)
    agrees(series, folder, 1e-6)
    summary = json.loads((folder / "summary.json").read_text())
    assert series["summary/test_nll"] == [(12, pytest.approx(summary["test_nll"], rel=1e-6))]


OFFLINE = """
import os, runpy, sys
def refuse(event, arguments):
    if event == "socket.getaddrinfo" or event == "socket.connect" and isinstance(arguments[1], tuple):
        os.write(2, f"NETWORK {event} {arguments}\\n".encode())
        os._exit(9)
sys.addaudithook(refuse)
runpy.run_module("launch.tracking.follow", run_name="__main__")
"""
READERS = {
    "tensorboard": """
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
shown = EventAccumulator(f"{run}/tracking/tensorboard", size_guidance={"scalars": 0})
shown.Reload()
series = {tag: [(e.step, e.value) for e in shown.Scalars(tag)] for tag in shown.Tags()["scalars"]}
""",
    "mlflow": """
import os
os.environ["MLFLOW_ALLOW_FILE_STORE"] = os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
from mlflow import MlflowClient
client = MlflowClient((run / "tracking/mlflow/mlruns").as_uri())
(found,) = client.search_runs([client.get_experiment_by_name("fedsim").experiment_id])
assert found.info.status == "FINISHED" and found.data.params["algo"] == "ivon_admm"
series = {
    name: sorted((m.step, m.value) for m in client.get_metric_history(found.info.run_id, name))
    for name in found.data.metrics
}
""",
    "trackio": """
import sqlite3
(file,) = (run / "tracking/trackio").glob("*.db")
series = {}
query = "SELECT run_name, step, metrics FROM metrics ORDER BY id"
for name, step, numbers in sqlite3.connect(file).execute(query):
    assert name == "run"
    for key, value in json.loads(numbers).items():
        series.setdefault(key, []).append((step, value))
""",
    "wandb": """
from wandb.proto.wandb_internal_pb2 import Record
series = {}
for file in (run / "tracking/wandb").rglob("*.wandb"):
    data, at, record = file.read_bytes(), 7, b""  # LevelDB's log format: blocks of 32 KiB, records in parts
    while at + 7 <= len(data):
        size, kind, left = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6], -at % 32768 or 32768
        if left < 7 or kind == 0:
            at += left
            continue
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            message, record = Record.FromString(record), b""
            if message.WhichOneof("record_type") == "history":
                items = message.history.item
                row = {"/".join(x.nested_key) or x.key: json.loads(x.value_json) for x in items}
                for key, value in row.items():
                    series.setdefault(key, []).append((row["_step"], value))
""",
}
"""Programs that read what a tracker has, with the tracker's own reader where it has one, as `series`."""


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_has_each_round_once_without_a_network(name: str, run: Path) -> None:
    """In two starts, of which the second has two rounds more; the second makes the tracker's folder again."""
    if tracking.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "MLFLOW", "TRACKIO"))}
    for some in (lines[:2], lines):
        (run / "metrics.jsonl").write_text("".join(some))
        done = ran(
            [sys.executable, "-c", OFFLINE, str(run), name],
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
            env=environment,
        )
        assert done.returncode == 0 and "NETWORK" not in done.stderr, done.stderr
    head = f"import json\nfrom pathlib import Path\nrun = Path({str(run)!r})\n"
    program = head + READERS[name] + "print(json.dumps(series))"
    read = ran([sys.executable, "-c", program])
    assert read.returncode == 0, read.stderr
    series = json.loads(read.stdout.splitlines()[-1])
    agrees(series, run, 1e-6 if name == "tensorboard" else 1e-15)
