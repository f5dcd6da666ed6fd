"""The round machine under a random world: workers, losses and orders of events drawn from a seed.

The simulator carries out every command as a coordinator would and asserts, command by command, what
must hold whatever the order; the schedule alone says what the outcome must be.
"""

from __future__ import annotations

import copy
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings, strategies as st

from fedsim.participation import Participation
from fedsim.round_events import (
    Arrived,
    ChunkId,
    Close,
    Command,
    Commit,
    Drop,
    Event,
    Finish,
    Folded,
    Give,
    Joined,
    Left,
    Open,
    Rejected,
    Release,
    ScoreChunk,
    Scored,
    TaskId,
    WorkItem,
)
from fedsim.round_machine import MAX_EVALUATIONS_BEHIND, ProtocolError, RoundMachine
from workers.coordinator.membership import Leases

MOST_HELD = 2
"""Tasks per lane."""
fixed = settings(deadline=None, derandomize=True, database=None, max_examples=80)


@dataclass(frozen=True)
class World:
    """What an experiment fixes: everything that may change the outcome."""

    clients: int
    rounds: int
    exchanges: int
    participations: tuple[Participation, ...]
    chunks: int
    eval_every: int
    setup: int = 0
    reaching: tuple[int, ...] | None = None
    """The rounds whose models have the target accuracy; None: there is no target."""
    lanes: int = 1
    ahead: bool = True

    @staticmethod
    def drawn(rng: random.Random) -> World:
        clients, rounds = rng.randint(1, 6), rng.randint(0, 6)
        participations = []
        for _ in range(rounds):
            participants = rng.sample(range(clients), rng.choice([0, 1, clients // 2, clients, clients]))
            lost = frozenset(k for k in participants if rng.random() < rng.choice([0, 0.3, 1]))
            dropouts = frozenset(k for k in participants if rng.random() < rng.choice([0, 0, 0.3, 1]))
            participations.append(Participation(tuple(sorted(participants)), lost - dropouts, dropouts))
        return World(
            clients,
            rounds,
            rng.randint(1, 2),
            tuple(participations),
            rng.choice([0, 1, 3]),
            rng.randint(1, 3),
            lanes=rng.choice([1, 1, 2, 3]),
            ahead=rng.choice([True, True, False]),
        )

    def participation(self, round: int) -> Participation:
        return self.participations[round - 1]

    def machine(self, cost: Callable[[int], float] = float) -> RoundMachine:
        return RoundMachine(
            self.rounds,
            self.exchanges,
            self.participation,
            [0] * self.clients,
            cost,
            self.chunks,
            self.eval_every,
            self.setup,
            has_target=self.reaching is not None,
            lanes=self.lanes,
            ahead=self.ahead,
        )

    def evaluated(self) -> list[int]:
        every = [r for r in range(self.rounds + 1) if r % self.eval_every == 0 or r == self.rounds]
        return [r for r in every if r <= self.last]

    @property
    def last(self) -> int:
        """The last round that is carried out."""
        rounds = range(1, self.rounds + 1)
        evaluated = [r for r in rounds if self.chunks and (r % self.eval_every == 0 or r == self.rounds)]
        return next((r for r in evaluated if r in (self.reaching or ())), self.rounds)

    def expected(self) -> list[Command]:
        """All commands but Give, Score and Finish, in their only possible order."""
        out: list[Command] = []
        versions, folds = [0] * self.clients, 0
        for r, participation in enumerate(self.participations[: self.last], 1):
            participants = participation.participants
            here = tuple(k for k in participants if k not in participation.dropouts)
            folded = tuple(k for k in here if k not in participation.lost_uploads)
            for e in range(1, self.exchanges + 1) if participants else ():
                if e > 1 and not here:
                    break
                receivers = here if e > 1 else participants
                out.append(Open(r, e, receivers, bool(folded), folds, len(participants)))
                out += [Drop(k) if k in participation.lost_uploads else Release(k) for k in here]
                out += [Close()] if folded else []
            for k in folded:
                versions[k] = r * self.exchanges
            folds += bool(folded)
            out.append(Commit(r, participants, folded, tuple(versions), folds))
        return out

    def tasks(self) -> set[TaskId]:
        """Every task with the version it starts from: the last committed one, or within a round the draft
        of the exchange before, folded or not."""
        out = set()
        versions = [0] * self.clients
        for r, participation in enumerate(self.participations[: self.last], 1):
            for k in participation.participants:
                base = versions[k]
                for e in range(1, self.exchanges + 1):
                    out.add(TaskId(r, e, k, base))
                    if k in participation.dropouts:
                        break
                    base = (r - 1) * self.exchanges + e
                if k not in participation.lost_uploads | participation.dropouts:
                    versions[k] = base
        return out


@dataclass
class Simulator:
    """Carries out commands and feeds back events in an order drawn from `rng`. leave: how likely it is that a
    worker is gone at a step, spoil: that an answer must not be folded. given and scored are what was not
    lost that way."""

    world: World
    machine: RoundMachine
    workers: int
    rng: random.Random
    leave: float = 0.0
    spoil: float = 0.0
    taken_back: set[TaskId] = field(default_factory=set)
    log: list[Command] = field(default_factory=list)
    held: dict[int, list[WorkItem]] = field(default_factory=dict)
    supplied: list[TaskId] = field(default_factory=list)
    scored: list[ChunkId] = field(default_factory=list)
    answered: list[ChunkId] = field(default_factory=list)
    committed: int = 0
    open: Open | None = None
    released: list[int] = field(default_factory=list)
    arrived: set[int] = field(default_factory=set)
    closed: bool = False
    finished: bool = False

    def run(self) -> Simulator:
        self.carry_out(self.machine.start())
        waiting = list(range(self.workers))
        self.rng.shuffle(waiting)
        self.join(waiting.pop())
        while not self.finished:
            events = self.possible()
            assert events or waiting, "stalled: nobody holds work, nothing is folded, nothing is finished"
            if waiting and (not events or self.rng.random() < 0.2):
                self.join(waiting.pop())
            elif self.held and self.rng.random() < self.leave:
                waiting.insert(0, self.lose(self.rng.choice(list(self.held))))
            else:
                self.feed(self.rng.choice(events))
        for worker in waiting:
            self.join(worker)
        assert not self.possible()
        return self

    def possible(self) -> list[Event]:
        events: list[Event] = [Folded()] if self.closed else []
        for worker, pieces in self.held.items():
            for piece in pieces:
                events.append(Arrived(worker, piece) if isinstance(piece, TaskId) else Scored(worker, piece))
                if isinstance(piece, TaskId) and self.rng.random() < self.spoil:
                    events[-1] = Rejected(worker, piece)
        return events

    def join(self, worker: int) -> None:
        self.held[worker] = []
        self.feed(Joined(worker))

    def lose(self, worker: int) -> int:
        for piece in self.held.pop(worker):
            if isinstance(piece, TaskId):
                self.supplied.remove(piece)
                self.taken_back.add(piece)
            else:
                self.scored.remove(piece)
        self.feed(Left(worker))
        return worker

    def feed(self, event: Event) -> None:
        match event:
            case Arrived(worker, task):
                self.held[worker].remove(task)
                self.arrived.add(task.client)
            case Rejected(worker, task):
                self.held[worker].remove(task)
                self.supplied.remove(task)
                self.taken_back.add(task)
            case Scored(worker, chunk):
                self.held[worker].remove(chunk)
                event = Scored(worker, chunk, self.reached_with(chunk))
            case Folded():
                self.closed = False
        self.carry_out(self.machine.handle(event))
        self.check_workers()
        self.check_phase()

    def reached_with(self, chunk: ChunkId) -> bool:
        """Whether this was the last chunk of a round that has the target accuracy."""
        self.answered.append(chunk)
        whole = self.is_scored(chunk.round)
        return whole and chunk.round > 0 and chunk.round in (self.world.reaching or ())

    def is_scored(self, round: int) -> bool:
        return sum(c.round == round for c in self.answered) == self.world.chunks

    def check_workers(self) -> None:
        assert all(len(pieces) <= MOST_HELD * self.world.lanes for pieces in self.held.values())
        assert bool(self.machine.working) == any(self.held.values())
        for worker, pieces in self.held.items():
            tasks = [p for p in pieces if isinstance(p, TaskId)]
            assert sorted(self.machine.held_by(worker), key=str) == sorted(tasks, key=str)
            assert self.world.ahead or len(tasks) <= self.world.lanes
            assert all(self.machine.holds(worker, t) for t in tasks)
        if any(not pieces for pieces in self.held.values()) and self.open is not None:
            participants = {
                t.client
                for t in self.supplied
                if (t.round, t.exchange) == (self.open.round, self.open.exchange)
            }
            assert participants == set(self.open.participants), "a worker idles while tasks wait"

    def check_phase(self) -> None:
        """The machine's phase is what its commands have said."""
        if self.finished:
            expected = "finished"
        elif self.open is None:
            expected = "evaluating"
        else:
            expected = "folding" if self.closed else "collecting"
        assert self.machine.phase == expected

    def carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            assert not self.finished, f"{command} after Finish"
            self.log.append(command)
            match command:
                case Open():
                    assert not self.closed
                    if self.world.reaching is not None:
                        due = [r for r in self.world.evaluated() if 0 < r < command.round]
                        assert all(map(self.is_scored, due)), "opened before the scores that decide"
                    self.open, self.released, self.arrived = command, [], set()
                case Give(worker, task, dropouts, second):
                    assert self.open is not None
                    assert second == (task in self.taken_back)
                    assert dropouts == bool(
                        task.round and task.client in self.world.participation(task.round).dropouts
                    )
                    assert (task.round, task.exchange) == (self.open.round, self.open.exchange)
                    self.supplied.append(task)
                    self.held[worker].append(task)
                case Release(client) | Drop(client):
                    assert client in self.arrived, "released before it arrived"
                    assert not self.released or client > self.released[-1]
                    self.released.append(client)
                case Close():
                    assert self.open is not None
                    dropouts = (
                        self.world.participation(self.open.round).dropouts if self.open.round else frozenset()
                    )
                    assert tuple(self.released) == tuple(
                        k for k in self.open.participants if k not in dropouts
                    )
                    self.closed = True
                case Commit(0):
                    assert not self.closed, "committed while a fold is under way"
                    assert self.log.count(command) == 1
                    assert self.world.setup
                    self.open = None
                case Commit(number):
                    assert not self.closed, "committed while a fold is under way"
                    assert number == self.committed + 1
                    self.committed = number
                    self.open = None
                case ScoreChunk(worker, chunk):
                    assert chunk.round <= self.committed, "scored before its commit"
                    self.scored.append(chunk)
                    self.held[worker].append(chunk)
                case Finish():
                    assert self.committed == self.world.last
                    assert not any(self.held.values())
                    self.finished = True


def simulated(
    world: World, seed: int, workers: int | None = None, leave: float = 0.0, spoil: float = 0.0
) -> Simulator:
    rng = random.Random(seed)
    costs = [rng.random() for _ in range(world.clients)]
    machine = world.machine(costs.__getitem__)
    return Simulator(world, machine, workers or rng.randint(1, 5), rng, leave, spoil).run()


def kept(log: list[Command]) -> list[Command]:
    return [c for c in log if not isinstance(c, Give | ScoreChunk | Finish)]


def test_any_world_in_any_order() -> None:
    """Commands in the order of the sequential run, every task and every chunk of every evaluated round once,
    also if workers are lost with all that they hold, and come again."""
    for seed in range(2400):
        world = World.drawn(random.Random(seed))
        leave, spoil = (0.0, 0.05, 0.2, 0.4)[seed % 4], (0.0, 0.2)[seed % 2]
        end = simulated(world, seed + 1000, leave=leave, spoil=spoil)
        assert kept(end.log) == world.expected(), seed
        assert Counter(end.supplied) == Counter(world.tasks()), seed
        pieces = Counter(ChunkId(r, chunk) for r in world.evaluated() for chunk in range(world.chunks))
        assert Counter(end.scored) == pieces, seed
        assert end.log.count(Finish()) == 1, seed
        commits = [c for c in end.log if isinstance(c, Commit)]
        versions = list(commits[-1].versions) if commits else [0] * world.clients
        assert end.machine.versions == versions, seed


@pytest.mark.parametrize("leave", [0.0, 0.2])
@pytest.mark.parametrize("seed", range(200))
def test_with_a_target_accuracy_the_run_ends_with_the_first_evaluated_round_that_has_it(
    seed: int, leave: float
) -> None:
    """In any order and for any number of workers, and no round is opened before the scores that decide."""
    rng = random.Random(seed)
    world = World.drawn(rng)
    reaching = tuple(r for r in range(world.rounds + 1) if rng.random() < rng.choice([0.1, 0.5]))
    world = replace(world, reaching=reaching)
    end = simulated(world, seed + 1000, leave=leave, spoil=leave)
    assert Counter(end.supplied) == Counter(world.tasks())
    assert kept(end.log) == world.expected()
    pieces = Counter(ChunkId(r, chunk) for r in world.evaluated() for chunk in range(world.chunks))
    assert Counter(end.scored) == pieces
    assert end.log.count(Finish()) == 1
    assert end.machine.target_reached == (bool(world.chunks) and world.last in reaching and world.last > 0)


@pytest.mark.parametrize("seed", range(20))
def test_a_set_up_is_not_held_back_by_the_start_model(seed: int) -> None:
    world = set_up((Participation((0, 1)),) * 3, chunks=2)
    end = simulated(replace(world, reaching=(2, 3)), seed, leave=0.1)
    assert [c.round for c in end.log if isinstance(c, Commit)] == [0, 1, 2]
    assert {c.round for c in end.scored} == {0, 1, 2}


@pytest.mark.parametrize("unscored", [(), (1,), (1, 2)])
def test_a_resumed_machine_waits_for_the_scores_that_decide(unscored: tuple[int, ...]) -> None:
    world = World(1, 4, 1, (Participation((0,)),) * 4, 1, 1, reaching=(2,))
    machine = world.machine()
    machine.round, machine.versions = 2, [2]
    commands = machine.start(resumed=True, unscored=unscored)
    assert (commands == [Open(3, 1, (0,), True, asked=1)]) == (not unscored)
    if unscored:
        assert machine.phase == "evaluating"
        assert machine.handle(Joined(0)) == [ScoreChunk(0, ChunkId(r, 0)) for r in unscored]
        assert [machine.handle(Scored(0, ChunkId(r, 0))) for r in unscored[:-1]] == [[]] * (len(unscored) - 1)
        last = unscored[-1]
        commands = machine.handle(Scored(0, ChunkId(last, 0), reached=last == 2))
        assert commands[0] == (Finish() if last == 2 else Open(3, 1, (0,), True, asked=1))


def test_a_machine_that_has_reached_its_target_before_finishes_at_once() -> None:
    machine = World(1, 4, 1, (Participation((0,)),) * 4, 1, 1, reaching=(2,)).machine()
    machine.round, machine.target_reached = 2, True
    assert machine.start(resumed=True) == [Finish()]


# ---- particular properties


def one_round(
    participants: tuple[int, ...], lost: tuple[int, ...] = (), exchanges: int = 1, chunks: int = 0
) -> World:
    return World(
        max(participants, default=0) + 1,
        1,
        exchanges,
        (Participation(participants, frozenset(lost)),),
        chunks,
        1,
    )


def test_the_phase_before_the_start_and_after_the_end() -> None:
    machine = World(1, 1, 1, (Participation((0,)),), 1, 1).machine()
    assert machine.phase == "ready"
    machine.start()
    assert machine.phase == "collecting"
    without_rounds = World(1, 0, 1, (), 1, 1).machine()
    assert (without_rounds.start(), without_rounds.phase) == ([], "evaluating")
    without_anything = World(1, 0, 1, (), 0, 1).machine()
    assert (without_anything.start(), without_anything.phase) == ([Finish()], "finished")


def test_the_largest_client_goes_first_and_ties_by_id() -> None:
    machine = one_round((0, 1, 2, 3)).machine([1.0, 5.0, 5.0, 2.0].__getitem__)
    machine.start()
    commands = machine.handle(Joined(0))
    while held := machine.held_by(0):
        commands += machine.handle(Arrived(0, held[0]))
    assert [c.task.client for c in commands if isinstance(c, Give)] == [1, 2, 3, 0]


def test_a_client_returns_to_the_worker_that_holds_its_state() -> None:
    """With as many workers as clients nobody has to move once every worker has one."""
    participants = [(0, 1, 2), (0, 1, 2), (1, 2), (0, 2), (0, 1), (1,), (2,), (0, 1, 2)]
    world = World(3, len(participants), 1, tuple(map(Participation, participants)), 0, 1)
    machine, rng = world.machine(), random.Random(3)
    end = Simulator(world, machine, 3, rng)
    end.carry_out(machine.start())
    for worker in range(3):
        end.join(worker)
    while not end.finished:
        end.feed(rng.choice(end.possible()))
    homes = {(c.task.client, c.worker) for c in end.log if isinstance(c, Give) and c.task.round > 1}
    assert len(homes) == len({k for k, _ in homes}) == len({w for _, w in homes}) == 3


def test_evaluation_cannot_fall_behind_for_ever() -> None:
    """A worker that never idles between training tasks still scores rounds that are too old."""
    world = World(4, 12, 1, (Participation((0, 1, 2, 3)),) * 12, 1, 1)
    machine = world.machine()
    end = Simulator(world, machine, 1, random.Random(0))
    end.carry_out(machine.start())
    end.join(0)
    behind = 0
    while not end.finished:
        oldest_first = sorted(end.possible(), key=lambda e: isinstance(e, Scored))
        end.feed(oldest_first[0])
        unscored = [r for r in world.evaluated() if r <= end.committed and ChunkId(r, 0) not in end.scored]
        behind = max(behind, end.committed - min(unscored, default=end.committed))
    assert behind <= MAX_EVALUATIONS_BEHIND + 1


def test_a_resumed_machine_goes_on_as_the_uninterrupted_one() -> None:
    world = World(4, 6, 2, tuple(Participation((0, 1, 3), frozenset({r % 4})) for r in range(6)), 0, 1)
    whole = simulated(world, 1)
    at = next(i for i, c in enumerate(whole.log) if isinstance(c, Commit) and c.round == 3)
    commit = whole.log[at]
    assert isinstance(commit, Commit)
    machine = world.machine()
    machine.round, machine.versions = 3, list(commit.versions)
    machine.folded_rounds = commit.folded_rounds
    rest = Simulator(world, machine, 2, random.Random(9), committed=3).run()
    assert kept(rest.log) == kept(whole.log[at + 1 :])
    assert set(rest.supplied) == {t for t in whole.supplied if t.round > 3}


# ---- events that cannot happen


def wrong_events(sim: Simulator) -> list[Event]:
    unauthenticated_peer = max(sim.held, default=0) + 50
    events: list[Event] = [*(Joined(w) for w in sim.held), Left(unauthenticated_peer)]
    for worker, pieces in sim.held.items():
        for piece in pieces:
            if isinstance(piece, TaskId):
                events += [Arrived(w, piece) for w in (*sim.held, unauthenticated_peer) if w != worker]
                events.append(
                    Arrived(worker, TaskId(piece.round, piece.exchange, piece.client, piece.base + 1))
                )
                events.append(
                    Arrived(worker, TaskId(piece.round + 1, piece.exchange, piece.client, piece.base))
                )
                events.append(
                    Arrived(worker, TaskId(piece.round, piece.exchange + 1, piece.client, piece.base))
                )
            else:
                events += [Scored(w, piece) for w in (*sim.held, unauthenticated_peer) if w != worker]
        events.append(Scored(worker, ChunkId(-1, 0)))
        events.append(Scored(worker, ChunkId(0, 99)))
    held = {t for pieces in sim.held.values() for t in pieces}
    events += [Arrived(w, t) for t in sim.supplied[-3:] if t not in held for w in sim.held]  # a second time
    return events + ([] if sim.closed else [Folded()])


@pytest.mark.parametrize("seed", range(12))
def test_wrong_events_raise_and_change_nothing(seed: int) -> None:
    rng = random.Random(seed)
    world = World.drawn(rng)
    machine = world.machine()
    sim = Simulator(world, machine, 2, rng)
    sim.carry_out(machine.start())
    for worker in range(2):
        sim.join(worker)
    while True:
        before = copy.deepcopy(machine, {id(machine.schedule): machine.schedule})
        for event in wrong_events(sim):
            with pytest.raises(ProtocolError):
                machine.handle(event)
            assert machine == before, event
        if sim.finished:
            return
        sim.feed(rng.choice(sim.possible()))


# ---- a set-up before round 1


def set_up(
    participations: tuple[Participation, ...] = (),
    *,
    setup: int = 2,
    clients: int = 3,
    exchanges: int = 1,
    chunks: int = 0,
) -> World:
    return World(clients, len(participations), exchanges, participations, chunks, 1, setup)


@pytest.mark.parametrize("setup", [0, 1, 2])
def test_the_schedule_is_asked_for_every_round_but_the_setup(setup: int) -> None:
    asked: list[int] = []
    world = set_up((Participation((0,)), Participation(())), setup=setup)

    def recorded(number: int) -> Participation:
        asked.append(number)
        assert number > 0
        return world.participation(number)

    machine = world.machine()
    machine.schedule = recorded
    end = Simulator(world, machine, 2, random.Random(0)).run()
    assert asked == [1, 2]
    participants = {c.participants for c in end.log if isinstance(c, Open) and not c.round}
    assert participants == ({(0, 1, 2)} if setup else set())


def test_the_start_model_can_be_scored_while_the_setup_is_under_way() -> None:
    """Nothing of round 0 changes it, so nobody has to wait for the commit."""
    machine = set_up((Participation((0,)),), clients=1, chunks=1).machine()
    machine.start()
    assert machine.handle(Joined(0)) == [Give(0, TaskId(0, 1, 0, 0)), ScoreChunk(0, ChunkId(0, 0))]


@st.composite
def worlds_with_a_setup(draw: Callable[..., object]) -> World:
    clients, rounds = draw(st.integers(1, 4)), draw(st.integers(0, 4))
    assert isinstance(clients, int) and isinstance(rounds, int)
    participations = []
    for _ in range(rounds):
        participants = draw(st.sets(st.integers(0, clients - 1)))
        assert isinstance(participants, set)
        lost = draw(st.sets(st.sampled_from(sorted(participants)))) if participants else set()
        assert isinstance(lost, set)
        participations.append(Participation(tuple(sorted(participants)), frozenset(lost)))
    exchanges, setup, chunks = draw(st.integers(1, 2)), draw(st.integers(0, 2)), draw(st.integers(0, 2))
    assert isinstance(exchanges, int) and isinstance(setup, int) and isinstance(chunks, int)
    return World(clients, rounds, exchanges, tuple(participations), chunks, 1, setup)


@fixed
@given(worlds_with_a_setup(), st.integers(0, 10_000))
def test_versions_and_bases_with_a_setup_are_what_the_formula_says(world: World, seed: int) -> None:
    """S + (r-1)*E + e, written out; every base is the last committed version, or within a round the draft
    of the exchange before, folded or not; nobody is lost in the set-up."""
    S, E = world.setup, world.exchanges
    end = simulated(world, seed)
    everyone = tuple(range(world.clients))
    held, bases = [0] * world.clients, {}
    commits: list[Commit] = []
    for r in range(0 if S else 1, world.rounds + 1):
        participation = world.participation(r) if r else Participation(everyone)
        for k in participation.participants:
            base = held[k]
            for e in range(1, (E if r else S) + 1):
                bases[r, e, k] = base
                base = S + (r - 1) * E + e if r else e
            if k not in participation.lost_uploads:
                held[k] = base
        folded = tuple(k for k in participation.participants if k not in participation.lost_uploads)
        folds = sum(bool(c.folded) for c in commits if c.round) + bool(r and folded)
        commits.append(Commit(r, participation.participants, folded, tuple(held), folds))
    assert {(t.round, t.exchange, t.client): t.base for t in end.supplied} == bases
    assert len(end.supplied) == len(bases)
    assert [c for c in end.log if isinstance(c, Commit)] == commits
    assert end.machine.versions == held
    pieces = Counter(ChunkId(r, chunk) for r in range(world.rounds + 1) for chunk in range(world.chunks))
    assert Counter(end.scored) == pieces


def test_workers_with_lanes_share_the_tasks_of_a_round() -> None:
    """Two that come at once get one in turn; what is left when both have one for every lane is given in
    advance only while there are plenty, and an answer makes room for the next."""

    def assigned_to(clients: int) -> tuple[RoundMachine, list[tuple[int, int]]]:
        world = World(clients, 1, 1, (Participation(tuple(range(clients))),), 0, 1, lanes=4)
        machine = world.machine(cost=lambda k: -k)
        machine.start()
        commands = machine.handle(Joined(0), Joined(1))
        return machine, [(c.worker, c.task.client) for c in commands if isinstance(c, Give)]

    assert assigned_to(5)[1] == [(0, 0), (1, 1), (0, 2), (1, 3), (0, 4)]
    machine, gives = assigned_to(18)
    assert gives == [(k % 2, k) for k in range(10)], "8, and two while more than 8 wait"
    assert not machine.handle(Arrived(1, TaskId(1, 1, 3, 0))), "four are left to it"
    (give,) = machine.handle(Arrived(1, TaskId(1, 1, 5, 0)))
    assert isinstance(give, Give) and (give.worker, give.task.client) == (1, 10)


@pytest.mark.parametrize(
    ("workers", "lanes", "chunks"), [(1, 1, 5), (10, 1, 5), (1, 2, 5), (1, 10, 5), (1, 10, 13)]
)
def test_evaluation_keeps_up_with_training_whatever_the_lanes(workers: int, lanes: int, chunks: int) -> None:
    """Workers take what they hold in its order, as many tasks at once as they have lanes; a task takes ten
    steps and more, a chunk one."""
    rounds, clients = 40, 10
    world = World(
        clients, rounds, 1, rounds * (Participation(tuple(range(clients))),), chunks, 1, lanes=lanes
    )
    machine = world.machine(cost=lambda k: -k)
    commands = deque([*machine.start(), *machine.handle(*map(Joined, range(workers)))])
    queues: dict[int, deque[WorkItem]] = {w: deque() for w in range(workers)}
    running: dict[int, list[tuple[WorkItem, int]]] = {w: [] for w in range(workers)}
    unscored, behind = set(range(1)), list[int]()
    scored: Counter[int] = Counter()
    for step in range(10_000):
        while commands:
            match command := commands.popleft():
                case Give(worker, task):
                    queues[worker].append(task)
                case ScoreChunk(worker, chunk):
                    queues[worker].append(chunk)
                case Close():
                    commands.extend(machine.handle(Folded()))
                case Commit():
                    unscored.add(command.round)
                    behind.append(len(unscored))
                case Finish():
                    assert max(behind) <= MAX_EVALUATIONS_BEHIND + 2
                    return
        for worker, queue in queues.items():
            while queue and len(running[worker]) < lanes:
                item = queue.popleft()
                ends = step + (1 if isinstance(item, ChunkId) else 10 + item.client % 3)
                running[worker].append((item, ends))
            for item, _ in [r for r in running[worker] if r[1] <= step]:
                if isinstance(item, ChunkId):
                    scored[item.round] += 1
                    unscored -= {r for r in unscored if scored[r] == chunks}
                    commands.extend(machine.handle(Scored(worker, item)))
                else:
                    commands.extend(machine.handle(Arrived(worker, item)))
            running[worker] = [r for r in running[worker] if r[1] > step]
    raise AssertionError("the run does not end")


def test_a_lease_begins_when_an_idle_worker_gets_several_tasks_at_once() -> None:
    now = [0.0]
    leases = Leases(10.0, lambda: now[0])
    world = World(3, 2, 1, 2 * (Participation((0, 1, 2)),), 0, 1, lanes=3)
    machine = world.machine()
    commands = [*machine.start(), *machine.handle(Joined(0))]
    leases.assigned(commands, machine)
    for give in [c for c in commands if isinstance(c, Give)]:
        leases.assigned(machine.handle(Arrived(0, give.task)), machine)
    now[0] = 15.0  # the fold takes longer than a lease
    commands = machine.handle(Folded())
    leases.assigned(commands, machine)
    assert len(machine.held_by(0)) == 3 and leases.over(machine.working) == []
    now[0] = 26.0
    assert leases.over(machine.working) == [0]
