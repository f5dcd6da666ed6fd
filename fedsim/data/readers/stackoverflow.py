"""Reader of Stack Overflow's sentences as TensorFlow Federated (TFF) prepares them: next words, and tags.

stackoverflow_{train,test}.h5 (fedsim/data/readers/tff.py) has columns of byte strings per user: tokens (one
sentence, words separated by spaces), and title and tags of the sentence's question (tags separated by '|').
Other columns are not read. stackoverflow.word_count has one line "word count" per word, the most frequent
first. stackoverflow.tag_count is one JSON object {tag: count}.

    next words   the first 20 words of a sentence, as BOS w1 w2 ... EOS PAD ... (fedsim/data/vocabulary.py);
                 EOS only after fewer than 20 words. Inputs are the first 20 positions, targets the last 20.
    tags         inputs are the counts of the 10,000 most frequent words in sentence and title, divided by the
                 sum of these counts; targets are the 500 most frequent tags, 1 for those that apply.

Differs: the files have 342,477 users (135,818,730 sentences), too many for one machine's memory. Only the
first CLIENTS users by id are read, with the first 128 sentences of each (TFF: 128 after a shuffle for next
words, 1,000 for tags), and the first 10,000 test sentences, at most 128 of each user. The held-out users in
TFF's third file are not read, as in TFF's own experiments.
"""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Mapping
from itertools import islice
from pathlib import Path

import numpy as np

from fedsim.data import vocabulary
from fedsim.data.arrays import Array, Arrays, bundle
from fedsim.data.readers.tff import opened
from fedsim.errors import DataError

WORDS = 10_000
TAGS = 500
SENTENCES = 128
"""Largest number of sentences per user."""
LENGTH = 20
"""Largest number of words of a sentence; also the length of a row of inputs or targets."""
TEST_ROWS = 10_000

Rows = tuple[Array, ...]


def read_next_words(files: tuple[Path, ...], clients: int) -> Arrays:
    """Read inputs (n, 20) int32 and targets (n, 20) int64 of 10,004 ids; files: train, test, word counts."""
    train, test, counts = files
    numbers = _numbers(most_frequent_words(counts, WORDS))
    train_rows, centres = _sentences(train, ("tokens",), clients, None)
    test_rows, _ = _sentences(test, ("tokens",), None, TEST_ROWS)
    (train_inputs, train_targets), (test_inputs, test_targets) = (
        _shifted(rows, numbers) for rows in (train_rows, test_rows)
    )
    return bundle(train_inputs, train_targets, test_inputs, test_targets, centres)


def read_tags(files: tuple[Path, ...], clients: int) -> Arrays:
    """Read inputs (n, 10000) float32 and targets (n, 500) uint8; files: train, test, word and tag counts."""
    train, test, word_counts, tag_counts = files
    words = _numbers(most_frequent_words(word_counts, WORDS))
    tags = _numbers(most_frequent_tags(tag_counts, TAGS))
    columns = ("tokens", "title", "tags")
    train_rows, centres = _sentences(train, columns, clients, None)
    test_rows, _ = _sentences(test, columns, None, TEST_ROWS)
    return bundle(
        bags_of_words(train_rows[0], train_rows[1], words),
        tagged(train_rows[2], tags),
        bags_of_words(test_rows[0], test_rows[1], words),
        tagged(test_rows[2], tags),
        centres,
        targets=np.uint8,
    )


def most_frequent_words(path: Path, size: int) -> list[bytes]:
    """Return the first `size` words of a file of word counts."""
    words = []
    with path.open("rb") as file:
        for number, line in enumerate(islice(file, size), start=1):
            word, _, count = line.removeprefix(BOM_UTF8).strip().rpartition(b" ")
            if not word or not count.isdigit():
                raise DataError(f"{path}: line {number} is not a word and its count; fetch it again")
            words.append(word)
    return _enough(path, words, size, "words")


