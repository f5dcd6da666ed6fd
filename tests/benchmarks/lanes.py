"""Measures the local training of many clients in one process, with lanes and without.

    python -m tests.benchmarks.lanes [--repeats 7] [--clients 32] [--epochs 4] [--tiny]

Every client has 320 random examples, and takes steps of Adam on batches of 32, on 1 thread: 10 an epoch. The
inputs are those of digits (64) for logistic and mlp_small, and of MNIST (784) for mlp. Printed are
client-steps per second of CPU time, and how many times as many that is as without lanes. The candidates
alternate.

The last lines are of random Linear layers whose numbers stand in two lanes of a stack, zeros or others beside
them: how many have other bits in the other lane, with contiguous stacks and with aligned ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import torch

from fedsim.learning.lanes import Lanes
from fedsim.learning.models.registry import build_model
from fedsim.learning.params import Net
from fedsim.learning.shards import Shard
from fedsim.learning.solvers.first_order import LocalTraining, minimise
from fedsim.learning.stack import Stack
from fedsim.seeds import RandomStream, seeded_torch
from tests.benchmarks.common import alternately, options_of, spread
from workers.assembly import fix_numerics

N, BATCH = 320, 32
MODELS = {"logistic": (1, 8, 8), "mlp_small": (1, 8, 8), "mlp": (1, 28, 28)}


def training(model: str, lanes: int, clients: int, epochs: int) -> Callable[[], None]:
    """The local training of all clients, in so many lanes; 1: one client after another, without lanes."""
    with seeded_torch(0):
        net = Net(build_model(model, MODELS[model], 10))
        inputs, targets = torch.rand(N, *MODELS[model]), torch.randint(10, (N,))
    together = Lanes(net, lanes, N) if lanes > 1 else None
    start, how = net.snapshot(), LocalTraining(epochs=epochs, batch_size=BATCH)

    def train(client: int) -> None:
        own = (together and together.current) or net
        rng = RandomStream(0, "benchmark", 1, client)
        minimise(Shard(own, inputs, targets, 1.0), start, how=how, rng=rng, round=1)

    def run() -> None:
        waiting = list(range(clients))
        while together is None and waiting:
            train(waiting.pop())
        while together is not None and (waiting or together.busy):
            while waiting and together.free:
                together.start(partial(train, waiting.pop()))
            together.advance()

    return run


def moved(aligned: bool, layers: int) -> int:
    """How many of some random layers give other bits in another lane, forward or backward."""
    draws, different = random.Random(0), 0
    for layer in range(layers):
        lanes, rows = draws.choice([2, 3, 8, 64]), draws.choice([1, 2, 7, 20, 32])
        inner, outer = draws.choice([3, 17, 64, 100, 101]), draws.choice([2, 10, 13, 33])
        shapes = ((rows, inner), (outer, inner), (rows, outer))
        generator = torch.Generator().manual_seed(layer)

        def numbers(shapes=shapes, generator=generator):  # type: ignore[no-untyped-def]
            return [torch.randn(shape, generator=generator) for shape in shapes]

        mine, results = numbers(), []
        for lane, beside in ((draws.randrange(lanes), numbers), (draws.randrange(lanes), None)):
            stacks = [Stack.zeros(lanes, shape, mine[0]).values for shape in (*shapes, *reversed(shapes))]
            if not aligned:
                stacks = [stack.contiguous() for stack in stacks]
            x, weight, slope, y, dw, dx = stacks
            for place in range(lanes):
                filled = mine if place == lane else beside() if beside else ()
                for stack, value in zip((x, weight, slope), filled, strict=False):
                    stack[place] = value
            torch.bmm(x, weight.mT, out=y)
            torch.bmm(slope.mT, x, out=dw)
            torch.bmm(slope, weight, out=dx)
            results.append((y[lane].clone(), dw[lane].clone(), dx[lane].clone()))
        different += any(not torch.equal(a, b) for a, b in zip(*results, strict=True))
    return different


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    clients, counts = (4, (1, 2, 4)) if options.tiny else (options.clients, (1, 4, 10, 32))
    repeats, epochs = (1, 1) if options.tiny else (options.repeats, options.epochs)
    fix_numerics(1, "cpu")
    steps = clients * epochs * -(-N // BATCH)
    print("| model | lanes | client-steps per second | times one lane |\n|---|---|---|---|")
    for model in MODELS:
        candidates = {lanes: training(model, lanes, clients, epochs) for lanes in counts}
        spent = alternately(candidates, repeats)
        for lanes, seconds in spent.items():
            times = [one / own for own, one in zip(seconds, spent[1], strict=True)]
            rate = [steps / own for own in seconds]
            print(f"| {model} | {lanes} | {spread(rate, digits=0)} | {spread(times, digits=2)} |")
    layers = 60 if options.tiny else 600
    for aligned, what in ((False, "contiguous"), (True, "aligned")):
        print(f"{what} stacks: {moved(aligned, layers)} of {layers} layers have other bits in another lane")


if __name__ == "__main__":
    main()
