"""Pack and read the messages between the coordinator and a registered worker, each in an envelope.

    coordinator -> worker    welcome, state, last, task (or gone), evaluate, heartbeat, stop
    worker -> coordinator    ready, heartbeat, draft, upload (or absent), score, failed

A worker answers `task` with `upload`, and `gone` (the client drops out after the download) with `absent`.
Remote workers do not share the run's folder: `state` sends them a client's state before the task that starts
from it, and `draft` returns the next state before the upload. If a broadcast refers to the previous one,
`last` sends the previous broadcast to a worker that lacks it. In a real federation a client keeps its own
state and its last broadcast, so `state`, `draft` and `last` are simulation traffic.

The envelopes at the beginning of a connection are in workers.transport.handshake. A function that reads an
envelope raises WireError if the envelope is malformed.
"""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import torch

from fedsim import model_specs, plugins
from fedsim.errors import FedsimError, WireError
from fedsim.evaluation import ChunkScore
from fedsim.learning.gaussian import (
    Gaussian,
    Model,
    Normalised,
    Plain,
    Point,
    Samples,
    diagonal,
    is_full,
    packed,
    unpacked,
)
from fedsim.printable import printable
from fedsim.problem import Problem
from fedsim.round_events import TaskId
from fedsim.running_statistics import FIELD, extended, with_field
from fedsim.wire.codecs import raw_bytes
from fedsim.wire.envelope import NONE, VERSION, Envelope, Header, Payload, blob, decode, pack
from fedsim.wire.schema import Dims, Draws, FullPrecision, Mean, Precision
from workers.place import Place, Printable
from workers.transport.handshake import notice, read_json

NO_PAYLOAD = Payload((), ())
NUMBERS = "numbers of "
"""The prefix of names in WorkerManifest.sources whose digests cover computed numbers, not files."""

# ---- registration


class WorkerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The data from which a worker builds the run.

    experiment: the fields of fedsim.experiment.Experiment. data_dir, run_dir: folders on the coordinator's
    machine; run_dir is None for remote workers. index: the worker's number. lanes: the number of tasks that a
    worker on a GPU computes at once, if more than one.
    """

    experiment: dict[str, Any]
    data_dir: str | None = None
    run_dir: str | None = None
    index: int = NONE
    lanes: int | msgspec.UnsetType = msgspec.UNSET


class WorkerManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The data that a worker reports after its set-up.

    data: Problem.data_digest, '' if it was not computed. sources: the user's own files and their sha256.
    facts: workers.numerics.facts_of_process. processor: the processor's name. place: where the worker runs,
    which is not compared.
    """

    data: Printable
    sources: dict[str, Printable]
    facts: dict[Printable, Printable] = {}
    processor: Printable = ""
    place: Place = Place()

    @staticmethod
    def of(envelope: Envelope) -> WorkerManifest:
        """Return the manifest of a ready message."""
        return read_json(envelope, WorkerManifest, "'ready'")

    def differ(self, other: WorkerManifest) -> str:
        """Return the first difference from the coordinator's manifest `other`, or '' if there is none."""
        if self.data != other.data:
            return f"its partitioned data has the digest {self.data}; this run's has {other.data}"
        for path, digest in other.sources.items():
            theirs = self.sources.get(path, "none")
            if theirs != digest and path.startswith(NUMBERS):
                return (
                    f"{path.removeprefix(NUMBERS)} gives other numbers in every process: draw them from a "
                    "generator with a fixed seed, and not from numpy.random, random, a clock or a set's order"
                )
            if theirs != digest:
                return f"its {path} has the sha256 {theirs[:12]}; this run's has {digest[:12]}"
        return ""


