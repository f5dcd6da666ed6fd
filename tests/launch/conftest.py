"""Runs for the tests of what reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from launch.runs.folder import RunFolder
from tests.launch.run_folders import make
from tests.protocols.conftest import launched
from tests.support.commands import fedsim
from tests.support.federation import Federation

__all__ = ["launched", "make"]


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., RunFolder]:
    """Runs of one process, made once per experiment. Not to be changed."""

    @cache
    def run(*options: str) -> RunFolder:
        folder = tmp_path_factory.mktemp("undisturbed") / "run"
        fedsim("launch", "--workers", "0", "--out", str(folder), *options)
        return RunFolder.open(folder)

    return run


@pytest.fixture
def federation(tmp_path: Path, undisturbed: Callable[..., RunFolder]) -> Iterator[Federation]:
    created = Federation(tmp_path, undisturbed)
    yield created
    created.close()
