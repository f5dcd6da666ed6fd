"""Terminal output: a standard output that may close, a status line, and JSON.

This module imports nothing heavy, because a run prints "starting" before it imports torch.
"""

from __future__ import annotations

import codecs
import io
import json
import math
import os
import secrets
import stat
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

import click

from fedsim.errors import UsageError
from fedsim.printable import one_line, printable
from workers.storage.atomic_files import disk_errors

if TYPE_CHECKING:
    from rich.console import Console

CLEAR = "\r\x1b[2K"
"""Move the cursor to the beginning of the line, and clear the line."""
UNFOLDED = 10_000
"""Width of a console that is not a terminal, unless COLUMNS is set. It is so large that no line wraps."""
REPLACED = "fedsim.replaced"
"""Name of the codec error handler that replaces characters that an encoding lacks."""
_SIMILAR = {ord("█"): "#", ord("·"): ".", ord("→"): ">", ord("━"): "-", ord("…"): "~", ord("×"): "x"}


def _replaced(error: UnicodeError) -> tuple[str | bytes, int]:
    """Replace each unencodable character by one similar ASCII character, so that columns stay aligned."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end].translate(_SIMILAR)
    return "".join(c if c.isascii() else "?" for c in lacking), error.end


codecs.register_error(REPLACED, _replaced)


class OutputThatMayClose:
    """Standard output that ignores write errors: a closed stream, a broken pipe, a full disk.
    Progress lines thus never end a run: `fedsim launch | head -1` runs to its end."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write if the stream is open; return the text's length. Unencodable characters are replaced."""
        try:
            if self._stream is not None:
                self._stream.write(text)
        except UnicodeEncodeError as e:
            self.write(text.encode(e.encoding, REPLACED).decode(e.encoding))
        except (OSError, ValueError):  # ValueError: the stream is closed
            self._stream = None
        return len(text)

    def flush(self) -> None:
        try:
            if self._stream is not None:
                self._stream.flush()
        except (OSError, ValueError):
            self._stream = None

    def isatty(self) -> bool:
        """Return True for a terminal, and False for an object without isatty."""
        with suppress(ValueError, AttributeError):
            return self._stream is not None and self._stream.isatty()
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def output_that_may_close() -> Iterator[None]:
    """Make sys.stdout ignore write errors inside the block."""
    before = sys.stdout
    sys.stdout = OutputThatMayClose(before)
    try:
        yield
    finally:
        sys.stdout = before


def finish_output() -> OSError | None:
    """Flush standard output before the program ends, and return the error if flushing fails.
    After an error, the text is dropped; otherwise Python would try again at exit and print an error."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError) as e:
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
        return e if isinstance(e, OSError) else None
    return None


def open_standard_files() -> None:
    """Open /dev/null for closed standard streams; otherwise the next opened file would get their number.
    Let standard output replace characters that its encoding lacks, because rich would raise an error.
    Escape control characters in warnings; matplotlib's name the characters that a font lacks."""
    warnings.formatwarning = _warning
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors=REPLACED)


def _warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    return one_line(f"{filename}:{lineno}: {category.__name__}: {message}") + "\n"


def say(text: object, err: bool = False) -> None:
    """Print a text on standard output or standard error, with control characters escaped.
    Lines after the first are indented, so that none of them can be mistaken for another message."""
    first, *rest = printable(str(text)).split("\n")
    click.echo("\n".join([first, *(f"  {line}" if line else "" for line in rest)]), err=err)


class Status:
    """A status line on a terminal, in which each text replaces the last; elsewhere, nothing is printed."""

    def __init__(self, quiet: bool = False) -> None:
        self.shown = not quiet and _is_terminal()

    def __call__(self, text: str) -> None:
        """Show the text in place of the last one; '' clears the line."""
        if self.shown:
            sys.stdout.write(CLEAR + one_line(text))
            sys.stdout.flush()


def _is_terminal() -> bool:
    return OutputThatMayClose(sys.stdout).isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def console(**options: Any) -> Console:
    """Create a rich console, without any styles if NO_COLOR is set.

    Control characters in printed text are escaped, except those of rich's own styles. Square brackets are
    text, not rich's markup, because paths and names may have them; rich.text.Text has styles.
    """
    from rich.console import Console
    from rich.segment import Segment

    class Printable(Console):
        def render(self, *args: Any, **keywords: Any) -> Iterable[Segment]:
            for segment in super().render(*args, **keywords):
                yield segment if segment.control else segment._replace(text=printable(segment.text))

    plain = {"color_system": None} if os.environ.get("NO_COLOR") else {}
    out = Printable(**{"highlight": False, "emoji": False, "markup": False, **plain, **options})
    if not (out.is_terminal or "width" in options or os.environ.get("COLUMNS")):
        out.width = UNFOLDED
    return out


def print_json(document: Any) -> None:
    """Print JSON, with dataclasses as objects, NumPy numbers as numbers, and NaN and infinity as null."""
    text = json.dumps(plain(document), indent=1, ensure_ascii=False, allow_nan=False)
    print("".join(c if c == "\n" or c.isprintable() else json.dumps(c)[1:-1] for c in text))


def plain(value: Any) -> Any:
    """Convert a value to the JSON types that print_json prints."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in value]
    if isinstance(value, Path):
        return str(value)
    if type(value).__module__ == "numpy":
        return plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def output_file(path: Path) -> Iterator[BinaryIO]:
    """Open a new file, and rename it to `path` when the block has ended without an error.

    A link at `path` is replaced and not followed, because the folder may be a run folder of somebody else.
    Only what is in /dev, but for files in /dev/shm, and a pipe that has a reader, are written directly.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name a file")
    with disk_errors(f"cannot write {path}"):
        place = Path(os.path.abspath(path)).parts
        direct = (place[1:2] == ("dev",) and place[2:3] != ("shm",)) or _is_pipe(path)
        target = path if direct else path.with_name(f".{secrets.token_hex(8)}.new")
        how = os.O_TRUNC | os.O_NONBLOCK if direct else os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        number = os.open(target, os.O_WRONLY | os.O_CLOEXEC | how, 0o666)
        os.set_blocking(number, True)
        try:
            with os.fdopen(number, "wb") as file:
                yield file
            if not direct:
                target.replace(path)
        finally:
            if not direct:
                target.unlink(missing_ok=True)


def _is_pipe(path: Path) -> bool:
    with suppress(FileNotFoundError):
        return stat.S_ISFIFO(path.lstat().st_mode)
    return False


def write_text(path: Path, text: str) -> None:
    """Write a text file like output_file, with control characters escaped."""
    with output_file(path) as file:
        file.write(printable(text).encode())