def sources_of(problem: Problem, names: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """Return digests of user files, of the numbers they compute, and of frozen parameters, by name.

    names: a mapping from this machine's paths of user files to the coordinator's paths, if they differ.
    """
    e, model = problem.experiment, problem.experiment.model.partition(plugins.WEIGHTS)[0]
    files = plugins.sources(plugins.computing_choices(e))
    result = {names.get(path, path): digest for path, digest in files.items()} | model_specs.sources(e.model)
    if problem.frozen_digest:
        result["frozen parameters"] = problem.frozen_digest
    data = [plugins.short(choice) for choice in (e.dataset, e.partition) if plugins.is_spec(choice)]
    if data:
        result[NUMBERS + " and ".join(data)] = problem.data_digest
    if plugins.is_spec(model):
        start = hashlib.sha256(raw_bytes(problem.start))
        start.update(raw_bytes(problem.statistics))
        result[f"{NUMBERS}{plugins.short(model)} at the start"] = start.hexdigest()
    return result


INTERRUPTED = b"interrupted"


def welcome(run: str, config: WorkerConfig) -> Envelope:
    """Return the answer to a hello: the worker's configuration."""
    return notice("welcome", run, "welcome", msgspec.json.encode(config))


def read_welcome(envelope: Envelope) -> WorkerConfig:
    """Return the configuration in a welcome."""
    return read_json(envelope, WorkerConfig, "welcome of the coordinator")


def ready(run: str, manifest: WorkerManifest) -> Envelope:
    """Return the message of a worker that has finished its set-up."""
    return notice("ready", run, "ready", msgspec.json.encode(manifest))


def stop(run: str, interrupted: bool = False) -> Envelope:
    """Return the message that ends a worker. interrupted: True if the run ends early and can be resumed."""
    return notice("stop", run, "reason", INTERRUPTED) if interrupted else pack(Header(VERSION, "stop", run))


def was_interrupted(envelope: Envelope) -> bool:
    """Return whether a stop message ends a run that has rounds left."""
    return any(bytes(frame) == INTERRUPTED for frame in envelope.frames)


# ---- tasks


def task(
    run: str, epoch: int, of: TaskId, payload: Payload, dropout: bool = False, folds: int = 0, asked: int = 0
) -> Envelope:
    """Return the message that assigns the task `of`.

    epoch: the number of this start of the run. payload: the encoded broadcast. dropout: True if the client
    gets the broadcast but computes nothing. folds: the number of earlier rounds that folded an upload. asked:
    the number of clients that take part in the round.
    """
    kind, fields = "gone" if dropout else "task", payload.fields
    which = (epoch, of.round, of.exchange, of.client, of.base)
    header = Header(VERSION, kind, run, *which, fields=fields, folds=folds, asked=asked)
    return pack(header, payload.frames)


def task_of(envelope: Envelope) -> TaskId:
    """Return the task that an envelope assigns or answers."""
    h = envelope.header
    return TaskId(h.round, h.exchange, h.client, h.base)


def state(of: Header, data: bytes) -> Envelope:
    """Return the message with the client state from which the task `of` starts, encoded as in its file."""
    return answer("state", of, *blob("state", data))


def last_broadcast(of: Header, round: int, payload: Payload) -> Envelope:
    """Return the message with an earlier round's broadcast, which the task's own broadcast refers to."""
    header = msgspec.structs.replace(of, kind="last", base=round, fields=payload.fields)
    return pack(header, payload.frames)


def draft(of: Header, data: bytes) -> Envelope:
    """Return the message with the client state that the task `of` has computed, encoded as in its file."""
    return answer("draft", of, *blob("state", data))


def upload(of: Header, payload: Payload, micros: int) -> Envelope:
    """Return the answer to the task `of`. micros: the microseconds that the worker has spent on the task."""
    return answer("upload", of, payload.fields, payload.frames, micros)


def absent(of: Header) -> Envelope:
    """Return the answer to the task `of` if the client computes nothing."""
    return answer("absent", of)


def heartbeat(of: Header) -> Envelope:
    """Return the message of a worker that is busy with `of`, which is a task or a chunk to evaluate."""
    return pack(Header(VERSION, "heartbeat", of.run, of.epoch, of.round, of.exchange, of.client, NONE))


def idle(run: str) -> Envelope:
    """Return the heartbeat of a worker that has nothing to do; it renews no lease."""
    return pack(Header(VERSION, "heartbeat", run))


def failed(run: str, error: Exception, of: Header | None = None) -> Envelope:
    """Return the message of a worker that failed in the task `of`, or in its set-up if `of` is None."""
    if isinstance(error, FedsimError):
        code, text = error.exit_code, str(error)
    else:
        code, text = FedsimError.exit_code, "".join(traceback.format_exception(error))
    header = msgspec.structs.replace(of, run=run) if of else Header(VERSION, "failed", run)
    notice = (code, printable(text))  # a lone surrogate cannot be encoded in UTF-8
    return answer("failed", header, *blob("error", msgspec.json.encode(notice)))


def read_failure(envelope: Envelope) -> tuple[int, str]:
    """Return the exit code and text in a `failed` message; the code is 1 if the message cannot be read."""
    try:
        code, text = msgspec.json.decode(envelope.frames[0], type=tuple[int, str])
    except (IndexError, msgspec.DecodeError, UnicodeDecodeError):
        return 1, "(its message cannot be read)"
    return code, printable(text)


def answer(kind: str, of: Header, fields: Any = (), frames: Any = (), micros: int = 0) -> Envelope:
    """Return an envelope of kind `kind` about the same task as `of`."""
    return pack(msgspec.structs.replace(of, kind=kind, micros=micros, fields=fields), frames)


# ---- evaluation


@dataclass(frozen=True)
class Spread:
    """The precision of a diagonal posterior, for sampling."""

    precision: Precision


@dataclass(frozen=True)
class Evaluate:
    """The model to evaluate, sent to each worker once per evaluated round."""

    mean: Mean
    spread: Spread | None = None


@dataclass(frozen=True)
class EvaluateFull:
    """The model to evaluate if its posterior has a full precision matrix."""

    mean: Mean
    triangle: FullPrecision


@dataclass(frozen=True)
class EvaluateSamples:
    """The model to evaluate if its posterior is given by samples."""

    mean: Mean
    samples: Draws


ToEvaluate = Evaluate | EvaluateFull | EvaluateSamples


def evaluate(run: str, epoch: int, round: int, chunk: int, model: Payload = NO_PAYLOAD) -> Envelope:
    """Return the request to evaluate the model of a round on one chunk of the test set.

    epoch: the number of this start of the run. chunk: the chunk's number, which the header stores as
    `exchange`. model: the encoded model if the worker does not have it yet.
    """
    return pack(Header(VERSION, "evaluate", run, epoch, round, chunk, fields=model.fields), model.frames)


def to_evaluate(model: Model, samples: int) -> ToEvaluate:
    """Return the message with a model. It contains more than the mean only if samples are drawn."""
    if isinstance(model, Normalised):
        message: ToEvaluate = extended(to_evaluate(model.model, samples), model.statistics)
        return message
    if not samples or isinstance(model, Point):
        return Evaluate(model.mean)
    if isinstance(model, Samples):
        return EvaluateSamples(model.mean, model.values[-samples:])
    if is_full(model.precision):
        return EvaluateFull(model.mean, packed(torch.as_tensor(model.precision)))
    return Evaluate(model.mean, Spread(diagonal(model.precision, model.mean)))


def to_score(message: ToEvaluate) -> Model:
    """Return the model of a message; a Gaussian gets natural parameters in float64."""
    plain, statistics = _weights_of(message), getattr(message, FIELD, None)
    return plain if statistics is None else Normalised(plain, statistics)


def _weights_of(message: ToEvaluate) -> Plain:
    if isinstance(message, EvaluateFull):
        return Gaussian.at(message.mean, unpacked(message.triangle))
    if isinstance(message, EvaluateSamples):
        return Samples(message.mean, message.samples)
    if message.spread is not None:
        return Gaussian.at(message.mean, message.spread.precision)
    return Point(message.mean)


def read_model(envelope: Envelope, dims: Dims) -> Model:
    """Return the model in an evaluate message."""
    kinds: dict[str, type[ToEvaluate]] = {"triangle": EvaluateFull, "samples": EvaluateSamples}
    names = {f.name for f in envelope.header.fields}
    kind: Any = next((kinds[name] for name in kinds if name in names), Evaluate)
    if FIELD in names:
        kind = with_field(kind)
    owner = f"model of round {envelope.header.round} to evaluate"
    return to_score(decode(kind, envelope, {}, dims, owner))


def score(of: Header, result: ChunkScore) -> Envelope:
    """Return the answer to the evaluate message `of`."""
    return answer("score", of, *blob("score", pack_score(result)))


def pack_score(score: ChunkScore) -> bytes:
    """Return the tallies as little-endian float64, because JSON cannot represent NaN."""
    return np.array([*score.tally, *score.ensemble, *score.clients], "<f8").tobytes()


def unpack_score(envelope: Envelope, width: int, sampled: bool, clients: int = 0) -> ChunkScore:
    """Return the result in a score message.

    width: the length of a tally (Measure.width). sampled: True if there is a second tally, of the ensemble.
    clients: the number of clients that have their own test rows; each has three numbers.

    Raises:
        WireError: if the message has the wrong length.
    """
    sizes = [memoryview(frame).nbytes for frame in envelope.frames]
    tallies = width * (2 if sampled else 1)
    expected = 8 * (tallies + 3 * clients)
    if sizes != [expected]:
        raise WireError(f"a score of {sizes} bytes instead of {expected}")
    values = tuple(np.frombuffer(envelope.frames[0], "<f8").tolist())
    return ChunkScore(values[:width], values[width:tallies], values[tallies:])
