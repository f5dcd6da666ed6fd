"""The main job in many ways, which must have one digest: by workers, lanes, recordings, and resumed."""

from __future__ import annotations

import os

from tests.benchmarks.gpu.stage import Command, Job, Stage, run_jobs
from workers.numerics import CUDA_GRAPHS

MAIN = ("--clients", "10", "--algo", "fedlap_cov")
ATTEMPTS = 3
"""To kill a run before it is over."""


class Digests:
    """The digests of model and client states so far, by name of the run."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self.rounds = stage, 10 if stage.tiny else 20
        self.digests: dict[str, tuple[str, str]] = {}

    def job(self, name: str, workers: int, *options: str, recorded: bool = True) -> Job:
        """One run, from start to end."""
        command = self._launch(name, workers, *options, variables={} if recorded else {CUDA_GRAPHS: "0"})
        yield command
        self._add(name, command, f"; {command.taken:.1f} s in all")

    def killed(self, workers: int, after: int) -> Job:
        """One run whose coordinator is killed after so many rounds, then resumed, then verified."""
        for attempt in range(1, ATTEMPTS + 1):
            name = f"workers {workers}, killed and resumed"
            name += f", attempt {attempt}" if attempt > 1 else ""
            command = self._launch(name, workers)
            command.until = lambda run=command: len(run.rows) > after
            yield command
            if command.code:
                break
        if command.stopped != "killed" or not command.code:
            self.stage.fail(name, command.error or "the run was over before it could be killed")
            return
        rounds = len(command.rows) - 1
        again = self.stage.command(name, "resume", str(command.run))
        yield again
        self._add(name, again, f"; killed after round {rounds} of {self.rounds}")
        check = self.stage.command(name, "verify", str(command.run), "--rounds", "2")
        yield check
        identical = check.output.count("identical")
        if check.code or not identical:
            self.stage.fail(f"{name}, verify", check.error or "nothing was identical")
        else:
            self.stage.report(f"{name}, verify: {identical} lines identical", {"verified": identical})

    def _launch(
        self, name: str, workers: int, *options: str, variables: dict[str, str] | None = None
    ) -> Command:
        arguments = (*MAIN, "--workers", str(workers), "--rounds", str(self.rounds), *options)
        return self.stage.launch(name, *arguments, variables=variables or {})

    def _add(self, name: str, command: Command, more: str) -> None:
        summary = command.summary
        if command.code or not summary:
            self.stage.fail(name, command.error or "no summary was written")
            return
        model, clients = summary["model_sha256"], summary["clients_sha256"]
        self.digests[name] = (model, clients)
        first = summary["seconds_to_first_round"]
        self.stage.report(
            f"{name}: model {model[:12]}, clients {clients[:12]}, accuracy {summary['test_accuracy']:.4f}; "
            f"start to the end of round 1: {first:.1f} s{more}",
            {name: {"model": model, "clients": clients, "first_round_s": first, "seconds": command.taken}},
        )


def run(stage: Stage) -> None:
    runs = Digests(stage)
    run_jobs([runs.job("workers 1", 1)])  # alone, because its start is measured
    others = [runs.killed(2 if stage.tiny else 3, 1 if stage.tiny else 4)]
    for workers in () if stage.tiny else (4, 10):
        others.append(runs.job(f"workers {workers}", workers, *stage.lanes(1)))
    if stage.gpu:
        for lanes in (1, 4, 10):
            others.append(runs.job(f"workers 1, lanes {lanes}", 1, *stage.lanes(lanes)))
        others.append(runs.job("workers 1, not recorded", 1, recorded=False))
    run_jobs(others, at_once=max(1, len(os.sched_getaffinity(0)) // 4))
    different = len(set(runs.digests.values()))
    stage.report(f"{len(runs.digests)} runs, {different} different digests", {"different": different})
    if different != 1:
        stage.fail("", f"{different} different digests")
