"""A peer's environment: made on demand from its requirements, and never in the environment of fedsim."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
DEFAULT = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedsim-peers"
"""Where environments are kept between two measurements."""
MARK = "installed.txt"
DEADLINE = 1800.0


@dataclass(frozen=True)
class Peer:
    """A tool: its program in programs/, its requirements, the interpreters it runs on, best first."""

    name: str
    program: str
    requirements: str
    pythons: tuple[str, ...] = ()
    sends: str = ""
    """What it says of its bytes, and what it sends."""
    deadline: float = 120.0
    """Seconds after which a run of it is given up."""
    worker: str = ""
    """What stands in the command of its workers and of no other process of it; '': every child is one."""
    relays: bool = False
    """Whether its program lets a relay count, given the ports "port" and "through" in its settings."""

    @property
    def source(self) -> Path:
        """The program that a user of it would write."""
        return HERE / "programs" / f"{self.program}.py"

    def lines(self) -> int:
        """Lines of its program and of those it names, without blank ones, comments and first docstrings."""
        body = _body(self.source)
        used = [p for p in self.source.parent.glob("*.py") if p.stem in body and p.stem != "job"]
        bodies = [body, *(_body(path) for path in used)]
        lines = [line.strip() for text in bodies for line in text.splitlines()]
        return sum(bool(line) and not line.startswith("#") for line in lines)


def _body(program: Path) -> str:
    """A program without its first docstring."""
    text = program.read_text(encoding="utf-8")
    return text.split('"""', 2)[2] if text.startswith('"""') else text


def _interpreter(names: tuple[str, ...]) -> str | None:
    """The first of these interpreters that runs; that of fedsim if none is named."""
    for name in names or (sys.executable,):
        path = shutil.which(name)
        if path and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0:
            return path
    return None


def python_of(peer: Peer, folder: Path) -> Path:
    """The interpreter of its environment, whether it is there or not."""
    return folder / peer.requirements / "bin" / "python"


def ready(peer: Peer, folder: Path) -> bool:
    """Whether its environment has what its requirements say now."""
    mark = folder / peer.requirements / MARK
    return mark.exists() and mark.read_bytes() == _required(peer).read_bytes()


def _required(peer: Peer) -> Path:
    return HERE / "requirements" / f"{peer.requirements}.txt"


def make(peer: Peer, folder: Path) -> str:
    """Make its environment; returns why there is none, or ''."""
    if ready(peer, folder):
        return ""
    interpreter = _interpreter(peer.pythons)
    if interpreter is None:
        return f"not installed: there is no {' or '.join(peer.pythons)}"
    target = folder / peer.requirements
    try:
        for command in (
            [interpreter, "-m", "venv", "--clear", str(target)],
            [str(python_of(peer, folder)), "-m", "pip", "install", "-q", "-r", str(_required(peer))],
        ):
            done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
            if done.returncode:
                reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
                return f"not installed: {(reasons or ['pip failed'])[-1][:200]}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"not installed: {error}"
    (target / MARK).write_bytes(_required(peer).read_bytes())
    return ""
