"""The coordinator's errors, which name the fault, the worker, the task and the remedy."""

from __future__ import annotations

from fedsim.errors import DiskError, FedsimError, TaskError
from fedsim.round_machine import RoundMachine
from fedsim.wire.envelope import NONE, Envelope
from workers.coordinator.worker_pool import ProcessExit
from workers.protocol_messages import read_failure


class ProtocolViolation(Exception):
    """An envelope violates the protocol. The text completes a sentence that begins with "worker N"."""


def silence(machine: RoundMachine, workers: int, patience: float) -> TaskError:
    """Return the error for a run in which nothing has happened for `patience` seconds."""
    held = {w: machine.held_by(w) for w in range(max(1, workers))}
    holders = "; ".join(
        f"worker {w} holds " + ", ".join(f"client {t.client}" for t in tasks)
        for w, tasks in held.items()
        if tasks
    )
    return TaskError(
        f"nothing has happened for {patience:g} s in round {machine.round}: "
        f"{holders or 'no worker holds a task, so the fold hangs'} (raise the limit with --patience)"
    )


def doing(machine: RoundMachine, worker: int) -> str:
    """Describe what a worker is doing: its round and clients."""
    held, now = machine.held_by(worker), len(machine.doing(worker))
    if not held:
        return f"in round {machine.round}, between tasks"
    clients = [str(item.client) for item in held]
    later = f" (next: {', '.join(clients[now:])})" if held[now:] else ""
    who = f"client {clients[0]}" if now == 1 else f"clients {', '.join(clients[:now])}"
    return f"in round {held[0].round}, at {who}{later}"


def task_failures(at: str, last: ProcessExit, count: int) -> TaskError:
    """Return the error for a run in which `count` workers have died in the same task or state."""
    return TaskError(
        f"worker {last.worker} {last.how} {at}: {count} workers have ended there, so it is not tried again. "
        f"All earlier rounds are kept; fedsim resume continues.\n{last.log_tail}"
    )


def reason(envelope: Envelope) -> str:
    """Return the last line of the error that a worker has reported; a traceback ends with the exception."""
    return (read_failure(envelope)[1].strip().splitlines() or ["no reason given"])[-1]


def failure(worker: int, envelope: Envelope, ready: bool = False) -> FedsimError:
    """Return the error that a worker has reported. ready: True if its set-up was complete."""
    h = envelope.header
    code, text = read_failure(envelope)
    what = text.rstrip()
    what = f"\n{what}" if "\n" in what else f" {what}"  # a traceback begins on a new line
    kind = DiskError if code == DiskError.exit_code else TaskError
    if h.round == NONE:
        return kind(f"worker {worker} {'failed' if ready else 'could not set itself up'}:{what}")
    if h.client == NONE:
        return kind(f"worker {worker} failed to evaluate round {h.round}:{what}")
    return kind(f"worker {worker} failed on client {h.client} in round {h.round}:{what}")
