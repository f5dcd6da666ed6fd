"""Seconds of a round on CIFAR-10 (the JPEG copy): published scenarios, and the shape of pfl-research's job.

S4 and S5 are those of docs/references/published-numbers.md: 10 clients, two Dirichlet draws, 10 local
epochs, batches of 64. A run that its time limit ends is measured by the rounds that it has evaluated.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from tests.benchmarks.gpu.stage import Job, Stage, run_jobs

CIFAR = "--dataset cifar10_jpeg"
SCENARIO = f"{CIFAR} --partition two_dirichlet --clients 10 --seed 62 --set epochs=10 --set batch_size=64"
S4 = f"{SCENARIO} --model cnn_zenke --set lr=1e-3"
S5 = f"{SCENARIO} --model cnn_acar"
IVON = (
    "--algo ivon_admm --set lr=5e-3 --set h0=0.1 --set beta2=0.99998 --set tau=0.1 --set delta=0.5 "
    "--set rho=1 --set gamma=0.1"
)
PFL = (
    f"{CIFAR} --partition iid --clients 1000 --participation 50 --algo fedavg "
    f"--model {Path(__file__).parents[3]}/docs/examples/tff.py:cnn_emnist "
    "--set epochs=1 --set batch_size=10 --set optimiser=sgd --set lr=0.1 --eval-every 10"
)
"""benchmarks/image_classification of pfl-research: 1,000 users of 50 examples, 50 a round. cnn_emnist is its
network: convolutions 3x3 of 32 and 64, a pool, 128 units, dropout of .25 and .5; P = 1,626,442."""
RUNS = {
    "S5 fedavg": (4, f"{S5} --algo fedavg --set lr=1e-3 --workers 1"),
    "S5 ivon_admm": (3, f"{S5} {IVON} --workers 1"),
    "S5 fedlap_cov": (3, f"{S5} --algo fedlap_cov --set lr=1e-3 --workers 1"),
    "S4 fedavg": (4, f"{S4} --algo fedavg --workers 1"),
    "S5 fedavg, tf32": (4, f"{S5} --algo fedavg --set lr=1e-3 --workers 1 --numerics tf32"),
    "pfl-research": (41, f"{PFL} --workers 1"),
    "S5 fedavg, 10 workers": (4, f"{S5} --algo fedavg --set lr=1e-3 --workers 10 --lanes 1"),
}
"""Rounds and options. Clients of one worker are lanes, as many as fit, where nothing is said of them."""
TINY = {
    "digits, batches of 10": (
        3,
        "--algo fedavg --clients 40 --participation 5 --partition iid --workers 1 --eval-every 2 "
        "--set epochs=1 --set batch_size=10 --set optimiser=sgd --set lr=0.1",
    )
}


def measured(stage: Stage, name: str, rounds: int, options: str, seconds: float) -> Job:
    command = stage.launch(name, *options.split(), "--rounds", str(rounds), seconds=seconds)
    yield command
    rows = command.rows[1:]
    if not rows or (command.code and not command.stopped):
        stage.fail(name, command.error or "no round was evaluated")
        return
    spent = [(row["seconds"], row["round"]) for row in rows]
    later = [s for s, _ in spent[1:]] or [s for s, _ in spent]
    each = statistics.median(later)
    last = rows[-1]
    stage.report(
        f"{name}: {each:.2f} s a round (n = {len(later)}), the first {spent[0][0]:.2f} s; accuracy "
        f"{last['test_accuracy']:.4f} and NLL {last['test_nll']:.4f} after round {last['round']} of {rounds}"
        f"{f'; {command.stopped}' if command.stopped else ''}",
        {
            name: {
                "round_s": each,
                "rounds_s": [s for s, _ in spent],
                "accuracy": [row["test_accuracy"] for row in rows],
                "nll": [row["test_nll"] for row in rows],
                "first_round_s": command.summary.get("seconds_to_first_round"),
            }
        },
    )


def run(stage: Stage) -> None:
    runs = TINY if stage.tiny else RUNS
    if not stage.tiny and (why := missing(stage)):
        stage.report(f"CIFAR-10 is not measured: {why}", {"not_measured": why})
        return
    for i, (name, (rounds, options)) in enumerate(runs.items()):
        data = () if stage.tiny else ("--data-dir", str(stage.data))
        seconds = stage.left / (len(runs) - i)
        run_jobs([measured(stage, name, rounds, " ".join((options, *data)), seconds)])


def missing(stage: Stage) -> str:
    """Why CIFAR-10 cannot be measured; "" if it can."""
    if not stage.gpu:
        return "there is no GPU here"
    if stage.data is None or not (stage.data / "CIFAR10").is_dir():
        return "--data-dir names no folder with CIFAR10/"
    return ""
