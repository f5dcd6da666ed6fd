"""Import of optional packages, which only some data sets, models or commands need."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from fedsim.errors import UsageError


def needed(package: str, owner: str, extra: str = "models") -> Any:
    """Import an optional package; if it is missing, a UsageError names the extra that installs it."""
    try:
        return import_module(package)
    except ImportError:
        raise not_installed(package, owner, extra) from None


def not_installed(package: str, owner: str, extra: str) -> UsageError:
    """Return the error for an optional package that is not installed; the arguments are those of `needed`."""
    return UsageError(
        f"{owner} needs the package {package}: pip install 'fedsim-wire[{extra}]' (or {package} alone)"
    )
