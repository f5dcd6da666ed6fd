"""All algorithms on digits, with one worker and with several: their digests must be equal.

Both ways are sweeps, which run side by side: torch is imported once for the runs of each.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.runs.folder import DONE
from tests.benchmarks.gpu.stage import Job, Stage, read_summary, run_jobs
from tests.support.harness import ALGORITHMS, short_settings

TINY = ("fedavg", "mime", "ivon_admm")


def recipe(names: list[str], rounds: int, execution: dict[str, Any]) -> Iterator[str]:
    """Lines of a sweep's recipe; short runs, of two local epochs where an algorithm has them."""
    yield 'title = "algorithms"'
    yield f"[experiment]\nclients = 4\nrounds = {rounds}"
    yield "[execution]"
    yield from (f"{key} = {json.dumps(value)}" for key, value in execution.items())
    for algorithm in ALGORITHMS:
        if algorithm.name in names:
            settings = short_settings(algorithm)
            settings |= {"epochs": 2} if "epochs" in settings else {}
            values = ", ".join(f"{key} = {json.dumps(value)}" for key, value in settings.items())
            yield f'[[variant]]\nlabel = "{algorithm.name}"'
            yield f'experiment = {{algo = "{algorithm.name}"}}\nhyperparameters = {{{values}}}'


class Pairs:
    """The runs of both sweeps, which have folders of the same names; each pair is compared once."""

    def __init__(self, stage: Stage, ways: dict[str, Path]) -> None:
        self.stage, self.ways = stage, ways
        self.equal: dict[str, bool] = {}
        self.failed = set[tuple[str, str]]()

    def look(self) -> bool:
        """Report what has ended since the last look."""
        for first in self.ways["one"].glob("*/"):
            name = first.name.rpartition("-")[0]
            if name in self.equal:
                continue
            summaries = {way: read_summary(runs / first.name) for way, runs in self.ways.items()}
            for way, summary in summaries.items():
                if summary and summary["status"] != DONE and (name, way) not in self.failed:
                    self.failed.add((name, way))
                    self.stage.fail(f"{name}, {way}", summary.get("error"))
            if all(summary.get("status") == DONE for summary in summaries.values()):
                keys = ("model_sha256", "clients_sha256", "test_accuracy")
                one, several = ([summary[key] for key in keys] for summary in summaries.values())
                self.equal[name] = one == several
                what = "equal" if one == several else f"DIFFERENT from {several[0][:12]} {several[1][:12]}"
                self.stage.report(
                    f"{name}: model {one[0][:12]}, clients {one[1][:12]}, accuracy {one[2]:.4f}: {what}",
                    {name: {"one": one, "several": several}},
                )
        return False


def run(stage: Stage) -> None:
    names = list(TINY) if stage.tiny else [a.name for a in ALGORITHMS]
    jobs = str(max(1, len(os.sched_getaffinity(0)) // 2))
    lanes = {"lanes": 1} if stage.gpu else {}
    executions: dict[str, dict[str, Any]] = {
        "one": {"workers": 1},
        "several": {"workers": 2 if stage.tiny else 3, **lanes},
    }
    pairs = Pairs(stage, {way: stage.scratch / f"{way}-runs" for way in executions})
    ended = list[str]()

    def sweep(way: str, execution: dict[str, Any]) -> Job:
        file = stage.scratch / f"{way}.toml"
        file.write_text("\n".join(recipe(names, 2, {"devices": stage.device, **execution})) + "\n")
        options = ("--runs", str(pairs.ways[way]), "--jobs", jobs)
        command = stage.command(way, "sweep", str(file), *options)
        command.until = pairs.look
        yield command
        if command.error:
            ended.append(f"the sweep {way}: {command.error}")

    run_jobs([sweep(*pair) for pair in executions.items()], at_once=2)
    pairs.look()
    equal = sum(pairs.equal.values())
    unequal = sorted(name for name, same in pairs.equal.items() if not same)
    without = sorted(set(names) - set(pairs.equal))
    stage.report(
        f"{equal} of {len(names)} equal, {len(unequal)} unequal, {len(without)} failed or not run",
        {"equal": equal, "unequal": unequal, "failed": without},
    )
    for why in ended:
        stage.fail("", why)
    if unequal or without:
        stage.fail("", f"unequal: {', '.join(unequal)}; failed or not run: {', '.join(without)}")
