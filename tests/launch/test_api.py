"""fedsim.run and its companions: from a script, a thread, and several times in one process."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedsim
from fedsim.errors import DataError, FedsimError, MismatchError, UsageError
from fedsim.experiment import Experiment
from launch.configuration.execution import Execution
from launch.session import run as launch_run
from protocols.fedavg import FedAvg
from tests.support.commands import DEADLINE, ran

ROOT = Path(__file__).resolve().parents[2]
SMALL: dict[str, Any] = {"algo": "fedavg", "clients": 3, "rounds": 2, "quiet": True}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs go into a folder of their own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> fedsim.Run:
    return fedsim.run(**SMALL, out=tmp_path_factory.mktemp("small") / "run")


class Linear(nn.Module):
    """Logistic regression, as a script or a notebook would define it."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.out = nn.Linear(int(np.prod(shape)), classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.out(x.flatten(1))
        return logits


@dataclasses.dataclass(frozen=True)
class Mine(FedAvg):
    """An algorithm that is not in the registry."""


def blobs() -> fedsim.Dataset:
    rng = np.random.default_rng(0)
    targets = rng.integers(0, 3, 150)
    inputs = (rng.normal(size=(150, 4)) + 2.0 * targets[:, None]).astype(np.float32)
    return fedsim.Dataset("blobs", inputs[:120], targets[:120], inputs[120:], targets[120:], 3)


def halves(targets: np.ndarray, clients: int, seed: int) -> list[np.ndarray]:
    return np.array_split(np.random.default_rng(seed).permutation(len(targets)), clients)


def alternating(population: fedsim.ClientPopulation) -> Any:
    return lambda round: range(round % 2, population.clients, 2)


# ---- what a run answers


def test_run_has_frames_a_model_a_page_and_bytes(small: fedsim.Run) -> None:
    assert small.status == "done"
    assert list(small.metrics["round"]) == [0, 1, 2]
    assert set(small.ledger["field"]) >= {"mean"}
    assert isinstance(small.model(), nn.Module)
    page = small.report()
    assert page == small.path / "report.html"
    assert "<html" in page.read_text()
    assert small.report("other.html") == Path("other.html")
    assert small.path.is_absolute()


def test_bytes_to_counts_until_the_first_round_that_reaches_the_accuracy(small: fedsim.Run) -> None:
    accuracies = small.metrics["test_accuracy"]
    down, up = (small.metrics[f"bytes_{side}"] for side in ("down", "up"))
    assert small.bytes_to(accuracy=0.0) == down[:2].sum() + up[:2].sum()
    best = float(accuracies[1:].max())
    last = int(accuracies[1:].idxmax())
    assert small.bytes_to(accuracy=best, direction="up") == up[: last + 1].sum()
    assert small.bytes_to(accuracy=best, direction="down") == down[: last + 1].sum()
    assert small.bytes_to(accuracy=1.01) is None
    with pytest.raises(UsageError, match="direction is 'down', 'up' or None"):
        small.bytes_to(accuracy=0.1, direction="sideways")  # type: ignore[arg-type]


def test_open_reads_a_run_that_is_there(small: fedsim.Run) -> None:
    assert fedsim.open(small.path) == small
    assert fedsim.open(str(small.path)).summary == small.summary
    with pytest.raises(UsageError, match="not a run folder"):
        fedsim.open("nowhere")
    Path("damaged").mkdir()
    Path("damaged/manifest.json").write_text("{")
    with pytest.raises(DataError, match="damaged"):
        fedsim.open("damaged")


def test_an_experiment_has_the_bits_of_its_arguments_and_these_go_over_its_fields(small: fedsim.Run) -> None:
    experiment = fedsim.Experiment(algo="fedavg", clients=3, rounds=4, hyperparameters={"lr": 0.5})
    run = fedsim.run(experiment, rounds=2, hyperparameters={"lr": 0.1}, quiet=True)
    other = fedsim.run(**SMALL, hyperparameters={"lr": 0.1})
    assert run.summary["model_sha256"] == other.summary["model_sha256"]
    same = fedsim.run(fedsim.Experiment(algo="fedavg", clients=3, rounds=2), quiet=True)
    assert same.summary["model_sha256"] == small.summary["model_sha256"]


