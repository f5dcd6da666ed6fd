"""The power is cut, or the process dies, after any operation of a run, and the disk may hold whatever POSIX
allows then: no round is lost whose checkpoint was durable, and the run goes on to the same bits (fault F3;
ALICE, OSDI 2014).

A file surely holds what it held at its last fsync, a folder names what it named at its own. Of what was
written, created, renamed, linked and removed since, any part may have reached the disk: see RULES.
"""

from __future__ import annotations

import builtins
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from fedsim.errors import FedsimError
from fedsim.experiment import Experiment, build_algorithm
from fedsim.problem import Problem
from launch.configuration.execution import Execution
from launch.runs.resume import Resumption
from launch.runs.summary import stored_model_digest
from launch.session.run import launch, resume
from protocols import find
from tests.launch.test_nth_fault import digests
from tests.support.reproducible import fresh_processes
from workers.storage import atomic_files, durability
from workers.storage.client_states import ClientStates
from workers.storage.durability import Durability
from workers.storage.recovery import NOTHING, recover

pytestmark = [pytest.mark.process, pytest.mark.chaos]

ROUNDS = 6
DIED = 77
RESUMED = 6
"""How many of a run's crash states go on to the end; by hand, all of them did."""


# ---- what is written down


class Names(msgspec.Struct, tag=True):
    """A folder names other files now; None: no longer."""

    folder: int
    names: dict[str, int | None]


class Content(msgspec.Struct, tag=True):
    file: int
    data: bytes


class Fsync(msgspec.Struct, tag=True):
    """Of a file or a folder."""

    what: int


Operation = Names | Content | Fsync
ROOT = 0


@dataclass
class Recorder:
    """Looks at a folder before and after every call that may change it, and writes down what has changed.

    Files and folders have numbers of their own, because the file system gives an inode's to another file.
    """

    root: Path
    log: list[Operation] = field(default_factory=list)
    names: dict[int, dict[str, int]] = field(default_factory=dict)
    held: dict[int, bytes] = field(default_factory=dict)
    numbers: dict[int, int] = field(default_factory=dict)
    supplied: int = ROOT

    def look(self) -> None:
        live: set[int] = set()
        try:
            self._folder(self.root, self._number(self.root.stat().st_ino, live), live)
        except FileNotFoundError:  # safetensors renames where nobody watches
            self.look()
        else:
            self.numbers = {inode: n for inode, n in self.numbers.items() if inode in live}

    def _number(self, inode: int, live: set[int]) -> int:
        live.add(inode)
        if inode not in self.numbers:
            self.numbers[inode], self.supplied = self.supplied, self.supplied + 1
        return self.numbers[inode]

    def _folder(self, path: Path, me: int, live: set[int]) -> None:
        entries = [(e, self._number(e.inode(), live)) for e in os.scandir(path)]
        for number in [me, *(number for e, number in entries if e.is_dir())]:
            if number not in self.names:  # a folder before anything names it
                self.names[number] = {}
                self.log.append(Names(number, {}))
        now, before = {e.name: number for e, number in entries}, self.names[me]
        changed = {name: now.get(name) for name in before | now if now.get(name) != before.get(name)}
        if changed:
            self.log.append(Names(me, changed))
        self.names[me] = now
        for entry, number in entries:
            if entry.is_dir():
                self._folder(Path(entry.path), number, live)
            elif (data := Path(entry.path).read_bytes()) != self.held.get(number, b""):
                self.log.append(Content(number, data))
                self.held[number] = data

    def synced(self, handle: int) -> None:
        number = self.numbers.get(os.fstat(handle).st_ino)
        if number is not None:
            self.log.append(Fsync(number))

    def watch(self, until: Callable[[Recorder], None] = lambda recorder: None) -> None:
        """Put it in the way of everything that reaches the disk. until: called after every operation."""
        lock = threading.RLock()

        def watched(real: Callable[..., Any]) -> Callable[..., Any]:
            def shim(*supplied: Any, **more: Any) -> Any:
                with lock:
                    self.look()
                    done = real(*supplied, **more)
                    self.look()
                    until(self)
                    return done

            return shim

        for name in ("rename", "link", "unlink", "mkdir", "write", "ftruncate"):
            setattr(os, name, watched(getattr(os, name)))
        os.fsync = watched(self.synced)  # the disk itself need not be troubled
        atomic_files.open = watched(builtins.open)  # type: ignore[attr-defined]


# ---- what a disk may hold afterwards

Tree = dict[str, bytes | None]
"""By path; None: a folder."""


