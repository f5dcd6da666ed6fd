"""The worker without its socket: it computes tasks, writes clients' states and evaluates models.

With `--workers 0`, the coordinator's process uses the same class.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedsim import plugins
from fedsim.device_copies import to_cpu
from fedsim.errors import ConnectionLost, Interrupted, WireError
from fedsim.learning.gaussian import Model
from fedsim.learning.ownership import give_up, keep
from fedsim.problem import Problem
from fedsim.wire.envelope import NONE, Envelope, Header
from fedsim.wire.message_context import NOTHING, MessageContext, codec_stream, of_broadcast
from fedsim.wire.schema import check_values
from workers import protocol_messages as messages
from workers.storage import client_states
from workers.storage.client_states import ClientStates
from workers.task_execution import execute


class WorkerRuntime:
    """The computation of replies to envelopes, with a cache of client states and one model to evaluate."""

    def __init__(
        self,
        problem: Problem,
        run_dir: Path,
        run: str,
        index: int,
        problems: Sequence[Problem] | None = None,
    ) -> None:
        """Set up. problems: `problem` with a network per concurrent task (Problem.beside); default: one."""
        self.problem, self.run, self.index = problem, run, index
        self.problems = problems or [problem]
        self.states = ClientStates(run_dir / "state", problem.algorithm.client_type, run)
        self._model: tuple[int, Model] | None = None
        """The model to evaluate, and its round."""
        self._broadcasts: dict[int, Any] = {}
        """The decoded broadcasts of the last rounds, if broadcasts refer to earlier ones."""

    def handle(self, envelope: Envelope, on: Problem | None = None) -> Envelope | None:
        """Return the reply (upload, absent, score, or failed), or None if the envelope needs no reply.

        on: the problem with the network to compute on, if it is not `self.problem` (Problem.beside).

        Raises:
            ConnectionLost: If the connection has ended, so that nobody waits for the reply.
        """
        h, problem = envelope.header, on or self.problem
        try:
            if h.run != self.run:
                raise WireError(f"an envelope of run {h.run!r}; worker {self.index} serves {self.run!r}")
            if h.kind == "task":
                return self._train(envelope, problem)
            if h.kind == "gone":
                return messages.absent(h)
            if h.kind == "last":
                self._keep(h.base, self._decoded(envelope, NOTHING))
                return None
            if h.kind == "evaluate":
                return self._evaluate(envelope, problem)
            raise WireError(f"worker {self.index} got an envelope of kind {h.kind!r}")
        except (Interrupted, ConnectionLost):
            raise
        except Exception as e:
            return messages.failed(self.run, e, h)

    def replies(self, envelope: Envelope, on: Problem | None = None) -> list[Envelope]:
        """Return the replies of a worker that shares the run's folder: one, or none."""
        reply = self.handle(envelope, on)
        return [] if reply is None else [reply]

    def _train(self, envelope: Envelope, problem: Problem) -> Envelope:
        began = time.monotonic_ns()
        h = envelope.header
        answered = problem.rounds.policy.answered(h.round, h.client)
        stream = codec_stream(problem.experiment.seed, answered, h.exchange)
        before = max((r for r in self._broadcasts if r < h.round), default=None)
        last = None if before is None else self._broadcasts[before]
        owner = h.client if problem.rounds.policy.has_own_broadcast() else NONE
        if owner != NONE:
            last = self._reference(h)
        fresh = not problem.rounds.policy.keeps_older(h)
        if fresh:
            down, received = self._decoded(envelope, of_broadcast(last, stream, owner)), h.round
        else:
            down, received = self._got(h)
        self._keep(h.round, down)
        stamp = (received, h.exchange, answered, before, owner, h.fields)  # identifies the broadcast
        copied = problem.copies.get("broadcast", stamp, lambda: down)
        task, state = messages.task_of(envelope), self._state
        result = execute(problem, task, state(h.client, h.base), down, h.folds, h.asked, copied, fresh)
        version = problem.messages.version(h.round, h.exchange)
        self.states.save(h.client, version, result.committed)
        problem.copies.keep(("state", h.client), version, result.committed)
        self.states.forget(h.client, h.base)
        return messages.upload(h, result.payload, (time.monotonic_ns() - began) // 1000)

    def _state(self, client: int, version: int) -> Any:
        """Return a client's state on the network's device. Only a cache keeps another reference to it."""
        problem = self.problem

        def stored() -> Any:
            if version:
                state = self.states.load(client, version)
                if plugins.is_spec(problem.experiment.algo):  # user code may read it after the task
                    return state
                return give_up(state, above=client_states.LARGEST_CACHED)
            return problem.algorithm.client_init(problem.context(0, 0), client)

        return problem.copies.get(("state", client), version, stored)

    def _reference(self, h: Header) -> Any:
        """Return the earlier broadcast to which a client's next one refers (+own)."""
        got = to_cpu(self._state(h.client, h.base).got)
        keep(got)
        return self.problem.rounds.policy.reference(got, self.problem.context(0, 0))

    def _got(self, h: Header) -> tuple[Any, int]:
        """Return the last broadcast that a client got, and its round; no new one was sent to it (+quiet)."""
        state = self._state(h.client, h.base)
        if state.got is None:
            raise WireError(f"client {h.client} got no broadcast in round {h.round}, and has none of before")
        got = to_cpu(state.got)
        keep(got)
        return got, state.got_in

    def _decoded(self, envelope: Envelope, context: MessageContext) -> Any:
        h, problem = envelope.header, self.problem
        owner = f"broadcast of round {h.round} to client {h.client}"
        kind = problem.messages.exchange(h.round, h.exchange).down
        down = problem.messages.decode(kind, envelope, "down", owner, context)
        check_values(down, owner)
        return down

    def _keep(self, round: int, down: Any) -> None:
        """Store this broadcast, and keep the newest earlier one, to which the round's tasks refer."""
        if self.problem.rounds.refers_to_last:
            self._broadcasts[round] = down
            self._broadcasts = {r: self._broadcasts[r] for r in sorted(self._broadcasts)[-2:]}

    def _evaluate(self, envelope: Envelope, problem: Problem) -> Envelope:
        h = envelope.header
        if envelope.frames:
            self._model = (h.round, messages.read_model(envelope, problem.messages.dims))
        if self._model is None or self._model[0] != h.round:
            raise WireError(f"worker {self.index} has no model of round {h.round} to evaluate")
        return messages.score(h, problem.evaluation.score(self._model[1], h.exchange, h.round))