def test_a_plan_is_the_bill_of_the_run(small: fedsim.Run) -> None:
    bill = fedsim.plan(algo="fedavg", clients=3, rounds=2)
    assert bill["exact"] and (bill["bytes_down"], bill["bytes_up"]) == (
        small.summary["bytes_down"],
        small.summary["bytes_up"],
    )
    again = fedsim.plan(fedsim.Experiment(algo="fedavg", clients=3), rounds=2)
    assert again == bill


def test_compare_returns_the_tables_and_writes_what_is_named(small: fedsim.Run) -> None:
    tables = fedsim.compare(small, to=["10%"], csv="groups.csv")
    assert [row["algo"] for row in tables["groups"]] == ["fedavg"] and tables["accuracies"] == [0.1]
    assert tables["groups"][0]["bytes_mean"] == small.summary["bytes_down"] + small.summary["bytes_up"]
    assert tables["files"] == {"csv": "groups.csv"} and not Path("comparisons").exists()
    with pytest.raises(UsageError, match="--to 'often'"):
        fedsim.compare(small.path, to=["often"])


WRONG: tuple[Any, ...] = (3, 3.5, True, b"x", "", [1], [None], {"algo": "fedavg"}, {3: [1]}, {1}, object())
"""Values of which no argument below can be made."""
TAKES: dict[str, tuple[str, ...]] = {
    "sweep": ("", "over", "runs", "out", "data_dir"),
    "compare": ("", "where", "out", "markdown", "csv"),
    "open": ("",),
    "resume": ("",),
    "preset": ("",),
    "load_dataset": ("",),
}


@pytest.mark.parametrize(("function", "argument"), [(f, key) for f, keys in TAKES.items() for key in keys])
def test_any_wrong_value_is_an_error_of_fedsim(function: str, argument: str, small: fedsim.Run) -> None:
    named: dict[str, Any] = {"over": {"algo": ["fedavg"]}} if function == "sweep" and argument else {}
    first = [small] if function == "compare" else []
    for value in WRONG:
        positional, keywords = ([value], {}) if not argument else (first, {**named, argument: value})
        with pytest.raises(FedsimError):
            getattr(fedsim, function)(*positional, **keywords)


