"""What the pictures of a sweep have on their axes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch.results import figures
from launch.results.statistics import Band


@pytest.mark.parametrize("end", [2, 20, 50])
def test_an_axis_of_rounds_has_no_tick_between_two_rounds(
    end: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(figures, "write_picture", lambda figure, path: drawn.append(figure))
    x = np.arange(end + 1.0)
    figures.picture(tmp_path / "a.png", {"fedavg": Band(x, x, x, x)}, "round", "accuracy")
    assert not (drawn[-1].axes[0].get_xticks() % 1).any()
