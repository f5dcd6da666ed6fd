"""Compute one task: the client's update, the upload as the server decodes it, and the next state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fedsim.device_copies import to_cpu
from fedsim.learning.blocks import settled
from fedsim.problem import Problem
from fedsim.round_events import TaskId
from fedsim.wire.envelope import Payload, scaled
from fedsim.wire.message_context import codec_stream, of_upload
from fedsim.wire.schema import map_tensors
from workers.heap import LARGE


@dataclass(frozen=True)
class TaskResult:
    """The result of a task, all tensors on the CPU.

    draft: the state as client_update returns it. up: the message before any codec. payload: the encoded
    message; empty if the client's event rule sends none. decoded: the message as the server decodes it.
    committed: the client's next state.
    """

    draft: Any
    up: Any
    payload: Payload
    decoded: Any
    committed: Any


def execute(
    problem: Problem,
    of: TaskId,
    state: Any,
    down: Any,
    folds: int,
    asked: int,
    copied: Any = None,
    fresh: bool = True,
) -> TaskResult:
    """Compute a task. The result depends only on the arguments.

    Args:
        problem: The experiment.
        of: The task; its base is not used.
        state: The client's state at the start of the task, on any device. The caller should keep no
            reference to it, so that unused memory is freed before the commit.
        down: The decoded broadcast, on the CPU.
        folds: The number of rounds before this one that folded an upload.
        asked: The number of clients that take part in the round.
        copied: The broadcast on the network's device, if the caller has it.
        fresh: True if `down` is this round's broadcast, False if it is one that the client kept (+quiet).

    Returns:
        The result. The client commits the decoded message, because the server folds this message, too.
    """
    algorithm, device = problem.algorithm, problem.net.device
    task = problem.task(of.round, of.exchange, of.client, folds, asked)
    problem.net.acquire()
    draft, up = algorithm.client_update(
        map_tensors(state, lambda t: t.to(device)),
        map_tensors(down, lambda t: t.to(device)) if copied is None else copied,
        problem.shard(of.client),
        task,
    )
    problem.net.restore()
    state = None  # free memory that is no longer needed
    if problem.net.layout.size >= LARGE:  # because the commit needs memory
        problem.net.release()
    draft, up = to_cpu((draft, up))
    stream = codec_stream(problem.experiment.seed, of.round, of.exchange, of.client)
    context = of_upload(down, stream, scaled(problem.messages.codecs["up"]))
    payload, decoded = problem.messages.sent(up, "up", context)
    task = replace(task, start=problem.start)
    size = sum(part.nbytes for f in payload.fields for part in f.parts)
    committed, sends = problem.rounds.policy.decide(
        algorithm, draft, down, decoded, task, size=size, fresh=fresh
    )
    committed = settled(committed, draft)
    return TaskResult(draft, up, payload if sends else Payload((), ()), decoded, committed)
