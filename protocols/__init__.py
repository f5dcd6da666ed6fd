"""One file per algorithm: its messages and its update rules, read beside the paper's box.

REGISTRY is written out by hand; a test checks that it is complete.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

from fedsim.algorithm import Algorithm
from fedsim.errors import UsageError, unknown
from protocols.ama import AMA
from protocols.bayes_admm import BayesADMM
from protocols.bcm import BCM
from protocols.bregman_admm import BregmanADMM
from protocols.fedadmm import FedADMM
from protocols.fedavg import FedAvg
from protocols.feddyn import FedDyn
from protocols.fedlap import FedLap
from protocols.fedlap_cov import FedLapCov
from protocols.fedlap_func import FedLapFunc
from protocols.fedprox import FedProx
from protocols.ivon_admm import IvonADMM
from protocols.ivon_pvi import IvonPVI
from protocols.precond_admm import PrecondADMM
from protocols.pvi import PVI

AnyAlgorithm = Algorithm[Any, Any, Any, Any]

REGISTRY: tuple[type[AnyAlgorithm], ...] = (
    *(FedAvg, FedProx),
    *(FedADMM, FedDyn, AMA, PrecondADMM),
    *(BayesADMM, BregmanADMM, IvonADMM),
    *(PVI, IvonPVI, BCM),
    *(FedLap, FedLapCov, FedLapFunc),
)


def find(name: str) -> type[AnyAlgorithm]:
    """The algorithm class of a registered name, or of path/to/file.py:ClassName.

    Errors: UsageError, naming the nearest known algorithm or what is wrong with the file.
    """
    if ".py:" in name:
        return _load(*name.rsplit(":", 1))
    for algorithm in REGISTRY:
        if algorithm.name == name:
            return algorithm
    raise unknown("algorithm", name, [a.name for a in REGISTRY])


def _load(path: str, class_name: str) -> type[AnyAlgorithm]:
    file = Path(path)
    if not file.is_file():
        raise UsageError(f"--algo {path}:{class_name}: there is no file {file.resolve()}")
    spec = importlib.util.spec_from_file_location(f"user_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise UsageError(f"--algo {path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclass annotations are resolved through sys.modules
    try:
        spec.loader.exec_module(module)
    except Exception as e:
        raise UsageError(f"--algo {path}: importing it failed: {type(e).__name__}: {e}") from e
    found = getattr(module, class_name, None)
    if not inspect.isclass(found) or not issubclass(found, Algorithm):
        raise UsageError(f"--algo {path}:{class_name}: the file defines no Algorithm of that name")
    return found
