"""The federated algorithms. A module has the messages and update rules of one algorithm, or of a few of one
paper, in the notation of the paper's pseudo-code. REGISTRY lists all algorithms: first those of the five
papers, then those of protocols/related.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from fedsim import plugins
from fedsim.algorithm import Algorithm
from fedsim.errors import UsageError, unknown
from fedsim.removed import removed
from fedsim.returned_values import checked
from fedsim.wire.schema import all_fields
from protocols.ama import AMA
from protocols.bayes_admm import BayesADMM
from protocols.bcm import BCM
from protocols.bregman_admm import BregmanADMM
from protocols.fedadmm import FedADMM
from protocols.fedavg import FedAvg
from protocols.fedcurv import FedCurv
from protocols.feddyn import FedDyn
from protocols.fedlap import FedLap
from protocols.fedlap_cov import FedLapCov
from protocols.fedlap_cov_func import FedLapCovFunc
from protocols.fedlap_func import FedLapFunc
from protocols.fedlap_func_public import FedLapFuncPublic
from protocols.fedopt import FedAdagrad, FedAdam, FedAvgM, FedYogi
from protocols.fedpa import FedPA
from protocols.fedprox import FedProx
from protocols.fola import FOLA
from protocols.iso_bayes_admm import IsoBayesADMM
from protocols.ivon_admm import IvonADMM
from protocols.ivon_pvi import IvonPVI
from protocols.laplace_offline import LaplaceOffline
from protocols.mbsgd import MBSGD
from protocols.mime import Mime, MimeLite
from protocols.precond_admm import PrecondADMM
from protocols.pvi import PVI

AnyAlgorithm = Algorithm[Any, Any, Any, Any]

PAPERS: tuple[type[AnyAlgorithm], ...] = (
    *(FedAvg, FedProx, FedAvgM, FedAdam, FedYogi, FedAdagrad, MBSGD, Mime, MimeLite),
    *(FedADMM, FedDyn, AMA, PrecondADMM),
    *(BayesADMM, BregmanADMM, IvonADMM, IsoBayesADMM),
    *(PVI, IvonPVI, BCM),
    *(FedLap, FedLapCov, FedLapFunc, FedLapFuncPublic, FedLapCovFunc),
    *(FedPA, FOLA, LaplaceOffline, FedCurv),
)
"""The algorithms of the five papers, with the baselines that they compare with."""


def _related() -> Iterator[type[AnyAlgorithm]]:
    """Yield the algorithms of the files in protocols/related, which no module imports by a statement."""
    for file in iter_modules([str(Path(__file__).with_name("related"))]):
        module = import_module(f"{__name__}.related.{file.name}")
        classes = [value for value in vars(module).values() if inspect.isclass(value)]
        yield from (c for c in classes if c.__module__ == module.__name__ and issubclass(c, Algorithm))


RELATED = tuple(_related())
"""Algorithms of other papers, for comparison."""

REGISTRY = (*PAPERS, *RELATED)


NEEDED = ("name", "default_model", "server_type", "client_type")
"""Class attributes that every algorithm must define."""


def find(name: str) -> type[AnyAlgorithm]:
    """Return the algorithm class with this registered name, or the class at path/to/file.py:ClassName."""
    if plugins.is_spec(name):
        return _users(name)
    for algorithm in REGISTRY:
        if algorithm.name == name:
            return algorithm
    raise unknown("algorithm", name, [a.name for a in REGISTRY])


def _users(spec: str) -> type[AnyAlgorithm]:
    """Load a user's algorithm and check its definition before the run starts."""
    result, owner = plugins.load(spec, "--algo"), f"--algo {plugins.short(spec)}"
    if not inspect.isclass(result) or not issubclass(result, Algorithm):
        raise UsageError(f"{owner}: this is no subclass of fedsim.algorithm.Algorithm")
    for kind in reversed(result.__mro__[: result.__mro__.index(Algorithm)]):
        if issubclass(kind, Algorithm):
            kind.read_types()
    lacks = sorted(result.__abstractmethods__) or [a for a in NEEDED if not hasattr(result, a)]
    if lacks:
        raise UsageError(f"{owner}: the class lacks {', '.join(lacks)} (see fedsim/algorithm.py)")
    for gone in filter(None, (removed("class variable", name) for name in vars(result))):
        raise UsageError(f"{owner}: {gone}")
    params = result.__dict__.get("__dataclass_params__")
    if params is None or not params.frozen:
        raise UsageError(f"{owner}: the class must be a frozen dataclass: @dataclass(frozen=True) above it")
    with plugins.user_code_errors(spec, "--algo", "building it with its defaults"):
        built = checked(result, spec)()
    with plugins.user_code_errors(spec, "--algo", "reading its messages"):
        for exchange in (*built.setup, *built.exchanges):
            for message in (exchange.down, exchange.up):
                all_fields(message)
    for state, names in ((built.client_type, built.duals.keys()), (built.server_type, built.duals.values())):
        parts = {f.name for f in fields(state)} if is_dataclass(state) else set()
        for name in filter(None, names):
            if (first := name.partition(".")[0]) not in parts and not hasattr(state, first):
                raise UsageError(
                    f"{owner}: `duals` names {name!r}, and {state.__name__} has no {first}; "
                    "define duals: {a dual of Client: the sum of all in Server}, or {} without duals"
                )
    return type(built)
