"""Compute an edge server's sums from uploads, pack them into a message, and read them from it.

Besides the algorithm's sums (Algorithm.add), the message has the scalars of every upload. The root thus
aggregates the same scalars for metrics.jsonl as it would without edge servers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, make_dataclass
from functools import cache
from typing import Annotated, Any, get_type_hints

import torch
from torch import Tensor

from fedsim.algorithm import Exchange
from fedsim.compressed_sums import Remainder
from fedsim.errors import WireError
from fedsim.learning.gaussian import is_full, packed
from fedsim.problem import Problem
from fedsim.round_events import Open
from fedsim.wire.envelope import Envelope, Payload, check_fields, decode, decode_own, encode
from fedsim.wire.message_context import NOTHING, MessageContext, codec_stream, of_sums
from fedsim.wire.schema import Dims, FieldKind, Sum, check_values, schema, summed_scalars
from fedsim.wire.wire_size import RUN_NAME, EnvelopeSize, envelope_size

Rows = Annotated[Tensor, FieldKind("info", ("U", "S"), dtype="f64", elastic=True)]
"""The S scalars (for metrics.jsonl) of each of U uploads, in ascending client id, shape (U, S)."""


def edge_dims(problem: Problem, exchange: Exchange, uploads: int) -> Dims:
    """Return the dimensions of the fields of an edge server's message with the sums of `uploads` uploads."""
    return {**problem.dims, "U": uploads, "S": len(summed_scalars(exchange.up))}


@cache
def message_of(exchange: Exchange) -> type:
    """Return the class of an edge server's message: the algorithm's sums, and the uploads' scalars if any."""
    assert exchange.sums is not None  # checked by fedsim.tree.check_tree
    known: list[tuple[str, Any]] = [*get_type_hints(exchange.sums, include_extras=True).items()]
    scalars = [("scalars", Rows)] if summed_scalars(exchange.up) else []
    return make_dataclass("EdgeSums", [*known, *scalars], frozen=True)


def sums_size(problem: Problem, round: int, number: int, uploads: int, run: str = RUN_NAME) -> EnvelopeSize:
    """Return the size of the envelope with an edge server's sums of `uploads` uploads."""
    exchange, layout = problem.exchange(round, number), problem.net.layout
    dims = edge_dims(problem, exchange, uploads)
    return envelope_size(message_of(exchange), problem.codecs["edge"], dims, layout, kind="sums", run=run)


@dataclass(frozen=True)
class EdgeSum:
    """The sums of an edge server: encoded, as the root decodes them, and what the codecs took from them (None
    if no codec is lossy)."""

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
    client id; the upload is None if the client's event rule withholds it. remainder: what the codecs took
    from the edge server's last sums; None before its first.
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
    lossy = problem.compressed.fields if problem.compressed else ()
    for name, owed in zip(lossy, remainder.values if remainder else (), strict=False):
        values[name] = values[name] + owed
    dims = edge_dims(problem, exchange, len(rows))
    table = torch.tensor(rows, dtype=torch.float64).reshape(len(rows), dims["S"])
    scalars = {"scalars": table} if dims["S"] else {}
    context = _context(problem, command.round, command.exchange, down, edge, len(rows))
    kind, codecs, layout = message_of(exchange), problem.codecs["edge"], problem.net.layout
    payload = encode(kind(**values, **scalars), codecs, dims, context, layout)
    decoded: Any = decode_own(kind, payload, codecs, dims, context, layout)
    left = Remainder(tuple(values[name] - getattr(decoded, name) for name in lossy)) if lossy else None
    return EdgeSum(payload, _without_scalars(exchange, decoded), left)


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


def _context(
    problem: Problem, round: int, exchange: int, down: Any, edge: int, uploads: int
) -> MessageContext:
    sums, stream = (
        problem.exchange(round, exchange).sums,
        codec_stream(problem.experiment.seed, round, exchange, edge),
    )
    if problem.compressed is None or sums is None:
        return NOTHING
    return of_sums(down, schema(sums), uploads, stream)


def _without_scalars(exchange: Exchange, message: Any) -> Any:
    assert exchange.sums is not None
    return exchange.sums(**{f.name: getattr(message, f.name) for f in fields(exchange.sums)})


def _sent(value: Any) -> Any:
    """Return a sum in the form of its field: a symmetric matrix as its triangle."""
    return packed(value) if is_full(value) else value


def read_sums(
    problem: Problem, envelope: Envelope, down: Any, edge: int, uploads: int, owner: str
) -> tuple[Any, Tensor]:
    """Return an edge server's sums, an instance of Exchange.sums, and the scalars of the uploads, (U, S).

    down: the decoded broadcast. uploads: the largest accepted number of uploads.
    """
    h = envelope.header
    exchange, codecs = problem.exchange(h.round, h.exchange), problem.codecs["edge"]
    dims, context = (
        edge_dims(problem, exchange, uploads),
        _context(problem, h.round, h.exchange, down, edge, uploads),
    )
    message: Any = decode(message_of(exchange), envelope, codecs, dims, owner, context, problem.net.layout)
    check_values(message, owner)
    return _without_scalars(exchange, message), getattr(
        message, "scalars", torch.zeros(uploads, 0, dtype=torch.float64)
    )


def check_sums(problem: Problem, envelope: Envelope, uploads: int, owner: str) -> None:
    """Check the fields, sizes and number of uploads in the header of an edge server's sums."""
    headers = envelope.header.fields
    exchange = problem.exchange(envelope.header.round, envelope.header.exchange)
    dims, layout = edge_dims(problem, exchange, uploads), problem.net.layout
    check_fields(message_of(exchange), headers, problem.codecs["edge"], dims, owner, layout)
    for f, h in zip(schema(message_of(exchange)), headers, strict=True):
        if f.kind.elastic and h.shape[0] != uploads:
            raise WireError(f"{owner}: {f.name} of {h.shape[0]} uploads where {uploads} count")
