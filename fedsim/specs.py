"""The grammar of specs on the command line and in configuration files, `NAME[:ARG,...][+MODIFIER:P...]`.

This module imports no large packages, because options are resolved before the fork server imports NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from fedsim.errors import UsageError, unknown
from fedsim.foreign_files import MOST_DIGITS


@dataclass(frozen=True)
class Form:
    """The syntax of a spec with one name.

    Attributes:
        arguments: The arguments after the name and a colon, in the notation of error messages. If there is
            one argument, it may contain commas.
        optional: The number of trailing arguments that may be omitted.
        help: The meaning of the arguments, for error messages.
    """

    name: str
    arguments: tuple[str, ...] = ()
    optional: int = 0
    help: str = ""

    @property
    def usage(self) -> str:
        """The spec with all its arguments."""
        return f"{self.name}:{','.join(self.arguments)}" if self.arguments else self.name

    def misuse(self, what: str, text: str) -> UsageError:
        """Return the error for a spec of this name whose arguments do not fit."""
        just = f" or just {self.name}" if self.arguments and len(self.arguments) == self.optional else ""
        return UsageError(f"{what} {text!r}: write {self.usage}{just}{self.help and f', {self.help}'}")


def parse(text: str, what: str, forms: Mapping[str, Form]) -> tuple[str, tuple[str, ...]]:
    """Parse NAME[:ARG,...] to the name and the arguments; errors name the nearest known name or the usage."""
    name, colon, rest = text.partition(":")
    if name not in forms:
        raise unknown(what, name, forms, lambda known: forms[known].usage)
    form = forms[name]
    arguments = () if not colon else (rest,) if len(form.arguments) == 1 else tuple(rest.split(","))
    least, most = len(form.arguments) - form.optional, len(form.arguments)
    if not least <= len(arguments) <= most or not all(arguments):
        raise form.misuse(what, text)
    return name, arguments


def split_modifiers(
    text: str,
    what: str,
    names: Sequence[str],
    read: Callable[[str, str], float] | None = None,
    others: str = "",
) -> tuple[str, Mapping[str, float]]:
    """Split a spec into the part before its modifiers, and the number P of every modifier +NAME:P.

    what: the option, for error messages. names: the modifiers. read: converts (text, owner) to P; by default
    P is a probability. others: other text that may follow a +, for error messages.
    """
    head, *modifiers = text.split("+")
    numbers: dict[str, float] = {}
    for modifier in modifiers:
        name, _, value = modifier.partition(":")
        if name not in names or name in numbers:
            known = " or ".join([*(f"{n}:P" for n in names), *filter(None, [others])])
            raise UsageError(f"{what} {text!r}: behind a + stands {known}, once each")
        numbers[name] = (read or probability)(value, f"{what} {name}")
    return head, numbers


def plain_share(text: str) -> str:
    """Convert a leading percentage to a share: 30%+lost:0.1 to 0.3+lost:0.1; other texts are unchanged."""
    head, plus, modifiers = text.partition("+")
    if not head.endswith("%") or not 0 < number(head[:-1]) <= 100:
        return text
    share = f"{Decimal(head[:-1]) / 100:f}"  # as Decimal, so that 7% is 0.07
    return f"{share if '.' in share else f'{share}.0'}{plus}{modifiers}"


def probability(text: str, owner: str) -> float:
    """Parse a number from 0 to 1, or a percentage."""
    value = number(plain_share(text))
    if not 0 <= value <= 1:
        raise UsageError(f"{owner}: {text!r} is no probability from 0 to 1")
    return value


def exponent(text: str, owner: str) -> float:
    """Parse a finite number of at least 0."""
    value = number(text)
    if not 0 <= value < math.inf:
        raise UsageError(f"{owner}: {text!r} is no exponent; write a number from 0 on, such as 0.5")
    return value


def number(text: str) -> float:
    """Parse a number; NaN if the text is not a number."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def whole(text: str) -> int:
    """Parse a whole number in at most MOST_DIGITS decimal digits; -1 if the text is not such a number."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS else -1


def key_values(text: str, owner: str = "", repeatable: Collection[str] = ()) -> tuple[tuple[str, str], ...]:
    """Parse KEY=VALUE,... to pairs; a value is empty without an equals sign. A key may not occur twice.

    owner: the beginning of error messages. repeatable: keys that may occur again, with different values.
    """
    parts = [part.partition("=") for part in text.split(",") if part]
    keys = [f"{key}={value}" if key in repeatable else key for key, _, value in parts]
    for key in keys:
        if keys.count(key) > 1:
            raise UsageError(f"{owner or repr(text)}: {key} is given twice; give it once")
    return tuple((key, value) for key, _, value in parts)
