"""fedsim codecs: size, error and speed of every codec on a run's next messages, as a table and as CSV.

The sizes are compared with these floors:

    indices    sum over layers of size H(kept / size) / 8, with H the binary entropy in bits: the minimum for
               independent positions (docs/references/bytes.md#bound-for-sparse-codecs)
    values     sum over byte planes of n H_0 / 8, with n the number of values and H_0 the entropy of order 0
               of a plane's bytes in bits. Plane i of a byte shuffle has byte i of every value that is sent (a
               kept value, a half-precision value or a distance). A layer's mean or range counts in full.
"""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Column, Table
from torch import Tensor

from fedsim import plugins
from fedsim.errors import UsageError
from fedsim.learning.gaussian import kl_divergence
from fedsim.problem import Problem
from fedsim.wire.codecs import CODECS, Codec, CodecFamily, Spec, codec
from fedsim.wire.codecs.zstd import expanded
from fedsim.wire.envelope import field_spec, reference
from fedsim.wire.message_context import SCALES, scale_of
from fedsim.wire.schema import DTYPES, Field, values_of
from launch import terminal
from launch.runs.restored import Message, RestoredRun
from launch.terminal import print_json, print_table
from workers.storage.atomic_files import disk_errors

WIDTH = 110
"""Width of the output in columns if there is no terminal."""
STEPS = (0.005, 0.02, 0.25)
"""Steps of codecs that have a step."""
MORE = {"sigma": ("5.0%+random", "10.0%"), "ratio": ("1.5+random",)}
"""Additional parameters, by codec."""
BITS = (2, 4, 8)
"""Numbers of bits of codecs that have such a parameter."""


@dataclass(frozen=True)
class Measured:
    """One codec on one field. Errors are None for an exact codec. Rates are MB of the dense tensor per second
    and None for dense, which copies nothing. Floors are bytes and None if the codec sends no such part."""

    direction: str
    exchange: int
    field: str
    kind: str
    shape: str
    codec: str
    sent: str
    of_the_run: bool
    bytes: int
    indices_bytes: int
    values_bytes: int
    dense_bytes: int
    ratio: float
    bits: float
    encode_mb_s: float | None
    decode_mb_s: float | None
    max_relative_error: float | None
    relative_l2_error: float | None
    indices_floor: float | None
    values_floor: float


def codecs(
    folder: Path, data_dir: Path | None, fractions: Sequence[float], file: Path | None, as_json: bool = False
) -> None:
    for fraction in fractions:
        codec(f"topk:{fraction!r}")  # refuses an invalid fraction before anything is computed
    if file is not None and not file.parent.is_dir():
        raise UsageError(f"--csv {file}: there is no folder {file.parent}")
    run = RestoredRun.open(folder, data_dir)
    client = run.largest_participant()
    sent = list(run.next_messages(client))
    result = [m for message in sent for m in measured(message, run.problem, fractions)]
    limits = [(m.exchange, bits) for m in sent if (bits := kl_bits(m)) is not None]
    if file is not None:
        write(file, result)
    if as_json:
        return print_json(to_json(run, client, result, limits))
    console = terminal.console()
    if not console.is_terminal:
        console.width = WIDTH
    e, p = run.problem.experiment, run.problem
    algo, dataset, model = (escape(plugins.short(choice)) for choice in (e.algo, e.dataset, e.model))
    console.print(
        f"[bold]{algo}[/] on {dataset}, {model}, P = {p.net.layout.size:,}: messages of round "
        f"{run.round + 1} with client {client} ({p.sizes[client]:,} examples)"
    )
    console.print()
    print_table(console, table(result))
    for exchange, bits in limits:
        where = f" of exchange {exchange}" if len(sent) > 2 else ""
        each = bits / p.net.layout.size
        console.print(f"KL(q_k || q_g) of the upload{where}: {bits:,.1f} bits, {each:.2g} a parameter.")
    for paragraph in FOOTER:
        console.print(paragraph, markup=False)
    return None


def to_json(
    run: RestoredRun, client: int, result: Sequence[Measured], limits: Sequence[tuple[int, float]]
) -> dict[str, Any]:
    """Return the table for --json; `codecs` has the columns of --csv. limits: (exchange, kl_bits) pairs."""
    e, p = run.problem.experiment, run.problem
    return {
        **{key: getattr(e, key) for key in ("algo", "dataset", "model")},
        "params": p.net.layout.size,
        "round": run.round + 1,
        "client": client,
        "examples": p.sizes[client],
        "kl": [{"exchange": exchange, "bits": bits} for exchange, bits in limits],
        "codecs": result,
    }


# ---- measuring


