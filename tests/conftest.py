"""One thread, as every task has by default: two would fight with the tests' own worker processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def _denormals() -> Iterator[None]:
    """A run in process flushes denormals to zero; no module leaves that to the next."""
    yield
    torch.set_flush_denormal(False)
