"""Untrusted text, made safe to show on a terminal, in a log, on a page or in Markdown.

A control character can move the cursor, clear the screen or set a window's title. A Unicode format character
can reorder or hide letters. A lone surrogate, which JSON may contain, has no UTF-8 encoding and cannot be
written. All of them are shown as escapes: \\u001b.

Source: Unicode general categories Cc, Cf, Cs, Zl, Zp, https://www.unicode.org/reports/tr44/; Boucher and
Anderson 2021, https://arxiv.org/abs/2111.00169 (bidirectional overrides).
"""

from __future__ import annotations

import re
import unicodedata

_TAG, _ENTITY = re.compile(r"<(?=[A-Za-z/!?])"), re.compile(r"&(?=#?\w+;)")
"""Where a tag, a comment or an entity of HTML may begin, as CommonMark defines them."""
_ESCAPED = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def printable(text: str, kept: str = "\n\t") -> str:
    """Escape control characters, format characters and lone surrogates, except those in `kept`."""
    if text.isprintable():
        return text
    return "".join(c if c in kept or unicodedata.category(c) not in _ESCAPED else _escape(c) for c in text)


def one_line(text: str) -> str:
    """Return the printable text on one line; with its line ends escaped, it cannot imitate two messages."""
    return printable(text, kept="")


def markdown(text: str) -> str:
    """Return the text for one line or table cell of Markdown, in which it is no markup but for * and _."""
    safe = _ENTITY.sub("&amp;", one_line(text.replace("\\", "\\\\")))
    safe = _TAG.sub("&lt;", safe)
    return safe.replace("|", "\\|").replace("`", "\\`").replace("](", "]\\(")


def _escape(c: str) -> str:
    return f"\\u{ord(c):04x}" if ord(c) < 0x10000 else f"\\U{ord(c):08x}"
