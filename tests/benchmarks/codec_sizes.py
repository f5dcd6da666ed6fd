"""Bytes and speed of every codec on real tensors: the table of docs/wire.md.

    PYTHONPATH=. python -m tests.benchmarks.codec_sizes --data-dir DIR

MNIST, MLP 784-200-100-10 with ReLU after 600 steps of Adam on everything; then one epoch at a client with
3,000 examples, mostly of five classes. Its diagonal GGN, and its mean against the broadcast one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.data import load_dataset
from fedsim.learning.curvature import diagonal_ggn
from fedsim.learning.params import Layout
from fedsim.wire.codecs import Spec, codec, pack_or_dense

CURVATURE = ("csr:0.1", "bitmap:0.1", "best:0.1", "log8", "zstd", "bf16")
MEAN = ("zstd", "delta+zstd")


def train(net: nn.Module, inputs: Tensor, targets: Tensor, rows: Tensor, steps: int) -> Tensor:
    """The flat parameters after so many steps of Adam on random batches of 64."""
    optimiser = torch.optim.Adam(net.parameters(), 1e-3)
    for _ in range(steps):
        chosen = rows[torch.randint(len(rows), (64,))]
        optimiser.zero_grad()
        F.cross_entropy(net(inputs[chosen]), targets[chosen]).backward()
        optimiser.step()
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()]).clone()


def fastest(job: Callable[[], object], repeats: int = 15) -> float:
    """Seconds of the fastest run."""
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        job()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def line(label: str, name: str, x: Tensor, layout: Layout, ref: Tensor | None = None) -> str:
    chosen, spec = codec(name), Spec.of(tuple(x.shape), x.dtype, layout)
    sent, parts = pack_or_dense(chosen, x, spec, ref)
    frames, size = tuple(part for _, part in parts), sum(part.nbytes for _, part in parts)
    assert sent == chosen.name
    packing = fastest(lambda: chosen.pack(x, spec, ref))
    unpacking = fastest(lambda: chosen.unpack(frames, spec, ref))
    rates = " / ".join(f"{spec.dense_bytes / s / 1e6:,.0f}" for s in (packing, unpacking))
    return f"| {label} | {name} | {size:,} | {spec.dense_bytes / size:.2f} | {rates} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    data = load_dataset("mnist", parser.parse_args().data_dir)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    inputs = torch.from_numpy(np.array(data.train_inputs)).flatten(1).float() / data.scale
    targets = torch.from_numpy(np.array(data.train_targets))
    hidden = (nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 100), nn.ReLU())
    net = nn.Sequential(*hidden, nn.Linear(100, 10))
    layout = Layout.of(net)
    broadcast = train(net, inputs, targets, torch.arange(len(inputs)), 600)
    share = torch.tensor([0.3, 0.25, 0.2, 0.15, 0.02, 0.02, 0.02, 0.02, 0.01, 0.01])
    rows = torch.multinomial(share[targets], 3000)
    mean = train(net, inputs, targets, rows, 47)
    curvature = diagonal_ggn(net, [inputs[rows]])
    print("| tensor | codec | bytes | ratio | encode / decode MB/s |")
    print("|---|---|---|---|---|")
    for name in CURVATURE:
        print(line("diagonal GGN", name, curvature, layout), flush=True)
    for name in MEAN:
        print(line("client mean", name, mean, layout, broadcast), flush=True)


if __name__ == "__main__":
    main()
