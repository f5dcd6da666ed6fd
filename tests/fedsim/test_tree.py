"""Trees: which edge server a client has, in what order uploads are folded, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from fedsim.errors import DataError, FedsimError, UsageError
from fedsim.tree import Tree, fold_order, tree


def of(text: str, clients: int) -> Tree:
    created = tree(text, clients)
    assert created is not None
    return created


@given(st.integers(1, 6), st.integers(1, 7), st.data())
def test_an_even_tree_keeps_the_order_of_ids(edges: int, each: int, data: st.DataObject) -> None:
    clients = edges * each
    created = of(f"{edges}x{each}", clients)
    clients_here = data.draw(st.lists(st.integers(0, clients - 1), unique=True))
    assert created.ordered(clients_here) == sorted(clients_here)
    assert [created.edge_of(k) for k in range(clients)] == [k // each for k in range(clients)]
    assert created.active(clients_here) == sorted({k // each for k in clients_here})
    assert created.merges == (edges > 1)


@given(st.lists(st.integers(0, 3), min_size=4, max_size=20), st.randoms())
def test_a_files_order_is_by_edge_server_then_by_id(owners: list[int], random: object) -> None:
    import numpy as np

    created = Tree(("a", "b", "c", "d"), np.array(owners, dtype=np.int32))
    order = created.ordered(range(len(owners)))
    assert sorted(order) == list(range(len(owners)))
    assert order == [k for e in range(4) for k in range(len(owners)) if owners[k] == e]


def test_no_tree_is_the_order_of_ids() -> None:
    assert tree("", 5) is None
    assert fold_order(None)([3, 1, 2]) == [1, 2, 3]


def test_a_file_names_edge_servers_and_their_clients(tmp_path: Path) -> None:
    path = tmp_path / "edges.toml"
    path.write_text('[edges]\nnorth = "0-2, 5"\nsouth = [4, 3]\n')
    created = of(str(path), 6)
    assert created.names == ("north", "south")
    assert created.ordered(range(6)) == [0, 1, 2, 5, 3, 4]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("4", "write 4x25"),
        ("0x10", "write 4x25"),
        ("2x" + "9" * 5000, "write 4x25"),
        ("x", "write 4x25"),
        ("3x3", "3 x 3 = 9 clients; there are 10"),
        ("missing.toml", "No such file"),
    ],
)
def test_a_mistake_is_one_line(text: str, says: str) -> None:
    with pytest.raises(UsageError, match="--tree") as raised:
        tree(text, 10)
    assert says in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("edges = 3", "no table [edges]"),
        ("", "no table [edges]"),
        ("[edges]\na = 'x'", "write"),
        ("[edges]\na = '0-'", "write"),
        ("[edges]\na = '3-1'", "write"),
        ("[edges]\na = [true]", "write"),
        ("[edges]\na = '0-3'\nb = '3'", "client 3 has two edge servers, a and b"),
        ("[edges]\na = '0-2'", "client 3 has no edge server"),
        ("[edges]\na = '0-4'", "client 4; clients count from 0 to 3"),
        ("[edges]\na = '0-3'\nb = []", "edge b has no client"),
        ("[edges]\n'a,b' = '0-3'", "is no name of an edge server"),
        ("[edges\n", "--tree"),
    ],
)
def test_a_mistake_in_a_file_names_it(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "edges.toml"
    path.write_text(content)
    with pytest.raises(DataError) as raised:
        tree(str(path), 4)
    assert says in str(raised.value) and str(path) in str(raised.value)


@given(st.text(max_size=12))
def test_any_text_is_a_tree_or_an_error(text: str) -> None:
    try:
        created = tree(text, 6)
    except FedsimError:
        return
    assert created is None or len(created.owners) == 6
