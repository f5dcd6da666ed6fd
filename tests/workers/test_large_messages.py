"""Fields and states of more than 2 GiB: sizes of 32 bits, wherever one were left, would cut them off.

The vectors are zeros that no memory stands for, except for a few values, so that only what is received is
large.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsim.learning.solvers.first_order import Moments
from fedsim.wire.envelope import NONE, VERSION, Envelope, Header, decode, encode, pack
from fedsim.wire.ledger import Ledger
from protocols._averaging import Client, Up
from tests.support.commands import DEADLINE
from workers.storage.client_states import ClientStates
from workers.transport.dealer import Connection
from workers.transport.endpoint import Incoming
from workers.transport.handshake import Hello
from workers.transport.listeners import LocalTcpListener
from workers.transport.router import ZmqEndpoint

pytestmark = [pytest.mark.process, pytest.mark.slow]

PARAMETERS = 2**29 + 5
LIMIT = 4 * PARAMETERS


@pytest.fixture
def vector() -> Tensor:
    """(P,) float32 of more than 2 GiB."""
    values = torch.from_numpy(np.zeros(PARAMETERS, dtype=np.float32))
    values[0], values[2**29], values[-1] = 1.0, 2.0, 3.0
    return values


@pytest.fixture
def endpoint() -> Iterator[ZmqEndpoint]:
    ledger = Ledger()
    created = ZmqEndpoint(ledger, LocalTcpListener(), LIMIT)
    yield created
    created.close()


def same(received: Tensor, sent: Tensor) -> bool:
    """torch.equal would make a copy."""
    return received.shape == sent.shape and int(received.count_nonzero()) == 3 and float(received[-1]) == 3.0


def next_of(endpoint: ZmqEndpoint) -> Incoming:
    incoming, _ = endpoint.wait([], DEADLINE)
    assert len(incoming) == 1
    return incoming[0]


def test_a_field_of_more_than_two_gibibytes_crosses_the_wire_both_ways(
    endpoint: ZmqEndpoint, vector: Tensor
) -> None:
    payload = encode(Up(vector, 0.5), {}, {"P": PARAMETERS})
    sent = pack(
        Header(VERSION, "upload", "run", round=1, exchange=1, client=0, fields=payload.fields), payload.frames
    )
    assert sent.total_bytes() > 2**31
    assert isinstance(endpoint.listener, LocalTcpListener)
    connection = Connection(endpoint.address, Hello(endpoint.listener.token, 0, 1), LIMIT)
    try:
        next_of(endpoint)  # the hello
        for direction in ("down", "up"):
            if direction == "down":
                endpoint.send(0, sent)
                received = connection.receive(DEADLINE)
            else:
                sending = Thread(target=connection.send, args=(sent,))
                sending.start()
                received = next_of(endpoint).envelope
                sending.join(DEADLINE)
            assert isinstance(received, Envelope)
            assert received.header.client != NONE
            assert same(decode(Up, received, {}, {"P": PARAMETERS}, "test").mean, vector)
            del received
        residual = endpoint.residual()
    finally:
        connection.close(linger=0.0)
    assert residual == {"down": 0, "up": 0}
    assert endpoint.ledger.booked("down") > 2**31


@pytest.mark.skipif("FEDSIM_LONG" not in os.environ, reason="half a minute and 9 GB; with FEDSIM_LONG=1")
def test_zstd_takes_a_field_of_more_than_two_gibibytes(vector: Tensor) -> None:
    codecs = {"mean": "zstd"}
    payload = encode(Up(vector, 0.5), codecs, {"P": PARAMETERS})
    assert sum(memoryview(frame).nbytes for frame in payload.frames) < 2**24
    envelope = pack(Header(VERSION, "upload", "run", fields=payload.fields), payload.frames)
    assert same(decode(Up, envelope, codecs, {"P": PARAMETERS}, "test").mean, vector)


def test_a_state_of_more_than_two_gibibytes_is_kept(tmp_path: Path, vector: Tensor) -> None:
    states = ClientStates(tmp_path / "state", Client)
    states.save(0, 1, Client(Moments(vector, torch.zeros(1), 7)))
    loaded = ClientStates(tmp_path / "state", Client).load(0, 1)
    states.path(0, 1).unlink()
    assert same(loaded.moments.first, vector)
    assert loaded.moments.steps == 7
