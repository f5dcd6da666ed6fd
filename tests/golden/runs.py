"""Short runs whose digests are recorded, and what is recorded of each of them.

Every run is three rounds of digits with four clients and the algorithm's own model, computed with portable
numerics. The digests depend neither on the number of workers nor on the processor, so one record stands for
all of them.
"""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from protocols import REGISTRY, find
from tests.support.commands import DEADLINE, fedsim, start
from tests.support.harness import has_setting
from workers.numerics import COMPUTES

ROUNDS = 3
CODECS = ("dense", "bf16")
Record = dict[str, str]


def names() -> list[str]:
    """`algorithm codec`, for every algorithm and codec."""
    return [f"{algorithm.name} {codec}" for algorithm in REGISTRY for codec in CODECS]


def record(run: Path) -> Record:
    """The digests of a run folder: model, client states, and the sorted algorithm rows of the ledger."""
    summary = json.loads((run / "summary.json").read_text())
    return {
        "model_sha256": summary["model_sha256"],
        "clients_sha256": summary["clients_sha256"],
        "rows_sha256": rows_digest(run / "ledger.csv"),
    }


def rows_digest(ledger: Path) -> str:
    """sha256 of the rows of kind algorithm, sorted, without the column worker."""
    with ledger.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["kind"] == "algorithm"]
    lines = sorted(",".join(v for k, v in row.items() if k != "worker") for row in rows)
    return sha256("\n".join(lines).encode()).hexdigest()


def options(name: str, rounds: int = ROUNDS) -> list[str]:
    """The command line of a recorded run, without its folder and its workers."""
    algo, codec = name.split()
    supplied = ["--algo", algo, "--clients", "4", "--rounds", str(rounds), "--participation", "full+lost:0.2"]
    supplied += ["--numerics", "portable"]
    for setting, value in (("server_steps", 20), ("epochs", 2), ("samples", 4)):
        if has_setting(find(algo), setting):
            supplied += ["--set", f"{setting}={value}"]
    if codec != "dense":
        supplied += [word for field in _float_fields(algo) for word in ("--codec", f"{field}={codec}")]
    return supplied


def _float_fields(algo: str) -> list[str]:
    """Fields of both directions that a lossy codec may encode."""
    from fedsim.experiment import Experiment, build_algorithm
    from fedsim.problem import Problem
    from fedsim.wire.codecs import codec
    from fedsim.wire.schema import all_fields

    algorithm = find(algo)
    problem = Problem.build(Experiment(algo=algo, clients=4), build_algorithm(algorithm, {}), None)
    return sorted(
        {
            f"{side}.{f.name}"
            for exchange in problem.messages.exchanges
            for side in ("down", "up")
            for f in all_fields(getattr(exchange, side))
            if f.kind.dims and not problem.messages.unfit(codec("bf16"), side, f.name, f.kind)
        }
    )


def created(name: str, workers: int) -> Record:
    """Launch a recorded run as a user does."""
    with tempfile.TemporaryDirectory(prefix="fedsim-golden-") as folder:
        run = Path(folder) / "run"
        fedsim("launch", *options(name), "--workers", str(workers), "--out", str(run))
        return record(run)


def special(name: str) -> Record:
    """A recorded run carried out in another way; its record is that of the plain run of the same name."""
    how, _, plain = name.partition(": ")
    with tempfile.TemporaryDirectory(prefix="fedsim-golden-") as folder:
        run = Path(folder) / "run"
        return {"resumed": _resumed, "verified": _verified, "remote": _remote}[how](plain, run)


def _resumed(plain: str, run: Path) -> Record:
    fedsim("launch", *options(plain, rounds=1), "--workers", "2", "--out", str(run))
    fedsim("resume", str(run), "--rounds", str(ROUNDS), "--workers", "0")
    return record(run)


def _verified(plain: str, run: Path) -> Record:
    """fedsim verify fails if it computes anything else."""
    fedsim("launch", *options(plain), "--workers", "0", "--out", str(run))
    fedsim("verify", str(run))
    return record(run)


def _remote(plain: str, run: Path) -> Record:
    """Two remote workers at a CURVE listener, with the kernel's count of every byte."""
    remote = ("--remote-workers", "2", "--bind", "tcp://127.0.0.1:*", "--verify-bytes")
    coordinator = start("launch", *options(plain), *remote, "--out", str(run))
    coordinator.wait_for("waiting for 2 workers")
    join = [sys.executable, "-m", "launch", "worker", "--join", str(run / "join.json"), "--connect"]
    url = json.loads((run / "join.json").read_text())["url"]
    workers = [subprocess.Popen([*join, url], stdout=subprocess.DEVNULL) for _ in range(2)]
    coordinator.rest()
    for worker in workers:
        assert worker.wait(DEADLINE) == 0
    # the framing of CURVE is longer, and everything else is equal: the plain record stands for the rest
    return {k: v for k, v in record(run).items() if k != "rows_sha256"}


SPECIAL = tuple(
    f"{how}: {plain}"
    for how, plains in {
        "resumed": ("fedlap_cov dense", "mime dense", "fedlap_func bf16"),
        "verified": ("fedlap_cov bf16", "ivon_admm dense"),
        "remote": ("fedlap_cov dense",),
    }.items()
    for plain in plains
)


def plan_numbers() -> str:
    """All numbers that fedsim plan prints for one experiment: its words may change, its numbers not.

    The digits of a word, as in bf16, are no number.
    """
    output = fedsim(
        "plan", "--algo", "fedlap_cov", "--rounds", "7", "--participation", "0.3", "--codec", "mean=bf16"
    )
    return " ".join(re.findall(r"(?<!\w)[0-9][0-9,.]*", output))


def versions() -> dict[str, str]:
    """The installed versions of the libraries that compute."""
    return {name: version(name) for name in COMPUTES}


def everything(quick: bool) -> Iterator[tuple[str, str, Any]]:
    """(key of the record, how it is made, function of no arguments)."""
    for name in names():
        for workers in (0,) if quick else (0, 2):
            yield name, f"{name}, {workers} workers", (created, name, workers)
    if not quick:
        for name in SPECIAL:
            yield name.partition(": ")[2], name, (special, name)
