"""Client states for remote workers.

A worker on the coordinator's machine finds a client's state in the run's folder and writes the draft there.
One elsewhere is sent the state before the task (envelope "state") unless it has that version, and sends the
draft back before the upload (envelope "draft"). In a real federation a client keeps its own state, so both
are simulation traffic; clients stay with their worker, which makes the first rare.
"""

from __future__ import annotations

from fedsim.errors import WireError
from fedsim.wire.envelope import VERSION, Envelope, Header, blob, pack
from workers.worker.runtime import WorkerRuntime


def state_envelope(kind: str, run: str, of: Header, data: bytes) -> Envelope:
    """kind: state or draft; of: the task's header; data: the state's file."""
    fields, frames = blob("state", data)
    label = Header(VERSION, kind, run, of.epoch, of.round, of.exchange, of.client, of.base, 0, fields)
    return pack(label, frames)


class ReplicaMap:
    """Which versions of which clients' states every remote worker has, as the coordinator knows it."""

    def __init__(self) -> None:
        self._held: dict[int, dict[int, set[int]]] = {}

    def lacks(self, worker: int, client: int, version: int) -> bool:
        """Version 0 is client_init, which everybody can make."""
        return bool(version) and version not in self._held.get(worker, {}).get(client, set())

    def has(self, worker: int, client: int, *versions: int) -> None:
        """It has these now, and has thrown older ones away."""
        self._held.setdefault(worker, {})[client] = set(versions)

    def forget(self, worker: int) -> None:
        self._held.pop(worker, None)


class RemoteStateCache:
    """A WorkerRuntime without the run's folder: it keeps states in one of its own."""

    def __init__(self, runtime: WorkerRuntime) -> None:
        self.runtime = runtime

    def handle(self, envelope: Envelope) -> list[Envelope]:
        """What to answer, in order."""
        h, states = envelope.header, self.runtime.states
        if h.kind == "state":
            if len(envelope.frames) != 1:
                raise WireError(f"a state of client {h.client} in {len(envelope.frames)} frames")
            states.put(h.client, h.base, bytes(envelope.frames[0]))
            return []
        reply = self.runtime.handle(envelope)
        if reply.header.kind != "upload":
            return [reply]
        created = self.runtime.problem.version(h.round, h.exchange)
        data = states.read(h.client, created)
        states.remove(h.client, below=h.base)
        return [state_envelope("draft", self.runtime.run, h, data), reply]
