"""Refusal to work where another file hides one of fedsim's other packages: launch, protocols, workers.

A script's own folder comes first in sys.path. A file launch.py or workers.py, or a folder protocols, beside a
user's script is therefore imported in place of the package of the same name that is installed with fedsim.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from fedsim.errors import UsageError

PACKAGES = ("launch", "protocols", "workers")
FOLDER = Path(__file__).resolve().parents[1]
"""The folder that fedsim and PACKAGES are installed in."""


class HiddenPackageError(UsageError, ImportError):
    """Another module has the name of one of PACKAGES and comes before it."""


def refuse_hidden_packages() -> None:
    """Check that PACKAGES are fedsim's own, without importing them.

    Raises:
        HiddenPackageError: for a module of the same name, imported or first in sys.path.
    """
    for name in PACKAGES:
        for place in _places(name):
            if os.path.realpath(place) not in (str(FOLDER / name), str(FOLDER / name / "__init__.py")):
                what = "folder" if os.path.isdir(place) else "file"
                raise HiddenPackageError(
                    f"{place} hides fedsim's package {name!r}, because Python finds it first; "
                    f"rename this {what}, or run your program from another folder"
                )


def _places(name: str) -> Iterator[str]:
    """Yield the file of the module of this name, or its folders if it is a namespace package."""
    module = sys.modules.get(name)
    try:
        spec = getattr(module, "__spec__", None) or find_spec(name)
    except (ImportError, ValueError):  # the module has no __spec__
        spec = None
    origin = getattr(spec, "origin", None) or getattr(module, "__file__", None)
    if origin is not None:
        yield origin
    elif spec is not None:
        yield from list(spec.submodule_search_locations or ())[:1]