def test_a_sweep_returns_its_runs_in_the_order_of_the_grid(tmp_path: Path) -> None:
    """From a script without a main guard, whose processes do not run it."""
    script = tmp_path / "script.py"
    script.write_text(
        "import fedsim\n"
        "print('once')\n"
        "grid = {'algo': ['fedprox', 'fedavg'], 'participation': [1.0, 'markov:0.5,0.5']}\n"
        "how = {'clients': 3, 'rounds': 1, 'hyperparameters': {'lr': 0.5}}\n"
        "runs = fedsim.sweep(over=grid, seeds=[1], **how, quiet=True)\n"
        "for run in runs: print(run.status, run.experiment['algo'], run.experiment['participation'])\n"
    )
    command = [sys.executable, str(script)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = ran(command, cwd=tmp_path, env=environment)
    assert done.stdout.splitlines() == [
        *("once", "done fedprox 1.0", "done fedprox markov:0.5,0.5", "done fedavg 1.0"),
        "done fedavg markov:0.5,0.5",
    ], done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "name a grid: over="),
        ({"seeds": 3}, "seeds=3: give a list, such as seeds=[0, 1, 2]"),
        ({"over": {"algo": "fedavg"}}, "over='fedavg': give a list, such as over={'algo': ['fedavg'"),
        ({"over": {"rounds": 3}}, "over=3: give a list"),
        ({"over": [1]}, "over=[1]: write a dictionary"),
        ({"over": {"algo": ["fedavg"]}, "workers": 2}, "jobs= is how many of them are computed side by side"),
        ({"over": {"algo": ["fedavg"]}, "jobs": "two"}, "jobs='two': give the number"),
        ({"over": {"algo": ["fedavg", "fedlop"]}}, "did you mean 'fedlap'"),
        ({"over": {"algo": ["fedavg"]}, "model": Linear}, "model="),
        ({"over": {"seed": [1, 2]}}, "--seeds"),
        ({"over": {"algo": ["fedavg"]}, "round": 3}, "did you mean 'rounds'"),
    ],
)
def test_a_mistake_in_a_sweep_is_a_usage_error(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        fedsim.sweep(**arguments, quiet=True)


def test_signature_names_every_key_with_its_default() -> None:
    parameters = dict(inspect.signature(fedsim.run).parameters)
    assert parameters.pop("experiment").kind is inspect.Parameter.POSITIONAL_ONLY
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters.values())
    defaults = {f.name: f.default for f in dataclasses.fields(Experiment)}
    mappings = {"hyperparameters", "codecs"}
    assert defaults.keys() - parameters.keys() == {"device"}  # the machine's: see --devices
    for name in defaults.keys() - {"device"} - mappings:
        assert parameters[name].default == defaults[name], name
    execution = {f.name for f in dataclasses.fields(Execution)}
    assert execution == parameters.keys() - defaults.keys() - {"quiet"}
    assert parameters["workers"].default == 0


# ---- values


@pytest.mark.parametrize(
    ("participation", "text"),
    [
        *((0.3, "0.3"), (3, "3"), (1.0, "1.0"), (1e-5, "0.00001"), ("coin:0.5", "coin:0.5")),
        (np.float64(0.5), "0.5"),
    ],
)
def test_participation_is_a_share_a_count_or_a_spec(
    participation: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Experiment] = []

    def launched(experiment: Experiment, *_: object, **__: object) -> Path:
        seen.append(experiment)
        raise UsageError("seen")

    monkeypatch.setattr(launch_run, "launch", launched)
    with pytest.raises(UsageError, match="seen"):
        fedsim.run(participation=participation)
    assert seen[0].participation == text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"algo": "fedlapp"}, "did you mean 'fedlap'"),
        ({"clients": 0}, "clients=0: must be"),
        ({"inputs": "row"}, "inputs='row': must be one of raw, scaled"),
        ({"hyperparameters": {"lr": "fast"}}, "lr = 'fast'"),
        ({"codecs": {"men": "bf16"}}, "did you mean 'mean'"),
        ({"codecs": "mean=bf16"}, "codecs='mean=bf16': write a dictionary"),
        ({"participation": 1.5}, "give 'full', a share such as 0.3"),
        ({"verify_bytes": True}, "add --transport tcp"),
        ({"leese": 1.0}, "unknown argument 'leese'; did you mean 'lease'"),
        ({"lr": 0.1}, "lr= is no argument; a hyperparameter is set by hyperparameters={'lr': 0.1}"),
        ({"foo": 0.1}, "unknown argument 'foo' (all: help(fedsim.run))"),
        ({"until": "nearly"}, "--until 'nearly': give an accuracy"),
        ({"deadline": "5ms"}, "--deadline needs --link or --compute: without them"),
        ({"devices": "cuda:77"}, "--devices cuda:77"),
        ({"hyperparameters": {"lr": 1.0, "local.lr": 1.0}}, "lr and local.lr are the same"),
        ({"out": "there"}, "there"),
    ],
)
def test_mistake_is_a_usage_error_that_names_the_key(arguments: dict[str, Any], words: str) -> None:
    Path("there").mkdir()
    Path("there/manifest.json").write_text("{}")
    with pytest.raises(UsageError) as caught:
        fedsim.run(**(SMALL | arguments))
    assert words in str(caught.value)


