"""fedsim list: from launch.names, because importing what the names stand for takes seconds."""

from __future__ import annotations

from rich.table import Table

from launch import names
from launch.terminal import console


def show(kind: str) -> None:
    """Print all names of a kind (one of launch.names.KINDS)."""
    heads = names.heads(kind)
    table = Table(box=None, pad_edge=False, show_header=bool(heads), header_style="bold")
    known = names.names(kind).values()
    columns = len(next(iter(known)).cells)
    for column in range(columns + 1):
        label = heads[column] if heads else ""
        bold, narrow = column == 0, column < columns
        table.add_column(label, style="bold" if bold else "", no_wrap=narrow)
    for name in known:
        table.add_row(name.usage, *name.cells)
    console().print(table)
