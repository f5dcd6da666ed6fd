"""Measures what a state's file costs in processor time: a new one, and one written over a file that is there.

    python -m tests.benchmarks.written_over [--repeats 30] [--tiny]

Files of 4.3 MB, a client's state of fedlap_cov with P = 178,110 (--tiny: 0.3 MB), in a temporary folder.
"""

from __future__ import annotations

import tempfile
from itertools import count
from pathlib import Path

from tests.benchmarks.common import alternately, options_of, spread
from workers.storage.atomic_files import SPARE, remove_or_spare, write_atomically


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    size, repeats = (300_000, 3) if options.tiny else (4_300_000, options.repeats)
    with tempfile.TemporaryDirectory() as name:
        folder, data, numbers = Path(name), bytes(size), count()

        def new() -> None:
            write_atomically(folder / f"{next(numbers)}.new", [data])

        def over() -> None:
            remove_or_spare(folder / "over")
            write_atomically(folder / "over", [data], spare=folder / SPARE)

        spent = alternately({"a new file": new, "written over": over}, repeats)
    for label, seconds in spent.items():
        print(f"{label}: {spread([1e3 * s for s in seconds], ' ms', 2)}")


if __name__ == "__main__":
    main()
