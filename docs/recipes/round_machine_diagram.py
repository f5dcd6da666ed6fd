"""The states of a round as a drawing and a table, found by trying every history of a few small cases.

    python docs/recipes/round_machine_diagram.py      5 seconds; writes the section of docs/architecture.md
                                                      between its marker comments, and
                                                      docs/assets/round_machine.svg

Nothing is written down twice: every arrow is a call of fedsim.round_machine.RoundMachine that was made. From
each state that can be reached, every event is tried that can come in it: a worker may join, leave, answer or
have its upload rejected at any time. tests/docs/test_generated_pages.py holds that the page is current.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import get_args

from fedsim.participation import Participation
from fedsim.round_events import (
    Arrived,
    Command,
    Event,
    Folded,
    Give,
    Joined,
    Left,
    Rejected,
    ScoreChunk,
    Scored,
    TaskId,
    WorkItem,
)
from fedsim.round_machine import Phase, RoundMachine

ROOT = Path(__file__).resolve().parents[2]
PAGE, PICTURE = "architecture.md", "assets/round_machine.svg"
PHASES: tuple[str, ...] = get_args(Phase)
EVENTS = ("start", "Joined", "Left", "Rejected", "Scored", "Arrived", "Folded")
WORK = ("Give", "ScoreChunk")
"""Commands that assign work; they may follow any event and depend on which worker is idle."""


@dataclass(frozen=True)
class Case:
    """A world that is small enough to try all of its histories.

    rounds: their participations. exchanges: in one round. chunks: of the test set. departures, rejections:
    how often a worker leaves, and an upload is rejected, at most. has_target: the run ends with a
    target accuracy, which any round may reach or not.
    """

    rounds: tuple[Participation, ...]
    exchanges: int
    chunks: int
    workers: int = 2
    departures: int = 1
    rejections: int = 1
    has_target: bool = False

    def machine(self) -> RoundMachine:
        clients = 1 + max(k for r in self.rounds for k in r.participants)
        return RoundMachine(
            rounds=len(self.rounds),
            exchanges=self.exchanges,
            schedule=self.participation,
            versions=[0] * clients,
            cost=float,
            chunks=self.chunks,
            has_target=self.has_target,
        )

    def participation(self, round: int) -> Participation:
        return self.rounds[round - 1]


ONE_LOST = Participation((0, 1), lost_uploads=frozenset({1}))
ONE_DROPOUT = Participation((0, 1), dropouts=frozenset({0}))
NONE_FOLDED = Participation((0, 1), lost_uploads=frozenset({0}), dropouts=frozenset({1}))
CASES = (
    Case((ONE_LOST, ONE_DROPOUT), exchanges=1, chunks=1),
    Case((ONE_LOST, ONE_DROPOUT), exchanges=2, chunks=1, departures=0, rejections=0),
    Case((NONE_FOLDED, NONE_FOLDED), exchanges=1, chunks=1, departures=0, rejections=0),
    Case((ONE_LOST, ONE_DROPOUT), exchanges=1, chunks=0),
    Case((NONE_FOLDED,), exchanges=1, chunks=0),
    Case((ONE_LOST, ONE_DROPOUT), exchanges=1, chunks=1, departures=0, rejections=0, has_target=True),
)


@dataclass
class State:
    """A machine and what the world knows of it: the work of each worker that has joined."""

    machine: RoundMachine
    work: dict[int, list[WorkItem]] = field(default_factory=dict)
    departures: int = 0
    rejections: int = 0

    @property
    def key(self) -> str:
        return repr(self)

    def possible(self, case: Case) -> Iterator[Event]:
        if self.machine.phase == "folding":
            yield Folded()
        for worker in range(case.workers):
            if worker not in self.work:
                yield Joined(worker)
            elif self.departures < case.departures:
                yield Left(worker)
            for item in self.work.get(worker, ()):
                if not isinstance(item, TaskId):
                    yield Scored(worker, item)
                    if case.has_target and item.round:  # its only chunk
                        yield Scored(worker, item, reached=True)
                    continue
                yield Arrived(worker, item)
                if self.rejections < case.rejections and not self.machine.is_dropout(item):
                    yield Rejected(worker, item)

    def after(self, event: Event) -> tuple[State, list[Command]]:
        new = copy.deepcopy(self)
        match event:
            case Joined(worker):
                new.work[worker] = []
            case Left(worker):
                del new.work[worker]
                new.departures += 1
            case Arrived(worker, item) | Rejected(worker, item):
                new.work[worker].remove(item)
                new.rejections += isinstance(event, Rejected)
            case Scored(worker, chunk):
                new.work[worker].remove(chunk)
        commands = new.machine.handle(event)
        for command in commands:
            match command:
                case Give(worker, item):
                    new.work[worker].append(item)
                case ScoreChunk(worker, chunk):
                    new.work[worker].append(chunk)
        return new, commands


@dataclass(frozen=True)
class Transition:
    """All calls that lead from one phase to another by one kind of event."""

    origin: str
    event: str
    target: str


Transitions = dict[Transition, set[tuple[str, ...]]]
"""For each transition the commands that were returned, by their names, without repetition."""


def explored(cases: Sequence[Case] = CASES) -> tuple[Transitions, int]:
    """Every transition of these cases, and how many states they have."""
    transitions: Transitions = {}
    states = 0
    for case in cases:
        first = State(case.machine())
        origin = first.machine.phase
        commands = first.machine.start()
        _add(transitions, origin, "start", first.machine.phase, commands)
        seen, waiting = {first.key}, deque([first])
        while waiting:
            state = waiting.popleft()
            states += 1
            if state.machine.phase == "finished":
                continue
            for event in state.possible(case):
                new, commands = state.after(event)
                _add(transitions, state.machine.phase, type(event).__name__, new.machine.phase, commands)
                if new.key not in seen:
                    seen.add(new.key)
                    waiting.append(new)
    return transitions, states


def _add(out: Transitions, origin: str, event: str, target: str, commands: Sequence[Command]) -> None:
    names = tuple(dict.fromkeys(type(c).__name__ for c in commands))
    out.setdefault(Transition(origin, event, target), set()).add(names)


# ---- the table


COMMANDS = ("Release", "Drop", "Close", "Commit", "Open", "Finish", *WORK)
"""In the order in which they are returned."""


def commands_of(variants: Iterable[tuple[str, ...]]) -> tuple[list[str], list[str]]:
    """The commands that every call of a transition has returned, and those that only some have."""
    variants = list(variants)
    always = [name for name in COMMANDS if all(name in v for v in variants)]
    return always, [name for name in COMMANDS if name not in always and any(name in v for v in variants)]


def ordered(transitions: Transitions) -> list[Transition]:
    return sorted(
        transitions, key=lambda t: (PHASES.index(t.origin), EVENTS.index(t.event), PHASES.index(t.target))
    )


def meanings() -> dict[str, str]:
    """What each phase is, from the docstring of RoundMachine.phase."""
    text = " ".join((inspect.getdoc(RoundMachine.phase) or "").split())
    names = "|".join(PHASES)
    return dict(re.findall(rf"\b({names}): (.*?)\.(?= (?:{names}): |$)", text))


def first_sentence(kind: type) -> str:
    """What an event or a command means, from its docstring."""
    paragraph = (inspect.getdoc(kind) or "").split("\n\n")[0]
    return " ".join(paragraph.split()).replace("|", "\\|")


def section(transitions: Transitions, states: int) -> str:
    """What stands between the markers of the page."""
    lines = [
        "![The phases of a run and the events that lead from one to the next](" + PICTURE + ")",
        "",
        "| phase | meaning |",
        "| --- | --- |",
        *(f"| {name} | {text} |" for name, text in meanings().items()),
        "",
        "Each arrow is a call of the round machine. The script tries all histories of "
        f"{len(CASES)} small cases, which have {states:,} states:",
        "two workers, two clients, one or two rounds of one or two exchanges, lost uploads, dropouts,",
        "a worker that leaves, a rejected upload, and a target accuracy (`--until`). With a target, no round",
        "is opened while scores of the one before are missing; without, evaluation is beside the next round.",
        "A pair of phase and event that has no row does not occur.",
        "The drawing leaves out Give and ScoreChunk, which assign work to workers.",
        "",
        "| event or command | meaning |",
        "| --- | --- |",
        *(f"| {kind.__name__} | {first_sentence(kind)} |" for kind in (*get_args(Event), *get_args(Command))),
        "",
        "| phase | event | next phase | commands always | commands in some cases |",
        "| --- | --- | --- | --- | --- |",
    ]
    for t in ordered(transitions):
        always, some = commands_of(transitions[t])
        lines.append(f"| {t.origin} | {t.event} | {t.target} | {', '.join(always)} | {', '.join(some)} |")
    return "\n".join(lines)


# ---- the drawing


WIDTH, BOX_WIDTH, BOX_HEIGHT, PITCH, TOP = 652, 150, 46, 122, 20
LEFT = 210
"""Where the boxes begin; loops and arrows upwards are left of it, arrows that pass a box are right of it."""
LANE = 90
INK, PAPER, LINE = "#1f2430", "#ffffff", "#5c6bc0"


def drawing(transitions: Transitions) -> str:
    """The phases one below the other as an SVG; an arrow's label has the event and the commands it causes."""
    used = [p for p in PHASES if any(p in (t.origin, t.target) for t in transitions)]
    top = {phase: TOP + n * PITCH for n, phase in enumerate(used)}
    height = TOP * 2 + (len(used) - 1) * PITCH + BOX_HEIGHT
    middle, right = LEFT + BOX_WIDTH / 2, LEFT + BOX_WIDTH
    lines, labels = [], []
    loops: dict[str, list[str]] = {}
    passing = []
    for t in ordered(transitions):
        steps = used.index(t.target) - used.index(t.origin)
        label = _lines(t, transitions[t])
        below = top[t.origin] + BOX_HEIGHT + (PITCH - BOX_HEIGHT) / 2
        if not steps:
            loops.setdefault(t.origin, []).append(t.event)
        elif steps == 1:
            lines.append(_arrow(f"M{middle} {top[t.origin] + BOX_HEIGHT} V{top[t.target] - 2}"))
            labels.append(_label(middle, below, label))
        elif steps < 0:
            far = -steps - 1  # phases that the arrow passes, on the left of their loops
            start, end = top[t.origin] + 12, top[t.target] + BOX_HEIGHT - 12 + 6 * far
            lane = LEFT - 60 - 122 * far
            lines.append(_arrow(f"M{LEFT} {start} H{lane} V{end} H{LEFT - 2}"))
            labels.append(_label(lane, (start + end) / 2, label))
        else:
            passing.append((steps, t, label, below))
    for n, (_, t, label, below) in enumerate(sorted(passing, key=lambda p: p[0])):
        lane = right + 50 + n * LANE
        start, end = (_side(top, passing, t, end) for end in (False, True))
        lines.append(_arrow(f"M{right} {start} H{lane} V{end} H{right + 2}"))
        labels.append(_label(lane, below, label))
    for phase, events in loops.items():
        upward = any(t.origin == phase and used.index(t.target) < used.index(phase) for t in transitions)
        y = top[phase] + (BOX_HEIGHT - 20 if upward else 8)
        lines.append(_arrow(f"M{LEFT} {y} h-18 v12 h16"))
        rows = [", ".join(events[n : n + 3]) for n in range(0, len(events), 3)]
        first = y + (10 if upward else 10 - 14 * (len(rows) - 1))
        labels.append(_text(LEFT - 24, first, rows, "end"))
    boxes = [_box(phase, top[phase]) for phase in used]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
            f'viewBox="0 0 {WIDTH} {height}" font-family="Roboto, Arial, sans-serif" font-size="13" '
            f'fill="{INK}">',
            "<title>The phases of the round machine</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            f'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{LINE}"/></marker></defs>',
            f'<rect width="{WIDTH}" height="{height}" rx="8" fill="{PAPER}"/>',
            *lines,
            *labels,
            *boxes,
            "</svg>",
            "",
        ]
    )


