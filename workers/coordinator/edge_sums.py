"""Compute an edge server's sums from uploads, pack them into a message, and read them from it.

Besides the algorithm's sums (Algorithm.add), the message has the scalars of every upload. The root thus
aggregates the same scalars for metrics.jsonl as it would without edge servers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, make_dataclass
from functools import cache
from typing import Annotated, Any, get_type_hints

import torch
from torch import Tensor

from fedsim.algorithm import Exchange
from fedsim.compressed_sums import Remainder, coded, to_posteriors, to_sums
from fedsim.errors import WireError
from fedsim.learning.gaussian import is_full, packed
from fedsim.problem import Problem
from fedsim.round_events import Open
from fedsim.wire.envelope import VERSION, Envelope, Header, Payload, check_fields, decode, encode
from fedsim.wire.message_context import NOTHING, codec_stream, of_sums
from fedsim.wire.schema import Dims, FieldKind, Sum, check_values, schema, summed_scalars
from fedsim.wire.wire_size import RUN_NAME, EnvelopeSize, envelope_size

Rows = Annotated[Tensor, FieldKind("info", ("U", "S"), dtype="f64", elastic=True)]
"""The S scalars (for metrics.jsonl) of each of U uploads, in ascending order of client id, shape (U, S)."""


def edge_dims(problem: Problem, exchange: Exchange, uploads: int) -> Dims:
    """Return the dimensions of the fields of an edge server's message. uploads: how many it sums."""
    return {**problem.dims, "U": uploads, "S": len(summed_scalars(exchange.up))}


@cache
def message_of(exchange: Exchange, coded_sums: bool) -> type:
    """Return the class of an edge server's message: the algorithm's sums, and the uploads' scalars if any.

    coded_sums: True if the sums have codecs (fedsim.compressed_sums.coded).
    """
    assert exchange.sums is not None  # checked by fedsim.tree.check_tree
    own = coded(exchange.sums) if coded_sums else exchange.sums
    known: list[tuple[str, Any]] = [*get_type_hints(own, include_extras=True).items()]
    scalars = [("scalars", Rows)] if summed_scalars(exchange.up) else []
    return make_dataclass("EdgeSums", [*known, *scalars], frozen=True)


def sums_size(problem: Problem, round: int, number: int, uploads: int, run: str = RUN_NAME) -> EnvelopeSize:
    """Return the size of the envelope with an edge server's sums of `uploads` uploads."""
    exchange, layout = problem.exchange(round, number), problem.net.layout
    dims = edge_dims(problem, exchange, uploads)
    kind, codecs = message_of(exchange, problem.compressed is not None), problem.codecs["edge"]
    return envelope_size(kind, codecs, dims, layout, kind="sums", run=run)


@dataclass(frozen=True)
class EdgeSum:
    """An edge server's sums: encoded, as decoded by the root, and the coding error (None without codecs)."""

    payload: Payload
    decoded: Any
    remainder: Remainder | None


def summed(
    problem: Problem,
    command: Open,
    down: Any,
    edge: int,
    ups: Iterable[tuple[int, Any]],
    remainder: Remainder | None = None,
) -> EdgeSum:
    """Return an edge server's sums for an exchange.

    down: the broadcast as clients decode it. ups: pairs of a client and its decoded upload, in ascending
    order of client id; the upload is None if the client's event rule withholds it. remainder: the coding
    error of the edge server's previous sums; None if there are none.
    """
    algorithm, exchange = problem.algorithm, problem.exchange(command.round, command.exchange)
    ctx = problem.context(command.round, command.exchange, command.folded_rounds, command.asked)
    rows: list[list[float]] = []

    def noted() -> Iterator[tuple[int, Any]]:
        for k, up in ups:
            if up is not None:
                rows.append(list(summed_scalars(up).values()))
            yield k, up
            del up  # keep only one upload in memory

    sums = algorithm.added(algorithm.no_sums(down, ctx), down, noted(), ctx)
    assert exchange.sums is not None
    values = {f.name: _sent(algorithm.sum_of(sums, f.name)) for f in fields(exchange.sums)}
    owing = problem.compressed.fields if problem.compressed else ()
    if remainder is not None:
        values |= {name: values[name] + r for name, r in zip(owing, remainder.values, strict=True)}
    coder = _Coder(problem, command.round, command.exchange, down, edge, len(rows))
    table = torch.tensor(rows, dtype=torch.float64).reshape(len(rows), coder.dims["S"])
    payload = coder.encoded(values, {"scalars": table} if coder.dims["S"] else {})
    assert problem.tree is not None
    owner = f"sums of edge server {problem.tree.names[edge]} in round {command.round}"
    decoded, _ = coder.decoded(payload, owner)
    left = Remainder(tuple(values[name] - getattr(decoded, name) for name in owing)) if owing else None
    return EdgeSum(payload, decoded, left)


