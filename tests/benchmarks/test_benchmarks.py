"""Every benchmark runs through at its smallest size and prints its figures.

Times are never compared: a test is not a measurement. Equal digests and bits are promises, and must hold.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.shaped_link import SKIPPED
from tests.support.commands import DEADLINE
from tests.support.shaped_links import unavailable

pytestmark = [pytest.mark.process, pytest.mark.slow]

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
PRINTS = {
    "codec_sizes": [
        r"^P = 178,110;",
        r"^\| 0\.5 \|",
        r"^\| diagonal GGN \| zstd \| [\d,]+ \|",
        r"^\| client's change \|",
    ],
    "curvature_cost": [r"^fedlap [\d.]+ s .*, fedlap_cov [\d.]+ s", r"^fedlap_cov / fedlap: [\d.]+ "],
    "engines": [
        r"^sweep of 2 runs, two at a time: [\d.]+ of linear on Ray",
        r"^ray: the coordinator's start to the end of round 1, 4 workers: [\d.]+ s",
        r"^ray: 1 of 1 identical, 0 processes left over",
    ],
    "envelope_cost": [r"pack an upload.*\d", r"unpack a heartbeat.*\d"],
    "flood": [
        r"^tcp on 127\.0\.0\.1.*: \d+ MiB without, \d+ with",
        r"^CURVE listener.*: \d+ MiB without",
    ],
    "gpu": [
        r"^machine: copies of [\d,]+ bytes: [\d.]+ GB/s",
        r"^digests: workers 2, killed and resumed: .*; killed after round \d of 10$",
        r"^digests: workers 2, killed and resumed, verify: [1-9]\d* lines identical$",
        r"^digests: 2 runs, 1 different digests$",
        r"^algorithms: 3 of 3 equal, 0 unequal, 0 failed or not run$",
        r"^steps: mlp_small, adam, .* us recorded.*; the same bits: True$",
        r"^steps: mlp_small, ivon, .* us recorded.*; the same bits: True$",
        r"^steps: mlp_small, plain torch: \d+ us a step",
        r"^steps: mlp_small, exact curvature of 128 examples: [\d.]+ s, or [\d.]+ epochs",
        r"^rounds: digits, .*: [\d.]+ s a round .* after round 3 of 3$",
        r"^memory: workers 2: [\d.]+ rounds/s, [\d.]+ of one process",
        r"^memory: different digests: 1$",
        r"^6 stages, 0 failures$",
    ],
    "growth": [
        r"^\| 20 \| \d+ \| [\d.]+ \| \d+ \|",
        r"^\| 2 \| [\d.]+ \| \d+ \| -?\d+ \|",
    ],
    "holders": [
        r"^fedlap_cov, a worker at its commit: \d+ bytes a parameter \(network 8, start 4, state 24,",
        r"^ivon_admm, the coordinator after a fold: \d+ bytes a parameter \(",
        r"^fedavg, a state on the disk: 8 bytes",
    ],
    "ivon_cost": [r"^ivon-opt +\d+ us", r"^ours, duals / adam: [\d.]+ "],
    "model_size": [
        r"^fedavg: ratio [\d.]+ ",
        r"^fedlap_cov: memory [\d,]+ MB, [\d,]+ vectors",
        r"^fedlap_cov: disk [\d,]+ MB, at most \d states a client",
    ],
    "nodes": [
        r"^agents' start to the end of round 1, 4 workers: [\d.]+ s",
        r"^a round on node agents / with local workers: [\d.]+",
        r"^memory of one more worker \(PSS\): -?\d+ MB",
    ],
    "numerics": [
        r"^probe, fedlap_cov on fashion_mnist: \d+ ms",
        r"^portable / native, ivon_admm, MLP of 178,110 parameters: [\d.]+",
    ],
    "peers": [
        r"^\| floor \| [\d.]+ ",
        r"^\| fedsim \| [\d.]+ .* \| [\d.]+ .* \| [\d.]+ ",
        r"^fedsim / floor: [\d.]+ ",
    ],
    "peers.relay": [
        r"^\| fedsim \| ([\d,]+) down, ([\d,]+) up \| \1 \| \2 \| – \| – \| 2 \| 0, 0 \|",
        r"^\| fedsim's ledger: algorithm \| – \| [\d,]+ \| [\d,]+ \| 1\.00\d\d to 1\.00\d\d \|",
    ],
    "recovery": [
        r"^main job, in process: [\d.]+ ms a round, [\d.]+ without; ratio [\d.]+$",
        r"^steady state, fedlap_cov, in process: ",
        r"^resume to the first commit: [\d.]+ s ",
        r"^a worker killed in a run of two: -?[\d.]+ s longer",
    ],
    "run_times": [
        r"^MLP, MNIST's shape \| fedlap_cov \| [\d.]+ s .* \| [\d.]+ ",
        r"^cnn_acar, CIFAR-10's shape \| ivon_admm \| [\d.]+ s ",
        r"^cnn_acar, CIFAR-10's shape \| fedlap_cov, curvature of 10 clients \| [\d.]+ s ",
    ],
    "soak": [
        r"^done after 400 rounds",
        r"^ +round +\d+: [\d.]+, [\d.]+, [\d.]+ MB",
        r"^ +slope of the second half",
    ],
    "shaped_link": [
        r"^a client without a link: [\d.]+ ms",
        r"^\| 50 \| 10 \| 0 \| [\d.]+ \| [\d.]+ \| 0\.\d+ \|",
        r"^bytes on links / on streams without loss: 1\.\d+ down, 1\.\d+ up",
    ],
    "stale_broadcasts": [
        r"^\| synchronous \| 6 \| 1 \| 0 \| \d+ \|",
        r"^\| B = 1 \| 60 \| (?:[2-9]|10) \| [1-9]\d* \| \d+ \|",
    ],
    "startup": [r"^command to the end of round 1: [\d.]+ s", r"^peak memory \(PSS, summed\): \d+ MB"],
    "trees": [
        r"^\| flat \| [\d,]+ \| \d+ \| 1\.00 \| \d+ \|",
        r"^\| edge processes \| [\d,]+ \| \d+ \| [\d.]+ \| \d+ \|",
        r"^bytes into the root, flat / tree: [\d.]+",
    ],
    "tracking": [
        *(
            rf"^{name}: ratio [\d.]+ .*\n{name}: its process computes [\d.]+ %|^--track {name} needs the pack"
            for name in ("tensorboard", "mlflow", "wandb", "trackio")
        ),
    ],
    "written_over": [r"^a new file: [\d.]+ ms", r"^written over: [\d.]+ ms"],
    "steady_state": [r"^fedavg: floor [\d.]+ s .*, fedsim [\d.]+ s", r"^fedlap_cov: ratio [\d.]+ "],
}
"""Lines that must be there, by benchmark."""


def test_every_benchmark_is_run_here() -> None:
    scripts = {f.stem for f in FOLDER.glob("*.py") if "\nif __name__ ==" in f.read_text(encoding="utf-8")}
    scripts |= {f.parent.name for f in FOLDER.glob("*/__main__.py")} | {"peers.relay"}
    assert scripts == set(PRINTS)


@pytest.mark.parametrize("name", PRINTS)
def test_tiny_benchmark_prints_its_figures(name: str, tmp_path: Path) -> None:
    plot = ["--plot", str(tmp_path / "plot.png")] if name == "codec_sizes" else []
    done = subprocess.run(
        [sys.executable, "-m", f"tests.benchmarks.{name}", "--tiny", *plot],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=3 * DEADLINE,  # many runs each
    )
    if done.returncode == SKIPPED and name == "shaped_link":
        reason = unavailable()
        assert reason and reason in done.stderr
        pytest.skip(reason)
    assert done.returncode == 0, done.stderr
    for line in PRINTS[name]:
        assert re.search(line, done.stdout, re.MULTILINE), done.stdout
    if plot:
        assert (tmp_path / "plot.png").stat().st_size > 1000
