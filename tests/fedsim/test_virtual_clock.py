"""The virtual clock: what a link and a computer make of bytes and examples."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fedsim.client_devices import Computer, Devices, Link
from fedsim.errors import DataError, UsageError
from fedsim.round_events import TaskId
from fedsim.seeds import RandomStream
from fedsim.virtual_clock import BLOCK, Clock, ExchangeClock, ExchangeCost, clock, indices


def created(link: str = "", compute: str = "", deadline: str = "", clients: int = 3, seed: int = 0) -> Clock:
    result = clock(link, compute, deadline, clients=clients, seed=seed)
    assert result is not None
    return result


def links(c: Clock) -> tuple[Link, ...]:
    return tuple(c.devices.link(k) for k in range(len(c.devices.up)))


def computers(c: Clock) -> tuple[Computer, ...]:
    return tuple(c.devices.computer(k) for k in range(len(c.devices.up)))


def test_noise_is_a_function_of_seed_round_and_client() -> None:
    c = created(compute="1ms,noise=0.5", clients=50)
    times = np.array([[c.seconds(r, k, 1000, 0, 0) for k in range(50)] for r in range(1, 41)])
    second = created(compute="1ms,noise=0.5", clients=50)
    assert second.seconds(7, 3, 1000, 9, 9) == times[6, 3]
    assert created(compute="1ms,noise=0.5", clients=50, seed=1).seconds(7, 3, 1000, 0, 0) != times[6, 3]
    assert abs(np.log(times).mean()) < 0.05 and abs(np.log(times).std() - 0.5) < 0.03


def test_links_by_client(tmp_path: Path) -> None:
    path = tmp_path / "links.csv"
    path.write_text("client,up,down,rtt\n1,1mbit,,\n0,10mbit,50mbit,10ms\n")
    c = created(str(path), clients=2)
    assert links(c) == (Link(1e7, 5e7, 0.01), Link(1e6, math.inf, 0.0))
    for text, says in (
        ("client,up\n0,1mbit\n", "no line for client 1"),
        ("client,up\n0,fast\n1,1mbit\n", "line 2: 'fast' is no rate"),
        ("client,up\n5,1mbit\n", "client '5'"),
        ("client,speed\n0,1mbit\n", "speed=1mbit"),
        ("client,compute\n0,slow\n", "line 2: 'slow' is no time"),
        ('client,compute\n0,"1ms,noise=x"\n', "line 2: .*noise=0.3"),
    ):
        path.write_text(text)
        with pytest.raises((DataError, UsageError), match=says):
            created(str(path), clients=2)


def test_computers_by_client(tmp_path: Path) -> None:
    path = tmp_path / "devices.csv"
    path.write_text('client,compute,rtt\n0,1ms,\n1,"10ms,noise=0.3",40ms\n')
    c = created(str(path), clients=2)
    assert computers(c) == (Computer(0.001), Computer(0.01, 0.3)) and links(c)[1] == Link(rtt=0.04)
    assert c.seconds(1, 0, 100, 1, 1) == pytest.approx(0.1)
    with pytest.raises(UsageError, match="says already"):
        created(str(path), "5ms", clients=2)
    path.write_text("client,compute\n0,1ms\n1,\n")
    assert computers(created(str(path), clients=2)) == (Computer(0.001), Computer())


@pytest.mark.parametrize(
    ("link", "compute", "deadline", "says"),
    [
        ("up=10", "", "", "no rate"),
        ("up=0mbit", "", "", "no rate"),
        ("left=1mbit", "", "", "write up=10mbit"),
        ("", "5", "", "no time"),
        ("", "5ms,noise=-1", "", "noise=0.3"),
        ("", "", "2s", "needs --link or --compute"),
        ("nowhere.csv", "", "", "No such file"),
    ],
)
def test_mistakes_are_named(link: str, compute: str, deadline: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        created(link, compute, deadline)


def test_exchange_lasts_until_the_deadline_if_a_client_sends_nothing() -> None:
    c = clock("", "1ms", "5s", clients=2, seed=0)
    exchange = ExchangeClock(c, (10, 10))
    for k in (0, 1):
        exchange.gave(k, 100)
    assert not exchange.late(TaskId(1, 1, 0, 0), 100)
    assert exchange.close(1) == ExchangeCost(5.0)
    without = ExchangeClock(clock("", "1ms", "", clients=2, seed=0), (10, 10))
    for k in (0, 1):
        without.gave(k, 100)
    assert not without.late(TaskId(1, 1, 0, 0), 100)
    assert without.close(1) == ExchangeCost(pytest.approx(0.01))
    assert ExchangeClock(None, (10, 10)).close(1) is None


# ---- many clients, jitter, energy, the server's link

BYTES = st.integers(0, 10**9)
AMOUNTS = st.floats(0, 10)
RATES = st.integers(1, 10**9)


def of_values(clients: int, seed: int = 0, **columns: float | list[float]) -> Clock:
    """A clock of clients with these columns; those that are not named are of Link() and Computer()."""
    alike = Devices.alike(Link(), Computer(), clients)
    named = {name: np.broadcast_to(np.array(v, dtype=np.float64), (clients,)) for name, v in columns.items()}
    return Clock(replace(alike, **named), math.inf, seed)


@st.composite
def clocks(draw: st.DrawFn) -> Clock:
    """Clients whose numbers all differ."""
    clients = draw(st.integers(1, 5))
    column = st.lists(st.floats(0.001, 100), min_size=clients, max_size=clients)
    names = ("up", "down", "rtt", "jitter", "seconds", "noise", "joules", "joules_up", "joules_down")
    scale = {"up": 1e6, "down": 1e6, "noise": 0.01}
    columns = {name: [scale.get(name, 1.0) * x for x in draw(column)] for name in names}
    return of_values(clients, draw(st.integers(0, 99)), **columns)


@settings(max_examples=60, deadline=None)
@given(clocks(), st.integers(0, 9), st.integers(1, 3), st.integers(0, 1000), BYTES, BYTES)
def test_seconds_without_jitter_are_to_the_bit_those_of_the_plain_formula(
    c: Clock, round: int, exchange: int, examples: int, down: int, up: int
) -> None:
    still = replace(c, devices=replace(c.devices, jitter=np.zeros(len(links(c)))))
    for k, (link, computer) in enumerate(zip(links(c), computers(c), strict=True)):
        draw = RandomStream(c.seed, "compute", round, k).numpy("noise")
        factor = math.exp(computer.noise * float(draw.standard_normal()))
        seconds = link.rtt + 8 * down / link.down + 8 * up / link.up + examples * computer.seconds * factor
        assert still.seconds(round, k, examples, down, up, exchange) == seconds


@settings(max_examples=60, deadline=None)
@given(clocks(), st.integers(0, 9), st.integers(1, 3), BYTES, BYTES)
def test_many_clients_at_once_are_to_the_bit_one_after_the_other(
    c: Clock, round: int, exchange: int, down: int, up: int
) -> None:
    clients = indices(range(len(links(c))))[::-1]
    sizes = 10 * clients + 1
    together = c.seconds_of(round, clients, sizes, down, up, exchange)
    alone = [c.seconds(round, int(k), 10 * int(k) + 1, down, up, exchange) for k in clients]
    assert together.tolist() == alone


@settings(max_examples=60, deadline=None)
@given(clocks(), AMOUNTS, st.integers(0, 9), BYTES)
def test_more_jitter_takes_no_less_time(c: Clock, more: float, round: int, down: int) -> None:
    clients = indices(range(len(links(c))))
    jittery = replace(c, devices=replace(c.devices, jitter=c.devices.jitter + more))
    before = c.seconds_of(round, clients, clients, down, 1)
    assert bool((jittery.seconds_of(round, clients, clients, down, 1) >= before).all())


def test_jitter_is_half_normal_and_of_seed_round_exchange_and_client() -> None:
    many = 4000
    c, clients = of_values(many, jitter=2.0), indices(range(many))

    def drawn(clock: Clock, round: int = 1, exchange: int = 1) -> list[float]:
        return clock.seconds_of(round, clients, clients, 0, 0, exchange).tolist()

    first = drawn(c)
    assert first == drawn(of_values(many, jitter=2.0)) == drawn(of_values(many + BLOCK, jitter=2.0))
    others = (drawn(c, round=2), drawn(c, exchange=2), drawn(of_values(many, seed=1, jitter=2.0)))
    for other in others:
        assert not set(first) & set(other)
    assert len(set(first)) == many
    assert np.mean(first) == pytest.approx(2 * math.sqrt(2 / math.pi), rel=0.05)
    assert np.mean(np.square(first)) == pytest.approx(4, rel=0.08)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(BYTES, BYTES), min_size=1, max_size=6), RATES, RATES)
def test_an_exchange_takes_no_less_than_all_bytes_take_on_the_servers_link(
    messages: list[tuple[int, int]], up: int, down: int
) -> None:
    own = of_values(len(messages), up=1e7, down=2e7)
    shared = replace(own, server=Link(up=float(up), down=float(down)))
    lasts = []
    for c in (own, shared):
        exchange = ExchangeClock(c, (1,) * len(messages))
        for k, (received, _) in enumerate(messages):
            exchange.gave(k, received)
        for k, (_, sent) in enumerate(messages):
            assert not exchange.late(TaskId(1, 1, k, 0), sent)
        lasts.append(exchange.close(1))
    without, with_it = lasts
    assert without is not None and with_it is not None
    bounds = (8 * sum(r for r, _ in messages) / down, 8 * sum(s for _, s in messages) / up)
    assert with_it.seconds == max(without.seconds, *bounds)


@settings(max_examples=60, deadline=None)
@given(clocks(), BYTES, BYTES, st.integers(0, 1000))
def test_energy_is_that_of_bytes_and_examples(c: Clock, down: int, up: int, examples: int) -> None:
    clients = indices(range(len(links(c))))
    joules = c.joules_of(clients, np.full(len(clients), examples), down, up)
    for k, (link, computer) in enumerate(zip(links(c), computers(c), strict=True)):
        expected = link.joules_up * up + link.joules_down * down + computer.joules * examples
        assert joules[k] == pytest.approx(expected, rel=1e-12)
