"""One file of an interrupted run is changed, and the run is resumed (fault F12).

The result is that of an undisturbed run, or the run is refused in one line. A trial's seed chooses the run,
the file, and what happens to it: a bit is flipped, a byte or a digit replaced; the file is cut, emptied or
deleted; a line is duplicated, or two blocks are swapped.

    python -m tests.mutations --trials 734 --seed 0
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from fedsim.errors import FedsimError, Interrupted
from fedsim.experiment import Experiment
from launch.configuration.execution import Execution
from launch.runs.folder import RunFolder
from launch.session.recorder import Recorder
from launch.session.run import launch, resume
from tests.support.reproducible import without_seconds
from tests.support.snapshots import snapshot

IDENTICAL, REFUSED, DIFFERENT, FAILED = "identical", "refused", "DIFFERENT", "FAILED"
OUTCOMES = (IDENTICAL, REFUSED, DIFFERENT, FAILED)
LINK = {"link": "up=1mbit,down=1mbit,rtt=10ms", "compute": "0.3ms,noise=0.5", "deadline": "200ms"}
RAW = ("zip()", "invalid literal", "Expecting", "codec can't decode", "Traceback")
"""What libraries say, and a user must not have to read."""


@dataclass(frozen=True)
class Ending:
    """When a run ends for the first time.

    Attributes:
        when: "committed": its ledger rows are written, and its checkpoint is not. "evaluated": its line of
            metrics.jsonl is written.
        round: The round that this is said of.
        signal: It is interrupted and writes its summary; otherwise it is killed.
        again: It is resumed, and killed when this round is evaluated.
    """

    when: str
    round: int
    signal: bool = False
    again: int = 0


RUNS: dict[str, tuple[dict[str, Any], Ending]] = {
    "lossy": (
        {"algo": "fedlap_cov", "participation": "0.7+lost:0.2", "hyperparameters": {"local.epochs": 1}},
        Ending("evaluated", 6),
    ),
    "two exchanges": (
        {"algo": "mime", "participation": "0.5+lost:0.3+gone:0.2"},
        Ending("committed", 6),
    ),
    "not every round evaluated": ({"algo": "fedavg", "eval_every": 3}, Ending("committed", 7, signal=True)),
    "set-up": ({"algo": "precond_admm", "participation": "0.5+lost:0.2"}, Ending("evaluated", 2)),
    "late": ({"algo": "fedavg", **LINK}, Ending("evaluated", 5)),
    "target reached": ({"algo": "fedavg", "rounds": 14, "until": 0.79}, Ending("evaluated", 7)),
    "killed twice": ({"algo": "fedadmm", "participation": "0.6+lost:0.3"}, Ending("evaluated", 3, again=6)),
    "asynchronous": (
        {"algo": "fedavg", "asynchronous": "fedbuff:2", "compute": "3ms,noise=0.5"},
        Ending("evaluated", 6),
    ),
}
"""What differs from four clients, eight rounds and the logistic model."""
SMALL = {"clients": 3, "rounds": 5, "participation": "0.7"}
EXCHANGED: dict[str, tuple[dict[str, Any], Ending]] = {
    "states with a version in their mark": ({"algo": "fedadmm", **SMALL}, Ending("evaluated", 3)),
    "small states": ({"algo": "scaffold", **SMALL}, Ending("committed", 4)),
    "states of several clients in flight": (
        {
            "algo": "fedadmm",
            "hyperparameters": {"silent": "last"},
            "asynchronous": "fedbuff:1",
            "compute": "3ms,noise=0.5",
            "clients": 3,
            "rounds": 5,
        },
        Ending("evaluated", 4),
    ),
}
"""Runs whose files are exchanged."""


@contextmanager
def at(when: str, round: int, do: Callable[[], None]) -> Iterator[None]:
    """Call `do` when a round of a run of this process was committed or evaluated."""
    method = getattr(Recorder, when)

    def watched(self: Recorder, what: Any, *more: Any) -> Any:
        result = method(self, what, *more)
        if (what["round"] if when == "evaluated" else what.round) == round:
            do()
        return result

    setattr(Recorder, when, watched)
    try:
        yield
    finally:
        setattr(Recorder, when, method)


@dataclass(frozen=True)
class Base:
    """An interrupted run, and what comes of it."""

    folder: Path
    expected: dict[str, Any]

    @staticmethod
    def of(name: str, home: Path, **changes: Any) -> Base:
        """Carry a run out, and keep what its folder held when it ended for the first time."""
        described, ending = (RUNS | EXCHANGED)[name]
        experiment = Experiment(**{"model": "logistic", "clients": 4, "rounds": 8, **described, **changes})
        whole, left = home / "whole", home / "left"
        with at(ending.when, ending.round, lambda: _end(whole, left, ending.signal)):
            try:
                launch(experiment, Execution(workers=0, devices="cpu", out=str(whole)), quiet=True)
            except Interrupted:
                snapshot(whole, left)
                resume(whole, {}, quiet=True)
        if ending.again:
            first = left.rename(home / "first")
            with at("evaluated", ending.again, lambda: _end(first, left, signal=False)):
                resume(first, {}, quiet=True)
        return Base(left, facts(whole))


def _end(folder: Path, left: Path, signal: bool) -> None:
    if signal and not left.exists():
        raise Interrupted("interrupted")
    if not signal:
        snapshot(folder, left)


def facts(folder: Path) -> dict[str, Any]:
    """All that must be the same; the files of the run that has ended are compared with its summary."""
    run = RunFolder.open(folder).checked()
    keys = (
        "status",
        "rounds",
        "model_sha256",
        "clients_sha256",
        "took_part",
        "folded",
        "bytes_down",
        "bytes_up",
    )
    own = run.ledger[run.ledger.kind == "algorithm"].drop(columns="worker")
    rows = sorted(own.itertuples(index=False, name=None))
    return {key: run.summary[key] for key in keys} | {"metrics": without_seconds(run.lines), "ledger": rows}


# ---- what happens to a file


def _place(data: bytes, random: Random) -> int:
    return random.randrange(len(data))


def flip(data: bytes, random: Random) -> bytes:
    changed, where = bytearray(data), _place(data, random)
    changed[where] ^= 1 << random.randrange(8)
    return bytes(changed)


def byte(data: bytes, random: Random) -> bytes:
    changed, where = bytearray(data), _place(data, random)
    changed[where] = random.randrange(256)
    return bytes(changed)


def digit(data: bytes, random: Random) -> bytes:
    places = [where for where, one in enumerate(data) if one in b"0123456789"]
    changed = bytearray(data)
    if places:
        changed[random.choice(places)] = random.choice(b"0123456789")
    return bytes(changed)


def cut(data: bytes, random: Random) -> bytes:
    return data[: _place(data, random)]


def empty(data: bytes, random: Random) -> bytes:
    return b""


def duplicate(data: bytes, random: Random) -> bytes:
    """A line twice; of a file without lines, a block."""
    lines = data.splitlines(keepends=True)
    if len(lines) > 1:
        where = random.randrange(len(lines))
        return b"".join([*lines[: where + 1], *lines[where:]])
    where = _place(data, random)
    return data[: where + 16] + data[where:]


def swap(data: bytes, random: Random) -> bytes:
    """Two blocks of equal length change places."""
    if len(data) < 4:
        return data[::-1]
    size = random.randint(1, min(64, len(data) // 2))
    one = random.randrange(len(data) - 2 * size + 1)
    other = random.randrange(one + size, len(data) - size + 1)
    middle = data[one + size : other]
    return data[:one] + data[other : other + size] + middle + data[one : one + size] + data[other + size :]


CHANGES: dict[str, Callable[[bytes, Random], bytes]] = {
    "flip": flip,
    "byte": byte,
    "digit": digit,
    "cut": cut,
    "empty": empty,
    "duplicate": duplicate,
    "swap": swap,
}
DELETE = "delete"
ATTEMPTS = 20
"""So often, a change that changes nothing is drawn again; there may be no digit. Then a byte is appended."""


# ---- trials


@dataclass(frozen=True)
class Trial:
    """One change of one file, and what came of it."""

    seed: int
    run: str
    file: str
    kind: str
    outcome: str = ""
    message: str = ""

    @property
    def group(self) -> str:
        """The file's name; of checkpoints and states their kind."""
        return self.file.split("/")[0]

    @property
    def good(self) -> bool:
        return self.outcome in (IDENTICAL, REFUSED)

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {self.run!r}, {self.kind} {self.file}: {self.outcome} {self.message}".rstrip()
        )


