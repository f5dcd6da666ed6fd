"""RUN/manifest.json: what was asked for, and what it was carried out with."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsim import plugins, traces
from fedsim.errors import DataError, MismatchError, UsageError
from fedsim.experiment import Experiment, convert, resolved_hyperparameters
from launch.config import Execution
from launch.runs.source_commit import commit
from workers.devices import gpu_models

if TYPE_CHECKING:
    from fedsim.problem import Problem

FORMAT = 1
WIRE = 2
"""fedsim.wire.header.VERSION, which must not be imported here: it imports torch."""
COMPUTES = ("python", "torch", "numpy")
"""Versions that bits may depend on; others only carry them about."""
LIBRARIES = ("torch", "numpy", "pyzmq", "msgspec", "xxhash", "safetensors", "scikit-learn", "zstandard")


def describe(
    experiment: Mapping[str, Any], execution: Execution, run: str, probe: Mapping[str, str]
) -> dict[str, Any]:
    """experiment: with every default resolved. probe: workers.probe.probe of this process. commit: of the
    source."""
    return {
        "format": FORMAT,
        "wire": WIRE,
        "run": run,
        "experiment": experiment,
        "execution": asdict(execution),
        **surroundings(probe),
        "commit": commit(),
        "seeds": {"run": experiment["seed"], "streams": "blake2b(seed|purpose|round|client|part)"},
        "started": now(),
        "command": sys.argv,
    }


def described(problem: Problem) -> dict[str, Any]:
    """Describe an experiment with every default resolved.

    `sources` has the user's own files and their sha256.
    """
    from fedsim.virtual_clock import is_file  # imports torch, and this module must not

    experiment = problem.experiment
    return asdict(experiment) | {
        "hyperparameters": resolved_hyperparameters(problem.algorithm.unwrapped),
        "params": problem.net.layout.size,
        "client_sizes": list(problem.sizes),
        "data": problem.data_digest,
        "sources": plugins.sources(plugins.all_choices(experiment))
        | traces.digest(experiment.participation)
        | ({experiment.link: traces.sha256(experiment.link)} if is_file(experiment.link) else {}),
    }


def surroundings(probe: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """What computes here: versions, platform, and the digest of a small computation."""
    return {
        "versions": versions(),
        "platform": {
            "system": platform.platform(),
            "machine": platform.machine(),
            "processor": _processor(),
            "gpus": gpu_models(),
            "probe": dict(probe),
        },
    }


def computing(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Of two manifests, what the bits may depend on besides the experiment: its name, and what it was (None:
    not recorded) and is."""
    for name in COMPUTES:
        yield name, before.get("versions", {}).get(name), now["versions"][name]
    then, here = before.get("platform", {}), now["platform"]
    for name in ("machine", "processor", "gpus"):
        yield name, then.get(name), here[name]
    for device in sorted(then.get("probe", {}).keys() & here["probe"].keys()):
        yield f"probe digest ({device})", then["probe"][device], here["probe"][device]


def read(folder: Path) -> dict[str, Any]:
    """Read the manifest of a run folder.

    Raises:
        UsageError: if this is no run of this format.
        DataError: if its manifest is damaged.
    """
    path = folder / "manifest.json"
    if not path.exists():
        raise UsageError(f"{folder} is no run folder: there is no {path}")
    result = json_of(path)
    if result.get("format") != FORMAT or not isinstance(result.get("experiment"), dict):
        options = result.get("format")
        raise UsageError(f"{path} has format {options!r}; this version of fedsim reads format {FORMAT}")
    return result


def check_wire(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Refuse a run that was begun with another wire format: its checkpoints and states are of that format.

    Raises:
        MismatchError: naming both formats.
    """
    begun = manifest.get("wire", 1)
    if begun != WIRE:
        raise MismatchError(
            f"{folder} was begun with wire format {begun}; this fedsim speaks {WIRE}. Finish it with the "
            "fedsim that began it (versions.fedsim in its manifest), or start a new run"
        )


def experiment(folder: Path, result: Mapping[str, Any]) -> Experiment:
    """Of a manifest, without what was added to it from data and algorithm.

    Raises:
        UsageError: if an argument is wrong.
    """
    known = {f.name for f in fields(Experiment)}
    described = {k: v for k, v in result["experiment"].items() if k in known}
    return convert(Experiment, described, f"the experiment of {folder / 'manifest.json'}")


def json_of(path: Path) -> dict[str, Any]:
    """Of one of a run's files; {} if it holds something else.

    Raises:
        UsageError: if an argument is wrong.
        DataError: if data is missing or damaged.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise UsageError(f"{path}: {e.strerror}") from None
    except ValueError as e:
        raise DataError(f"{path} is damaged: {e}") from None
    return dict(result) if isinstance(result, dict) else {}


def now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Python, fedsim and the libraries that results may depend on."""
    import fedsim

    return {
        "fedsim": fedsim.__version__,
        "python": platform.python_version(),
        **{name: version(name) for name in LIBRARIES},
    }


def _processor() -> str:
    """The CPU's instruction set as torch sees it: bits may differ between capabilities."""
    import torch

    return str(torch.backends.cpu.get_cpu_capability())