def test_the_name_of_an_algorithm_in_the_place_of_an_experiment_says_what_to_write() -> None:
    with pytest.raises(UsageError, match="not 'fedlap_cov'; write algo='fedlap_cov'"):
        fedsim.run("fedlap_cov", quiet=True)  # type: ignore[call-overload]


def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    plain: dict[str, Any] = {"clients": 3, "rounds": 1, "seed": 2, "fraction": 0.5, "max_norm": 0.0}
    plain |= {"workers": 0, "lease": 10.0, "hyperparameters": {"lr": 0.5, "local": {"epochs": 2}}}
    theirs: dict[str, Any] = {"clients": np.int64(3), "rounds": np.uint8(1), "seed": np.int32(2)}
    theirs |= {"fraction": np.float32(0.5), "max_norm": np.float16(0), "workers": np.int16(0)}
    theirs |= {"lease": np.float32(10), "error_feedback": np.bool_(False)}
    theirs["hyperparameters"] = {"lr": torch.tensor(0.5), "local": {"epochs": np.array(2)}}
    one, other = (fedsim.run(**(SMALL | options)) for options in (plain, theirs))
    assert one.summary["model_sha256"] == other.summary["model_sha256"]
    assert one.manifest["experiment"] == other.manifest["experiment"]
    assert fedsim.resume(other, rounds=np.int64(2), quiet=True).status == "done"  # type: ignore[arg-type]
    for wrong in (np.array([2, 3]), np.ma.masked, np.float64(2.5), True):
        with pytest.raises(UsageError, match=r"clients=.*: must be a whole number of at least 1"):
            fedsim.run(**(SMALL | {"clients": wrong}))


# ---- objects of the program


def test_objects_of_the_program_run_without_workers_and_resume() -> None:
    choices: dict[str, Any] = {
        "algo": Mine,
        "model": Linear,
        "dataset": blobs,
        "partition": halves,
        "participation": alternating,
    }
    run = fedsim.run(**(SMALL | choices))
    assert run.experiment["algo"].endswith("test_api.py:Mine")
    assert set(run.experiment["sources"]) == {run.experiment[key] for key in choices}
    uploads = run.ledger[run.ledger["message"] == "upload"].groupby("round")
    assert uploads["client"].nunique().to_dict() == {1: 1, 2: 2}
    assert isinstance(run.model(), Linear)
    further = fedsim.resume(run, rounds=4, quiet=True, **choices)
    whole = fedsim.run(**(SMALL | choices | {"rounds": 4}))
    assert further.summary["model_sha256"] == whole.summary["model_sha256"]
    with pytest.raises(MismatchError, match="model"):
        fedsim.resume(run, rounds=5, quiet=True, model=nn.Linear)


def test_instance_of_an_algorithm_brings_its_hyperparameters() -> None:
    how = dataclasses.replace(FedAvg().local, lr=0.02, epochs=2)
    run = fedsim.run(**(SMALL | {"algo": FedAvg(local=how)}), hyperparameters={"epochs": 1}, workers=2)
    assert run.experiment["algo"] == "fedavg"
    assert run.experiment["hyperparameters"]["local.lr"] == 0.02
    assert run.experiment["hyperparameters"]["local.epochs"] == 1


@pytest.mark.parametrize("option", ["algo", "model", "dataset", "partition"])
def test_object_with_workers_is_refused_with_what_to_write(option: str) -> None:
    thing = {"algo": Mine, "model": Linear, "dataset": blobs, "partition": halves}[option]
    with pytest.raises(UsageError) as caught:
        fedsim.run(**(SMALL | {option: thing}), workers=2)
    where = f"{Path(__file__).resolve()}:{thing.__qualname__}"
    assert f"Write {option}='{where}', or take workers=0" in str(caught.value)
    with pytest.raises(UsageError, match=rf"write {option}='FILE.py:NAME', or take workers=0"):
        fedsim.run(**(SMALL | {option: lambda *_: None}), workers=2)


