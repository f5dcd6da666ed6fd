"""Measures what a state's file costs in processor time: a new one, and one written over a file that is there.

    python -m tests.benchmarks.written_over [--repeats 30] [--tiny]

Files of 4.3 MB, a client's state of fedlap_cov with P = 178,110 (--tiny: 0.3 MB), in a temporary folder.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from tests.benchmarks.common import options_of
from workers.storage.atomic_files import remove_or_spare, write_atomically


def milliseconds(path: Path, data: bytes, spare: Path | None) -> float:
    start = time.process_time()
    write_atomically(path, [data], spare=spare)
    return 1e3 * (time.process_time() - start)


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    size, repeats = (300_000, 3) if options.tiny else (4_300_000, options.repeats)
    with tempfile.TemporaryDirectory() as name:
        folder, data = Path(name), bytes(size)
        new, over = list[float](), list[float]()
        for number in range(repeats):  # alternately
            new.append(milliseconds(folder / f"{number}.new", data, None))
            path = folder / "0.over"
            if path.exists():
                remove_or_spare(path)
            over.append(milliseconds(path, data, folder / "spare"))
        del over[0]  # there was no file yet
    for label, values in (("a new file", new), ("written over", over)):
        print(f"{label}: {statistics.median(values):.2f} ms ({min(values):.2f} to {max(values):.2f})")


if __name__ == "__main__":
    main()
