"""The ledger against arithmetic, against a measured test vector, and against bytes on a stream."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager

import torch
import zmq
from hypothesis import given, settings, strategies as st

from fedsim.wire.codecs import codec
from fedsim.wire.envelope import NONE, VERSION, Envelope, FieldHeader, Header, PartHeader, blob, digest, pack
from fedsim.wire.ledger import KINDS, Ledger
from fedsim.wire.ledger_rows import COLUMNS, Entry
from fedsim.wire.wire_size import CURVE, NULL, framing
from tests.support.commands import DEADLINE
from tests.support.relay import Relay

fixed = settings(deadline=None, derandomize=True, database=None, max_examples=60)
VECTOR = ([40, 0], [255], [256], [222], [223], [64, 712_440], [1, 1, 1], [70, 4_000_000, 4_000_000])
"""The eight messages of docs/references/bytes.md#test-vector."""
PAYLOAD, STREAM = 8_713_573, 8_713_736


def total(entries: Iterable[Entry]) -> int:
    return sum(e.bytes for e in entries)


def f(n: int) -> int:
    """Bytes on the stream of one frame of n bytes (ZMTP 3.1, NULL): docs/references/bytes.md#framing."""
    return n + 2 if n <= 255 else n + 9


def random_envelope(rng: random.Random) -> Envelope:
    """An envelope of any kind with dense, rounded and two-part fields."""
    kind = rng.choice(["task", "upload", "evaluate", "score", "hello", "welcome", "ready", "failed", "stop"])
    headers, frames = [], []
    for i in range(rng.randrange(4)):
        count = rng.choice([0, 1, 30, 63, 64, 500])
        name = rng.choice(["dense", "bf16", "pairs"])
        layers = ("values", "indices") if name == "pairs" else ("values",)
        parts = []
        for layer in layers:
            size = 3 * count if name == "pairs" else codec(name).sizes(count, 4)[0][1]
            frames.append(rng.randbytes(size))
            parts.append(PartHeader(layer, size, digest(frames[-1])))
        headers.append(FieldHeader(f"field{i}", name, "f32", (count,), tuple(parts)))
    number = NONE if kind in ("hello", "welcome", "ready", "stop") else rng.randrange(4)
    client = rng.randrange(3) if kind in ("task", "upload") else NONE
    return pack(Header(VERSION, kind, "run", 1, number, 1, client, fields=tuple(headers)), frames)


def booked(seed: int, envelopes: int = 12) -> tuple[Ledger, list[tuple[Envelope, int, str]]]:
    rng = random.Random(seed)
    sent = [(random_envelope(rng), rng.randrange(3), rng.choice(["up", "down"])) for _ in range(envelopes)]
    ledger = Ledger()
    for envelope, worker, direction in sent:
        ledger.book(envelope, worker, direction)
    return ledger, sent


# ---- arithmetic


@fixed
@given(st.lists(st.integers(0, 2**20)))
def test_framing_adds_over_frames(sizes: list[int]) -> None:
    assert sum(sizes) + framing(sizes) == sum(map(f, sizes))


def test_the_references_vector() -> None:
    assert sum(map(sum, VECTOR)) == PAYLOAD
    stream = {
        m.name: {d: n + sum(sum(s) + m.framing(s) for s in VECTOR) for d, n in m.handshake.items()}
        for m in (NULL, CURVE)
    }
    assert stream == {"NULL": {"up": STREAM, "down": STREAM}, "CURVE": {"up": 8_714_672, "down": 8_714_406}}


def test_the_handshakes_from_their_parts() -> None:
    """Greeting 64; READY: command name (6) and the properties Socket-Type and an empty Identity. CURVE:
    HELLO 200 and INITIATE 257 + metadata up, WELCOME 168 and READY 30 + metadata down."""
    for socket_type in ("DEALER", "ROUTER"):
        metadata = (1 + 11 + 4 + len(socket_type)) + (1 + 8 + 4)
        assert 64 + f(6 + metadata) == NULL.handshake["up"] == NULL.handshake["down"]
        assert 64 + f(200) + f(257 + metadata) == CURVE.handshake["up"]
        assert 64 + f(168) + f(30 + metadata) == CURVE.handshake["down"]


