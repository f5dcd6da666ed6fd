"""Short runs in this process, and the commands that look at them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from fedsim.experiment import Experiment
from launch.cli import main
from launch.configuration.execution import Execution
from launch.session.run import launch

LINK = {"link": "up=1mbit,down=1mbit,rtt=10ms", "compute": "0.3ms,noise=0.5", "deadline": "200ms"}
RUNS: dict[str, dict[str, Any]] = {
    "lossy": {"algo": "fedlap_cov", "codecs": {"up.precision": "bf16", "up.mean": "delta+zstd"}, "rounds": 4},
    "two exchanges": {"algo": "mime", "participation": "full+lost:0.3+gone:0.3"},
    "set-up": {"algo": "precond_admm", "participation": "2", "rounds": 2},
    "parts": {"algo": "fedlap_func", "participation": "0.7"},
    "late": {"algo": "fedavg", **LINK},
    "empty rounds": {"algo": "fedavg", "participation": "coin:0.2"},
    "events": {
        "algo": "fedlap_cov",
        "participation": "full+lost:0.2+event:norm:99%+quiet:0.2",
        "rounds": 5,
        "codecs": {"up.mean": "sigma:0.05+dither", "up.precision": "ratio:0.25"},
    },
    "fed back": {"algo": "fedavgm", "codecs": {"up.delta": "topk:0.1"}, "error_feedback": True},
}
"""What differs from three clients, three rounds and the logistic model."""


@dataclass(frozen=True)
class Printed:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str


def kept_run(folder: Path, **changes: Any) -> Path:
    described: dict[str, Any] = {"model": "logistic", "clients": 3, "rounds": 3} | changes
    execution = Execution(workers=0, devices="cpu", out=str(folder))
    return launch(Experiment(**described), execution, quiet=True)


def command(name: str, run: Path, *options: object) -> Printed:
    done = CliRunner().invoke(main, [name, str(run), *map(str, options)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert "Traceback" not in done.output
    return Printed(done.exit_code, done.stdout, done.stderr)


def files(run: Path) -> dict[Path, bytes]:
    """Everything in a run's folder, but for who holds its lock."""
    return {p: p.read_bytes() for p in sorted(run.rglob("*")) if p.is_file() and p.name != "lock"}


def flip(path: Path, at: float = 0.5) -> None:
    """One bit, at this share of the file."""
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 1
    path.write_bytes(data)


def algorithm_file(folder: Path, body: str) -> str:
    """A user's FedAvg with a method of its own; returns its spec."""
    source = (
        "from __future__ import annotations\nimport os, time\nfrom dataclasses import dataclass, replace\n"
        "from protocols.fedavg import FedAvg\n\n@dataclass(frozen=True)\nclass Mine(FedAvg):\n" + body
    )
    (folder / "mine.py").write_text(source)
    return f"{folder / 'mine.py'}:Mine"
