"""Every test has a cache of its own and no data folder but the one that it asks for."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fedsim.data import DATASETS

_ROOT = Path(__file__).resolve().parents[3]
_SHARED = Path(os.environ.get("FEDSIM_DATA") or _ROOT.parent / "shared" / "data")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDSIM_DATA", raising=False)


@pytest.fixture
def real_data() -> Callable[[str], Path]:
    """The folder of the real files of a data set: $FEDSIM_DATA, else shared/data beside the
    checkout. Skips the test where they are absent."""

    def folder(name: str) -> Path:
        for file in DATASETS[name].files:
            if not any((_SHARED / (file + suffix)).is_file() for suffix in ("", ".gz")):
                pytest.skip(f"no real data: {_SHARED / file} (FEDSIM_DATA names the folder)")
        return _SHARED

    return folder