@fixed
@given(st.integers(0, 10_000))
def test_the_ledgers_sum_is_every_frame_and_its_framing(seed: int) -> None:
    ledger, sent = booked(seed)
    on_stream = {
        d: sum(sum(map(f, envelope.sizes)) for envelope, _, way in sent if way == d) for d in ("up", "down")
    }
    by_direction = {
        d: sum(n for (_, way, _, _), n in ledger.totals.items() if way == d) for d in ("up", "down")
    }
    assert by_direction == on_stream
    assert total(ledger.close(100)) == sum(on_stream.values())


@fixed
@given(st.integers(0, 10_000))
def test_summary_totals_and_rows_agree(seed: int) -> None:
    ledger, sent = booked(seed)
    nested = ledger.nested()
    rows = ledger.close(100)
    assert sum(
        n for d in nested.values() for f in d.values() for ls in f.values() for n in ls.values()
    ) == total(rows)
    for kind in {"algorithm", "simulation", "control"}:
        for direction in ("up", "down"):
            expected = total(e for e in rows if (e.kind, e.direction) == (kind, direction))
            assert ledger.bytes_of(kind, direction) == expected
            tree = nested.get(kind, {}).get(direction, {})
            assert sum(n for layers in tree.values() for n in layers.values()) == expected
            for field, layers in tree.items():
                for layer, n in layers.items():
                    same = (kind, direction, field, layer)
                    assert n == total(e for e in rows if (e.kind, e.direction, e.field, e.layer) == same)
    for (number, direction), n in ledger.rounds.items():
        label = ("algorithm", number, direction)
        assert n == total(e for e in rows if (e.kind, e.round, e.direction) == label)
    assert {e.kind for e in rows} == {KINDS.get(envelope.header.kind, "control") for envelope, _, _ in sent}


def test_rows_of_one_letter() -> None:
    fields = (
        FieldHeader("mean", "dense", "f32", (100,), (PartHeader("values", 400, 0),)),
        FieldHeader(
            "precision", "pairs", "f32", (100,), (PartHeader("values", 40, 0), PartHeader("indices", 20, 0))
        ),
        FieldHeader("loss", "dense", "f64", (), (PartHeader("values", 8, 0),)),
    )
    header = Header(VERSION, "upload", "run", 1, 4, 2, 7, 3, 5, fields)
    envelope = pack(header, [bytes(400), bytes(40), bytes(20), bytes(8)])
    ledger = Ledger()
    ledger.book(envelope, 1, "up")
    label = ("algorithm", 4, 2, 7, 1, "up", "upload")
    assert set(ledger.close(4)) == {
        Entry(*label, "mean", "values", "dense", 400, 400),
        Entry(*label, "precision", "values", "pairs", 400, 40),
        Entry(*label, "precision", "indices", "pairs", 0, 20),
        Entry(*label, "loss", "values", "dense", 8, 8),
        Entry(*label, "", "header", "", 0, len(envelope.head)),
        Entry(*label, "", "framing", "", 0, 9 + 9 + 2 + 2 + 2),
    }


def test_columns_are_the_contract_of_ledger_csv() -> None:
    assert ",".join(COLUMNS) == (
        "kind,round,exchange,client,worker,direction,message,field,layer,codec,dense_bytes,bytes"
    )


def test_blobs_are_booked_as_control() -> None:
    fields, frames = blob("hello", b"x" * 300)
    ledger = Ledger()
    ledger.book(pack(Header(VERSION, "hello", "", fields=fields), frames), 2, "up")
    rows = ledger.close(0)
    assert {(e.kind, e.round, e.exchange, e.client, e.worker) for e in rows} == {
        ("control", NONE, NONE, NONE, 2)
    }
    assert next(e for e in rows if e.field == "hello").bytes == 300