def _lines(t: Transition, variants: Iterable[tuple[str, ...]]) -> list[str]:
    """An arrow's label: the event, and below it all commands that do not assign work."""
    always, some = commands_of(variants)
    names = [name for name in COMMANDS if name in (*always, *some) and name not in WORK]
    return [t.event, *(", ".join(names[n : n + 2]) for n in range(0, len(names), 2))]


def _side(
    top: dict[str, int], passing: Sequence[tuple[int, Transition, list[str], float]], t: Transition, end: bool
) -> float:
    """Where on the right side of a box an arrow begins or ends, so that arrows at one box stay apart."""
    phase = t.target if end else t.origin
    at_box = [p[1] for p in sorted(passing, key=lambda p: p[0]) if phase in (p[1].origin, p[1].target)]
    rank = at_box.index(t) + 1
    step = BOX_HEIGHT / (len(at_box) + 1)
    return round(top[phase] + step * (rank if end else len(at_box) + 1 - rank), 1)


def _arrow(path: str) -> str:
    return f'<path d="{path}" fill="none" stroke="{LINE}" stroke-width="1.4" marker-end="url(#tip)"/>'


def _label(x: float, y: float, lines: Sequence[str]) -> str:
    """Lines on the arrow that they belong to, with the ground behind them."""
    width, height = 7.1 * max(map(len, lines)) + 6, 15 * len(lines) + 4
    ground = (
        f'<rect x="{x - width / 2:.1f}" y="{y - height / 2:.1f}" width="{width:.1f}" height="{height}" '
        f'fill="{PAPER}"/>'
    )
    return ground + _text(x, y - height / 2 + 14, lines, "middle")


