"""Temporary folders of processes that were killed are removed by the next one of their kind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from workers.scratch import YOUNG_SECONDS, Scratch

pytestmark = pytest.mark.process

MAKES_ONE = """
import sys, time
from workers.scratch import Scratch
print(Scratch("mine-", sys.argv[1]).path, flush=True)
time.sleep(60)
"""


def scratch_of_other_process(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", MAKES_ONE, str(parent)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def aged(path: Path) -> Path:
    old = time.time() - 2 * YOUNG_SECONDS
    os.utime(path, (old, old))
    return path


def test_a_killed_processs_folder_goes_and_a_living_ones_stays(tmp_path: Path) -> None:
    killed, lost = scratch_of_other_process(tmp_path)
    alive, held = scratch_of_other_process(tmp_path)
    (lost / "file").write_text("left behind")
    killed.send_signal(signal.SIGKILL)
    killed.wait(10)
    try:
        scratch = Scratch("mine-", str(tmp_path))
        assert not lost.exists()
        assert held.exists()
    finally:
        alive.kill()
        alive.wait(10)
        for process in (killed, alive):
            assert process.stdout is not None
            process.stdout.close()
    assert scratch.path.stat().st_mode & 0o777 == 0o700
    scratch.remove()
    scratch.remove()
    assert not scratch.path.exists()


def test_young_ones_other_kinds_and_links_are_left_alone(tmp_path: Path) -> None:
    young = tmp_path / ".mine-young"  # it gets its name when it is locked
    other, target = tmp_path / "other-one", tmp_path / "target"
    for path in (young, other, target):
        path.mkdir()
    link = tmp_path / "mine-link"
    link.symlink_to(target)
    old = time.time() - 2 * YOUNG_SECONDS
    os.utime(link, (old, old), follow_symlinks=False)
    aged(other)
    aged(target)
    Scratch("mine-", str(tmp_path)).remove()
    assert young.exists() and other.exists() and target.exists() and link.is_symlink()
