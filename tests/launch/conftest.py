"""Runs for the tests of what reads them."""

from __future__ import annotations

from tests.protocols.conftest import launched

__all__ = ["launched"]
