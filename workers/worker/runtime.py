"""The worker: receives tasks, computes them, writes the client's next state, replies.

WorkerRuntime is the role without any socket; `--workers 0` drives the same object in process.
"""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from fedsim.errors import FedsimError, Interrupted, WireError
from fedsim.learning.gaussian import Gaussian, Point, diagonal, is_full, packed, unpacked
from fedsim.problem import ChunkScore, Problem
from fedsim.round_machine import TaskId
from fedsim.wire.envelope import VERSION, Envelope, Header, blob, decode, decode_own, encode, pack, references
from fedsim.wire.schema import FullPrecision, Mean, Precision, check_values, map_tensors
from workers.storage.client_states import ClientStates


def pack_score(score: ChunkScore) -> bytes:
    """Both tallies as little-endian float64: a NaN must survive, so no JSON."""
    return np.array([*score.tally, *score.ensemble], "<f8").tobytes()


def unpack_score(envelope: Envelope, width: int, sampled: bool) -> ChunkScore:
    """The score of a reply; `width` (Measure.width) and `sampled` say how long it is.

    Raises:
        WireError: if it is damaged or does not fit.
    """
    sizes = [memoryview(frame).nbytes for frame in envelope.frames]
    expected = 8 * width * (2 if sampled else 1)
    if sizes != [expected]:
        raise WireError(f"a score of {sizes} bytes where one of {expected} is due")
    values = tuple(np.frombuffer(envelope.frames[0], "<f8").tolist())
    return ChunkScore(values[:width], values[width:])


@dataclass(frozen=True)
class Spread:
    """The precision of a diagonal posterior, for sampling."""

    precision: Precision


@dataclass(frozen=True)
class Evaluate:
    """The model to score, sent once per worker and evaluated round."""

    mean: Mean
    spread: Spread | None = None


@dataclass(frozen=True)
class EvaluateFull:
    """The same, of a posterior with a full precision matrix."""

    mean: Mean
    triangle: FullPrecision


def to_evaluate(model: Point | Gaussian, samples: int) -> Evaluate | EvaluateFull:
    """The message that carries a model to those who score it; its precision only if it is sampled."""
    if not samples or isinstance(model, Point):
        return Evaluate(model.mean)
    if is_full(model.precision):
        return EvaluateFull(model.mean, packed(torch.as_tensor(model.precision)))
    return Evaluate(model.mean, Spread(diagonal(model.precision, model.mean)))


def to_score(message: Evaluate | EvaluateFull) -> Point | Gaussian:
    """The model of a message to evaluate, by its natural parameters in float64."""
    if isinstance(message, EvaluateFull):
        return Gaussian.at(message.mean, unpacked(message.triangle))
    if message.spread is not None:
        return Gaussian.at(message.mean, message.spread.precision)
    return Point(message.mean)


class WorkerRuntime:
    """Turns one envelope into its reply. Holds the problem, a cache of states, and one model to score."""

    def __init__(self, problem: Problem, run_dir: Path, run: str, index: int) -> None:
        self.problem, self.run, self.index = problem, run, index
        self.states = ClientStates(run_dir / "state", problem.algorithm.client_type)
        self._to_score: tuple[int, Point | Gaussian] | None = None

    def handle(self, envelope: Envelope) -> Envelope:
        """The reply: upload, score, or 'failed' with what went wrong and whose task it was."""
        h = envelope.header
        try:
            if h.run != self.run:
                raise WireError(f"an envelope of run {h.run!r}; worker {self.index} serves {self.run!r}")
            if h.kind == "task":
                return self._train(envelope)
            if h.kind == "gone":
                return self._reply("absent", envelope)
            if h.kind == "evaluate":
                return self._score(envelope)
            raise WireError(f"worker {self.index} got an envelope of kind {h.kind!r}")
        except Interrupted:
            raise
        except Exception as e:
            return self._reply("failed", envelope, *failure(e))

    def _reply(
        self, kind: str, to: Envelope, fields: Any = (), frames: Any = (), micros: int = 0
    ) -> Envelope:
        h = to.header
        head = Header(VERSION, kind, self.run, h.epoch, h.round, h.exchange, h.client, h.base, micros, fields)
        return pack(head, frames)

    def _train(self, envelope: Envelope) -> Envelope:
        began = time.monotonic_ns()
        h, problem, algorithm = envelope.header, self.problem, self.problem.algorithm
        owner = f"broadcast of round {h.round} to client {h.client}"
        types = problem.exchange(h.round, h.exchange)
        codecs, dims, layout = problem.codecs, problem.dims, problem.net.layout
        received: Any = decode(types.down, envelope, codecs["down"], dims, owner, layout=layout)
        check_values(received, owner)
        device = problem.net.device
        down = map_tensors(received, lambda t: t.to(device))
        if h.base:
            state = self.states.load(h.client, h.base)
        else:
            state = algorithm.client_init(problem.context(0, 0), h.client)
        state = map_tensors(state, lambda t: t.to(device))
        task = problem.task(h.round, h.exchange, h.client)
        draft, up = algorithm.client_update(state, down, problem.shard(h.client), task)
        refs = references(received)
        payload = encode(map_tensors(up, lambda t: t.cpu()), codecs["up"], dims, refs, layout)
        seen: Any = decode_own(types.up, payload, codecs["up"], dims, refs, layout)
        committed = algorithm.client_commit(
            map_tensors(draft, lambda t: t.cpu()), received, seen, replace(task, start=problem.start)
        )
        created = problem.version(h.round, h.exchange)
        self.states.save(h.client, created, committed)
        self.states.forget(h.client, h.base)
        micros = (time.monotonic_ns() - began) // 1000
        return self._reply("upload", envelope, payload.fields, payload.frames, micros)

    def _score(self, envelope: Envelope) -> Envelope:
        h = envelope.header
        if envelope.frames:
            owner = f"model of round {h.round} to evaluate"
            full = any(f.name == "triangle" for f in h.fields)
            kind: type[Evaluate | EvaluateFull] = EvaluateFull if full else Evaluate
            self._to_score = (h.round, to_score(decode(kind, envelope, {}, self.problem.dims, owner)))
        if self._to_score is None or self._to_score[0] != h.round:
            raise WireError(f"worker {self.index} has no model of round {h.round} to evaluate")
        score = self.problem.score(self._to_score[1], h.exchange, h.round)
        return self._reply("score", envelope, *blob("score", pack_score(score)))


def failure(error: Exception) -> tuple[Any, Any]:
    """The field of a 'failed' envelope: exit code and what went wrong."""
    if isinstance(error, FedsimError):
        notice = (error.exit_code, str(error))
    else:
        notice = (FedsimError.exit_code, "".join(traceback.format_exception(error)))
    return blob("error", msgspec.json.encode(notice))


def task_of(envelope: Envelope) -> TaskId:
    """The task that an envelope answers."""
    h = envelope.header
    return TaskId(h.round, h.exchange, h.client, h.base)
