"""RUN/manifest.json: the configuration of a run, and its environment."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from hashlib import sha256
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from fedsim import model_specs, partition_specs, plugins, traces
from fedsim.experiment import Experiment, resolved_hyperparameters
from fedsim.version import __version__
from launch.configuration.execution import AUTO, Execution
from launch.runs.source_commit import commit
from workers.devices import gpu_models
from workers.numerics import HERE, PROBE, Difference, Facts, differences, facts_of_machine, processor_name

if TYPE_CHECKING:
    from fedsim.problem import Problem

MANIFEST = "manifest.json"
FORMAT = 1
ALWAYS = ("algo", "dataset", "clients", "rounds", "seed")
"""Keys that every manifest's experiment must have; `params` follows when the start has made the model."""
WIRE = 3
"""The value of fedsim.wire.header.VERSION, which cannot be imported here, because that imports torch."""
LIBRARIES = ("torch", "numpy", "pyzmq", "msgspec", "xxhash", "safetensors", "scikit-learn", "zstandard")


def describe(
    experiment: Mapping[str, Any], execution: Execution, run: str, probe: Mapping[str, str]
) -> dict[str, Any]:
    """Return a run's manifest. `experiment` has all defaults, and `probe` is workers.probe.probe here."""
    return {
        "format": FORMAT,
        "wire": WIRE,
        "run": run,
        "experiment": experiment,
        "experiment_sha256": digest(experiment),
        "execution": _settings(execution),
        **surroundings(probe),
        "commit": commit(),
        "seeds": {"run": experiment["seed"], "streams": "blake2b(seed|purpose|round|client|part)"},
        "started": now(),
        "command": sys.argv,
    }


def draft(experiment: Experiment, execution: Execution) -> dict[str, Any]:
    """Return the manifest of a run whose start has not made the model yet, as far as it is known then."""
    content = {"format": FORMAT, "wire": WIRE, "run": "", "experiment": asdict(experiment)}
    return content | {"execution": _settings(execution), "started": now(), "command": sys.argv}


def _settings(execution: Execution) -> dict[str, Any]:
    return {name: "auto" if value == AUTO else value for name, value in asdict(execution).items()}


def described(problem: Problem) -> dict[str, Any]:
    """Return the experiment with all defaults resolved. `sources` has the sha256 of the user's files."""
    experiment = problem.experiment
    files = {text for text in (experiment.link, experiment.tree) if text.endswith((".csv", ".toml"))}
    features, dropped = problem.dataset.features, problem.dataset.dropped
    return asdict(experiment) | {
        "hyperparameters": resolved_hyperparameters(problem.algorithm.unwrapped),
        "params": problem.net.layout.size,
        **({"frozen": problem.frozen_digest} if problem.frozen_digest else {}),
        "client_sizes": list(problem.sizes),
        "data": problem.data_digest,
        **({"features": list(features)} if features else {}),
        **({"rows_dropped": dropped} if dropped else {}),
        **({} if problem.evaluation.test_clients is None else {"client_scores": "own test rows"}),
        "sources": plugins.sources(plugins.all_choices(experiment))
        | model_specs.sources(experiment.model)
        | traces.digest(experiment.participation)
        | partition_specs.digest(experiment.partition)
        | {path: traces.sha256(path) for path in sorted(files)},
    }


def surroundings(probe: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the versions and the platform, including digests of small computations."""
    facts = facts_of_machine()
    return {
        "versions": versions(),
        "platform": {
            "system": platform.platform(),
            "machine": facts["machine"],
            "processor": facts["processor"],
            "processor_name": processor_name(),
            "gpus": gpu_models(),
            "probe": dict(probe),
        },
    }


def facts_of(content: Mapping[str, Any], device: str) -> dict[str, str]:
    """Return the facts in a manifest, or in surroundings(), on which bits depend (workers/numerics.py).
    Missing facts are left out, and so is the machine's GPU unless `device` is "cuda"."""
    versions, machine = content.get("versions", {}), content.get("platform", {})
    facts = {name: value for name, value in {**versions, **machine}.items() if name in HERE}
    if device == "cuda":
        facts |= {"gpus": ", ".join(machine["gpus"])} if machine.get("gpus") else {}
        facts |= {"gpu": machine["gpu"]} if machine.get("gpu") else {}
    return facts | {PROBE.format(kind): digest for kind, digest in sorted(machine.get("probe", {}).items())}


def computing(before: Mapping[str, Any], now: Mapping[str, Any], device: str) -> list[Difference]:
    """Return the differences between two manifests (`there` before, `here` now) that may change bits."""
    return list(differences(facts_of(before, device), facts_of(now, device)))


def with_workers(content: Mapping[str, Any], facts: Facts, drift: Sequence[str]) -> dict[str, Any]:
    """Add the first worker's facts to a manifest, because the coordinator may lack the GPU and its probe.
    `drift` has a text for each worker whose bits may differ."""
    known = content["platform"]
    digests = {kind: facts[name] for kind in ("cpu", "cuda") if (name := PROBE.format(kind)) in facts}
    machine = {**known, "probe": {**digests, **known.get("probe", {})}}
    if "gpu" in facts:
        machine.setdefault("gpu", facts["gpu"])
    result = {**content, "platform": machine}
    noted = list(dict.fromkeys([*content.get("drift", []), *drift]))
    return result | {"drift": noted} if noted else result


CHANGEABLE = ("rounds", "until")
"""The fields of an experiment that a resume may change: those that determine its end."""


def resumed(before: Mapping[str, Any], now: Experiment, start: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest of a resumed run. `now` is its new experiment, and `start` describes the resume."""
    experiment = {**before["experiment"], **{name: getattr(now, name) for name in CHANGEABLE}}
    changes = {"experiment": experiment, "experiment_sha256": digest(experiment)}
    return {**before, **changes, "resumes": [*before.get("resumes", []), start]}


def digest(experiment: Mapping[str, Any]) -> str:
    """Return the sha256 of a manifest's experiment as JSON with sorted keys."""
    plain = json.loads(json.dumps(experiment))
    return sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def lasting_digest(experiment: Mapping[str, Any]) -> str:
    """Return the digest of the experiment without the fields that a resume may change."""
    return digest({key: value for key, value in experiment.items() if key not in CHANGEABLE})


def now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Return the versions of Python, fedsim and the libraries on which results may depend."""
    return {
        "fedsim": __version__,
        "python": platform.python_version(),
        **{name: version(name) for name in LIBRARIES},
    }