class _Coder:
    """The encoding of an edge server's sums of `uploads` uploads, with or without codecs."""

    def __init__(
        self, problem: Problem, round: int, exchange: int, down: Any, edge: int, uploads: int
    ) -> None:
        described = problem.exchange(round, exchange)
        assert described.sums is not None
        self.sums, self.down, self.uploads, self.layout = described.sums, down, uploads, problem.net.layout
        self.coded, self.codecs = problem.compressed is not None, problem.codecs["edge"]
        self.kind, self.dims = message_of(described, self.coded), edge_dims(problem, described, uploads)
        stream = codec_stream(problem.experiment.seed, round, exchange, edge)
        self.context = of_sums(down, schema(self.kind), stream) if self.coded else NOTHING

    def encoded(self, values: Mapping[str, Any], scalars: Mapping[str, Tensor]) -> Payload:
        sent = to_posteriors(self.sums, values, self.down, self.uploads) if self.coded else values
        return encode(self.kind(**sent, **scalars), self.codecs, self.dims, self.context, self.layout)

    def decoded(self, payload: Payload, owner: str) -> tuple[Any, Tensor]:
        """Return the sums (an instance of Exchange.sums) and the uploads' scalars, shape (U, S).

        Raises:
            WireError: if the message or a value is invalid.
        """
        envelope = Envelope(Header(VERSION, "sums", "", fields=payload.fields), b"", payload.frames)
        sent: Any = decode(self.kind, envelope, self.codecs, self.dims, owner, self.context, self.layout)
        check_values(sent, owner)
        rows = getattr(sent, "scalars", torch.zeros(self.uploads, 0, dtype=torch.float64))
        if self.coded:
            return to_sums(self.sums, sent, self.down, self.uploads), rows
        return self.sums(**{f.name: getattr(sent, f.name) for f in fields(self.sums)}), rows


@cache
def _remainder_type(names: tuple[str, ...]) -> type:
    return make_dataclass("EdgeRemainder", [(name, Sum) for name in names], frozen=True)


def pack_remainder(problem: Problem, remainder: Remainder) -> Payload:
    """Return the message with an edge server's remainder, in float64."""
    assert problem.compressed is not None  # there is no remainder without it
    return encode(_remainder_type(problem.compressed.fields)(*remainder.values), {}, problem.dims)


def read_remainder(problem: Problem, envelope: Envelope, owner: str) -> Remainder:
    """Return the remainder in a message."""
    names = problem.compressed.fields if problem.compressed else ()
    message: Any = decode(_remainder_type(names), envelope, {}, problem.dims, owner)
    check_values(message, owner)
    return Remainder(tuple(getattr(message, name) for name in names))


def _sent(value: Any) -> Any:
    """Return the form in which a sum is sent: the triangle of a symmetric matrix, else the sum itself."""
    return packed(value) if is_full(value) else value


def read_sums(
    problem: Problem, envelope: Envelope, down: Any, edge: int, uploads: int, owner: str
) -> tuple[Any, Tensor]:
    """Return an edge server's sums (an instance of Exchange.sums) and the uploads' scalars, shape (U, S).

    down: the decoded broadcast. uploads: the number of summed uploads; without codecs, an
    upper bound.
    """
    h = envelope.header
    coder = _Coder(problem, h.round, h.exchange, down, edge, uploads)
    return coder.decoded(Payload(h.fields, envelope.frames), owner)


def check_sums(problem: Problem, envelope: Envelope, uploads: int, owner: str) -> None:
    """Check the fields, sizes and number of uploads in the header of an edge server's sums."""
    headers = envelope.header.fields
    exchange = problem.exchange(envelope.header.round, envelope.header.exchange)
    dims, layout = edge_dims(problem, exchange, uploads), problem.net.layout
    kind = message_of(exchange, problem.compressed is not None)
    check_fields(kind, headers, problem.codecs["edge"], dims, owner, layout)
    for f, h in zip(schema(kind), headers, strict=True):
        if f.kind.elastic and h.shape[0] != uploads:
            raise WireError(f"{owner}: {f.name} has rows for {h.shape[0]} uploads, not for {uploads}")
