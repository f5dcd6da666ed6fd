"""Runs for the tests of what reads them."""

from __future__ import annotations

from tests.launch.run_folders import make
from tests.protocols.conftest import launched

__all__ = ["launched", "make"]
