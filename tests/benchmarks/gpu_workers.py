"""Measures rounds per second of 1, 2, 4 and 10 workers on one GPU, beside one process that only trains.

    python -m tests.benchmarks.gpu_workers [--models mlp,resnet20] [--workers 1,4] [--rounds 20] [--tiny]

fedavg, data of FashionMNIST's shape, 10 clients of 600 examples, a batch of 32, 1 local epoch. The floor is
the same training and evaluation in one process, without messages and files. Printed are the rounds per
second after the first two, the memory of the device that each worker takes, and whether model and client
states have the same digests for every number of workers. Without a GPU the workers compute on the CPU.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedsim.experiment import Experiment
from tests.benchmarks.common import FEW, FULL, fashion_shaped, launch, options_of, round_seconds, summary
from tests.benchmarks.floor import floor
from workers.devices import visible_gpus

WARM, CLIENTS = 2, 10


def used_mib() -> int:
    """Memory of the first GPU that is in use, by all processes."""
    query = "nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits --id=0"
    return int(subprocess.run(query.split(), check=True, capture_output=True, text=True, timeout=30).stdout)


@contextmanager
def watched(gpu: bool) -> Iterator[list[int]]:
    """The MiB in use on the device, before and then every half second of the block; on a CPU zeros."""
    seen, ended = [used_mib() if gpu else 0], threading.Event()

    def look() -> None:
        while not ended.wait(0.5):
            seen.append(used_mib() if gpu else 0)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--models", default="mlp,cnn_mcmahan,resnet20,resnet18_gn")
    parser.add_argument("--workers", default="1,2,4,10")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    gpu = bool(visible_gpus())
    device = "cuda:0" if gpu else "cpu"
    models, counts, rounds, fraction = (
        options.models.split(","),
        options.workers.split(","),
        options.rounds,
        0.1,
    )
    if options.tiny:
        models, counts, rounds, fraction = ["mlp_small"], ["1", "2"], 2, 0.02
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["FEDSIM_CACHE"] = f"{scratch}/cache"
        data = fashion_shaped(Path(scratch) / "data", FEW if options.tiny else FULL)
        for model in models:
            experiment = Experiment(
                algo="fedavg",
                dataset="fashion_mnist",
                fraction=fraction,
                partition="iid",
                model=model,
                clients=CLIENTS,
                rounds=rounds,
                hyperparameters={"epochs": 1},
            )
            least = floor(experiment, data, WARM, processes=1, device="cuda" if gpu else "cpu")
            print(f"{model}, {device}: one process that only trains: {1 / least:.2f} rounds/s", flush=True)
            digests = set[tuple[str, str]]()
            for workers in counts:
                arguments = (
                    f"--algo fedavg --dataset fashion_mnist --fraction {fraction} --partition iid "
                    f"--model {model} --clients {CLIENTS} --workers {workers} --devices {device} "
                    f"--rounds {rounds + WARM} --set epochs=1 --data-dir {data}"
                )
                with watched(gpu) as seen:
                    run = launch(Path(scratch) / f"{model}-{workers}", *arguments.split())
                seconds = round_seconds(run, WARM)
                ended = summary(run)
                digests.add((ended["model_sha256"], ended["clients_sha256"]))
                mean = sum(seconds) / len(seconds)
                taken = (
                    f"; {(max(seen) - seen[0]) / int(workers):.0f} MiB of its memory a worker" if gpu else ""
                )
                print(
                    f"{model}, {device}, workers {workers}: {1 / mean:.2f} rounds/s, {least / mean:.2f} of "
                    f"one process{taken}",
                    flush=True,
                )
            print(
                f"{model}, {device}: digests for {len(counts)} numbers of workers: {len(digests)}", flush=True
            )
    if not gpu:
        print("there is no GPU here: workers on one are not measured")


if __name__ == "__main__":
    main()
