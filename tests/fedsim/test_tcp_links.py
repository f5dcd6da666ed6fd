"""TCP on a link: overhead, loss and slow start, against their definitions."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fedsim import tcp_links
from fedsim.client_devices import Link, network
from fedsim.errors import DataError, UsageError
from fedsim.tcp_links import LEAST_TIMEOUT, OVERHEAD, SEGMENT
from fedsim.virtual_clock import clock

BYTES = st.integers(0, 10**9)
RATES = st.floats(1e4, 1e10)
RTTS = st.floats(1e-4, 1.0)


def seconds(
    stream_bytes: int,
    rate: float,
    rtt: float,
    overhead: float = 1.0,
    loss: float = 0.0,
    initcwnd: float = math.inf,
) -> float:
    columns = (np.array([value]) for value in (rate, rtt, overhead, loss, initcwnd))
    return float(tcp_links.seconds(stream_bytes, *columns)[0])


@given(BYTES, RATES, RTTS)
def test_without_options_the_bits_are_those_of_bytes_by_rate(sent: int, rate: float, rtt: float) -> None:
    assert seconds(sent, rate, rtt) == 8 * sent / rate
    assert seconds(sent, math.inf, rtt) == 0.0


@given(BYTES, RATES, RTTS)
def test_overhead_and_retransmissions_take_their_share_of_the_rate(
    sent: int, rate: float, rtt: float
) -> None:
    assert seconds(sent, rate, rtt, OVERHEAD) == pytest.approx(8 * sent * 1514 / 1448 / rate, rel=1e-12)
    again = seconds(sent, rate, rtt, OVERHEAD, 0.25)
    assert again >= 8 * sent * OVERHEAD / (0.75 * rate) * (1 - 1e-12)


@given(st.floats(1e-9, 1e-6), RTTS)
def test_a_rare_loss_gives_the_rate_of_mathis(loss: float, rtt: float) -> None:
    """X -> s / (R sqrt(2 p / 3)); the timeouts add T 3 sqrt(3 p / 8) p to its denominator, which is the
    relative difference stated here."""
    x = float(tcp_links.throughput(np.array([rtt]), np.array([loss]))[0])
    mathis = 8 * SEGMENT / rtt * math.sqrt(1.5 / loss)
    timeouts = (rtt + LEAST_TIMEOUT) * 3 * math.sqrt(3 / 8) * loss / (rtt * math.sqrt(2 / 3))
    assert mathis >= x >= mathis * (1 - timeouts * (1 + 32 * loss**2) - 1e-12)


def windows(sent: int, rate: float, rtt: float, first: int) -> float:
    """Slow start, window by window: each begins a round trip after the one before, or when that is sent."""
    a_segment, left, at, window = 8 * SEGMENT / rate, sent / SEGMENT, 0.0, float(first)
    while left > window:
        at, left = at + max(rtt, window * a_segment), left - window
        window *= 2
    return at + left * a_segment


@settings(max_examples=300)
@given(st.integers(1, 10**8), st.floats(1e5, 1e9), RTTS, st.integers(1, 64))
def test_slow_start_takes_as_long_as_its_windows(sent: int, rate: float, rtt: float, first: int) -> None:
    """To 1e-9 of the seconds, or a window of rounding where the message ends exactly with one."""
    assert seconds(sent, rate, rtt, initcwnd=first) == pytest.approx(
        windows(sent, rate, rtt, first), rel=1e-9
    )


def test_without_a_limit_of_the_rate_slow_start_takes_whole_round_trips() -> None:
    """31 segments need windows of 1, 2, 4, 8 and 16: four round trips until the last one is sent."""
    assert seconds(31 * SEGMENT, math.inf, 0.1, initcwnd=1) == pytest.approx(0.4, rel=1e-12)
    assert seconds(0, math.inf, 0.1, initcwnd=1) == 0.0


def test_the_clock_reads_them_from_the_option_and_from_a_file(tmp_path: Path) -> None:
    expected = Link(up=5e6, rtt=0.1, overhead=OVERHEAD, loss=0.01, initcwnd=10.0)
    alike = network("up=5mbit,rtt=100ms,overhead=tcp,loss=1%,initcwnd=10", "", clients=2)
    assert alike.devices.link(1) == expected
    (tmp_path / "tcp.csv").write_text(
        "client,up,rtt,overhead,loss,initcwnd\n0,5mbit,100ms,tcp,0.01,10\n1,,,1.05,,\n"
    )
    described = network(str(tmp_path / "tcp.csv"), "", clients=2).devices
    assert (described.link(0), described.link(1)) == (expected, Link(overhead=1.05))
    c = clock("up=5mbit,down=20mbit,rtt=100ms,overhead=tcp,loss=1%,initcwnd=10", "", "", clients=1, seed=0)
    assert c is not None
    sides = [seconds(n, rate, 0.1, OVERHEAD, 0.01, 10) for n, rate in ((700_000, 2e7), (800_000, 5e6))]
    assert c.seconds(1, 0, 5, 700_000, 800_000) == pytest.approx(0.1 + sum(sides), rel=1e-12)
    assert c.download_of(np.array([0]), 700_000)[0] == pytest.approx(sides[0], rel=1e-12)


@pytest.mark.parametrize(
    ("link", "says"),
    [
        ("overhead=0.9", "'0.9' is no number of at least 1; write tcp"),
        ("loss=100%", "loses every packet"),
        ("loss=2", "no probability"),
        ("initcwnd=0", "no whole number of at least 1; write 10"),
    ],
)
def test_mistakes_are_named(link: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=says):
        network(link, "", clients=1)
    key, _, value = link.partition("=")
    (tmp_path / "tcp.csv").write_text(f"client,{key}\n0,{value}\n")
    with pytest.raises((DataError, UsageError), match=says):
        network(str(tmp_path / "tcp.csv"), "", clients=1)