def trial(bases: dict[str, Base], seed: int, home: Path) -> Trial:
    """Change one file of one run as the seed says, resume, and compare."""
    random = Random(seed)
    name = random.choice(sorted(bases))
    folder = shutil.copytree(bases[name].folder, home / f"trial-{seed}")
    files = files_of(folder)
    groups = sorted({file.split("/")[0] for file in files})
    group = random.choice(groups)
    file = random.choice([file for file in files if file.split("/")[0] == group])
    kind = random.choice([*CHANGES, DELETE])
    path = folder / file
    if kind == DELETE:
        path.unlink()
    else:
        before = path.read_bytes()
        tried = (CHANGES[kind](before, random) for _ in range(ATTEMPTS))
        after = next((data for data in tried if data != before), before + b"0")
        path.unlink()  # a state may be a link to the one before
        path.write_bytes(after)
    outcome, message = _resumed(folder, bases[name].expected)
    shutil.rmtree(folder)
    return replace(Trial(seed, name, file, kind), outcome=outcome, message=message)


def files_of(folder: Path) -> list[str]:
    """The files of a run that its resume may read."""
    files = (str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file())
    return [f for f in files if not f.startswith(("lock", "logs", ".")) and (folder / f).stat().st_size]


def exchanged(base: Base, one: str, other: str, home: Path, of: Base | None = None) -> Trial:
    """Let two files of an interrupted run change places, resume, and compare.

    Args:
        base: The run.
        one: A file of it.
        other: Another one.
        home: A folder for it.
        of: The run that `other` belongs to; it is copied to the place of `one` then.
    """
    folder = shutil.copytree(base.folder, home / "exchanged")
    contents = {one: ((of or base).folder / other).read_bytes()}
    if of is None:
        contents[other] = (base.folder / one).read_bytes()
    for file, data in contents.items():
        (folder / file).unlink()  # a state may be a link to the one before
        (folder / file).write_bytes(data)
    outcome, message = _resumed(folder, base.expected)
    shutil.rmtree(folder)
    return Trial(0, "", f"{one} <-> {other}", "exchange", outcome, message)


