"""A run folder of somebody else: what reads it writes to no other file, and what it says stays text."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fedsim.errors import DataError, FedsimError, Interrupted
from fedsim.printable import printable
from launch.runs.documents import LONGEST
from launch.runs.folder import RunFolder
from launch.runs.restored import RestoredRun
from launch.runs.resume import Resumption
from launch.session.display import on_the_clock
from launch.session.run import resume
from launch.terminal import output_file
from tests.support.commands import ran
from tests.support.kept_runs import command, files, kept_run
from tests.support.snapshots import at
from workers.storage.atomic_files import RunLock, is_locked


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kept_run(tmp_path_factory.mktemp("runs") / "run", algo="fedavg", rounds=2)


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


# ---- writing


WRITTEN: dict[str, tuple[tuple[str, ...], Callable[[Path], tuple[object, ...]]]] = {
    "card": (("card.md", "card.html"), lambda run: ()),
    "report": (("report.html",), lambda run: ()),
    "trace": (("trace.json",), lambda run: ()),
    "compare": (
        ("page.html", "page.md", "page.csv"),
        lambda run: ("--out", run / "page.html", "--markdown", run / "page.md", "--csv", run / "page.csv"),
    ),
    "ledger": (("bytes.csv",), lambda run: ("--csv", run / "bytes.csv")),
}
"""The files that a command writes into a run folder, and its options."""


@pytest.mark.parametrize("name", WRITTEN)
def test_a_link_in_the_place_of_a_page_is_replaced_and_not_followed(
    name: str, run: Path, tmp_path: Path
) -> None:
    names, options = WRITTEN[name]
    target = tmp_path / "profile"
    for content in ("mine", None):  # None: the links lead to nothing
        for page in names:
            (run / page).unlink(missing_ok=True)
            (run / page).symlink_to(target)
        if content:
            target.write_text(content)
        assert command(name, run, *options(run)).code == 0
        assert not any((run / page).is_symlink() or not (run / page).is_file() for page in names)
        assert target.read_text() == content if content else not target.exists()
        target.unlink(missing_ok=True)


def test_a_page_has_the_mode_of_the_umask_and_leaves_no_other_file(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with output_file(tmp_path / "page") as file:
            file.write(b"text")
        with pytest.raises(RuntimeError), output_file(tmp_path / "page"):
            raise RuntimeError
    finally:
        os.umask(before)
    assert files(tmp_path) == {tmp_path / "page": b"text"}
    assert (tmp_path / "page").stat().st_mode & 0o777 == 0o640


def test_a_file_in_shared_memory_is_created_like_another() -> None:
    path = Path("/dev/shm") / f"fedsim-test-{os.getpid()}"
    try:
        with output_file(path) as file:
            file.write(b"text")
        assert path.read_bytes() == b"text"
    finally:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("name", ["card.md", "card.html", "report.html", "trace.json"])
def test_a_pipe_in_the_place_of_a_page_is_an_error(name: str, run: Path) -> None:
    os.mkfifo(run / name)
    output = command(name.partition(".")[0], run)
    assert output.code == 5 and output.err.splitlines() == [
        f"fedsim: cannot write {run / name}: No such device or address"
    ]


PLACES = (
    *("metrics.jsonl", "ledger.csv", "journal", "timeline.csv", "lock", "processes.json", ".manifest.json"),
    *("checkpoints/000002.checkpoint", "state", "logs", "spool", "logs/worker-0.log", "tracking"),
    *("tracking/tensorboard", "state/000000/000001.state", "checkpoints"),
)


@pytest.mark.parametrize("name", PLACES)
def test_a_run_with_a_link_is_neither_resumed_nor_restored(name: str, run: Path, tmp_path: Path) -> None:
    away, place = tmp_path / "away", run / name
    place.parent.mkdir(exist_ok=True)
    if place.exists():
        place.rename(away)
    else:
        away.mkdir()
    place.symlink_to(away)
    before = files(tmp_path)
    for opened in (Resumption.open, RestoredRun.open):
        with pytest.raises(DataError, match="is a link, a pipe or a device: put the file itself there"):
            opened(run)
    assert files(tmp_path) == before


def test_links_of_a_tracker_are_its_own(tmp_path: Path) -> None:
    def stop() -> None:
        raise Interrupted("seen")

    with at("committed", 1, stop), pytest.raises(Interrupted):
        kept_run(tmp_path / "run", algo="fedavg", rounds=2)
    folder = tmp_path / "run" / "tracking" / "wandb"
    folder.mkdir(parents=True)
    (folder / "latest-run").symlink_to(tmp_path)
    resume(tmp_path / "run", {}, quiet=True)
    assert (tmp_path / "run" / "summary.json").is_file()


# ---- what a manifest has


def changed(run: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Change the manifest, and remove the digests that would show it."""
    manifest, summary = (json.loads((run / name).read_text()) for name in ("manifest.json", "summary.json"))
    for content in (manifest, summary):
        content.pop("experiment_sha256")
    change(manifest)
    (run / "manifest.json").write_text(json.dumps(manifest))
    (run / "summary.json").write_text(json.dumps(summary))
    return run


def test_a_manifest_may_lack_any_key(whole: Path, tmp_path: Path) -> None:
    keys = json.loads((whole / "manifest.json").read_text()).keys() - {"experiment_sha256"}
    for key in keys:
        run = changed(
            Path(shutil.copytree(whole, tmp_path / key)), lambda manifest, key=key: manifest.pop(key)
        )
        for read in (RunFolder.open, RestoredRun.open, lambda folder: Resumption.open(folder).configure({})):
            with suppress(FedsimError):
                read(run)
        if key in ("run", "experiment"):
            assert "manifest.json is damaged" in command("verify", run).err


