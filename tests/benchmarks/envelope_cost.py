"""CPU time to pack and to unpack one envelope, here and at an earlier commit.

    python -m tests.benchmarks.envelope_cost [--before COMMIT] [--repeats 15] [--tiny]

The upload has two dense fields of 7,510 parameters; unpacking includes the checksums of their 60,080 bytes.
Its fields are new each time, as they are in a run, while those of the task are encoded once for all clients.
The control envelope is a heartbeat. With --before, each of the two trees is measured in a process of its own,
and the two take turns, so that both see the same load of the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from fedsim.wire.envelope import NONE, VERSION, Envelope, Header, encode, pack, unpack
from fedsim.wire.schema import Mean, Precision

ROOT = Path(__file__).parents[2]
P = 7_510
VARIANTS = 32
"""Uploads that take turns: more than the cache of encoded fields holds."""


@dataclass(frozen=True)
class Up:
    mean: Mean
    precision: Precision


def operations() -> dict[str, Callable[[int], object]]:
    """What is measured, by name; each function takes the number of its repetition."""
    draw = torch.Generator().manual_seed(0)
    payloads = [
        encode(Up(torch.randn(P, generator=draw), torch.rand(P, generator=draw)), {}, {"P": P})
        for _ in range(VARIANTS)
    ]

    def upload(i: int) -> Envelope:
        payload = payloads[i % VARIANTS]
        return pack(Header(VERSION, "upload", "run", 1, i, 1, 3, i, i, payload.fields), payload.frames)

    def task(i: int) -> Envelope:
        return pack(Header(VERSION, "task", "run", 1, i, 1, i, i, 0, payloads[0].fields), payloads[0].frames)

    def heartbeat(i: int) -> Envelope:
        return pack(Header(VERSION, "heartbeat", "run", 1, i, 1, 3, NONE))

    uploads, beats = (
        [[e.head, *e.frames] for e in map(make, range(VARIANTS))] for make in (upload, heartbeat)
    )
    return {
        "pack an upload": upload,
        "pack a task": task,
        "pack a heartbeat": heartbeat,
        "unpack an upload": lambda i: unpack(uploads[i % VARIANTS], "benchmark"),
        "unpack a heartbeat": lambda i: unpack(beats[i % VARIANTS], "benchmark"),
    }


def serve(loops: int) -> None:
    """Answer every line on stdin with a line of JSON: the microseconds of CPU time of each operation."""
    torch.set_num_threads(1)
    todo = operations()
    for _ in sys.stdin:
        micros = {}
        for name, operation in todo.items():
            began = time.process_time()
            for i in range(loops):
                operation(i)
            micros[name] = 1e6 * (time.process_time() - began) / loops
        print(json.dumps(micros), flush=True)


@contextmanager
def measuring(tree: Path, loops: int) -> Iterator[Callable[[], dict[str, float]]]:
    """A process that measures with the packages of `tree`; each call is one measurement."""
    command = [sys.executable, __file__, "--serve", str(loops)]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, text=True, env=os.environ | {"PYTHONPATH": str(tree)}
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def measure() -> dict[str, float]:
            stdin.write("\n")
            stdin.flush()
            micros: dict[str, float] = json.loads(stdout.readline())
            return micros

        yield measure
        stdin.close()


def checked_out(commit: str, folder: Path) -> Path:
    """The package fedsim as it was at `commit`, in this folder."""
    archive = subprocess.run(["git", "archive", commit, "fedsim"], cwd=ROOT, check=True, capture_output=True)
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--before", metavar="COMMIT", help="measure this commit too")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--loops", type=int, default=2_000)
    parser.add_argument("--tiny", action="store_true", help="as short as possible, to see that it runs")
    parser.add_argument("--serve", type=int, metavar="LOOPS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    loops, repeats = (VARIANTS, 1) if options.tiny else (options.loops, options.repeats)
    with ExitStack() as stack:
        trees = {"here": ROOT}
        if options.before:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            trees = {options.before: checked_out(options.before, folder), **trees}
        sides = {name: stack.enter_context(measuring(tree, loops)) for name, tree in trees.items()}
        taken: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
        for repeat in range(repeats + 1):
            for name, measure in sides.items():
                micros = measure()
                if repeat or options.tiny:  # the first round only warms up
                    taken[name].append(micros)
    print_table(taken)


def print_table(taken: dict[str, list[dict[str, float]]]) -> None:
    """A line per operation: median, least and most microseconds of each side."""
    for operation in next(iter(taken.values()))[0]:
        cells = []
        for name, rows in taken.items():
            micros = sorted(row[operation] for row in rows)
            cells.append(f"{name}: {micros[len(micros) // 2]:.2f} us [{micros[0]:.2f}, {micros[-1]:.2f}]")
        print(f"{operation:20} {'  '.join(cells)}")


if __name__ == "__main__":
    main()
