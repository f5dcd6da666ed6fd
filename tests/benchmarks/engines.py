"""Measures runs and sweeps on Slurm and Ray, on pretended nodes of this machine.

    python -m tests.benchmarks.engines [--only sweep,ray,slurm] [--trials 20] [--runs 40] [--tiny]

sweep: small runs on Ray against the same sweep with --jobs 2 on this machine, as speed-up over --jobs 1.
ray, slurm: seconds from the coordinator's start to the end of round 1, ten workers on two nodes; then runs
one of whose two nodes is removed without grace (Ray), or whose job is requeued (Slurm), at an instant between
the first evaluation and the end that is drawn anew for each: how many have the digests of one process, how
many processes were left over, and the seconds that it cost.

Slurm's parts are left out, and named, where its commands are not; --tiny has none of them.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

from launch.runs.folder import RunFolder
from tests.benchmarks.common import launch, options_of, round_seconds, spread, summary
from tests.benchmarks.nodes import rounds_of
from tests.support import slurm_cluster
from tests.support.commands import DEADLINE
from tests.support.process_tree import left_over
from tests.support.ray_cluster import RayCluster

FEDSIM = (sys.executable, "-m", "launch")
RUN = ("--algo", "fedlap_cov", "--clients", "8")
LONG, SHORT = (("--rounds", "12", "--set", "local.epochs=30"), ("--rounds", "4"))
MAIN = ("--algo", "fedlap_cov", "--rounds", "5")


class Place:
    """An engine, and what can happen to it."""

    name = ""
    options: tuple[str, ...] = ()
    environment: dict[str, str] | None = None

    def disturb(self) -> None:
        """What happens at a random instant."""

    def restore(self) -> None:
        """Make good what disturb has broken."""

    def carry_out(self, run: Path, *arguments: str, workers: int, after: float | None = None) -> str:
        """A run on two nodes, disturbed so many seconds after its first evaluation; returns when that was."""
        began, when, evaluated = time.monotonic(), "undisturbed", 0.0
        command = [*FEDSIM, "launch", "--on", self.name, *self.options, "--nodes", "2", "--out", str(run)]
        started = subprocess.Popen(
            [*command, "--workers", str(workers), *arguments],
            env=self.environment,
            stdout=subprocess.DEVNULL,
        )
        while not self._over(run, started):
            assert time.monotonic() < began + DEADLINE, f"{self.name}: {run} is not over"
            if not evaluated and rounds_of(run):
                evaluated = time.monotonic()
            if after is not None and evaluated and time.monotonic() >= evaluated + after:
                when, after = f"after {rounds_of(run)} evaluations", None
                self.disturb()
            time.sleep(0.05)
        started.wait(DEADLINE)
        if when != "undisturbed":
            self.restore()
        return when

    def _over(self, run: Path, started: subprocess.Popen[bytes]) -> bool:
        raise NotImplementedError


class OnSlurm(Place):
    """A requeued job waits two minutes in Slurm, unless it is told to begin."""

    name = "slurm"

    def __init__(self, cluster: slurm_cluster.Cluster) -> None:
        self.cluster, self.environment, self._looked = cluster, cluster.environment, 0.0

    def _job(self) -> str:
        return self.cluster.command("squeue", "--noheader", "--format=%i %r").strip()

    def disturb(self) -> None:
        number = self._job().split()[:1]
        if number:
            self.cluster.command("scontrol", "requeue", *number)
            time.sleep(4)  # until it has ended what it kills

    def _over(self, run: Path, started: subprocess.Popen[bytes]) -> bool:
        if started.poll() is None or time.monotonic() < self._looked + 0.5:
            return False
        self._looked, job = time.monotonic(), self._job()
        if "BeginTime" in job or "Dependency" in job:
            self.cluster.command("scontrol", "update", f"JobId={job.split()[0]}", "StartTime=now")
        return not job


class OnRay(Place):
    """Nodes are removed in turn, and another one is added after the run."""

    name = "ray"

    def __init__(self, cluster: RayCluster) -> None:
        self.cluster, self._first = cluster, 0
        self.options = ("--engine-option", f"address={cluster.address}")

    def disturb(self) -> None:
        self.cluster.tell(f"remove {self._first}")

    def restore(self) -> None:
        self._first += 1
        self.cluster.tell("add 1")

    def _over(self, run: Path, started: subprocess.Popen[bytes]) -> bool:
        return started.poll() is not None


def first_round(place: Place, folder: Path, workers: int, repeats: int) -> Iterator[float]:
    """Seconds from the coordinator's start to the end of its first round."""
    for n in range(repeats):
        run = folder / f"first-{place.name}-{n}"
        place.carry_out(run, *MAIN, workers=workers)
        yield summary(run)["seconds_to_first_round"]


