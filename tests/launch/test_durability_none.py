"""--durability none: states in memory, the same bits, nothing on the disk, nothing left over."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from fedsim.errors import UsageError
from tests.support.commands import fedsim, start
from workers.storage.memory_folder import FOLDERS, MEMORY, put_in_memory, remove

pytestmark = pytest.mark.skipif(not os.access(MEMORY, os.W_OK), reason="no memory file system")
OPTIONS = ("--algo", "fedlap_cov", "--clients", "4", "--rounds", "40", "--set", "local.epochs=1")


def run_folder(path: Path) -> Path:
    for name in FOLDERS:
        (path / name).mkdir(parents=True)
    return path


def in_memory() -> set[Path]:
    return set(MEMORY.glob(f"fedsim-{os.getuid()}-*"))


def test_the_folders_are_in_memory_until_they_are_removed(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    memory = put_in_memory(run)
    (run / "state" / "a").write_bytes(b"x")
    assert (memory / "state" / "a").read_bytes() == b"x"
    remove(run, memory)
    assert not memory.exists()
    assert [(run / name).is_dir() and not (run / name).is_symlink() for name in FOLDERS] == [True, True]
    remove(run, memory)  # once more changes nothing


def test_what_a_killed_coordinator_left_is_removed_and_no_one_elses(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    left = memory / f"fedsim-{os.getuid()}-{os.getpid()}-1-7"  # this process began at another tick
    others = memory / f"fedsim-{os.getuid() + 1}-1-1-7"
    left.mkdir()
    others.mkdir()
    first = put_in_memory(run_folder(tmp_path / "one"), memory)
    second = put_in_memory(run_folder(tmp_path / "two"), memory)
    assert set(memory.iterdir()) == {others, first, second}


def test_it_is_refused_where_it_cannot_be(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    with pytest.raises(UsageError, match="which is not there; use process"):
        put_in_memory(run, tmp_path / "no memory")
    (run / "state" / "a").write_bytes(b"x")
    with pytest.raises(UsageError, match="has files already"):
        put_in_memory(run, tmp_path)


@pytest.mark.process
@pytest.mark.slow
def test_a_dead_worker_changes_no_bit_and_a_dead_coordinator_ends_the_run(tmp_path: Path) -> None:
    before = in_memory()
    fedsim("launch", *OPTIONS, "--workers", "0", "--out", str(tmp_path / "disk"), "--quiet")
    out = tmp_path / "memory"
    running = start("launch", *OPTIONS, "--workers", "2", "--durability", "none", "--out", str(out))
    running.wait_for(" 2/40")
    assert (out / "state").is_symlink()
    processes = json.loads((out / "processes.json").read_text())
    os.kill(next(p["pid"] for p in processes if p["role"] == "worker"), signal.SIGKILL)
    running.rest()
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("disk", "memory")]
    for key in ("model_sha256", "clients_sha256", "bytes_up"):
        assert summaries[0][key] == summaries[1][key]
    assert not list((out / "state").iterdir())
    assert in_memory() == before
    for command in ("resume", "verify"):
        assert "was launched with --durability none" in fedsim(command, str(out), code=2)

    gone = start(
        *("launch", *OPTIONS[:-4], "--rounds", "500", "--workers", "2", "--durability", "none"),
        *("--out", str(tmp_path / "gone")),
    )
    gone.wait_for(" 2/500")
    gone.kill()
    left = in_memory() - before  # at once: any run of this machine with durability = none removes it
    assert len(left) == 1
    assert "was launched with --durability none" in fedsim("resume", str(tmp_path / "gone"), code=2)
    fedsim(*("launch", *OPTIONS, "--workers", "0", "--durability", "none", "--out", str(tmp_path / "next")))
    assert in_memory() == before
