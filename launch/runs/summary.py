"""The files written when a run ends: summary.json and model.safetensors."""

from __future__ import annotations

import errno
import os
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from fedsim.errors import DataError, DiskError
from fedsim.learning.gaussian import Model, Point, Samples, is_full, taken_apart
from fedsim.learning.models.weights import read_tensors
from fedsim.learning.params import Layout
from fedsim.problem import Problem
from fedsim.wire.ledger import Ledger
from launch.configuration.target_accuracy import TargetAccuracy
from launch.runs.client_costs import ClientCosts
from workers.coordinator.loop import Outcome
from workers.storage.atomic_files import patiently, write_atomically
from workers.storage.client_states import ClientStates, clients_digest, model_digest
from workers.storage.metrics_file import OPTIONAL_SCORES

NOTHING = Layout(())


class Start(NamedTuple):
    """The start of the program in seconds since the epoch, and the seconds of its imports."""

    at: float
    imports: float


def spread_of(model: Model) -> Tensor | None:
    """Return a model's precision, shape (P,) or (P, P), or its samples, shape (n, P); None for a point."""
    model = taken_apart(model)[0]
    if isinstance(model, Point):
        return None
    if isinstance(model, Samples):
        return model.values
    if is_full(model.precision):
        return torch.as_tensor(model.precision)
    return torch.as_tensor(model.precision).expand_as(model.mean).contiguous()


def write_model(path: Path, problem: Problem, model: Model) -> None:
    """Write the model in float32: the mean by parameter name, and running statistics by name. A precision is
    stored as `precision.<name>`, or as `precision` if it is a matrix; samples, shape (n, P), as `samples`."""
    layout = problem.net.layout
    model, statistics = taken_apart(model)
    tensors = {name: t.clone() for name, t in layout.unflatten(model.mean.float().cpu()).items()}
    spread = spread_of(model)
    if spread is not None and isinstance(model, Samples):
        tensors["samples"] = spread.float().cpu()
    elif spread is not None and is_full(spread):
        tensors["precision"] = spread.float().cpu()
    elif spread is not None:
        named = layout.unflatten(spread.float().cpu())
        tensors |= {f"precision.{name}": t.clone() for name, t in named.items()}
    if statistics is not None:
        tensors |= {name: t.clone() for name, t in problem.net.running.unflatten(statistics).items()}
    try:
        patiently(lambda: _save(tensors, path, problem.experiment.algo))
    except (OSError, SafetensorError) as e:
        raise DiskError(f"cannot write {path}: {e}") from None


def _save(tensors: dict[str, Tensor], path: Path, algo: str) -> None:
    """Write tensors and the algorithm's name; raise OSError if no file descriptor is left."""
    temporary = path.with_name(f".{path.name}")
    write_atomically(temporary, [])
    mode = temporary.stat().st_mode  # by the umask; safetensors gives 0600
    try:
        save_file(tensors, temporary, {"algorithm": algo})
    except SafetensorError as e:
        if f"(os error {errno.EMFILE})" not in str(e):
            raise
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE)) from None
    temporary.chmod(mode)
    temporary.rename(path)


def digest_of(model: Model) -> str:
    """Return the model_sha256 of a model."""
    return model_digest(model.mean, spread_of(model), taken_apart(model)[1])


def stored_model_digest(path: Path, layout: Layout, running: Layout = NOTHING) -> str:
    """Return the model_sha256 of a file that write_model has written."""
    try:
        tensors = read_tensors(path)
        mean = _vector(tensors, layout, "")
        known = bool(running.slices) and running.slices[0].name in tensors  # absent if clients keep their own
        statistics = _vector(tensors, running, "") if known else None
        for whole in ("precision", "samples"):
            if whole in tensors:
                return model_digest(mean, tensors[whole], statistics)
        precise = any(name.startswith("precision.") for name in tensors)
        return model_digest(mean, _vector(tensors, layout, "precision.") if precise else None, statistics)
    except (OSError, SafetensorError) as e:
        raise DataError(f"{path} cannot be read: {e}") from None
    except KeyError as e:
        raise DataError(f"{path} has no tensor {e}") from None


def check_model(path: Path, problem: Problem, summary: Mapping[str, Any]) -> None:
    """Compare a run's model.safetensors with the digest in its summary, if there is one.

    Raises:
        DataError: if they differ.
    """
    recorded = summary.get("model_sha256")
    if recorded and stored_model_digest(path, problem.net.layout, problem.net.running) != recorded:
        raise DataError(
            f"{path} was changed: summary.json has the model_sha256 of another model. Restore the original, "
            "or run the experiment again"
        )


