"""The rounds that are read off a relay's pieces."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from fedsim.wire.relayed_rounds import RelayedRounds, Silence

PIECES = st.lists(
    st.tuples(
        st.integers(0, 5),  # seconds since the piece before
        st.integers(0, 3),
        st.sampled_from(["down", "up"]),
        st.integers(1, 10_000),
    ),
    max_size=60,
)
RULE = Silence(3.0, 4096)


def booked(pieces: list[tuple[int, int, str, int]], rule: Silence | None = RULE) -> RelayedRounds:
    rounds, time = RelayedRounds(rule), 0
    for wait, connection, direction, size in pieces:
        time += wait
        rounds.add(float(time), connection, direction, size)
    return rounds


UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@UNTIMED
@given(PIECES)
def test_no_byte_is_lost_whatever_the_rounds(pieces: list[tuple[int, int, str, int]]) -> None:
    rounds = booked(pieces)
    expected: Counter[tuple[int, str]] = Counter()
    for _, connection, direction, size in pieces:
        expected[connection, direction] += size
    by_row: Counter[tuple[int, str]] = Counter()
    for entry in rounds.entries():
        by_row[entry.worker, entry.direction] += entry.bytes
    assert by_row == expected
    for direction in ("down", "up"):
        total = sum(size for (_, side), size in expected.items() if side == direction)
        assert sum(getattr(r, direction) for r in rounds.rounds()) == total


@UNTIMED
@given(PIECES)
def test_a_round_begins_exactly_where_the_server_was_silent(pieces: list[tuple[int, int, str, int]]) -> None:
    """Pieces of one connection and one second are one burst."""
    time, bursts = 0, Counter[tuple[int, int]]()
    for wait, connection, direction, size in pieces:
        time += wait
        bursts[time, connection] += size * (direction == "down")
    large = sorted(time for (time, _), size in bursts.items() if size >= RULE.smallest)
    starts = [t for n, t in enumerate(large) if n == 0 or t - large[n - 1] >= RULE.seconds]
    assert [r.began for r in booked(pieces).rounds() if r.number] == starts


@UNTIMED
@given(PIECES, st.data())
def test_small_pieces_and_uploads_begin_no_round(
    pieces: list[tuple[int, int, str, int]], data: st.DataObject
) -> None:
    without = [
        (w + (d == "down"), c, d, n if d == "up" else min(n, RULE.smallest - 1)) for w, c, d, n in pieces
    ]
    assert all(r.number == 0 for r in booked(without).rounds())


def test_training_for_longer_than_the_silence_does_not_cut_a_round() -> None:
    rounds = booked([(0, 0, "down", 5000), (9, 0, "up", 5000), (1, 0, "down", 5000), (9, 0, "up", 5000)])
    assert [(r.number, r.down, r.up) for r in rounds.rounds()] == [(1, 5000, 5000), (2, 5000, 5000)]


def test_a_model_in_segments_is_one_burst_and_all_of_it_belongs_to_its_round() -> None:
    """Of Ethernet's segments none is as large as the smallest burst."""
    rounds = RelayedRounds(RULE)
    for start in (0.0, 10.0):
        for n in range(70):
            rounds.add(start + n / 100, 0, "down", 1448)
            rounds.add(start + n / 100, 1, "down", 1448)
            rounds.add(start + n / 100, 0, "up", 1)
        rounds.add(start + 5, 0, "down", 4095)  # small, and behind a gap
    rows = [(r.number, r.began, r.down, r.connections) for r in rounds.rounds()]
    assert [row for row in rows if row[0]] == [(n, 10.0 * (n - 1), 140 * 1448 + 4095, 2) for n in (1, 2)]


def test_lines_begin_rounds_and_a_line_that_comes_twice_begins_one() -> None:
    rounds = RelayedRounds(None)
    rounds.add(0.0, 0, "up", 1)
    for number in (1, 1, 3, 2):
        rounds.begin(1.0, number)
        rounds.add(2.0, 0, "down", 9000)
    rounds.begin(3.0)
    rounds.add(4.0, 1, "up", 5)
    assert [(r.number, r.down, r.up, r.connections) for r in rounds.rounds()] == [
        (0, 0, 1, 1),
        (1, 18_000, 0, 1),
        (3, 18_000, 0, 1),
        (4, 0, 5, 1),
    ]


@pytest.mark.parametrize("rule", [None, RULE])
def test_a_row_of_the_ledger_has_connection_and_direction(rule: Silence | None) -> None:
    (entry,) = booked([(0, 2, "up", 7)], rule).entries()
    assert entry.kind == "opaque" and (entry.round, entry.worker, entry.client) == (0, 2, -1)
    assert (entry.direction, entry.layer, entry.bytes) == ("up", "stream", 7)
