"""The devices of clients: the file's columns, its line of the server, and its mistakes."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fedsim.client_devices import Computer, Link, Network, network
from fedsim.errors import DataError, UsageError

HEADS = "client,compute,noise,up,down,rtt,jitter,joules_up,joules_down,joules_example"


def read(path: Path, text: str, compute: str = "", clients: int = 2) -> Network:
    path.write_text(text)
    return network(str(path), compute, clients=clients)


def test_every_column_is_read(tmp_path: Path) -> None:
    text = (
        f"{HEADS}\n1,200/s,0.3,6mbit,13mbit,70ms,10ms,4e-6,1e-6,0.01\n0,5ms,,,,,,,,\nserver,1gbit,,,,,,,,\n"
    )
    with pytest.raises(DataError, match="line 4: the server's link has up and down, but no compute"):
        read(tmp_path / "all.csv", text)
    text = text.replace("server,1gbit,,,,", "server,,,1gbit,10gbit,")
    described = read(tmp_path / "all.csv", text)
    columns, server = described.devices, described.server
    assert columns.link(1) == Link(6e6, 13e6, 0.07, 0.01, 4e-6, 1e-6)
    assert columns.computer(1) == Computer(0.005, 0.3, 0.01)
    assert (columns.link(0), columns.computer(0)) == (Link(), Computer(0.005))
    assert server == Link(1e9, 1e10) and columns.has_energy


def test_a_file_of_before_means_what_it_meant(tmp_path: Path) -> None:
    text = 'client,compute,up,down,rtt\n0,"2ms,noise=0.2",20mbit,100mbit,40ms\n1,20ms,,,\n'
    described = read(tmp_path / "old.csv", text)
    columns, server = described.devices, described.server
    assert (columns.link(0), columns.link(1)) == (Link(2e7, 1e8, 0.04), Link())
    assert (columns.computer(0), columns.computer(1)) == (Computer(0.002, 0.2), Computer(0.02))
    assert server == Link() and not columns.has_energy


def test_the_last_line_of_a_client_counts_as_a_whole(tmp_path: Path) -> None:
    columns = read(tmp_path / "twice.csv", "client,up,rtt\n0,1mbit,1s\n1,1mbit,1s\n0,2mbit,\n").devices
    assert (columns.link(0), columns.link(1)) == (Link(up=2e6), Link(up=1e6, rtt=1.0))


def test_values_of_all_clients() -> None:
    described = network(
        "up=6mbit,jitter=5ms,joules_up=2e-6,joules_example=0.5,server_up=1gbit", "1ms,noise=0.1", clients=3
    )
    columns, server = described.devices, described.server
    assert {columns.link(k) for k in range(3)} == {Link(up=6e6, jitter=0.005, joules_up=2e-6)}
    assert {columns.computer(k) for k in range(3)} == {Computer(0.001, 0.1, 0.5)}
    assert server == Link(up=1e9)


def test_energy_of_a_file_goes_with_the_computer_of_all(tmp_path: Path) -> None:
    columns = read(tmp_path / "j.csv", "client,joules_example\n0,0.5\n1,\n", "2ms,noise=0.1").devices
    assert [columns.computer(k) for k in (0, 1)] == [Computer(0.002, 0.1, 0.5), Computer(0.002, 0.1)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("client,jitter\n0,5\n1,5\n", r"line 2: '5' is no time; write 40ms"),
        ("client,noise\n0,-1\n1,\n", r"line 2: '-1' is no number of at least 0"),
        ("client,joules_up\n0,much\n1,\n", r"line 2: 'much' is no number of at least 0; write 2e-6"),
        ("client,compute\n0,0/s\n1,\n", r"line 2: '0/s' is no time"),
        ('client,compute,noise\n0,"5ms,noise=0.1",\n1,,\n', r"line 2: .*there is a column noise"),
        ("client,up\n0,1mbit,2mbit\n1,\n", r"line 2 has more cells"),
        ("client,up\n0,1mbit\nedges,1mbit\n", r"line 3: client 'edges'"),
        ("client,compute\nedge a,1ms\n", r"line 2: an edge server's link has up, .* but no compute"),
        ("client,clients_up\n0,1mbit\n", r"line 2: only a line `edge NAME` has clients_up and clients_down"),
        ("client,server_up\n0,1mbit\n1,\n", r"line 2: 'server_up=1mbit'; write up="),
        ("client,joules\n0,1\n1,\n", r"line 2: 'joules=1'; write up=.*joules_example"),
        ("", "no line for client 0"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises((DataError, UsageError), match=says) as raised:
        read(tmp_path / "wrong.csv", text)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "binary.csv").write_bytes(b"client,up\n\xff\xfe\n")
    with pytest.raises(DataError, match=r"binary\.csv: this is no text in UTF-8"):
        network(str(tmp_path / "binary.csv"), "", clients=1)


def test_noise_of_the_file_and_a_computer_of_all_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="says already"):
        read(tmp_path / "n.csv", "client,noise\n0,0.3\n1,\n", "5ms")


@settings(max_examples=50, deadline=None)
@given(st.permutations(range(6)), st.lists(st.integers(1, 10**6), min_size=6, max_size=6))
def test_the_order_of_lines_does_not_matter(order: list[int], rates: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        lines = "".join(f"{k},{rates[k]}kbit\n" for k in order)
        columns = read(Path(folder) / "any.csv", "client,up\n" + lines, clients=6).devices
    np.testing.assert_allclose(columns.up, [1e3 * rate for rate in rates], rtol=1e-15)
    assert bool((columns.down == math.inf).all())