def _text(x: float, y: float, lines: Sequence[str], anchor: str) -> str:
    """Lines of text; the first of an arrow's label, the event, is bold."""
    bold = ' font-weight="bold"'
    rows = [
        f'<tspan x="{x}" y="{y + 15 * n:.1f}"{bold if anchor == "middle" and not n else ""}>'
        f"{escape(line)}</tspan>"
        for n, line in enumerate(lines)
    ]
    return f'<text text-anchor="{anchor}">{"".join(rows)}</text>'


def _box(phase: str, y: int) -> str:
    ground = "#eceff1" if phase in (PHASES[0], PHASES[-1]) else "#e8eaf6"
    return (
        f'<rect x="{LEFT}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6" fill="{ground}" '
        f'stroke="{LINE}" stroke-width="1.4"/>'
        f'<text x="{LEFT + BOX_WIDTH / 2}" y="{y + BOX_HEIGHT / 2 + 5}" text-anchor="middle" '
        f'font-size="15">{phase}</text>'
    )


# ---- the files


def between(page: str, new: str) -> str:
    """The page with a new section between the marker comments."""
    opening = "<!-- states: written by docs/recipes/round_machine_diagram.py -->"
    closing = "<!-- end of states -->"
    before, rest = page.split(opening)
    _, after = rest.split(closing)
    return f"{before}{opening}\n\n{new}\n\n{closing}{after}"


def files() -> dict[str, str]:
    """The text of every file that this script writes, by its path in docs/."""
    transitions, states = explored()
    page = (ROOT / "docs" / PAGE).read_text(encoding="utf-8")
    return {PAGE: between(page, section(transitions, states)), PICTURE: drawing(transitions)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="folder of the page")
    out = parser.parse_args(argv).out
    for name, text in files().items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
