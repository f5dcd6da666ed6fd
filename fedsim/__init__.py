"""Measures what federated Bayesian and ADMM learning costs on the wire.

    import fedsim
    run = fedsim.run(algo="fedlap_cov", rounds=20, workers=2)
    run.metrics, run.ledger, run.bytes_to(accuracy=0.9), run.model(), run.report()

The names below are the public ones (docs/python-api.md). Each is imported when it is first used, so that
`import fedsim` is quick and imports no torch. This package is the ground floor: nothing in it opens a socket,
starts a process or knows an algorithm by name.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedsim.algorithm import Algorithm, AnyShard, At, Context, Exchange, Step, Task, step_size
    from fedsim.data.datasets import Dataset
    from fedsim.errors import (
        AccessError,
        ConnectionLost,
        DataError,
        DiskError,
        FedsimError,
        Interrupted,
        MismatchError,
        TaskError,
        UsageError,
        WireError,
    )
    from fedsim.experiment import Experiment
    from fedsim.learning.gaussian import Gaussian, Point, Samples
    from fedsim.learning.shards import Shard
    from fedsim.learning.solvers.first_order import LocalTraining, minimise
    from fedsim.participation import ClientPopulation, Participation
    from fedsim.python_api import Run, open, preset, resume, run
    from fedsim.seeds import RandomStream
    from fedsim.wire.codecs.base import Bound, Codec, Part, Spec
    from fedsim.wire.schema import (
        Check,
        Curvature,
        Delta,
        Dual,
        FieldKind,
        Flag,
        FullDelta,
        FullPrecision,
        Gradient,
        Inputs,
        Least,
        Logits,
        Mean,
        Norm,
        Owners,
        Precision,
        Scalar,
        Shift,
        Statistic,
        Total,
        Weights,
    )

__version__ = "0.1.0"

_MODULES = {
    "fedsim.algorithm": "Algorithm AnyShard At Context Exchange Step Task step_size",
    "fedsim.data.datasets": "Dataset",
    "fedsim.errors": "AccessError ConnectionLost DataError DiskError FedsimError Interrupted MismatchError "
    "TaskError UsageError WireError",
    "fedsim.experiment": "Experiment",
    "fedsim.python_api": "Run open preset resume run",
    "fedsim.learning.gaussian": "Gaussian Point Samples",
    "fedsim.learning.shards": "Shard",
    "fedsim.learning.solvers.first_order": "LocalTraining minimise",
    "fedsim.participation": "ClientPopulation Participation",
    "fedsim.seeds": "RandomStream",
    "fedsim.wire.codecs.base": "Bound Codec Part Spec",
    "fedsim.wire.schema": "Check Curvature Delta Dual FieldKind Flag FullDelta FullPrecision Gradient Inputs "
    "Least Logits Mean Norm Owners Precision Scalar Shift Statistic Total Weights",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [
    "AccessError",
    "Algorithm",
    "AnyShard",
    "At",
    "Bound",
    "Check",
    "ClientPopulation",
    "Codec",
    "ConnectionLost",
    "Context",
    "Curvature",
    "DataError",
    "Dataset",
    "Delta",
    "DiskError",
    "Dual",
    "Exchange",
    "Experiment",
    "FedsimError",
    "FieldKind",
    "Flag",
    "FullDelta",
    "FullPrecision",
    "Gaussian",
    "Gradient",
    "Inputs",
    "Interrupted",
    "Least",
    "LocalTraining",
    "Logits",
    "Mean",
    "MismatchError",
    "Norm",
    "Owners",
    "Part",
    "Participation",
    "Point",
    "Precision",
    "RandomStream",
    "Run",
    "Samples",
    "Scalar",
    "Shard",
    "Shift",
    "Spec",
    "Statistic",
    "Step",
    "Task",
    "TaskError",
    "Total",
    "UsageError",
    "Weights",
    "WireError",
    "minimise",
    "open",
    "preset",
    "resume",
    "run",
    "step_size",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedsim' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
