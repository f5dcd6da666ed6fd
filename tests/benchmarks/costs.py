"""What every algorithm costs on the wire and reaches on the main job's data: the table of
docs/algorithms.md.

    PYTHONPATH=. python -m tests.benchmarks.costs > table.md

Every row is one run of the launcher with two workers and the algorithm's own defaults: digits, ten clients
of the heterogeneous split, seed 0. Bytes are measured (ledger, all layers), not computed.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from fedsim.experiment import build_algorithm
from launch.catalogue import cost_once, wire_cost
from protocols import REGISTRY, find
from tests.benchmarks.common import launch, summary

VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("fedadmm", {"silent": "last"}),
    ("precond_admm", {"preconditioner": 10.0}),
    ("bayes_admm", {"covariance": "diagonal"}),
    ("pvi", {"covariance": "full"}),
    ("ivon_admm", {"silent": "last"}),
    ("fedlap_func", {"points_per_class": 2}),
    ("fedlap_func", {"send_global_labels": True}),
)
"""Options that change the messages or the family."""

COLUMNS = (
    *("algorithm", "P", "per client and round", "once per client", "rounds", "bytes down", "bytes up"),
    *("accuracy / NLL", "averaged over samples", "s per round"),
)


def run(name: str, settings: dict[str, Any], rounds: int) -> dict[str, Any]:
    """summary.json of one run."""
    arguments = ["--algo", name, "--workers", "2", "--clients", "10", "--eval-every", str(rounds)]
    if find(name).default_rounds > 1:
        arguments += ["--rounds", str(rounds)]
    for key, value in settings.items():
        arguments += ["--set", f"{key}={str(value).lower() if isinstance(value, bool) else value}"]
    with tempfile.TemporaryDirectory() as folder:
        return summary(launch(Path(folder) / "run", *arguments))


def row(name: str, settings: dict[str, Any], rounds: int) -> str:
    """One line of the table."""
    algorithm = build_algorithm(find(name), settings)
    s = run(name, settings, rounds)
    label = name + "".join(f", {k}={str(v).lower()}" for k, v in settings.items())
    ensemble = f"{s['ensemble_accuracy']:.3f} / {s['ensemble_nll']:.2f}" if s.get("ensemble_nll") else ""
    return (
        f"| {label} | {s['params']:,} | {wire_cost(algorithm)} | {cost_once(algorithm)} | {s['rounds']} "
        f"| {s['bytes_down']:,} | {s['bytes_up']:,} | {s['test_accuracy']:.3f} / {s['test_nll']:.2f} "
        f"| {ensemble} | {s['seconds_round_median']:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    print(
        "| algorithm | P | per client and round | once per client | rounds | bytes down | bytes up ", end=""
    )
    print("| accuracy / NLL | averaged over samples | s per round |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, settings in (*((kind.name, {}) for kind in REGISTRY), *VARIANTS):
        print(row(name, settings, rounds), flush=True)


if __name__ == "__main__":
    main()