def _vector(tensors: Mapping[str, Tensor], layout: Layout, prefix: str) -> Tensor:
    return torch.cat([tensors[prefix + s.name].reshape(-1) for s in layout.slices])


def dual_mismatch(
    problem: Problem, server: Any, states: ClientStates, versions: tuple[int, ...]
) -> float | None:
    """Return Algorithm.dual_mismatch over all clients' states, with one in memory at a time. Send nothing."""
    algorithm, ctx = problem.algorithm, problem.context(0, 0)
    clients = (
        states.load(k, version) if version else algorithm.client_init(ctx, k)
        for k, version in enumerate(versions)
    )
    return algorithm.dual_mismatch(server, clients)


def asynchronous(problem: Problem, rounds: int) -> dict[str, Any]:
    """Return the duration and the uploads by staleness of an asynchronous run; {} for a synchronous run."""
    schedule = problem.rounds.policy.schedule
    if schedule is None:
        return {}
    counts = schedule.staleness(rounds)
    mean = sum(s * n for s, n in enumerate(counts)) / max(sum(counts), 1)
    return {
        "asynchronous": {
            "simulated_seconds": schedule.seconds(rounds),
            "staleness": counts,
            "staleness_mean": mean,
        }
    }


def summarise(
    problem: Problem,
    ledger: Ledger,
    *,
    status: str,
    error: str | None,
    rounds: int,
    metrics: Mapping[str, Any] | None,
    target: TargetAccuracy,
    bytes_to_until: Mapping[str, int] | None,
    took_part: list[int],
    folded: list[int],
    costs: ClientCosts,
    outcome: Outcome | None,
    states: ClientStates | None,
    start: Start,
) -> dict[str, Any]:
    """Return the content of summary.json. `costs` is of the committed rounds (docs/decisions/005). For each
    client, `took_part` counts the rounds in which it got the broadcast, and `folded` the rounds in which its
    upload was aggregated. In the result, `until` is the target accuracy, `reached` the first evaluated round
    with it, and `bytes_to_until` the algorithm's bytes up to that round by direction. `kernel_residual` is
    the kernel's byte count of the streams minus the ledger's, and `kernel_retransmitted` the bytes that the
    coordinator's kernel sent again (tcp); `dual_mismatch` is taken at the end."""
    params = problem.net.layout.size
    down, up = ledger.bytes_of("algorithm", "down"), ledger.bytes_of("algorithm", "up")
    summary: dict[str, Any] = {
        "format": 1,
        "status": status,
        "error": error,
        "rounds": rounds,
        "params": params,
        "test_accuracy": metrics["test_accuracy"] if metrics else None,
        "test_nll": metrics["test_nll"] if metrics else None,
        "until": target.until or None,
        "reached": target.reached,
        "bytes_to_until": bytes_to_until,
        **{k: v for k, v in (metrics or {}).items() if k in OPTIONAL_SCORES},
        "bytes": ledger.nested(),
        "bytes_down": down,
        "bytes_up": up,
        "participations": sum(took_part),
        "took_part": took_part,
        "folded": folded,
        **costs.units(params=params, participations=sum(took_part), clients=len(took_part)),
        "kernel_residual": None,
        "kernel_retransmitted": None,
        "seconds_to_first_round": None,
        "seconds_imports": round(start.imports, 3),
        "seconds_round_median": None,
        "seconds_clients": None,
        "model_sha256": None,
        "clients_sha256": None,
        "dual_mismatch": None,
        **asynchronous(problem, rounds),
        **({"limits": metrics["limits"]} if metrics and "limits" in metrics else {}),
    }
    if outcome is not None and states is not None:
        later = outcome.seconds_rounds[1:] or outcome.seconds_rounds
        summary |= {
            "kernel_residual": outcome.kernel_residual,
            "kernel_retransmitted": outcome.kernel_retransmitted,
            "seconds_to_first_round": round(outcome.seconds_to_first_round, 3),
            "seconds_round_median": round(statistics.median(later), 6) if later else None,
            "seconds_clients": round(outcome.seconds_clients, 3),
            "model_sha256": digest_of(outcome.model),
            "clients_sha256": clients_digest(problem, states, outcome.versions),
            "dual_mismatch": dual_mismatch(problem, outcome.server, states, outcome.versions),
        }
    return summary
