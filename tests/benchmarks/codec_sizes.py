"""Measures the bytes of every codec on a trained MLP: the tables of docs/wire.md and docs/compression.md.

    python -m tests.benchmarks.codec_sizes (--data-dir DIR | --tiny) [--plot FILE.png]

Setting (docs/references/bytes.md): MNIST, 20 clients, dirichlet:0.5, MLP 784-200-100-10, ReLU, 4 rounds, here
of FedAvg with 2 local epochs of Adam. Then the largest client trains once more, and its two curvatures are
taken at the weights that it would upload: the empirical Fisher (squared gradients of the true labels) and
the diagonal GGN.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from fedsim.experiment import Experiment
from fedsim.learning.curvature.diagonal_ggn import diagonal_ggn
from fedsim.learning.params import Layout
from fedsim.seeds import RandomStream
from fedsim.wire.codecs import Spec, codec, pack_or_dense
from fedsim.wire.message_context import scale_of
from launch.configuration.execution import Execution
from launch.results.codecs import errors, fastest, indices_floor
from launch.runs.restored import RestoredRun
from launch.session.run import launch
from tests.benchmarks.common import FEW, fashion_shaped, options_of

FRACTIONS = (0.01, 0.05, 0.1, 0.2, 0.5)
KEEPING = ("csr", "bitmap", "best")
WHOLE = ("log8", "bf16", "zstd")
COLOURS = {"csr": "#0072B2", "bitmap": "#D55E00", "best": "#009E73"}
"""Okabe and Ito's, which people with any colour vision can tell apart."""
MARKS = {"csr": "s", "bitmap": "o", "best": "^"}


def relu_mlp(shape: tuple[int, ...], classes: int) -> nn.Module:
    hidden = (nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 100), nn.ReLU())
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(100, classes))


@dataclass(frozen=True)
class Trained:
    """Vectors (P,) float32 of one client: what it was sent, what it uploads, its curvatures there."""

    layout: Layout
    examples: int
    broadcast: Tensor
    mean: Tensor
    fisher: Tensor
    ggn: Tensor


def trained(data_dir: Path, rounds: int = 4) -> Trained:
    experiment = Experiment(
        algo="fedavg",
        dataset="mnist",
        partition="dirichlet:0.5",
        clients=20,
        rounds=rounds,
        model=f"{Path(__file__).resolve()}:relu_mlp",
        hyperparameters={"local.epochs": 2},
    )
    with tempfile.TemporaryDirectory() as folder:
        execution = Execution(workers=0, devices="cpu", data_dir=str(data_dir), out=f"{folder}/run")
        run = RestoredRun.open(launch(experiment, execution, quiet=True))
        client = run.largest_participant()
        down, up = run.next_messages(client)
    shard, mean = run.problem.shard(client), up.value.mean
    shard.net.load(mean)
    chunks = torch.split(shard.floats(shard.inputs), shard.chunk)
    ggn = diagonal_ggn(shard.net.module, chunks)
    fisher = shard.mean_fisher(mean)
    return Trained(run.problem.net.layout, shard.size, down.value.mean, mean, fisher, ggn)


def size(name: str, x: Tensor, spec: Spec) -> int:
    """Bytes that the codec itself takes, also where dense would be sent."""
    parts = codec(name).pack(x, spec)
    assert parts is not None
    return sum(part.nbytes for _, part in parts)


def by_fraction(title: str, x: Tensor, spec: Spec) -> None:
    """Bytes, the ratio to dense and the ratio to the bound (docs/references/bytes.md): P H(p) / 8 for the
    positions and whole values of the codec's own width."""
    zeros = float((x == 0).double().mean())
    print(f"\n{title}: {zeros:.1%} exact zeros\n")
    print("| p | " + " | ".join(KEEPING) + " | indices of bitmap / floor | lost, relative L2 |")
    print("|---|" + "---|" * (len(KEEPING) + 2))
    for p in FRACTIONS:
        bitmap = codec(f"bitmap:{p}")
        floor = indices_floor(bitmap, spec)
        cells = []
        for name in KEEPING:
            selected, total = codec(f"{name}:{p}"), size(f"{name}:{p}", x, spec)
            bound = floor + (selected.width or 4) * selected.numbers(spec)
            cells.append(f"{total:,} ({spec.dense_bytes / total:.3g}; {total / bound:.2f})")
        parts = dict(bitmap.pack(x, spec) or ())
        lost = errors(bitmap.unpack((parts["indices"], parts["values"]), spec), x)[1]
        print(f"| {p:g} | {' | '.join(cells)} | {parts['indices'].nbytes / floor:.2f} | {lost:.2f} |")
    whole = [f"{name} {size(name, x, spec):,}" for name in ("dense", *WHOLE)]
    print(f"\nwhatever p: {', '.join(whole)}")


