"""Files of an interrupted run are changed, and the run is resumed (fault F12).

The result is that of an undisturbed run, or the run is refused in one line. A trial's seed chooses the run,
the file, and what happens to it: a bit is flipped or a digit replaced; the file is cut or deleted; a line is
duplicated, or two blocks are swapped. A failure names the seed that replays it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from fedsim.errors import FedsimError, Interrupted
from fedsim.experiment import Experiment
from launch.configuration.execution import Execution
from launch.runs.folder import RunFolder
from launch.session.run import launch, resume
from tests.support.reproducible import without_seconds
from tests.support.snapshots import at, snapshot

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

SEEDS = range(10_000, 10_036)
IDENTICAL, REFUSED = "identical", "refused"
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
    "two exchanges": ({"algo": "mime", "participation": "0.5+lost:0.3+gone:0.2"}, Ending("committed", 6)),
    "not every round evaluated": ({"algo": "fedavg", "eval_every": 3}, Ending("committed", 7, signal=True)),
    "killed twice": ({"algo": "fedadmm", "participation": "0.6+lost:0.3"}, Ending("evaluated", 3, again=6)),
}
"""What differs from four clients, eight rounds and the logistic model."""


@dataclass(frozen=True)
class Base:
    """An interrupted run, and what comes of it."""

    folder: Path
    expected: dict[str, Any]

    @staticmethod
    def of(described: dict[str, Any], ending: Ending, home: Path) -> Base:
        """Carry a run out, and keep what its folder held when it ended for the first time."""
        experiment = Experiment(**{"model": "logistic", "clients": 4, "rounds": 8, **described})
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
    """Read all that must be the same; the files of the run that has ended are compared with its summary."""
    run = RunFolder.open(folder).checked()
    keys = ("status", "rounds", "model_sha256", "clients_sha256", "took_part", "folded")
    keys += ("bytes_down", "bytes_up")
    own = run.ledger[run.ledger.kind == "algorithm"].drop(columns="worker")
    rows = sorted(own.itertuples(index=False, name=None))
    return {key: run.summary[key] for key in keys} | {"metrics": without_seconds(run.lines), "ledger": rows}


# ---- what happens to a file


def flip(data: bytes, random: Random) -> bytes:
    changed, where = bytearray(data), random.randrange(len(data))
    changed[where] ^= 1 << random.randrange(8)
    return bytes(changed)


def digit(data: bytes, random: Random) -> bytes:
    places = [where for where, one in enumerate(data) if one in b"0123456789"]
    changed = bytearray(data)
    if places:
        changed[random.choice(places)] = random.choice(b"0123456789")
    return bytes(changed)


def cut(data: bytes, random: Random) -> bytes:
    return data[: random.randrange(len(data))]


def duplicate(data: bytes, random: Random) -> bytes:
    """Repeat a line; of a file without lines, a block."""
    lines = data.splitlines(keepends=True)
    if len(lines) > 1:
        where = random.randrange(len(lines))
        return b"".join([*lines[: where + 1], *lines[where:]])
    where = random.randrange(len(data))
    return data[: where + 16] + data[where:]


def swap(data: bytes, random: Random) -> bytes:
    """Let two blocks of equal length change places."""
    if len(data) < 4:
        return data[::-1]
    size = random.randint(1, min(64, len(data) // 2))
    one = random.randrange(len(data) - 2 * size + 1)
    other = random.randrange(one + size, len(data) - size + 1)
    middle = data[one + size : other]
    return data[:one] + data[other : other + size] + middle + data[one : one + size] + data[other + size :]


CHANGES: tuple[Callable[[bytes, Random], bytes], ...] = (flip, digit, cut, duplicate, swap)
ATTEMPTS = 20
"""So often, a change that changes nothing is drawn again; there may be no digit. Then a byte is appended."""


def changed(base: Base, random: Random, home: Path) -> tuple[str, str]:
    """Change a file of a run, or delete it, and resume; returns the outcome, and what was done."""
    folder = shutil.copytree(base.folder, home / "changed")
    files = files_of(folder)
    group = random.choice(sorted({file.split("/")[0] for file in files}))
    file = random.choice([file for file in files if file.split("/")[0] == group])
    change = random.choice([*CHANGES, None])
    before = (folder / file).read_bytes()
    (folder / file).unlink()  # a state may be a link to the one before
    if change is not None:
        tried = (change(before, random) for _ in range(ATTEMPTS))
        (folder / file).write_bytes(next((data for data in tried if data != before), before + b"0"))
    outcome = _resumed(folder, base.expected)
    shutil.rmtree(folder)
    return outcome, f"{change.__name__ if change else 'delete'} {file}: {outcome}"


def files_of(folder: Path) -> list[str]:
    """List the files of a run that its resume may read."""
    files = (str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file())
    return [f for f in files if not f.startswith(("lock", "logs", ".")) and (folder / f).stat().st_size]


def _resumed(folder: Path, expected: dict[str, Any]) -> str:
    """Resume a run; returns how it ended, which is good only if it is IDENTICAL or REFUSED."""
    try:
        resume(folder, {}, quiet=True)
        ended = facts(folder)
    except FedsimError as e:
        message = str(e)
        clear = message.strip() and "\n" not in message and not any(word in message for word in RAW)
        return REFUSED if clear else message
    except Exception as e:  # a user would see a traceback
        return repr(e)
    differs = [key for key in expected if ended[key] != expected[key]]
    return f"different in {', '.join(differs)}" if differs else IDENTICAL


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Base]:
    return {name: Base.of(*RUNS[name], tmp_path_factory.mktemp("interrupted")) for name in RUNS}


def test_a_run_with_a_changed_file_goes_on_identically_or_is_refused(
    interrupted: dict[str, Base], tmp_path: Path
) -> None:
    outcomes = set()
    for seed in SEEDS:
        random = Random(seed)
        name = random.choice(sorted(interrupted))
        outcome, what = changed(interrupted[name], random, tmp_path)
        assert outcome in (IDENTICAL, REFUSED), f"seed {seed}: {name!r}, {what}"
        outcomes.add(outcome)
    assert outcomes == {IDENTICAL, REFUSED}