def common(one: bytes, other: bytes) -> int:
    """How many bytes from the start on."""
    if other.startswith(one):
        return len(one)
    differ = (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))


def zeros(synced: bytes, now: bytes) -> bytes:
    """The file has its length, and not what was appended."""
    return now[: common(synced, now)].ljust(len(now), b"\0")


def torn(synced: bytes, now: bytes, random: Random) -> bytes:
    at = common(synced, now)
    return now[: random.randint(at, len(now))]


@dataclass
class Disk:
    """Every name and every file with its values since the last fsync: the first is sure, the last is seen."""

    names: dict[int, dict[str, list[int | None]]] = field(default_factory=dict)
    held: dict[int, list[bytes]] = field(default_factory=dict)

    def apply(self, operation: Operation) -> None:
        match operation:
            case Names(folder, names):
                entries = self.names.setdefault(folder, {})
                for name, what in names.items():
                    entries.setdefault(name, [None]).append(what)
            case Content(file, data):
                self.held.setdefault(file, [b""]).append(data)
            case Fsync(what) if what in self.names:
                self.names[what] = {name: values[-1:] for name, values in self.names[what].items()}
            case Fsync(what):
                self.held[what] = self.held.get(what, [b""])[-1:]

    def tree(self, names: Callable[..., int | None], held: Callable[..., bytes]) -> Tree:
        """names and held choose one of the values."""
        result: Tree = {}
        selected = {file: held(values) for file, values in self.held.items()}

        def enter(folder: int, path: str) -> None:
            for name, values in self.names.get(folder, {}).items():
                what = names(values)
                if what is not None:
                    result[path + name] = None if what in self.names else selected.get(what, b"")
                    enter(what, path + name + "/")

        enter(ROOT, "")
        return result


RULES: dict[str, Callable[[Disk, Random], Tree]] = {
    "all that was written": lambda disk, _: disk.tree(lambda v: v[-1], lambda v: v[-1]),
    "only what was synced": lambda disk, _: disk.tree(lambda v: v[0], lambda v: v[0]),
    "names, and files as synced": lambda disk, _: disk.tree(lambda v: v[-1], lambda v: v[0]),
    "names, and zeros": lambda disk, _: disk.tree(lambda v: v[-1], lambda v: zeros(v[0], v[-1])),
    "names, and torn files": lambda disk, r: disk.tree(lambda v: v[-1], lambda v: torn(v[0], v[-1], r)),
    **{
        f"each as it comes, {share:g} of it": lambda disk, r, share=share: by_chance(disk, r, share)
        for share in (0.6, 0.95)
    },
}


def by_chance(disk: Disk, random: Random, share: float) -> Tree:
    """Every name and every file for itself is as seen, or else any other way that it may be."""

    def names(values: list[int | None]) -> int | None:
        return values[-1] if random.random() < share else random.choice(values)

    def held(values: list[bytes]) -> bytes:
        synced, now = values[0], values[-1]
        if random.random() < share:
            return now
        return random.choice([*values, zeros(synced, now), torn(synced, now, random)])

    return disk.tree(names, held)


@dataclass(frozen=True)
class Cut:
    """What a disk may hold after a power cut. floor: the newest round whose checkpoint was durable then."""

    where: str
    tree: Tree
    floor: int
    ledger: bytes
    """All that had been written."""


def cuts(log: list[Operation], start: int, whole: dict[str, bytes]) -> Iterator[Cut]:
    """Those after every operation from `start` on; each tree once."""
    disk, floor, seen = Disk(), NOTHING, set[Any]()
    for at, operation in enumerate(log):
        disk.apply(operation)
        sure = RULES["only what was synced"](disk, Random())
        floor = max([floor, *(round_of(path) for path in sure if whole.get(path, 0) == sure[path])])
        if at < start:
            continue
        ledger = disk.tree(lambda v: v[-1], lambda v: v[-1]).get("run/ledger.csv") or b""
        for rule, apply in RULES.items():
            tree = apply(disk, Random(f"{at} {rule}"))
            if (key := (floor, frozenset(tree.items()))) not in seen:
                seen.add(key)
                yield Cut(f"{rule}, after operation {at}", tree, floor, ledger)


def round_of(path: str) -> int:
    """Of a checkpoint's path; of any other NOTHING."""
    result = re.fullmatch(r"run/checkpoints/(\d+)\.checkpoint", path)
    return int(result[1]) if result else NOTHING


