"""The ids of words in data sets whose targets are tokens (the layout of TensorFlow Federated).

    0 PAD    1..V words, the most frequent first    V + 1 OOV    V + 2 BOS    V + 3 EOS        classes = V + 4

OOV is any other word. BOS begins every sentence; EOS ends a sentence that is shorter than a row. Inputs after
the end are PAD. A position without a next token is NO_TARGET in the targets and has no loss.
"""

from __future__ import annotations

PAD = 0
NO_TARGET = -1
SPECIALS = 4
"""Number of ids that a model may predict besides words: PAD, OOV, BOS and EOS."""


def words(classes: int) -> int:
    """Return V; the ids 1..V are words, and accuracy counts only positions whose target is a word."""
    return classes - SPECIALS


def oov(classes: int) -> int:
    return classes - 3


def bos(classes: int) -> int:
    return classes - 2


def eos(classes: int) -> int:
    return classes - 1
