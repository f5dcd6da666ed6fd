"""A launch and its remote workers, as real processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from launch.runs.folder import RunFolder
from tests.support.commands import DEADLINE, Command, start


def eventually(true: Callable[[], object], what: str) -> None:
    until = time.monotonic() + DEADLINE
    while not true():
        assert time.monotonic() < until, f"{what}: not within {DEADLINE:g} s"
        time.sleep(0.02)


@dataclass
class Federation:
    """A launch and its remote workers; host, remote worker: what stands before their commands."""

    folder: Path
    alone: Callable[..., RunFolder]
    """An experiment in one process."""
    host: tuple[str, ...] = ()
    remote_worker: tuple[str, ...] = ()
    bind: str = "tcp://127.0.0.1:*"
    started: list[Command] = field(default_factory=list)

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def join_credentials(self) -> Path:
        return self.run / "join.json"

    def await_new_keys(self, old: bytes) -> None:
        """Wait for the keys of the next start, which removes the old file before it writes its own."""
        file = self.join_credentials
        eventually(lambda: file.exists() and file.read_bytes() != old, "new keys")

    def launch(self, *options: str, workers: int = 2) -> Command:
        return self.command(
            self.host,
            *("launch", "--remote-workers", str(workers), "--bind", self.bind, "--out", str(self.run)),
            *options,
        )

    def join(self, *options: str, file: Path | None = None, **env: str) -> Command:
        eventually((file or self.join_credentials).exists, "join.json")
        return self.command(
            self.remote_worker, "worker", "--join", str(file or self.join_credentials), *options, **env
        )

    def command(self, before: tuple[str, ...], *arguments: str, **env: str) -> Command:
        self.started.append(start(*arguments, before=before, **env))
        return self.started[-1]

    def close(self) -> None:
        for running in self.started:
            running.kill()


def ends(running: Command, code: int = 0) -> str:
    """All that it printed, once it has ended with this code."""
    return running.rest(code)


def same_bits(one: RunFolder, other: RunFolder) -> None:
    for key in ("model_sha256", "clients_sha256", "test_accuracy"):
        assert one.summary[key] == other.summary[key]