def _resumed(folder: Path, expected: dict[str, Any]) -> tuple[str, str]:
    try:
        resume(folder, {}, quiet=True)
        ended = facts(folder)
    except FedsimError as e:
        message = str(e)
        clear = message.strip() and "\n" not in message and not any(word in message for word in RAW)
        return (REFUSED if clear else FAILED), message
    except Exception as e:  # a user would see a traceback
        return FAILED, repr(e)
    differs = [key for key in expected if ended[key] != expected[key]]
    return (DIFFERENT, f"in {', '.join(differs)}") if differs else (IDENTICAL, "")


def table(trials: list[Trial], of: Callable[[Trial], str]) -> str:
    """Counts of outcomes, a line per file or kind."""
    counts: dict[str, Counter[str]] = {}
    for one in trials:
        counts.setdefault(of(one), Counter())[one.outcome] += 1
    head = f"{'':18}{'trials':>8}" + "".join(f"{outcome:>11}" for outcome in OUTCOMES)
    lines = [
        f"{name:18}{counter.total():>8}" + "".join(f"{counter[outcome]:>11}" for outcome in OUTCOMES)
        for name, counter in sorted(counts.items())
    ]
    return "\n".join([head, *lines])


def bases(home: Path) -> dict[str, Base]:
    """All interrupted runs."""
    result = {}
    for number, name in enumerate(RUNS):
        (home / str(number)).mkdir()
        result[name] = Base.of(name, home / str(number))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trials", type=int, default=734)
    parser.add_argument("--seed", type=int, default=0, help="of the first; then one more each")
    parser.add_argument("--verbose", action="store_true", help="print every trial")
    selected = parser.parse_args()
    began, trials = time.monotonic(), []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        interrupted = bases(Path(folder))
        for seed in range(selected.seed, selected.seed + selected.trials):
            trials.append(trial(interrupted, seed, Path(folder)))
            if selected.verbose or not trials[-1].good:
                print(trials[-1], flush=True)
    print(table(trials, lambda one: one.group))
    print(table(trials, lambda one: one.kind))
    print(table(trials, lambda one: one.run))
    good = sum(one.good for one in trials)
    print(f"{good} of {len(trials)} identical or refused in one line, in {time.monotonic() - began:.0f} s")
    raise SystemExit(good < len(trials))


if __name__ == "__main__":
    main()
