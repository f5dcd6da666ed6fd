"""Memory of the card and rounds per second with one worker and with ten, beside one process that only trains.

fedavg with an MLP, data of FashionMNIST's shape, 10 clients of 600 examples, batches of 32, one local epoch.
"""

from __future__ import annotations

import subprocess
import time

from fedsim.experiment import Experiment
from tests.benchmarks.common import FEW, FULL, fashion_shaped
from tests.benchmarks.floor import floor
from tests.benchmarks.gpu.stage import Job, Stage, run_jobs

WARM, CLIENTS, SAMPLE = 2, 10, 0.5
QUERY = "nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits --id=0"


class Used:
    """The MiB of the first GPU that all processes use together: before, and at the most."""

    def __init__(self, gpu: bool) -> None:
        self.gpu, self.next = gpu, 0.0
        self.before = self.most = self._now()

    def _now(self) -> int:
        if not self.gpu:
            return 0
        shown = subprocess.run(QUERY.split(), check=True, capture_output=True, text=True, timeout=30)
        return int(shown.stdout)

    def look(self) -> bool:
        """Twice a second."""
        if time.monotonic() >= self.next:
            self.most, self.next = max(self.most, self._now()), time.monotonic() + SAMPLE
        return False


def measured(stage: Stage, workers: int, options: list[str], least: float, digests: set[str]) -> Job:
    used = Used(stage.gpu)
    name = f"workers {workers}"
    command = stage.launch(name, *options, "--workers", str(workers))
    command.until = used.look
    yield command
    seconds = [row["seconds"] for row in command.rows if row["round"] > WARM]
    if command.error or not seconds:
        stage.fail(name, command.error or "there are no rounds")
        return
    digests.add(command.summary["model_sha256"] + command.summary["clients_sha256"])
    rate, taken = len(seconds) / sum(seconds), used.most - used.before
    card = f"; {taken} MiB of the card, {taken / workers:.0f} a worker" if stage.gpu else ""
    stage.report(
        f"{name}: {rate:.2f} rounds/s, {rate * least:.2f} of one process that only trains{card}",
        {name: {"rounds_s": rate, "of_one_process": rate * least, "MiB": taken if stage.gpu else None}},
    )


def run(stage: Stage) -> None:
    model, counts, rounds, fraction = (
        ("mlp_small", (1, 2), 2, 0.02) if stage.tiny else ("mlp", (1, 10), 20, 0.1)
    )
    data = fashion_shaped(stage.scratch / "data", FEW if stage.tiny else FULL)
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
    least = floor(experiment, data, WARM, processes=1, device="cuda" if stage.gpu else "cpu")
    stage.report(f"one process that only trains: {1 / least:.2f} rounds/s", {"floor_rounds_s": 1 / least})
    digests = set[str]()
    for workers in counts:
        arguments = (
            f"--algo fedavg --dataset fashion_mnist --fraction {fraction} --partition iid --model {model} "
            f"--clients {CLIENTS} --rounds {rounds + WARM} --set epochs=1 --data-dir {data}"
        )
        lanes = stage.lanes(1) if workers > 1 else ()
        run_jobs([measured(stage, workers, [*arguments.split(), *lanes], least, digests)])
    stage.report(f"different digests: {len(digests)}", {"different": len(digests)})
    if len(digests) != 1:
        stage.fail("", f"{len(digests)} different digests")
