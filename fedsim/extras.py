"""Packages that only some data sets, models or commands need: optional extras, imported when needed."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from fedsim.errors import UsageError


def needed(package: str, owner: str, extra: str = "models") -> Any:
    """Import an optional package, which the extra of fedsim-wire installs; a UsageError says so if it is
    missing.

    Hugging Face's packages may not use the network, whatever the environment: a run downloads nothing.
    """
    for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        os.environ[variable] = "1"
    try:
        return import_module(package)
    except ImportError:
        raise not_installed(package, owner, extra) from None


def not_installed(package: str, owner: str, extra: str) -> UsageError:
    """The error for an optional package that is not there; the arguments are those of needed."""
    return UsageError(
        f"{owner} needs the package {package}: pip install 'fedsim-wire[{extra}]' (or {package} alone)"
    )