@dataclass
class Folder:
    """A folder that holds one tree after another, in links to what was written once."""

    home: Path
    holds: Tree = field(default_factory=dict)

    def __post_init__(self) -> None:
        for folder in (self.root, self.pool):
            folder.mkdir()

    @property
    def root(self) -> Path:
        return self.home / "after"

    @property
    def pool(self) -> Path:
        return self.home / "pool"

    def hold(self, tree: Tree) -> Path:
        """Returns the run's folder, only to be read."""
        for path in sorted(self.holds.keys() - tree.keys(), reverse=True):  # a folder after what is in it
            (self.root / path).rmdir() if self.holds[path] is None else (self.root / path).unlink()
        for path, data in tree.items():  # a folder before what is in it
            if data is None:
                (self.root / path).mkdir(exist_ok=True)
            elif data != self.holds.get(path):
                (self.root / path).unlink(missing_ok=True)
                (self.root / path).hardlink_to(self._once(data))
        self.holds = tree
        return self.root / "run"

    def _once(self, data: bytes) -> Path:
        path = self.pool / sha256(data).hexdigest()
        if not path.exists():
            path.write_bytes(data)
        return path


# ---- what is done with it, each in a process of its own


def first_start(
    folder: str, experiment: Experiment, seconds: float, dies_at: str, survives: Durability
) -> None:
    """Record a run; dies_at: the file's name with whose first appearance it is killed -9."""
    durability.SYNC_SECONDS = seconds
    recorder = Recorder(Path(folder) / "disk")
    recorder.root.mkdir()

    def dies(recorder: Recorder) -> None:
        if any(dies_at in names for names in recorder.names.values()):
            keep(folder, recorder)
            os._exit(DIED)

    recorder.watch(dies)
    atomic_files.SPARE_BYTES = 0  # every state and checkpoint is written over one that is needed no more
    run = str(recorder.root / "run")
    launch(experiment, Execution(workers=0, out=run, durability=survives), quiet=True)
    keep(folder, recorder)


def second_start(folder: str) -> None:
    """Go on with the record and with the run, whose files are what they were."""
    recorder = kept(Path(folder))
    recorder.watch()
    resume(recorder.root / "run", {}, quiet=True)
    keep(folder, recorder)


def keep(folder: str, recorder: Recorder) -> None:
    recorder.look()
    (Path(folder) / "record").write_bytes(msgspec.msgpack.encode(recorder, enc_hook=str))


def kept(folder: Path) -> Recorder:
    """The record that an earlier process has left."""
    data = (folder / "record").read_bytes()
    return msgspec.msgpack.decode(data, type=Recorder, dec_hook=lambda kind, text: kind(text))


def check(path: str, start: int, experiment: Experiment, survives: Durability) -> None:
    """Recover from every crash state, and go on from a sample of them; leaves a report.

    With durability = process a run may refuse to go on, and what it goes on from is right all the same.
    """
    os.fsync = lambda handle: None
    home = Path(path)
    log = kept(home).log
    problem = Problem.build(
        experiment, build_algorithm(find(experiment.algo), experiment.hyperparameters), None
    )
    launch(experiment, Execution(workers=0, out=str(home / "undisturbed")), quiet=True)
    expected, whole = digests(home / "undisturbed"), contents(log)
    assert digests(home / "disk" / "run") == expected
    created = list(cuts(log, start, whole))
    wrong: list[str] = []
    result: list[int] = []
    refused = 0
    folder = Folder(home)
    for cut in created:
        run = folder.hold(cut.tree)
        try:
            result.append(recovered(run, cut, problem, whole))
            if complete(run):
                compare(run, problem, expected)
        except FedsimError as e:
            refused += 1
            if survives == "power":
                wrong.append(f"{cut.where}: {e!r}")
        except Exception as e:  # of whatever kind: the next state is of interest, too
            wrong.append(f"{cut.where}: {e!r}")
    sample = Random(0).sample(created, min(RESUMED, len(created)))
    for n, cut in enumerate(sample):
        folder.hold(cut.tree)
        run = shutil.copytree(folder.root, home / f"after-{n}") / "run"
        try:
            if not complete(run):
                resume(run, {}, quiet=True)
            compare(run, problem, expected)
        except FedsimError as e:  # without a manifest it never became a run
            if survives == "power" and (cut.floor > NOTHING or "manifest.json" not in str(e)):
                wrong.append(f"{cut.where}, resumed: {e!r}")
        except Exception as e:
            wrong.append(f"{cut.where}, resumed: {e!r}")
        shutil.rmtree(run.parent)
    report = {
        "prefixes": len(log) - start,
        "states": len(created),
        "resumed": len(sample),
        "durable": sorted({cut.floor for cut in created}),
        "found": sorted(set(result)),
        "refused": refused,
        "written over": written_over(log),
        "wrong": wrong,
    }
    (home / "report").write_text(json.dumps(report))