def measured(message: Message, problem: Problem, fractions: Sequence[float]) -> Iterator[Measured]:
    """Measure every tensor of a message with every codec that fits it, except scalars and empty tensors."""
    for f, x in values_of(message.value):
        if not isinstance(x, Tensor) or not f.kind.dims or not x.numel():
            continue
        context, own = message.context, codec(problem.codecs[message.side].get(f.name, "dense"))
        if context.scale is None:
            own_scales = (scale_of(n, getattr(message.value, n)) for n in SCALES if hasattr(message.value, n))
            context = replace(context, scale=next((s for s in own_scales if s is not None), None))
        dtype = next(n for n, d in DTYPES.items() if d is x.dtype)
        spec = field_spec(f, tuple(x.shape), dtype, problem.net.layout, context)
        for c in _candidates(problem, message.side, f, own, fractions):
            ref = reference(c, f.name, context)
            parts = None if c.last and ref is None else c.pack(x, spec, ref)
            if parts is not None:
                yield _measure(message, f, x, spec, ref, c, parts, c.name == own.name)


def _names(family: CodecFamily, fractions: Sequence[float]) -> list[str]:
    few, most = family.bits or (1, 0)
    bits = [b for b in BITS if few <= b <= most]
    parameters = fractions if family.fraction else STEPS if family.step else bits
    texts = [*map(repr, parameters), *MORE.get(family.name, ())]
    return [f"{family.name}:{text}" for text in texts] or [family.name]


def _candidates(
    problem: Problem, side: str, field: Field, own: Codec, fractions: Sequence[float]
) -> list[Codec]:
    """Return the codecs to compare, in the table's order, including the run's own codec."""
    names = [name for family in CODECS.values() for name in _names(family, fractions)]
    every = dict.fromkeys([codec(name) for name in names] + [own])
    return [c for c in every if not problem.unfit(c, side, field.name, field.kind)]


def _measure(
    message: Message,
    field: Field,
    x: Tensor,
    spec: Spec,
    ref: Tensor | None,
    selected: Codec,
    parts: tuple[tuple[str, memoryview], ...],
    of_the_run: bool,
) -> Measured:
    sizes, frames = {layer: part.nbytes for layer, part in parts}, tuple(part for _, part in parts)
    total, dense = sum(sizes.values()), spec.dense_bytes
    result = selected.unpack(frames, spec, ref)
    worst, l2 = errors(result, x) if selected.lossy else (None, None)
    timed = selected.name != "dense"
    encoding = dense / fastest(lambda: selected.pack(x, spec, ref)) / 1e6 if timed else None
    decoding = dense / fastest(lambda: selected.unpack(frames, spec, ref)) / 1e6 if timed else None
    return Measured(
        direction=message.side,
        exchange=message.exchange,
        field=field.name,
        kind=field.kind.name,
        shape="x".join(str(n) for n in spec.shape),
        codec=selected.name,
        sent=selected.name if total <= dense else "dense",
        of_the_run=of_the_run,
        bytes=total,
        indices_bytes=sizes.get("indices", 0),
        values_bytes=sizes["values"],
        dense_bytes=dense,
        ratio=dense / total,
        bits=8 * total / x.numel(),
        encode_mb_s=encoding,
        decode_mb_s=decoding,
        max_relative_error=worst,
        relative_l2_error=l2,
        indices_floor=indices_floor(selected, spec) if "indices" in sizes else None,
        values_floor=values_floor(selected, spec, dict(parts)["values"]),
    )


def errors(result: Tensor, x: Tensor) -> tuple[float, float]:
    """Return the largest |result - x| / |x| over the entries that are not 0, and ||result - x|| / ||x||."""
    distance, size = (result.double() - x.double()).abs(), x.double().abs()
    nonzero = size > 0
    worst = float((distance[nonzero] / size[nonzero]).max()) if bool(nonzero.any()) else 0.0
    norm = float(size.norm())
    return worst, float(distance.norm()) / norm if norm else float(distance.norm())


def fastest(job: Callable[[], object], budget: float = 0.03, least: int = 3) -> float:
    """Run `job` at least `least` times and for at least `budget` s; return the seconds of the fastest run."""
    best, spent, runs = math.inf, 0.0, 0
    while runs < least or spent < budget:
        began = time.perf_counter()
        job()
        seconds = time.perf_counter() - began
        best, spent, runs = min(best, seconds), spent + seconds, runs + 1
    return max(best, 1e-9)


# ---- floors


