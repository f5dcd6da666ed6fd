"""A worker that computes tasks again and compares the results with those that the run accepted.

A task's result is its upload and the client's next state. The journal has the digests of the upload's frames,
and the run's folder has the state's file unless it was removed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsim.errors import DiskError, WireError
from fedsim.problem import Problem
from fedsim.wire.envelope import Envelope, Header
from fedsim.wire.state_file import decode_state
from workers.protocol_messages import absent
from workers.storage.client_states import ClientStates
from workers.worker.runtime import WorkerRuntime

Digests = Mapping[tuple[int, int, int], Sequence[int]]
"""The xxh3 of all frames of an upload's fields, by round, exchange and client."""


def digests(journal: Sequence[Mapping[str, Any]]) -> Digests:
    """Return the digests of the journal's uploads, from the last upload if a resumed run repeated a task."""
    uploads = (r for r in journal if r["what"] == "upload")
    return {(r["round"], r["exchange"], r["client"]): r["xxh3"] for r in uploads}


@dataclass(frozen=True)
class Difference:
    """A task whose result differs. what: the first field that differs, or another fault.

    repeatable: True if two computations on this machine agree with each other.
    """

    round: int
    exchange: int
    client: int
    what: str
    repeatable: bool


@dataclass(frozen=True)
class Result:
    """A task's result: its upload, and the bytes of the client's next state."""

    upload: Envelope
    state: bytes

    @property
    def parts(self) -> list[tuple[str, int]]:
        """The names and digests of the upload's frames."""
        return [(_name(f.name, p.layer), p.digest) for f in self.upload.header.fields for p in f.parts]


class TaskVerifier:
    """A worker (workers.transport.endpoint) for one round. Nothing is written outside `scratch`.

    only: the clients whose tasks of the round's last exchange are computed, None for all. Earlier exchanges
    are computed for all clients, because the next broadcast depends on them. twice: compute each task twice.
    """

    def __init__(
        self,
        problem: Problem,
        folder: Path,
        run: str,
        scratch: Path,
        recorded: Digests,
        only: Collection[int] | None = None,
        twice: bool = False,
    ) -> None:
        self.problem, self.recorded, self.only, self.twice = problem, recorded, only, twice
        self.compared, self.left_out = 0, 0
        self.differences: list[Difference] = []
        self._original = ClientStates(folder / "state", problem.algorithm.client_type, run)
        self._states = _Drafts(scratch / "state", self._original)
        self._worker = WorkerRuntime(problem, scratch, run, 0)
        self._worker.states = self._states

    def handle(self, envelope: Envelope) -> Envelope | None:
        h = envelope.header
        if h.kind in ("gone", "last"):
            return self._worker.handle(envelope)
        if self._is_left_out(h):
            self.left_out += 1
            return absent(h)
        reply = self._worker.handle(envelope)
        if reply is None or reply.header.kind != "upload":
            return reply
        result = self._result(reply)
        whats = list(self._whats(h, result))
        if whats or self.twice:
            retry = self._worker.handle(envelope)
            if retry is None or retry.header.kind != "upload":
                return retry
            second = next(_apart(result, self._result(retry)), "")
            if whats or second:
                what = whats[0] if whats else f"computed twice here, {second} is not the same"
                self.differences.append(Difference(h.round, h.exchange, h.client, what, not second))
        self.compared += 1
        return reply

    def _is_left_out(self, h: Header) -> bool:
        """Return whether a task is not requested, or follows an exchange whose results differ."""
        last = h.exchange == len(self.problem.algorithm.exchanges_in(h.round))
        asked = self.only is None or not last or h.client in self.only
        return not asked or any(d.exchange < h.exchange for d in self.differences)

    def _result(self, upload: Envelope) -> Result:
        h = upload.header
        return Result(upload, self._states.read(h.client, self.problem.messages.version(h.round, h.exchange)))

    def _whats(self, h: Header, result: Result) -> Iterator[str]:
        recorded = self.recorded.get((h.round, h.exchange, h.client))
        if recorded is None:
            yield "the journal has no record of its upload"
            return
        for (name, here), there in zip(result.parts, recorded, strict=False):
            if here != there:
                yield f"{name} differs"
        if len(result.parts) != len(recorded):
            yield f"an upload of {len(result.parts)} frames, where the run had {len(recorded)}"
        try:
            state = self._original.read(h.client, self.problem.messages.version(h.round, h.exchange))
        except DiskError:  # the file was removed
            return
        except WireError as e:  # the file is of another client or run
            yield str(e)
            return
        if state != result.state:
            yield self._state_difference(h, state)

    def _state_difference(self, h: Header, state: bytes) -> str:
        path = self._original.path(h.client, self.problem.messages.version(h.round, h.exchange))
        try:
            decode_state(self._original.kind, state, str(path))
        except WireError as e:
            return str(e)
        return f"the client's next state differs from {path}"


def _apart(one: Result, other: Result) -> Iterator[str]:
    """Yield the differences between two computations of the same task."""
    for (name, here), (_, there) in zip(one.parts, other.parts, strict=False):
        if here != there:
            yield name
    if len(one.parts) != len(other.parts):
        yield "the number of frames"
    if one.state != other.state:
        yield "the client's next state"


def _name(field: str, layer: str) -> str:
    return f"field {field!r}" if layer == "values" else f"field {field!r} ({layer})"


class _Drafts(ClientStates):
    """Client states that are written to a scratch folder, and read from it or else from the run's folder."""

    def __init__(self, folder: Path, original: ClientStates) -> None:
        super().__init__(folder, original.kind, original.run)
        self._original = original

    def mapped(self, client: int, version: int) -> memoryview:
        if self.path(client, version).exists():
            return super().mapped(client, version)
        return self._original.mapped(client, version)