def most_frequent_tags(path: Path, size: int) -> list[bytes]:
    """Return the `size` most frequent tags; equally frequent tags keep the order of the file."""
    try:
        counts = json.loads(path.read_bytes())
        tags = [tag.encode() for tag, _ in sorted(counts.items(), key=lambda item: -item[1])]
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is not a JSON object of tag counts ({error}); fetch it again") from None
    return _enough(path, tags[:size], size, "tags")


def bags_of_words(sentences: Array, titles: Array, words: Mapping[bytes, int]) -> Array:
    """Return the share of each known word, (n, len(words)) float32; zeros if no word is known."""
    bags = np.zeros((len(sentences), len(words)), np.float32)
    for bag, sentence, title in zip(bags, sentences, titles, strict=True):
        result = [words[word] for word in (*sentence.split(), *title.split()) if word in words]
        placements, counts = np.unique(np.array(result, dtype=np.int64), return_counts=True)
        bag[placements] = counts / max(len(result), 1)
    return bags


def tagged(rows: Array, tags: Mapping[bytes, int]) -> Array:
    """Return 1 for every tag that applies, else 0, (n, len(tags)) uint8; other tags are left out."""
    targets = np.zeros((len(rows), len(tags)), np.uint8)
    for target, row in zip(targets, rows, strict=True):
        target[[tags[tag] for tag in row.split(b"|") if tag in tags]] = 1
    return targets


def _shifted(rows: Rows, numbers: Mapping[bytes, int]) -> tuple[Array, Array]:
    """Convert sentences to rows of ids, and to rows of the next ids with NO_TARGET instead of PAD."""
    (sentences,) = rows
    classes = len(numbers) + vocabulary.SPECIALS
    ids = np.full((len(sentences), LENGTH + 1), vocabulary.PAD, np.int64)
    for row, sentence in zip(ids, sentences, strict=True):
        words = sentence.split()[:LENGTH]
        # `numbers` counts words from 0, but id 0 is PAD
        known = [numbers[word] + 1 if word in numbers else vocabulary.oov(classes) for word in words]
        end = [vocabulary.eos(classes)] if len(words) < LENGTH else []
        placed = [vocabulary.bos(classes), *known, *end]
        row[: len(placed)] = placed
    targets = np.where(ids[:, 1:] == vocabulary.PAD, vocabulary.NO_TARGET, ids[:, 1:])
    return ids[:, :-1].astype(np.int32), targets


def _sentences(
    path: Path, columns: tuple[str, ...], clients: int | None, most: int | None
) -> tuple[Rows, Array]:
    """Read columns of at most `most` sentences of the first `clients` users; also return the user numbers."""
    taken: list[Rows] = []
    room = SENTENCES if most is None else most
    with opened(path) as file:
        for client in file.ids[:clients]:
            rows = tuple(file.column(client, name, min(SENTENCES, room)) for name in columns)
            file.alike(client, columns, rows)
            for name, column in zip(columns, rows, strict=True):
                if not all(isinstance(text, bytes) for text in column.tolist()):
                    raise DataError(f"{path}: examples/{client}/{name} is not a column of byte strings")
            if len(rows[0]):
                taken.append(tuple(column.astype(object) for column in rows))
                room -= len(rows[0]) if most is not None else 0
            if room <= 0:
                break
    if not taken:
        raise DataError(f"{path} has no sentences")
    centres = np.repeat(np.arange(len(taken)), [len(rows[0]) for rows in taken])
    return tuple(np.concatenate(column) for column in zip(*taken, strict=True)), centres


def _numbers(names: list[bytes]) -> dict[bytes, int]:
    return {name: number for number, name in enumerate(names)}


def _enough(path: Path, names: list[bytes], size: int, what: str) -> list[bytes]:
    if len(set(names)) < size:
        raise DataError(f"{path} has {len(set(names))} different {what} where {size} are needed")
    return names