def test_object_that_another_process_began_with_is_asked_for() -> None:
    from fedsim import live_objects

    run = fedsim.run(**SMALL, model=Linear)
    spec = run.experiment["model"]
    kept = live_objects._objects.pop(spec)
    with pytest.raises(UsageError, match=r"fedsim.resume\(RUN, model=Linear\)"):
        fedsim.resume(run, rounds=3, quiet=True)
    assert isinstance(fedsim.open(run.path, model=Linear).model(), Linear)
    assert live_objects._objects[spec] is kept


# ---- the process that it runs in


def test_run_in_a_thread_installs_no_signal_handler(
    monkeypatch: pytest.MonkeyPatch, small: fedsim.Run
) -> None:
    """A notebook server may run cells beside its main thread."""
    installed: list[Any] = []
    real = signal.signal
    monkeypatch.setattr(signal, "signal", lambda *a: (installed.append(a), real(*a))[1])
    runs: list[fedsim.Run] = []
    for workers in (0, 2):
        thread = threading.Thread(target=lambda n=workers: runs.append(fedsim.run(**SMALL, workers=n)))
        thread.start()
        thread.join(DEADLINE)
    assert [run.summary["model_sha256"] for run in runs] == [small.summary["model_sha256"]] * 2
    assert installed == []


def test_process_is_as_it_was_after_a_run() -> None:
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    environment, threads = dict(os.environ), torch.get_num_threads()
    torch.set_flush_denormal(False)
    fedsim.run(**SMALL, threads=threads + 1)
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert dict(os.environ) == environment
    assert torch.get_num_threads() == threads
    assert float(torch.tensor(1e-310, dtype=torch.float64) * 1.0) > 0


def test_ctrl_c_is_keyboard_interrupt_and_leaves_a_run_to_resume(small: fedsim.Run) -> None:
    @dataclasses.dataclass(frozen=True)
    class Stopping(Mine):
        def client_update(self, client: Any, down: Any, shard: Any, task: Any) -> Any:
            if task.round == 2 and not Path("stopped").exists():
                Path("stopped").touch()
                signal.raise_signal(signal.SIGINT)
            return FedAvg.client_update(self, client, down, shard, task)

    with pytest.raises(KeyboardInterrupt, match="interrupted after round 1"):
        fedsim.run(**(SMALL | {"algo": Stopping}), out="run")
    assert fedsim.open("run").status == "interrupted"
    run = fedsim.resume("run", quiet=True)
    assert run.status == "done"
    assert run.summary["model_sha256"] == small.summary["model_sha256"]


def test_second_ctrl_c_does_not_end_the_process() -> None:
    wakeup = launch_run.Wakeup()
    with launch_run.StopSignals(wakeup, in_process=False, embedded=True) as signals:
        signals.started()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    wakeup.close()


SCRIPT = """
import os, sys
with open("started", "a") as file:
    print(os.getpid(), file=file)
import fedsim
assert "torch" not in sys.modules and "launch" not in sys.modules
secret = object()
first = fedsim.run(algo="fedavg", clients=3, rounds=2, workers=2, out="first", participation=2)
second = fedsim.run(algo="fedavg", clients=3, rounds=2, out="second", participation=2, quiet=True)
third = fedsim.run(algo="fedavg", clients=3, rounds=2, workers=2, out="third", participation=2, quiet=True)
assert len({run.summary["model_sha256"] for run in (first, second, third)}) == 1
print(fedsim.resume("third", rounds=3, workers=1, quiet=True).status)
"""


def test_script_without_a_main_guard_starts_workers_that_do_not_run_it() -> None:
    Path("script.py").write_text(SCRIPT)
    done = ran([sys.executable, "script.py"], env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert len(Path("started").read_text().splitlines()) == 1
    lines = done.stdout.splitlines()
    assert sum(line.startswith("round ") for line in lines) == 3  # the first run, rounds 0 to 2
    assert lines[-1] == "done"
