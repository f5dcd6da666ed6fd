"""Pictures as files."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from launch.terminal import output_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = 128
"""The size of a PNG's palette. Lines, bands and the edges of text need fewer; a third of the bytes stays."""


def write_picture(figure: Figure, path: Path, dpi: float | None = None) -> None:
    """Write a figure in the format of the path's suffix; the same figure gives the same bytes of a PNG.

    dpi: dots per inch; by default the figure's.
    """
    if path.suffix.lower() not in ("", ".png"):
        with output_file(path) as file:
            figure.savefig(file, format=path.suffix[1:])
        return
    from PIL import Image

    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=dpi or "figure", metadata={"Software": None})
    image = Image.open(drawn).convert("RGB")
    palette = image.quantize(COLOURS, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    with output_file(path if path.suffix else path.with_suffix(".png")) as file:
        palette.save(file, "png", optimize=True)
