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
    "curvature_cost": [r"^fedlap [\d.]+ s .*, fedlap_cov [\d.]+ s", r"^fedlap_cov / fedlap: [\d.]+ "],
    "envelope_cost": [r"pack an upload.*\d", r"unpack a heartbeat.*\d"],
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
    "growth": [r"^\| 20 \| \d+ \| [\d.]+ \| \d+ \|", r"^\| 2 \| [\d.]+ \| \d+ \| -?\d+ \|"],
    "model_size": [
        r"^fedavg: ratio [\d.]+ ",
        r"^fedlap_cov: memory [\d,]+ MB, [\d,]+ vectors",
        r"^fedlap_cov: disk [\d,]+ MB, at most \d states a client",
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
    "waterfall": [
        r"^\| a task \| client_commit \| 1.0 \| [\d.]+ \|",
        r"^\| a fold \| in all \| +\| [\d.]+ \|",
    ],
    "shaped_link": [
        r"^a client without a link: [\d.]+ ms",
        r"^\| 50 \| 10 \| 0 \| [\d.]+ \| [\d.]+ \| 0\.\d+ \|",
        r"^bytes on links / on streams without loss: 1\.\d+ down, 1\.\d+ up",
    ],
    "startup": [r"^command to the end of round 1: [\d.]+ s", r"^peak memory \(PSS, summed\): \d+ MB"],
    "steady_state": [r"^fedavg: floor [\d.]+ s .*, fedsim [\d.]+ s", r"^fedlap_cov: ratio [\d.]+ "],
}
"""Lines that must be there, by benchmark."""


def test_every_benchmark_is_run_here() -> None:
    scripts = {f.stem for f in FOLDER.glob("*.py") if "\nif __name__ ==" in f.read_text(encoding="utf-8")}
    scripts |= {f.parent.name for f in FOLDER.glob("*/__main__.py")} | {"peers.relay"}
    assert scripts == set(PRINTS)


@pytest.mark.parametrize("name", PRINTS)
def test_tiny_benchmark_prints_its_figures(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"tests.benchmarks.{name}", "--tiny"],
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
