"""The fedsim command as a process: until it ends, or until it has said something.

It is forked from a process that has imported torch (tests.support.preloaded), or a new interpreter where
libraries have to read other variables. Tests that are about the start of an interpreter use subprocess.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support import preloaded

DEADLINE = 600.0
"""Seconds after which a test gives up a process that hangs. On an idle machine nothing takes ten, so
that fifty times the load is not taken for a hang."""
REPEATED = ("--set", "--codec", "--over", "--where", "--to", "--keep", "--engine-option")
"""Options that may stand there several times, with other keys."""


def over(*words: str) -> list[str]:
    """Keep the last of options and keys that stand there twice, which the command refuses. A switch has no
    value; an option has none here if another one follows."""
    pairs: list[list[str]] = []
    for word in words:
        new = word.startswith("--") or not pairs or len(pairs[-1]) == 2 or not pairs[-1][0].startswith("--")
        pairs.append([word]) if new else pairs[-1].append(word)
    last: dict[tuple[str, ...], list[str]] = {}
    for at, pair in enumerate(pairs):
        repeated = pair[0] in REPEATED and len(pair) == 2
        key = (pair[0], pair[1].partition("=")[0]) if repeated else (pair[0],)
        last[key if pair[0].startswith("--") else (pair[0], str(at))] = pair
    return [word for pair in last.values() for word in pair]


def fedsim(*arguments: str, code: int = 0) -> str:
    """Return what it printed. Fails if it does not end with `code`."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = _started(over(*arguments), out.fileno(), err.fileno())
        try:
            status = process.wait(DEADLINE)
        except BaseException:
            process.kill()
            process.wait(DEADLINE)
            raise
        output, errors = (file.seek(0) or file.read().decode() for file in (out, err))
    assert status == code, errors
    return output + errors


def ran(command: Sequence[str | Path], **options: Any) -> subprocess.CompletedProcess[str]:
    """Any program that has ended, with whatever code, and what it printed."""
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, **options)


def _started(words: list[str], stdout: int, stderr: int) -> preloaded.Process | subprocess.Popen[bytes]:
    """The command in a fork, or in a new interpreter where libraries must read the environment anew."""
    if not _portable(words) and _at_import() == AT_IMPORT:
        with open(os.devnull, "rb") as nothing:
            return preloaded.Process(words, nothing.fileno(), stdout, stderr)
    return subprocess.Popen([sys.executable, "-m", "launch", *words], stdout=stdout, stderr=stderr)


def _portable(words: list[str]) -> bool:
    """Whether the command says portable numerics, or a run or a join file that it names does."""
    files = [file for word in words for file in (Path(word), Path(word) / "manifest.json") if file.is_file()]
    return "portable" in words or any(b'"portable"' in file.read_bytes() for file in files)


def _at_import() -> dict[str, str]:
    """The variables that libraries read when they are imported."""
    blas = ("ATEN_", "MKL_", "OMP_", "KMP_", "NPY_", "ONEDNN_", "DNNL_", "OPENBLAS_")
    kinds = (*blas, "PYTHON", "LD_", "GLIBC_")
    return {name: value for name, value in os.environ.items() if name.startswith(kinds)}


AT_IMPORT = _at_import()


@dataclass
class Command:
    """A running one; stdout and stderr together."""

    process: subprocess.Popen[bytes] | preloaded.Process
    lines: list[str] = field(default_factory=lambda: [""])

    def wait_for(self, text: str) -> None:
        """Until a whole line contains it."""
        until = time.monotonic() + DEADLINE
        while not any(text in line for line in self.lines[:-1]):
            assert self._read(until), f"it ended without {text!r}: {self.lines[-9:]}"

    def listen(self, seconds: float) -> None:
        """Read what it says for so long, or until it has ended."""
        assert self.process.stdout is not None
        until, fd = time.monotonic() + seconds, self.process.stdout.fileno()
        while (left := until - time.monotonic()) > 0 and select.select([fd], [], [], left)[0]:
            if not self._read(time.monotonic() + DEADLINE):
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(max(0.0, until - time.monotonic()))
                return

    def wait(self) -> None:
        """Until it has ended, however."""
        until = time.monotonic() + DEADLINE
        while self._read(until):
            pass

    def output(self) -> list[str]:
        """All its lines that are not empty, once it has ended, however."""
        self.wait()
        return [line for line in self.lines if line]

    def rest(self, code: int = 0) -> str:
        """All that it has said, once it has ended, which it must with `code`."""
        until = time.monotonic() + DEADLINE
        while self._read(until):
            pass
        output = "\n".join(self.lines)
        assert self.process.wait(DEADLINE) == code, output
        self.kill()
        return output

    def kill(self) -> None:
        """-9, and wait until it is gone."""
        assert self.process.stdout is not None
        self.process.kill()
        self.process.wait(DEADLINE)
        self.process.stdout.close()

    def _read(self, until: float) -> bool:
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()  # not the file object: select cannot see what it has buffered
        left = max(0.0, until - time.monotonic())
        assert select.select([fd], [], [], left)[0], f"silent: {self.lines[-9:]}"
        got = os.read(fd, 1 << 16).decode()
        *whole, rest = (self.lines.pop() + got).split("\n")
        self.lines += [*whole, rest]
        return bool(got)


def start(*arguments: str, before: tuple[str, ...] = (), **env: str) -> Command:
    """before: what stands before the command, such as another program that runs it."""
    words = over(*arguments)
    if before or env:
        return Command(
            subprocess.Popen(
                [*before, sys.executable, "-m", "launch", *words],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env},
            )
        )
    ours, theirs = os.pipe()
    try:
        process = _started(words, theirs, theirs)
    finally:
        os.close(theirs)
    process.stdout = os.fdopen(ours, "rb", 0)
    return Command(process)