def digests(run: Path) -> tuple[str, str]:
    known = RunFolder.open(run).summary
    return known["model_sha256"], known["clients_sha256"]


def trials(place: Place, folder: Path, count: int, length: tuple[str, ...], seed: int = 17) -> str:
    """Disturb so many runs, and compare each with the run in one process."""
    alone = digests(launch(folder / f"alone-{place.name}", *RUN, *length, "--workers", "0"))
    quiet, rng = folder / f"undisturbed-{place.name}", random.Random(seed)
    place.carry_out(quiet, *RUN, *length, workers=4)
    span = sum(round_seconds(quiet, 0))
    equal, left, cost, instants = 0, 0, list[float](), Counter[str]()
    for n in range(count):
        run = folder / f"{place.name}-{n}"
        instants[place.carry_out(run, *RUN, *length, workers=4, after=rng.uniform(0, span))] += 1
        equal += digests(run) == alone
        left += len(left_over(run))
        cost.append(sum(round_seconds(run, 0)) - span)
    where = ", ".join(f"{instant}: {times}" for instant, times in sorted(instants.items()))
    return (
        f"{place.name}: {equal} of {count} identical, {left} processes left over ({where}); rounds of "
        f"{span:.1f} s took longer by {spread(cost, ' s', 1)}"
    )


def sweep(cluster: RayCluster, folder: Path, runs: int, rounds: int) -> str:
    """Speed-ups over --jobs 1, of --jobs 2 and of Ray with as many at a time."""
    grid = ("--over", "algo=fedavg,fedlap_cov", "--seeds", f"0-{runs // 2 - 1}", "--clients", "4")
    seconds = {}
    for name, how in (
        ("one", ("--jobs", "1")),
        ("two", ("--jobs", "2")),
        ("ray", ("--jobs", "2", "--on", "ray", "--engine-option", f"address={cluster.address}")),
    ):
        began = time.monotonic()
        command = [
            *FEDSIM,
            "sweep",
            *grid,
            "--rounds",
            str(rounds),
            "--runs",
            str(folder / name),
            "--quiet",
            *how,
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=3600)
        seconds[name] = time.monotonic() - began
    two, ray = (seconds["one"] / seconds[name] / 2 for name in ("two", "ray"))
    return (
        f"sweep of {runs} runs, two at a time: {ray:.2f} of linear on Ray, {two:.2f} on this machine "
        f"({seconds['one']:.0f} s one after another)"
    )


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--only", default="sweep,ray,slurm")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--runs", type=int, default=40)
    options = parser.parse_args()
    count, runs, workers, repeats = (1, 2, 4, 1) if options.tiny else (options.trials, options.runs, 10, 3)
    only = "sweep,ray" if options.tiny else options.only
    print(f"{datetime.now():%Y-%m-%d}, {'tiny' if options.tiny else f'{count} trials an engine'}", flush=True)
    with ExitStack() as closing:
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory()))
        places: list[Place] = []
        if "sweep" in only or "ray" in only:
            cluster = RayCluster()
            closing.callback(cluster.close)
            if "sweep" in only:
                print(sweep(cluster, folder, runs, 2 if options.tiny else 20), flush=True)
            places += [OnRay(cluster)] if "ray" in only else []
        if "slurm" in only and (lacking := slurm_cluster.missing()):
            print(f"slurm: not measured, there is no {', '.join(lacking)}", flush=True)
        elif "slurm" in only:
            slurm = slurm_cluster.Cluster(2, cpus=5)
            closing.callback(slurm.stop)
            slurm.start()
            places.append(OnSlurm(slurm))
        for place in places:
            figures = spread([*first_round(place, folder, workers, repeats)], " s", 1)
            print(
                f"{place.name}: the coordinator's start to the end of round 1, {workers} workers: {figures}"
            )
            print(trials(place, folder, count, SHORT if options.tiny else LONG), flush=True)


if __name__ == "__main__":
    main()