def contents(log: list[Operation]) -> dict[str, bytes]:
    """Checkpoints and states by path, as they were when they were whole."""
    disk, result = Disk(), {}
    for operation in log:
        disk.apply(operation)
        if isinstance(operation, Names):
            result |= disk.tree(lambda v: v[-1], lambda v: v[-1])
    return {path: data for path, data in result.items() if data and path.endswith(("checkpoint", ".state"))}


def written_over(log: list[Operation]) -> int:
    """How often a state's file that was needed no more was written over by a later one."""
    names = (operation.names for operation in log if isinstance(operation, Names))
    return sum(name == atomic_files.SPARE and what is None for of in names for name, what in of.items())


def recovered(run: Path, cut: Cut, problem: Problem, whole: dict[str, bytes]) -> int:
    """The round that it goes on after, which has all that it needs."""
    recovery = recover(run, problem)
    assert recovery.round >= cut.floor, f"round {cut.floor} was durable, {recovery.round} is left"
    assert (run / "manifest.json").exists() or cut.floor == NOTHING, "there is no manifest"
    if recovery.checkpoint is not None:
        states = ClientStates(run / "state", problem.algorithm.client_type)
        files = [run / "checkpoints" / f"{recovery.round:06d}.checkpoint"]
        files += [states.path(k, v) for k, v in enumerate(recovery.checkpoint.versions.tolist()) if v]
        for path in files:
            assert path.exists(), f"{path} is named and missing"
            assert path.read_bytes() == whole[str(path.relative_to(run.parent))], f"{path} is not whole"
        ledger = (run / "ledger.csv").read_bytes()[: recovery.ends.get("ledger.csv", 0)]
        assert ledger.endswith(b"\n") and cut.ledger.startswith(ledger), "the ledger is not whole"
        assert set(recovery.commits) >= set(range(1, recovery.round + 1)), "the journal is not whole"
    return recovery.round


def complete(run: Path) -> bool:
    return (run / "manifest.json").exists() and Resumption.open(run).complete


def compare(run: Path, problem: Problem, expected: dict[str, Any]) -> None:
    assert digests(run) == expected
    assert stored_model_digest(run / "model.safetensors", problem.net.layout) == expected["model_sha256"]


@pytest.fixture(scope="module")
def alone() -> Callable[..., int]:
    return fresh_processes(__name__, 120.0)


@pytest.mark.parametrize(
    ("algo", "participation", "seconds", "dies_at", "survives"),
    [
        ("fedlap", "full", 0.0, "", "power"),
        ("fedlap", "full", durability.SYNC_SECONDS, "", "power"),
        ("fedavg", "full", durability.SYNC_SECONDS, "", "power"),
        ("fedlap", "0.5", durability.SYNC_SECONDS, "000003.checkpoint", "power"),
        ("fedlap", "full", 0.0, "", "process"),
    ],
    ids=[
        *("synced every round", "synced at first and at last", "linked states", "killed and resumed"),
        "never synced",
    ],
)
def test_a_power_cut_costs_at_most_the_rounds_not_yet_synced(
    algo: str,
    participation: str,
    seconds: float,
    dies_at: str,
    survives: Durability,
    alone: Callable[..., int],
    tmp_path: Path,
) -> None:
    experiment = Experiment(
        algo=algo,
        clients=2,
        rounds=ROUNDS,
        model="logistic",
        participation=participation,
        hyperparameters={"local.epochs": 1},
    )
    folder, start = str(tmp_path), 0
    assert alone(first_start, folder, experiment, seconds, dies_at, survives) == (DIED if dies_at else 0)
    if dies_at:
        start = len(kept(tmp_path).log)
        assert alone(second_start, folder) == 0
    assert alone(check, folder, start, experiment, survives) == 0
    report = json.loads((tmp_path / "report").read_text())
    print(report | {"wrong": len(report["wrong"])})
    assert not report["wrong"], "\n".join(report["wrong"][:20])
    assert report["found"][-1] == ROUNDS
    if survives == "power":
        assert report["durable"][-1] == ROUNDS
    else:
        assert report["refused"]
    if not seconds and survives == "power":
        assert len(report["durable"]) > 3
    if not seconds:
        assert report["written over"]
