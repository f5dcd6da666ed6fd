"""Measures the CPU time of a step of IVON on flat vectors, of the package ivon-opt and of Adam.

    python -m tests.benchmarks.ivon_cost [--repeats 9] [--epochs 4] [--tiny]

The model is the MLP 784-200-100-10 (178,110 parameters). A step has a batch of 32 and one sample, on 1
thread; there are 640 random examples. The candidates alternate. `ours, duals` has a vector prior and duals,
as from the second round on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from ivon import IVON

from fedsim.learning.gaussian import Gaussian
from fedsim.learning.models.registry import build_model
from fedsim.learning.params import Net
from fedsim.learning.shards import Shard
from fedsim.learning.solvers.first_order import LocalTraining, minimise
from fedsim.learning.solvers.ivon import IvonTraining, ivon
from fedsim.seeds import RandomStream
from tests.benchmarks.common import alternately, options_of, spread

N, BATCH = 640, 32
HOW = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.9998}
ESS, PRIOR, H0 = float(N), 10.0, 1e-2


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    repeats, epochs = (1, 1) if options.tiny else (options.repeats, options.epochs)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = build_model("mlp", (1, 28, 28), 10)
    inputs, targets = torch.rand(N, 1, 28, 28), torch.randint(10, (N,))
    shard = Shard(Net(copy.deepcopy(module)), inputs, targets, 1.0)
    start = shard.net.snapshot()
    ones, rng = torch.ones_like(start), RandomStream(1, "benchmark")
    training = IvonTraining(epochs=epochs, batch_size=BATCH, **HOW)
    dual = Gaussian(1e-4 * torch.randn_like(start), 0.5 * PRIOR / ESS * torch.rand_like(start))

    def stock() -> None:
        local = copy.deepcopy(module)
        optimiser = IVON(
            local.parameters(), ess=ESS, weight_decay=PRIOR / ESS, hess_init=H0, rescale_lr=False, **HOW
        )
        order = rng.torch("batches")
        for _ in range(epochs):
            for x, y in shard.batches(BATCH, order):
                with optimiser.sampled_params(train=True):
                    optimiser.zero_grad()
                    F.cross_entropy(local(x), y).backward()
                optimiser.step()

    def ours(precision: torch.Tensor, dual: Gaussian | None, h0: float | None) -> None:
        prior = {"prior_mean": 0 * start, "prior_precision": precision, "ess": ESS, "dual": dual}
        ivon(shard, start, how=training, rng=rng, round=1, h0=h0, **prior)

    adam = LocalTraining(epochs=epochs, batch_size=BATCH)
    candidates: dict[str, Callable[[], object]] = {
        "ivon-opt": stock,
        "ours": lambda: ours(PRIOR * ones, None, H0),
        "ours, duals": lambda: ours(PRIOR * (0.5 + torch.rand_like(start)), dual, None),
        "adam": lambda: minimise(shard, start, how=adam, rng=rng, round=1),
        "noise alone": lambda: [torch.randn(len(start)) for _ in range(steps)],
    }
    steps = epochs * -(-N // BATCH)
    spent = alternately(candidates, repeats)
    for name, seconds in spent.items():
        print(f"{name:12} {spread([1e6 * s / steps for s in seconds], ' us', 0)}")
    for over, under in (
        ("ivon-opt", "ours"),
        ("ivon-opt", "ours, duals"),
        ("ivon-opt", "adam"),
        ("ours", "adam"),
        ("ours, duals", "adam"),
    ):
        ratios = [a / b for a, b in zip(spent[over], spent[under], strict=True)]
        print(f"{over} / {under}: {spread(ratios, digits=2)}")


if __name__ == "__main__":
    main()
