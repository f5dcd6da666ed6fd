"""Figures: their axes, and their files, which are equal bytes for equal runs."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from launch.results.figures import LONGEST, Line, chart, write_figures


@pytest.mark.parametrize("end", [2, 20, 50])
def test_an_axis_of_rounds_has_no_tick_between_two_rounds(end: int) -> None:
    x = np.arange(end + 1.0)
    (figure,) = chart([Line("fedavg", x, x, x, x)], "round", "accuracy", legend="right", size=(7.6, 4.6))
    assert not (figure.drawing().axes[0].get_xticks() % 1).any()


def test_the_label_of_a_metric_may_be_longer_than_a_file_name(tmp_path: Path) -> None:
    (figure,) = chart([Line("fedavg", np.ones(1), np.ones(1))], "round", "y" * 300)
    assert [path.name for path in write_figures(tmp_path, [figure])] == [
        "y" * LONGEST + s for s in (".svg", ".pdf")
    ]


def test_a_figure_is_two_files_of_a_column_s_width_without_dates(tmp_path: Path) -> None:
    x = np.arange(4.0)
    lines = [Line("fedavg (lr 0.1)", x, x, x - 1, x + 1), Line("$x_1$ & 50 %", x, x * x)]
    written = [
        [
            path.read_bytes()
            for path in write_figures(tmp_path / name, chart(lines, "round", "NLL (nats)", legend=""))
        ]
        for name in ("a", "b")
    ]
    assert written[0] == written[1]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [
        "NLL_nats_against_round.pdf",
        "NLL_nats_against_round.svg",
    ]
    svg, pdf = written[0][0].decode(), written[0][1]
    assert ">fedavg (lr 0.1)</text>" in svg and "$x_1$ &amp; 50 %" in svg, "text is text, with the legend"
    width = re.search(r'<svg[^>]* width="([0-9.]+)pt"', svg)
    assert width is not None and float(width[1]) == pytest.approx(3.3 * 72)
    assert b"CreationDate" not in pdf and b"/CIDFontType2" in pdf and "<dc:date>" not in svg
