"""The syntax of partitions, `SPLIT[+least:N]`, where SPLIT may be rows:FILE or FILE.py:NAME.

This module is separate from fedsim.data.partitions, because options are resolved and the manifest is written
before the fork server imports NumPy.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedsim.errors import UsageError
from fedsim.foreign_files import sha256
from fedsim.removed import removed
from fedsim.specs import whole

PREFIX = "rows:"


@dataclass(frozen=True)
class PartitionSpec:
    """The parts of a partition's text.

    Attributes:
        split: NAME, NAME:ARGUMENTS, rows:FILE or FILE.py:NAME.
        least: The smallest number of rows that a client may have.
    """

    split: str
    least: int = 1

    @staticmethod
    def parse(text: str) -> PartitionSpec:
        """Parse a text; the split itself is not checked.

        Raises:
            UsageError: If a modifier is unknown, occurs twice, or has an invalid number.
        """
        for modifier in text.split("+")[1:]:
            if gone := removed("partition", f"+{modifier.partition(':')[0]}"):
                raise UsageError(f"--partition {text!r}: {gone}")
        head, least = _divided(text)
        if "+" in head and not is_file(head) and ".py" not in head:
            raise UsageError(f"--partition {text!r}: behind a + stands least:N, once")
        if least is not None and whole(least) < 1:
            raise UsageError(
                f"--partition {text!r}: least:N is the smallest number of rows of a client, from 1 on, not "
                f"{least!r}"
            )
        return PartitionSpec(head, 1 if least is None else whole(least))


def _divided(text: str) -> tuple[str, str | None]:
    """Divide a partition's text into the split, and the N of +least:N behind it; None without it.

    The path of a file may contain a +, so only the name of the modifier makes one.
    """
    head, plus, last = text.rpartition("+")
    name, _, value = last.partition(":")
    return (head, value) if plus and name == "least" else (text, None)


def split_of(text: str) -> str:
    """Return a partition without its modifiers."""
    return _divided(text)[0]


def is_file(text: str) -> bool:
    """Return whether a partition is rows:FILE."""
    return text.startswith(PREFIX) and split_of(text) != PREFIX


def file_of(text: str) -> Path:
    """Return the file of rows:FILE."""
    return Path(split_of(text).removeprefix(PREFIX)).expanduser()


def moved(text: str, file: Path) -> str:
    """Return the same partition with the absolute path of another file of rows."""
    return f"{PREFIX}{file.expanduser().resolve()}{text.removeprefix(split_of(text))}"


def absolute(text: str) -> str:
    """Return the same partition with the absolute path of its file, valid in every working directory."""
    return moved(text, file_of(text)) if is_file(text) else text


def fingerprint(text: str) -> str:
    """Return the identity of rows:FILE, which depends on the file's bytes, but not on its folder."""
    modifiers = text.removeprefix(split_of(text))
    return f"{PREFIX}{_sha256(file_of(text))}{modifiers}"


def digest(text: str) -> dict[str, str]:
    """Return the digest {path: sha256} of a partition's file of rows; {} for other partitions."""
    return {str(file_of(text)): _sha256(file_of(text))} if is_file(text) else {}


def _sha256(path: Path) -> str:
    try:
        return sha256(path)
    except OSError as e:
        raise UsageError(f"--partition {PREFIX}{path}: {e.strerror}") from None
