"""Measures a step of local training on a GPU, recorded as a CUDA graph and as it comes.

    python -m tests.benchmarks.recorded_steps [--repeats 5] [--epochs 10] [--tiny]

One client of 640 random examples takes steps of Adam on batches of 32, with one Gaussian penalty. The two
ways alternate; recordings are made in a task that is not counted, and last. Printed are wall-clock
microseconds a step, the ratio (at least 3 is the target for mlp), and whether the weights have the same
bits. Without a GPU the steps are computed on one thread of the processor as they come.
"""

from __future__ import annotations

import time

import torch

from fedsim.learning.gaussian import Gaussian
from fedsim.learning.models.registry import build_model
from fedsim.learning.params import Net
from fedsim.learning.recordings import Recordings, cuda_graphs
from fedsim.learning.shards import Shard
from fedsim.learning.solvers.first_order import LocalTraining, minimise
from fedsim.seeds import RandomStream, seeded_torch
from tests.benchmarks.common import options_of, spread
from workers.assembly import fix_numerics

N, BATCH = 640, 32
MODELS = {"mlp_small": (1, 8, 8), "mlp": (1, 28, 28), "cnn_mcmahan": (1, 28, 28)}


def measure(model: str, device: str, epochs: int, repeats: int) -> None:
    """One model: both ways alternately, after a task of each that is not counted."""
    with seeded_torch(0):
        net = Net(build_model(model, MODELS[model], 10), torch.device(device))
        inputs, targets = torch.rand(N, *MODELS[model]), torch.randint(10, (N,))
    shard = Shard(net, inputs.to(device), targets.to(device), 1.0)
    start = net.snapshot()
    how, prior = LocalTraining(epochs=epochs, batch_size=BATCH), Gaussian(0.1 * start, 0.5)
    graphs = Recordings(cuda_graphs(), net.device) if device == "cuda" else None
    ways = {"as they come": None} | ({"recorded": graphs} if graphs else {})
    repetitions: list[int] = []
    if graphs:
        graphs.before = lambda: repetitions.append(1)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    weights = {}
    for repeat in range(-1, repeats):
        for way, spent in seconds.items():
            net.recordings, began = ways[way], time.perf_counter()
            rng = RandomStream(0, "benchmark", 1, 0)
            fit = minimise(shard, start, how=how, rng=rng, round=1, penalties=(prior,))
            weights[way] = fit.solution.tolist()  # waits for the device
            if repeat >= 0:
                spent.append(time.perf_counter() - began)
    steps = how.steps(N)
    for way, spent in seconds.items():
        print(f"{model}, {device}: steps {way}: {spread([1e6 * s / steps for s in spent], ' us', 0)}")
    if "recorded" in seconds:
        pairs = zip(seconds["as they come"], seconds["recorded"], strict=True)
        print(f"{model}, {device}: as they come / recorded: {spread([one / other for one, other in pairs])}")
        same = weights["recorded"] == weights["as they come"]
        print(f"{model}, {device}: the same bits: {same}, with {len(repetitions)} repetitions")


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    fix_numerics(1, device)
    for model in ("mlp_small",) if options.tiny else MODELS:
        measure(model, device, *((1, 1) if options.tiny else (options.epochs, options.repeats)))
    if device == "cpu":
        print("there is no GPU here: recorded steps are not measured")


if __name__ == "__main__":
    main()
