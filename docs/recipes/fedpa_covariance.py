"""What FedPA's covariance does to the deltas of docs/results/fedpa.md.

    python docs/recipes/fedpa_covariance.py --data-dir DIR    a minute; prints a table

It trains FedAvg-ME for the burn-in of the stand-in's seed 62, draws every client's samples there, and prints
by shrinkage rho, as medians over the clients: the largest eigenvalue of rho Z Z', the length of FedPA's delta
beside FedAvg's, and the cosine between the two. Z has the samples minus their mean as rows. Sigma is
(I + rho Z' Z) / s with s = 1 + (l-1) rho, so the covariance turns a delta only where an eigenvalue is not
small beside 1; elsewhere the delta is s (x_0 - xbar).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

import fedsim
from fedsim.learning.solvers.iasg import iasg, posterior_delta
from fedsim.problem import Problem
from launch.runs.restored import RestoredRun
from launch.sweep.recipe import Recipe
from protocols.fedpa import FedPA

RECIPE = Path(__file__).with_name("fedpa_standin.toml")
SHRINKAGES = (0.01, 0.1, 1.0, 10.0, 100.0)


def deltas(problem: Problem, mean: Tensor, rho: float, round: int) -> Iterator[tuple[float, float, float]]:
    """By client: the largest eigenvalue, the lengths' ratio to FedAvg's, and the cosine to FedAvg's."""
    how = problem.algorithm
    assert isinstance(how, FedPA)
    for k in range(len(problem.clients)):
        rng = problem.task(round, 1, k).rng
        chain = iasg(problem.shard(k), mean, how=how.sampling, rng=rng, round=round).solution
        plain = mean.double() - chain.last.double()
        delta = posterior_delta(mean, chain.samples, rho)
        rows = chain.samples.double()
        rows = rows - rows.mean(0)
        top = rho * float(torch.linalg.eigvalsh(rows @ rows.T)[-1])
        yield top, float(delta.norm() / plain.norm()), float(delta @ plain / delta.norm() / plain.norm())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    options = parser.parse_args(argv)
    recipe = Recipe.read(RECIPE)
    found = {t.row.variant.label: t.experiment for t in recipe.trials() if t.seed == recipe.seeds[0]}
    rounds = int(found["FedPA-ME"].hyperparameters["burn_in_rounds"])
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "run"
        fedsim.run(found["FedPA-ME"], rounds=rounds, data_dir=options.data_dir, out=out, quiet=True)
        stored = RestoredRun.open(out, options.data_dir)
    mean = stored.checkpoint.server.mean.float()
    print("| rho | largest eigenvalue of rho Z Z' | length / FedAvg's | cosine to FedAvg's |")
    print("|---|---|---|---|")
    for rho in SHRINKAGES:
        measured = torch.tensor(list(deltas(stored.problem, mean, rho, rounds + 1)))
        top, length, cosine = (float(x) for x in measured.median(0).values)
        print(f"| {rho:g} | {top:.2g} | {length:.2f} | {cosine:.2f} |", flush=True)


if __name__ == "__main__":
    main()
