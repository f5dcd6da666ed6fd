"""What fedsim.compare returns: the document of `fedsim compare --json`, with figures and tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from launch.results.compare import Comparison
    from launch.table import Table


class ComparedRuns(dict[str, Any]):
    """The document of `fedsim compare --json`, with figures and tables for a paper."""

    _comparison: Comparison

    def figure(self, label: str = "") -> Figure:
        """Return a figure of the page as a drawing of matplotlib, of the width of a paper's column.

        Args:
            label: A figure's label, such as "accuracy against round"; "" for the first.

        Raises:
            UsageError: if the page has no such figure.
        """
        return self._comparison.page.figure(label).drawing()

    def table(self, title: str = "Results") -> Table:
        """Return a table, which has markdown(), latex() and csv().

        Args:
            title: A table's title, such as "Results" or "Calibration and clients".

        Raises:
            UsageError: if there is no such table.
        """
        return self._comparison.table(title)

    def latex(self, title: str = "Results", caption: str = "", label: str = "") -> str:
        """Return a table of LaTeX (booktabs), with the best values bold.

        Args:
            title: As in `table`.
            caption: The caption, which makes the table float.
            label: The name for references, which makes the table float.
        """
        return self.table(title).latex(caption, label)
