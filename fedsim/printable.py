"""Text of others, as it may be shown: on a terminal, in a log, on a page.

A control character moves the cursor, clears the screen or sets a window's title; a format character of
Unicode shows letters in another order than they have, or hides some; a lone surrogate, which JSON may hold,
has no UTF-8 and cannot be written at all. All are shown as escapes: \\u001b.

Source: Unicode general categories Cc, Cf, Cs, Zl, Zp, https://www.unicode.org/reports/tr44/; Boucher and
Anderson 2021, https://arxiv.org/abs/2111.00169 (bidirectional overrides).
"""

from __future__ import annotations

import unicodedata

_ESCAPED = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def printable(text: str, kept: str = "\n\t") -> str:
    """The text with control and format characters and lone surrogates escaped, but for those kept."""
    if text.isprintable():
        return text
    return "".join(c if c in kept or unicodedata.category(c) not in _ESCAPED else _escape(c) for c in text)


def one_line(text: str) -> str:
    """The same on one line, so that it cannot pass for a second message."""
    return printable(text, kept="")


def _escape(c: str) -> str:
    return f"\\u{ord(c):04x}" if ord(c) < 0x10000 else f"\\U{ord(c):08x}"