def line(label: str, name: str, x: Tensor, spec: Spec, ref: Tensor | None, seconds: float) -> str:
    selected = codec(name)
    sent, parts = pack_or_dense(selected, x, spec, ref)
    frames, total = tuple(part for _, part in parts), sum(part.nbytes for _, part in parts)
    assert sent == selected.name
    packing = fastest(lambda: selected.pack(x, spec, ref), seconds)
    unpacking = fastest(lambda: selected.unpack(frames, spec, ref), seconds)
    rates = " / ".join(f"{spec.dense_bytes / s / 1e6:,.0f}" for s in (packing, unpacking))
    return f"| {label} | {name} | {total:,} | {spec.dense_bytes / total:.2f} | {rates} |"


def draw(file: Path, panels: dict[str, Tensor], spec: Spec) -> None:
    """Bytes against p, one panel per tensor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, every = pyplot.subplots(1, len(panels), figsize=(9.6, 4.4), dpi=120, sharey=True)
    figure.set_layout_engine("constrained")
    for axes, (title, x) in zip(every, panels.items(), strict=True):
        axes.axhline(spec.dense_bytes, color="black", linewidth=1.6)
        axes.text(0.01, spec.dense_bytes * 1.07, "dense", fontsize=9)
        for name in WHOLE:
            flat = size(name, x, spec)
            axes.axhline(flat, color="0.55", linewidth=1.0, linestyle="--")
            axes.text(0.01, flat * 1.07, name, fontsize=9, color="0.35")
        for name in KEEPING:
            sizes = [size(f"{name}:{p}", x, spec) for p in FRACTIONS]
            axes.plot(FRACTIONS, sizes, color=COLOURS[name], marker=MARKS[name], linewidth=1.8, label=name)
            axes.annotate(
                name,
                (FRACTIONS[0], sizes[0]),
                xytext=(9, -6),
                textcoords="offset points",
                color=COLOURS[name],
                fontsize=10,
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(FRACTIONS, [f"{p:g}" for p in FRACTIONS])
        axes.minorticks_off()
        axes.set_yticks([10**3, 10**4, 10**5, 10**6], ["1 kB", "10 kB", "100 kB", "1 MB"])
        axes.set_xlim(0.009, 0.56)
        axes.set_ylim(1000, 1.3e6)
        axes.set_xlabel("p, the share of entries that is kept")
        axes.set_title(title, fontsize=11)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    every[0].set_ylabel("bytes per upload")
    figure.savefig(file)
    pyplot.close(figure)


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    options = parser.parse_args()
    if options.tiny:
        with tempfile.TemporaryDirectory() as scratch:
            os.environ["FEDSIM_CACHE"] = f"{scratch}/cache"
            tables(trained(fashion_shaped(Path(scratch), FEW, "MNIST"), 1), options.plot, 0.01)
    elif options.data_dir is None:
        parser.error("it needs --data-dir, the folder with MNIST, or --tiny")
    else:
        tables(trained(options.data_dir), options.plot, 0.3)


def tables(result: Trained, plot: Path | None, seconds: float) -> None:
    """Print all tables; every rate is the fastest within so many seconds."""
    layout, spec = result.layout, Spec.of((result.layout.size,), torch.float32, result.layout)
    still = float((result.mean == result.broadcast).double().mean())
    print(
        f"P = {layout.size:,}; one client with {result.examples:,} examples; {still:.1%} of the weights still"
    )
    by_fraction("empirical Fisher", result.fisher, spec)
    by_fraction("diagonal GGN", result.ggn, spec)
    known = replace(spec, scale=scale_of("curvature", result.ggn), stream=RandomStream(0, "codec"))
    print("\n| tensor | codec | bytes | ratio | encode / decode MB/s |")
    print("|---|---|---|---|---|")
    rows: list[tuple[str, str, Tensor, Tensor | None]] = [
        ("diagonal GGN", name, result.ggn, None)
        for name in (
            "csr:0.1",
            "bitmap:0.1",
            "best:0.1",
            "log8",
            "zstd",
            "bf16",
            "ratio:0.25",
            "ratio:1.5+random",
        )
    ]
    rows += [
        ("client mean", name, result.mean, result.broadcast)
        for name in (
            "zstd",
            "delta+zstd",
            "qsgd:4",
            "sigma:auto",
            "sigma:auto+dither",
            "sigma:5%+random",
            "sigma:10%",
        )
    ]
    rows += [("client's change", "topk:0.1", result.mean - result.broadcast, None)]
    for label, name, x, ref in rows:
        print(line(label, name, x, known, ref, seconds), flush=True)
    if plot:
        draw(plot, {"empirical Fisher": result.fisher, "diagonal GGN": result.ggn}, spec)


if __name__ == "__main__":
    main()
