"""What the C library is asked to keep and to give back, by a pretended one."""

from __future__ import annotations

import ctypes

import pytest

from workers.heap import (
    LARGE,
    M_MMAP_THRESHOLD,
    MAPPED,
    MAPPED_SAVING,
    SAVE_MEMORY,
    give_back,
    keep_vectors_apart,
    set_malloc_thresholds,
)


class Library:
    """A C library that remembers its thresholds."""

    def __init__(self) -> None:
        self.mapped_from = 0
        self.trims = 0

    def mallopt(self, what: int, value: int) -> int:
        if what == M_MMAP_THRESHOLD:
            self.mapped_from = value
        return 1

    def malloc_trim(self, pad: int) -> int:
        self.trims += 1
        return 1


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    pretended = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: pretended)
    monkeypatch.delenv(SAVE_MEMORY, raising=False)
    return pretended


def test_a_process_keeps_what_is_no_float64_vector(library: Library) -> None:
    set_malloc_thresholds()
    assert library.mapped_from == MAPPED
    keep_vectors_apart(LARGE)
    assert 4 * LARGE < library.mapped_from < 8 * LARGE
    keep_vectors_apart(2**40)
    assert library.mapped_from < 2**31


def test_small_models_change_nothing(library: Library) -> None:
    set_malloc_thresholds()
    keep_vectors_apart(LARGE - 1)
    give_back(LARGE - 1)
    assert (library.mapped_from, library.trims) == (MAPPED, 1)
    give_back(LARGE)
    assert library.trims == 2


def test_the_variable_has_every_large_vector_given_back(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SAVE_MEMORY, "1")
    set_malloc_thresholds()
    keep_vectors_apart(16_000_000)
    assert library.mapped_from == MAPPED_SAVING < 4 * 16_000_000


def test_a_library_without_such_functions_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    set_malloc_thresholds()
    keep_vectors_apart(LARGE)
    give_back(LARGE)