def test_a_handshake_is_booked_both_ways() -> None:
    ledger = Ledger()
    ledger.book_handshake(5)
    rows = ledger.close(0)
    assert [(e.direction, e.bytes, e.worker, e.kind, e.layer) for e in rows] == [
        ("down", 107, 5, "control", "framing"),
        ("up", 107, 5, "control", "framing"),
    ]


@fixed
@given(st.integers(0, 10_000))
def test_close_takes_each_row_once_with_its_round(seed: int) -> None:
    everything = booked(seed)[0].close(100)
    ledger, _ = booked(seed)
    parts = [ledger.close(r) for r in range(5)]
    assert {e.round for e in parts[0]} <= {NONE, 0}
    assert all({e.round for e in part} <= {r} for r, part in enumerate(parts) if r)
    assert sorted(e for part in parts for e in part) == everything
    assert all(part == sorted(part) for part in parts)
    assert ledger.close(100) == []


def test_rows_do_not_depend_on_the_order_of_letters_or_on_the_worker() -> None:
    _, sent = booked(11)
    one, other = Ledger(), Ledger()
    for envelope, _, direction in sent:
        one.book(envelope, 0, direction)
    for envelope, worker, direction in reversed(sent):
        other.book(envelope, worker, direction)
    assert one.close(100) == sorted(e._replace(worker=0) for e in other.close(100))


# ---- the stream


@contextmanager
def connected() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes], Relay]]:
    """A ROUTER, a DEALER connected to it through a relay, and the relay."""
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
        for end in (router, dealer):
            stack.callback(end.close, 0)
            end.setsockopt(zmq.SNDTIMEO, int(DEADLINE * 1000))
            end.setsockopt(zmq.RCVTIMEO, int(DEADLINE * 1000))
        relay = stack.enter_context(closing(Relay(router.bind_to_random_port("tcp://127.0.0.1"))))
        dealer.connect(f"tcp://127.0.0.1:{relay.port}")
        yield router, dealer, relay


def exchange(router: zmq.Socket[bytes], dealer: zmq.Socket[bytes], frames: list[bytes]) -> None:
    """Send a message up and an equal one down, and wait for both."""
    dealer.send_multipart(frames, copy=False)
    route, *received = router.recv_multipart()
    assert received == frames
    router.send_multipart([route, *frames], copy=False)
    assert dealer.recv_multipart() == frames


def test_the_references_vector_on_a_counted_stream() -> None:
    with connected() as (router, dealer, relay):
        for sizes in VECTOR:
            exchange(router, dealer, [bytes(n) for n in sizes])
        assert relay.bytes == {"up": STREAM, "down": STREAM}


def test_the_ledger_is_the_bytes_on_the_stream() -> None:
    """Envelopes as the endpoints send them, one of them with a frame of 1 MB, and the handshake."""
    large = torch.arange(250_000, dtype=torch.float32)
    parts = codec("dense").pack(large)
    described = tuple(PartHeader(layer, data.nbytes, digest(data)) for layer, data in parts)
    field = FieldHeader("mean", "dense", "f32", (250_000,), described)
    rng = random.Random(5)
    envelopes = [random_envelope(rng) for _ in range(10)]
    envelopes.append(pack(Header(VERSION, "upload", "run", 1, 1, 1, 0, fields=(field,)), [parts[0][1]]))
    ledger = Ledger()
    with connected() as (router, dealer, relay):
        ledger.book_handshake(0)
        for envelope in envelopes:
            for direction in ("up", "down"):
                ledger.book(envelope, 0, direction)
            exchange(router, dealer, [envelope.head, *(bytes(memoryview(x)) for x in envelope.frames)])
        booked_bytes = {
            d: sum(n for (_, w, _, _), n in ledger.totals.items() if w == d) for d in ("up", "down")
        }
        assert relay.bytes == booked_bytes
    assert struct.unpack("<f", bytes(parts[0][1][-4:])) == (249_999.0,)
