"""The numbering of words in data sets whose targets are tokens (the layout of TensorFlow Federated).

    0 PAD    1..V words, the most frequent first    V + 1 OOV    V + 2 BOS    V + 3 EOS        classes = V + 4

OOV stands for every other word, BOS opens a sentence and EOS closes one that is shorter than a row.
A place without a next word is PAD among the inputs and NO_TARGET among the targets: it has no loss.
"""

from __future__ import annotations

PAD = 0
NO_TARGET = -1
SPECIALS = 4
"""PAD, OOV, BOS and EOS: what a model may predict besides words."""


def words(classes: int) -> int:
    """V: the ids 1..V are words, which accuracy counts; the others are not content."""
    return classes - SPECIALS


def oov(classes: int) -> int:
    return classes - 3


def bos(classes: int) -> int:
    return classes - 2


def eos(classes: int) -> int:
    return classes - 1
