"""Compute an edge server's sums from uploads, pack them into a message, and read them from it.

Besides the algorithm's sums (Algorithm.add), the message has the scalars of every upload. The root thus
aggregates the same scalars for metrics.jsonl as it would without edge servers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, make_dataclass
from functools import cache
from typing import Annotated, Any, get_type_hints

import torch
from torch import Tensor

from fedsim.algorithm import Exchange
from fedsim.errors import WireError
from fedsim.learning.gaussian import is_full, packed
from fedsim.problem import Problem
from fedsim.round_events import Open
from fedsim.wire.envelope import VERSION, Envelope, Header, Payload, check_fields, decode, encode
from fedsim.wire.schema import Dims, FieldKind, check_values, schema, summed_scalars
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
    return envelope_size(message_of(exchange), {}, dims, layout, kind="sums", run=run)


def summed(problem: Problem, command: Open, down: Any, ups: Iterable[tuple[int, Any]]) -> Payload:
    """Return an edge server's message for an exchange.

    down: the broadcast as clients decode it. ups: pairs of a client and its decoded upload, in ascending
    client id; the upload is None if the client's event rule withholds it.
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
    dims = edge_dims(problem, exchange, len(rows))
    table = torch.tensor(rows, dtype=torch.float64).reshape(len(rows), dims["S"])
    scalars = {"scalars": table} if dims["S"] else {}
    return encode(message_of(exchange)(**values, **scalars), {}, dims)


def _sent(value: Any) -> Any:
    """Return a sum in the form of its field: a symmetric matrix as its triangle."""
    return packed(value) if is_full(value) else value


def read_sums(problem: Problem, envelope: Envelope, uploads: int, owner: str) -> tuple[Any, Tensor]:
    """Return an edge server's sums, an instance of Exchange.sums, and the scalars of the uploads, (U, S).

    uploads: the largest accepted number of uploads.
    """
    exchange = problem.exchange(envelope.header.round, envelope.header.exchange)
    dims = edge_dims(problem, exchange, uploads)
    message: Any = decode(message_of(exchange), envelope, {}, dims, owner)
    check_values(message, owner)
    assert exchange.sums is not None
    sums = exchange.sums(**{f.name: getattr(message, f.name) for f in fields(exchange.sums)})
    return sums, getattr(message, "scalars", torch.zeros(uploads, 0, dtype=torch.float64))


def check_sums(problem: Problem, envelope: Envelope, uploads: int, owner: str) -> None:
    """Check the fields, sizes and number of uploads in the header of an edge server's sums."""
    headers = envelope.header.fields
    exchange = problem.exchange(envelope.header.round, envelope.header.exchange)
    check_fields(message_of(exchange), headers, {}, edge_dims(problem, exchange, uploads), owner)
    for f, h in zip(schema(message_of(exchange)), headers, strict=True):
        if f.kind.elastic and h.shape[0] != uploads:
            raise WireError(f"{owner}: {f.name} of {h.shape[0]} uploads where {uploads} count")


def own_sums(problem: Problem, command: Open, payload: Payload) -> Any:
    """Decode the sums that this process has encoded, as the root decodes those of an edge server."""
    header = Header(VERSION, "sums", "", 1, command.round, command.exchange, fields=payload.fields)
    return read_sums(problem, Envelope(header, b"", payload.frames), len(problem.sizes), "own sums")[0]
