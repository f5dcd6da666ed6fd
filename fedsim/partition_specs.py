"""The syntax of partitions, `SPLIT[+least:N][+noise:P]`, where SPLIT may be rows:FILE or FILE.py:NAME.

This module is separate from fedsim.data.partitions, because options are resolved and the manifest is written
before the fork server imports NumPy.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fedsim.errors import UsageError
from fedsim.specs import probability, whole

PREFIX = "rows:"
MODIFIERS = ("least", "noise")


@dataclass(frozen=True)
class PartitionSpec:
    """The parts of a partition's text.

    Attributes:
        split: NAME, NAME:ARGUMENTS, rows:FILE or FILE.py:NAME.
        least: The smallest number of rows that a client may have.
        noise: The share of each client's labels that are replaced by wrong ones.
    """

    split: str
    least: int = 1
    noise: float = 0.0

    @staticmethod
    def parse(text: str) -> PartitionSpec:
        """Parse a text; the split itself is not checked.

        Raises:
            UsageError: If a modifier is unknown, occurs twice, or has an invalid number.
        """
        head, modifiers = divided(text)
        names = [name for name, _ in modifiers]
        if ("+" in head and not is_file(head) and ".py" not in head) or len(set(names)) < len(names):
            raise UsageError(f"--partition {text!r}: behind a + stands least:N or noise:P, once each")
        values = dict(modifiers)
        least = whole(values.get("least", "1"))
        if least < 1:
            raise UsageError(
                f"--partition {text!r}: least:N is the smallest number of rows of a client, from 1 on, not "
                f"{values['least']!r}"
            )
        return PartitionSpec(head, least, probability(values.get("noise", "0"), "--partition noise"))


def divided(text: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Divide a partition's text into the split, and the name and number of each modifier after the split.

    The path of a file may contain a +, so only a part with the name of a modifier counts as one.
    """
    modifiers: tuple[tuple[str, str], ...] = ()
    head = text
    while True:
        rest, plus, last = head.rpartition("+")
        name, _, value = last.partition(":")
        if not plus or name not in MODIFIERS:
            return head, modifiers
        head, modifiers = rest, ((name, value), *modifiers)


def split_of(text: str) -> str:
    """Return a partition without its modifiers."""
    return divided(text)[0]


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
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as e:
        raise UsageError(f"--partition {PREFIX}{path}: {e.strerror}") from None
