"""The virtual clock: what a link and a computer make of bytes and examples."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from fedsim.client_devices import Computer, Link
from fedsim.errors import DataError, UsageError
from fedsim.round_events import TaskId
from fedsim.virtual_clock import Clock, ExchangeClock, clock


def created(link: str = "", compute: str = "", deadline: str = "", clients: int = 3, seed: int = 0) -> Clock:
    result = clock(link, compute, deadline, clients=clients, seed=seed)
    assert result is not None
    return result


def test_seconds_are_those_of_the_formula() -> None:
    c = created("up=10mbit,down=50mbit,rtt=40ms", "5ms")
    assert c.seconds(1, 0, 200, 5_000_000, 1_000_000) == pytest.approx(0.04 + 0.8 + 1.0 + 0.8, rel=1e-12)
    assert created("rtt=2s").seconds(1, 0, 200, 10**9, 10**9) == 2.0
    assert created(compute="150us").seconds(4, 2, 1000, 1, 1) == pytest.approx(0.15)


def test_noise_is_a_function_of_seed_round_and_client() -> None:
    c = created(compute="1ms,noise=0.5", clients=50)
    times = np.array([[c.seconds(r, k, 1000, 0, 0) for k in range(50)] for r in range(1, 41)])
    second = created(compute="1ms,noise=0.5", clients=50)
    assert second.seconds(7, 3, 1000, 9, 9) == times[6, 3]
    assert created(compute="1ms,noise=0.5", clients=50, seed=1).seconds(7, 3, 1000, 0, 0) != times[6, 3]
    assert abs(np.log(times).mean()) < 0.05 and abs(np.log(times).std() - 0.5) < 0.03


def test_there_is_none_unless_asked_for() -> None:
    assert clock("", "", "", clients=2, seed=0) is None


def test_links_by_client(tmp_path: Path) -> None:
    path = tmp_path / "links.csv"
    path.write_text("client,up,down,rtt\n1,1mbit,,\n0,10mbit,50mbit,10ms\n")
    c = created(str(path), clients=2)
    assert c.links == (Link(1e7, 5e7, 0.01), Link(1e6, math.inf, 0.0))
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
    assert c.computers == (Computer(0.001), Computer(0.01, 0.3)) and c.links[1] == Link(rtt=0.04)
    assert c.seconds(1, 0, 100, 1, 1) == pytest.approx(0.1)
    with pytest.raises(UsageError, match="says already"):
        created(str(path), "5ms", clients=2)
    path.write_text("client,compute\n0,1ms\n1,\n")
    assert created(str(path), clients=2).computers == (Computer(0.001), Computer())


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
    assert exchange.close(1) == 5.0
    without = ExchangeClock(clock("", "1ms", "", clients=2, seed=0), (10, 10))
    for k in (0, 1):
        without.gave(k, 100)
    assert not without.late(TaskId(1, 1, 0, 0), 100)
    assert without.close(1) == pytest.approx(0.01)
    assert ExchangeClock(None, (10, 10)).close(1) is None
