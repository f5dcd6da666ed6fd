"""Measure what federated Bayesian and ADMM learning costs on the wire.

    import fedsim
    run = fedsim.run(algo="fedlap_cov", rounds=20, workers=2)
    run.metrics, run.ledger, run.bytes_to(accuracy=0.9), run.model(), run.report()

__init__.pyi lists the public names (docs/python-api.md) and the module that defines each name. A name is
imported when it is first used, so that `import fedsim` is quick and does not import torch. Of our modules,
only those of protocols/related import a public name from this file, as a user's file does.

A file launch.py, or another that hides one of fedsim's other packages, is refused here and at the first use
of a name (fedsim.hidden_packages).
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

from fedsim.hidden_packages import refuse_hidden_packages
from fedsim.version import __version__ as __version__

refuse_hidden_packages()

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_HOMES = {
    alias.name: str(node.module)
    for node in _STUB.body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedsim' has no attribute {name!r}")
    refuse_hidden_packages()  # sys.path may have changed since the import of fedsim
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