def kl_bits(message: Message) -> float | None:
    """Return KL(q_k || q_g) in bits, for the posteriors of upload and broadcast; None if one is missing."""
    q, p = message.value, message.context.fields
    if not all(isinstance(getattr(q, name, None), Tensor) and name in p for name in ("mean", "precision")):
        return None
    if not q.mean.shape == q.precision.shape == p["mean"].shape == p["precision"].shape:
        return None
    return kl_divergence(q.mean, q.precision, p["mean"], p["precision"]) / math.log(2)


def entropy(counts: np.ndarray) -> float:
    """Return the empirical entropy of counts in bits per symbol."""
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log2(p)).sum()) + 0.0


def indices_floor(selected: Codec, spec: Spec) -> float:
    """Return the floor of the indices' bytes, as defined in the module's docstring."""
    assert selected.kept is not None
    bits = 0.0
    for s in spec.layout.slices:
        if s.size:
            kept = selected.kept(s.size)
            bits += s.size * entropy(np.array([kept, s.size - kept]))
    return bits / 8


def values_floor(selected: Codec, spec: Spec, part: memoryview) -> float:
    """Return the floor of the values' bytes, as defined in the module's docstring."""
    if selected.entropy is not None:
        return selected.entropy(part, spec) / 8
    side = selected.side * len(spec.layout.slices)
    count, width = selected.numbers(spec), selected.width or spec.dtype.itemsize
    bound = next(b for b in selected.bounds(spec) if b.layer == "values")
    if bound.least == bound.most:
        planes = np.frombuffer(part[side:], dtype=np.uint8).reshape(count, width).T
    else:
        planes = np.frombuffer(expanded(part[side:], count * width), dtype=np.uint8).reshape(width, count)
    return side + sum(count * entropy(np.bincount(plane)) for plane in planes if count) / 8


# ---- showing

FOOTER = (
    "> the run's own codec. * not smaller than dense, which is sent in its place. Scalars are left out.",
    "bits: for each value. KL: a sample of q_k could be sent in about as many bits to who has q_g; the "
    "parameters of q_k, from which duals are computed, need more.",
    "MB/s: of the dense tensor, the fastest of several runs in this process.",
    "error: the largest |x' - x| / |x| over entries that are not 0; the same of the vectors' norms; - exact.",
    "indices / floor: bytes over P H(p) / 8 for p kept of P, summed over layers: the least for positions "
    "independent of each other; real ones are not (whole columns and units are large together).",
    "values / floor: bytes over the entropy of order 0 of the values' bytes, one histogram per byte plane "
    "(all first bytes, all second bytes, ...); of sigma, ratio and qsgd over that of their integers, by "
    "layer. Neighbours alike beat it; of few values it is too low.",
)


def table(result: Sequence[Measured]) -> Table:
    """Return a table that fits a width of 110. Its first column has field, kind and shape of each group."""
    out = Table(*(Column(name, no_wrap=True) for name in ("field", "codec")), header_style="bold")
    speeds, errors = ("encode\nMB/s", "decode\nMB/s"), ("largest\nerror", "L2\nerror")
    for name in ("bytes", "ratio", "bits", *speeds, *errors, "indices\n/ floor", "values\n/ floor"):
        out.add_column(name, justify="right")
    several = any(m.exchange > 1 for m in result)
    for (direction, exchange, name), group in groupby(result, lambda m: (m.direction, m.exchange, m.field)):
        rows = list(group)
        label = [f"[bold]{direction}.{name}[/]", f"[dim]{rows[0].kind} {rows[0].shape}[/]"]
        label += [f"[dim]exchange {exchange}[/]"] if several else []
        for i, m in enumerate(rows):
            out.add_row(
                label[i] if i < len(label) else "",
                f"{'>' if m.of_the_run else ' '} {m.codec}{' *' if m.sent != m.codec else ''}",
                f"{m.bytes:,}",
                f"{m.ratio:.2f}" if m.ratio < 100 else f"{m.ratio:.0f}",
                f"{m.bits:.2f}",
                *("-" if rate is None else f"{rate:,.0f}" for rate in (m.encode_mb_s, m.decode_mb_s)),
                *("-" if e is None else f"{e:.1e}" for e in (m.max_relative_error, m.relative_l2_error)),
                _over(m.indices_bytes, m.indices_floor),
                _over(m.values_bytes, m.values_floor),
            )
        out.add_row()
    return out


def _over(size: int, floor: float | None) -> str:
    return f"{size / floor:.2f}" if floor else "-"


def write(file: Path, result: Sequence[Measured]) -> None:
    """Write one row per codec and field; a cell without a value is empty."""
    with disk_errors(f"--csv {file}"), file.open("w", newline="", encoding="utf-8") as out:
        rows = csv.DictWriter(out, [f.name for f in fields(Measured)], lineterminator="\n")
        rows.writeheader()
        rows.writerows(asdict(m) for m in result)
