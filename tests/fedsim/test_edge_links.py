"""Edge servers on the virtual clock: the formula, and what must not change anything."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fedsim.client_devices import Link
from fedsim.errors import UsageError
from fedsim.round_events import TaskId
from fedsim.tree import tree
from fedsim.virtual_clock import Clock, EdgeLinks, ExchangeClock, ExchangeCost, Hops, clock, indices


def created(link: str, spec: str = "2x2", compute: str = "1ms", deadline: str = "") -> Clock:
    result = clock(link, compute, deadline, clients=4, seed=0, tree=tree(spec, 4))
    assert result is not None
    return result


def lasts(c: Clock, took: list[float], answered: list[bool], hops: Hops) -> float:
    """A kilobyte down and two up of each of four clients."""
    there = np.array(answered)
    sent = indices([1000] * 4), indices([2000 * a for a in answered])
    return c.duration(indices(range(4)), (np.array(took), there), sent, hops)


HOPS = Hops(indices([1000, 1000]), indices([4000, 4000]))


def test_an_exchange_is_that_of_the_slowest_edge_server() -> None:
    c = created("edge_up=8kbit,edge_down=80kbit,edge_rtt=300ms")
    own = 0.3 + 0.1 + 4.0  # its round trip, the broadcast, its sums
    assert lasts(c, [1.0, 2.0, 5.0, 3.0], [True] * 4, HOPS) == pytest.approx(5.0 + own, rel=1e-12)
    shared = replace(c, server=Link(up=4000.0))
    assert lasts(shared, [1.0, 2.0, 5.0, 3.0], [True] * 4, HOPS) == 8 * 8000 / 4000


def test_clients_of_an_edge_server_share_its_link() -> None:
    c = created("edge_clients_up=8kbit,edge_clients_down=1kbit")
    assert lasts(c, [1.0] * 4, [True] * 4, HOPS) == pytest.approx(16.0, rel=1e-12)  # 2,000 bytes down
    assert lasts(c, [20.0, 1.0, 1.0, 1.0], [True] * 4, HOPS) == 20.0


def test_who_sends_nothing_is_waited_for_by_its_own_edge_server_alone(tmp_path: Path) -> None:
    path = tmp_path / "links.csv"
    lines = ("client,up,rtt", "0,,", "1,,", "2,,", "3,,", "edge edge0,8kbit,1s", "edge,,10s")
    path.write_text("\n".join((*lines, "")))
    c = created(str(path), deadline="60s")
    assert lasts(c, [0.0, 3.0, 1.0, 1.0], [False, True, True, True], HOPS) == 1.0 + 60.0 + 4.0
    assert lasts(c, [2.0, 3.0, 0.0, 1.0], [True, True, False, True], HOPS) == 10.0 + 60.0


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.01, 100), st.booleans()), min_size=4, max_size=4),
    st.sampled_from(["4x1", "2x2", "1x4"]),
    st.sampled_from(["", "50s"]),
)
def test_fast_links_of_edge_servers_change_nothing(
    clients: list[tuple[float, bool]], spec: str, deadline: str
) -> None:
    """The exchange of a tree is that of the run without one, to the bit."""
    took, answered = [s if there else 0.0 for s, there in clients], [there for _, there in clients]
    c = created("", spec, deadline=deadline)
    flat, edges = replace(c, tree=None, edges=None), len(tree(spec, 4).names)  # type: ignore[union-attr]
    hops = Hops(indices([9**9] * edges), indices([9**9] * edges))
    assert lasts(c, took, answered, hops) == lasts(flat, took, answered, hops)


def test_the_hops_of_an_exchange_are_those_since_the_last_one() -> None:
    exchange = ExchangeClock(created("edge_up=8kbit,edge_down=80kbit"), (1,) * 4)
    for edge in (0, 1):
        exchange.hop(edge, "down", 500)
    for k in range(4):
        exchange.gave(k, 500)
        assert not exchange.late(TaskId(1, 1, k, 0), 700)
    exchange.hop(0, "up", 1000)
    exchange.hop(1, "up", 2000)
    assert exchange.close(1) == ExchangeCost(pytest.approx(0.001 + 0.05 + 2.0))
    for k in (0, 1):  # a set-up: uploads are passed on as they are
        exchange.gave(k, 500)
        assert not exchange.late(TaskId(0, 1, k, 0), 700)
        exchange.hop(0, "up", 700)
    assert exchange.close(0) == ExchangeCost(pytest.approx(0.001 + 1.4))


def test_mistakes_are_named(tmp_path: Path) -> None:
    path = tmp_path / "links.csv"
    path.write_text("client,up\n0,\n1,\n2,\n3,\nedge north,1mbit\n")
    for link, spec, says in (
        ("edge_up=1mbit", "", "there are none: add --tree"),
        (str(path), "2x2", "describes edge server 'north'; --tree has edge0, edge1"),
    ):
        with pytest.raises(UsageError, match=says):
            clock(link, "1ms", "", clients=4, seed=0, tree=tree(spec, 4))


def test_a_line_counts_before_that_of_all() -> None:
    links = EdgeLinks.of({"": {"up": 5.0, "rtt": 1.0}, "b": {"up": 7.0}}, ("a", "b"))
    assert links.up.tolist() == [5.0, 7.0] and links.rtt.tolist() == [1.0, 1.0]
    assert links.down.tolist() == [math.inf] * 2 and not links.shared
