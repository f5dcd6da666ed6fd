"""Measures fedsim on one GPU, and checks that workers, lanes and recordings change no bit.

    python -m tests.benchmarks.gpu [--minutes 8] [--json FILE] [--data-dir DIR] [--only STAGE,...] [--tiny]

machine      versions, seconds of imports, and the card's limits: copies and matrix products
digests      the main job for 1, 4 and 10 workers, for 1, 4 and 10 lanes, not recorded, killed and resumed
algorithms   all algorithms, with one worker and with three: equal digests
steps        microseconds of a training step beside plain torch, equal bits, seconds of curvatures
rounds       seconds of a round on CIFAR-10 (the JPEG copy in DIR): S4, S5, and the job of pfl-research
memory       memory of the card, and rounds per second beside one process that only trains

A stage is a process of its own, forked when torch is imported and CUDA is not started. It is ended at its
time limit, a share of the minutes that are left. The JSON file is written again after every stage. The exit
code is 1 if anything failed, or if digests differ that should be equal. Without a GPU the stages run on the
CPU, and what needs one is not measured.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from launch.processes.fork_server import ENVIRONMENT, die_with_parent
from launch.runs.source_commit import commit
from tests.benchmarks.gpu.stage import Stage
from workers.devices import gpu_models, visible_gpus
from workers.numerics import processor_name

SHARES = {"machine": 6, "digests": 16, "algorithms": 22, "steps": 16, "rounds": 34, "memory": 8}
"""Parts of the time, by stage, in the order in which they run."""


def compute(name: str, create: Callable[..., Stage], sender: Connection, parent: int) -> None:
    """A child process: one stage, in a process group of its own."""
    os.setsid()
    die_with_parent(parent)
    stage = create(lambda figures: sender.send_bytes(json.dumps(figures).encode()))
    try:
        importlib.import_module(f"tests.benchmarks.gpu.{name}").run(stage)
    except Exception as e:
        traceback.print_exc()
        stage.fail("", e)


def measure(name: str, create: Callable[..., Stage], seconds: float) -> dict[str, Any]:
    """The figures of one stage; `failures` is a list of what failed, empty if nothing did."""
    context, began = get_context("fork"), time.monotonic()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=compute, args=(name, create, sender, os.getpid()))
    process.start()
    sender.close()
    figures: dict[str, Any] = {"failures": []}
    why = f"it was not over after {seconds:.0f} s"
    try:
        while receiver.poll(max(0.0, began + seconds - time.monotonic())):
            figures |= json.loads(receiver.recv_bytes())
    except EOFError:
        process.join(10.0)
        why = f"it ended with exit code {process.exitcode}" if process.exitcode else ""
    finally:
        with suppress(ProcessLookupError):  # the stage, and what it has left
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()  # which may not have its group yet
        process.join()
    if why:
        figures["failures"].append(why)
        print(f"{name} failed: {why}", flush=True)
    return figures | {"seconds": round(time.monotonic() - began, 1)}


def main() -> int:
    os.environ.update(ENVIRONMENT)  # before numpy and torch are imported
    from tests.benchmarks.common import options_of

    parser = options_of(__doc__)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--data-dir", type=Path, metavar="DIR", default=os.environ.get("FEDSIM_DATA"))
    parser.add_argument("--only", default=",".join(SHARES), metavar="STAGE,...")
    options = parser.parse_args()
    names = [name for name in SHARES if name in options.only.split(",")]
    if unknown := sorted(set(options.only.split(",")) - set(SHARES)):
        parser.error(f"no such stage: {', '.join(unknown)}; there are {', '.join(SHARES)}")
    end = time.monotonic() + 60 * options.minutes
    importlib.import_module("torch")  # once for all stages
    data = Path(options.data_dir).resolve() if options.data_dir else None
    device = "cuda:0" if visible_gpus() else "cpu"
    card = ", ".join(gpu_models()) or processor_name()
    result: dict[str, Any] = {"card": card, "torch": version("torch"), "commit": commit(), "stages": {}}
    if device == "cpu":
        print("there is no GPU here: steps on one, its memory and CIFAR-10 are not measured", flush=True)
    with tempfile.TemporaryDirectory(prefix="gpu-", ignore_cleanup_errors=True) as scratch:
        os.environ.setdefault("FEDSIM_CACHE", f"{scratch}/cache")
        for i, name in enumerate(names):
            share = SHARES[name] / sum(SHARES[n] for n in names[i:])
            seconds = max(1.0, share * (end - time.monotonic()))
            (folder := Path(scratch) / name).mkdir()
            create = partial(Stage, name, device, options.tiny, folder, data, time.monotonic() + seconds)
            print(f"== {name}, at most {seconds:.0f} s", flush=True)
            result["stages"][name] = figures = measure(name, create, seconds)
            result["card"] = figures.get("card", result["card"])
            if options.json:
                options.json.write_text(json.dumps(result, indent=1) + "\n")
    failures = [f"{name}: {why}" for name, figures in result["stages"].items() for why in figures["failures"]]
    print(f"{len(names)} stages, {len(failures)} failures", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