@pytest.mark.parametrize("where", ["algo", "left", "codecs.up.mean", "hyperparameters.local.batch_size"])
def test_a_setting_that_no_page_could_show_is_damage(where: str, run: Path) -> None:
    table, _, name = where.partition(".")
    long = "x" * (LONGEST + 1)
    changed(run, lambda manifest: manifest["experiment"].update({table: {name: long} if name else long}))
    with pytest.raises(DataError, match=f"manifest.json is damaged: {table} Expected `str` of length <= "):
        RunFolder.open(run)


@pytest.mark.parametrize("table", ["codecs", "hyperparameters", "sources", "experiment"])
@pytest.mark.parametrize(("count", "length"), [(10_000, 1), (10, LONGEST)])
def test_more_settings_than_a_page_could_show_are_damage(
    count: int, length: int, table: str, run: Path
) -> None:
    many = {f"x{n}": "x" * length for n in range(count)}

    def change(manifest: dict[str, Any]) -> None:
        manifest["experiment"].update(many if table == "experiment" else {table: many})

    changed(run, change)
    with pytest.raises(DataError, match=r"its settings have [\d,]+ characters; at most 131,072 are shown"):
        RunFolder.open(run)


def test_more_threads_than_a_process_can_have_are_damage(run: Path) -> None:
    changed(run, lambda manifest: manifest["experiment"].update({"threads": 10**6}))
    with pytest.raises(DataError, match="threads Expected `int` <= 1024"):
        RunFolder.open(run)


@pytest.mark.parametrize(
    "costs", [{"client_seconds": [1.0]}, {"client_joules": [], "client_joules_total": 1}]
)
def test_simulated_costs_may_be_incomplete(costs: dict[str, Any]) -> None:
    assert on_the_clock({"simulated_seconds": 2.0, **costs}) == "virtual clock: 2.0 s"


# ---- what a page and a terminal show


HOSTILE = "\x1b]0;title\x07\n# not a heading <script>alert(1)</script> | `code` [link](http://x) \u202eback"


def with_hostile_text(run: Path) -> Path:
    """Put hostile text where a run has names: the data set, a codec, a metric, a field, the command."""
    content = json.loads((run / "manifest.json").read_text())
    content["experiment"] |= {"dataset": HOSTILE, "codecs": {"up.mean": HOSTILE}}
    content |= {"command": ["fedsim", HOSTILE], "commit": HOSTILE}
    del content["experiment_sha256"]
    (run / "manifest.json").write_text(json.dumps(content))
    summary = json.loads((run / "summary.json").read_text())
    del summary["files"], summary["experiment_sha256"]
    (run / "summary.json").write_text(json.dumps(summary))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    written = [json.dumps(line | {HOSTILE: float(n)}) + "\n" for n, line in enumerate(lines)]
    (run / "metrics.jsonl").write_text("".join(written))
    return run


@pytest.mark.filterwarnings("ignore::UserWarning")  # matplotlib's, of glyphs and of space
def test_text_of_a_run_is_no_markup_in_markdown(run: Path, tmp_path: Path) -> None:
    assert command("card", with_hostile_text(run)).code == 0
    other = kept_run(tmp_path / "other", algo="fedavg", rounds=2)
    page = tmp_path / "page.md"
    done = command("compare", run, other, "--markdown", page, "--out", tmp_path / "page.html")
    assert done.code == 0, done.err
    for text in ((run / "card.md").read_text(), page.read_text()):
        assert printable(text) == text and "<script" not in text and "\n# not" not in text
        assert "](http" not in text and r"\`code\`" in text and "&lt;script" in text
        table = [line for line in text.splitlines() if line.startswith("|")]
        bars = {len(re.findall(r"(?<!\\)\|", line)) for line in table if "script" in line}
        assert bars <= {len(re.findall(r"(?<!\\)\|", line)) for line in table if "script" not in line}


def test_a_warning_of_matplotlib_has_no_control_characters(run: Path) -> None:
    words = [sys.executable, "-m", "launch", "report", with_hostile_text(run)]
    done = ran(words)
    assert done.returncode == 0 and "Glyph" in done.stderr
    assert printable(done.stderr) == done.stderr
    page = (run / "report.html").read_text()
    assert printable(page) == page and "<script>alert(1)" not in page


# ---- modes


def modes(run: Path) -> dict[str, int]:
    entries = (path for path in run.rglob("*") if path.is_file())
    return {path.relative_to(run).as_posix(): path.stat().st_mode & 0o777 for path in entries}


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_all_files_have_the_mode_of_the_umask_but_for_the_lock(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        run = modes(kept_run(tmp_path / "run", algo="fedavg", rounds=1))
    finally:
        os.umask(before)
    assert run.pop("lock") == (0o660 if umask == 0o002 else 0o600)
    assert "model.safetensors" in run and set(run.values()) == {mode}


def test_a_lock_that_may_not_be_read_is_seen_among_the_locks_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    lock = RunLock(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("os.open", denied)
        assert is_locked(tmp_path)
    lock.release()
    monkeypatch.setattr("os.open", denied)
    assert not is_locked(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"), [("manifest.json", "Permission denied"), ("model.safetensors", "Permission denied")]
)
def test_a_file_that_may_not_be_read_is_not_called_missing(
    name: str, message: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.open

    def denied(path: Any, *rest: Any, **more: Any) -> int:
        if str(path).endswith(name):
            raise PermissionError(13, "Permission denied")
        return before(path, *rest, **more)

    monkeypatch.setattr("os.open", denied)
    output = command("verify", run)
    assert output.code and message in output.err and "No such file" not in output.err, output.err
