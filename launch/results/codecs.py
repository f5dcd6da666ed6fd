"""fedsim codecs: size, error and speed of every codec on a run's next messages, as a table and as CSV.

The sizes are compared with these floors:

    indices    sum over layers of size H(kept / size) / 8, with H the binary entropy in bits: the minimum for
               independent positions (docs/references/bytes.md#bound-for-sparse-codecs)
    values     sum over byte planes of n H_0 / 8, with n the number of values and H_0 the entropy of order 0
               of a plane's bytes in bits. Plane i of a byte shuffle has byte i of every value that is sent (a
               kept value, a half-precision value or a distance). A layer's mean or range counts in full. An
               entropy coder's floor is the entropy of its integers, by layer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pandas
from rich.table import Column, Table
from rich.text import Text
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

WIDTH = 110
"""Width of the output in columns if there is no terminal."""
STEPS = (0.005, 0.02, 0.25)
"""Steps of codecs that have a step."""
MORE = {"sigma": ("5.0%+random", "10.0%"), "ratio": ("1.5+random",)}
"""Additional parameters, by codec."""
BITS = (2, 4, 8)
"""Numbers of bits of codecs that have such a parameter."""
Row = dict[str, Any]
"""One codec on one field, by the columns of the CSV (docs/reference.md). Errors are None for an exact codec,
rates are None for dense, which copies nothing, and a floor is None if the codec sends no such part."""
LOSSES = ("max_relative_error", "relative_l2_error")
FOOTER = (
    "> the run's own codec; * not smaller than dense, which is sent in its place; bits for each value; MB/s "
    "of the dense tensor; errors relative to values that are not 0, and to the norm; - exact.",
    "indices / floor: bytes over the entropy of independent positions; values / floor: over the entropy of "
    "order 0 of the values' byte planes or integers. Positions and neighbours that are alike beat a floor. "
    "A sample of q_k costs about KL bits; its parameters, from which duals follow, cost more.",
)


def codecs(
    folder: Path, data_dir: Path | None, fractions: Sequence[float], file: Path | None, as_json: bool = False
) -> None:
    """Compare all codecs on the messages that the run would send next; print the table or JSON."""
    for fraction in fractions:
        codec(f"topk:{fraction!r}")  # refuses an invalid fraction before anything is computed
    if file is not None and not file.parent.is_dir():
        raise UsageError(f"--csv {file}: there is no folder {file.parent}")
    run = RestoredRun.open(folder, data_dir)
    client, problem, e = run.largest_participant(), run.problem, run.problem.experiment
    sent = list(run.next_messages(client))
    rows = [row for message in sent for row in measured(message, problem, fractions)]
    kl = [{"exchange": m.exchange, "bits": bits} for m in sent if (bits := kl_bits(m)) is not None]
    if file is not None:
        with terminal.output_file(file) as opened:
            pandas.DataFrame(rows).to_csv(opened, index=False, lineterminator="\n")
    where: Row = {"algo": e.algo, "dataset": e.dataset, "model": e.model, "params": problem.net.layout.size}
    where |= {"round": run.round + 1, "client": client, "examples": problem.sizes[client]}
    if as_json:
        return terminal.print_json({**where, "kl": kl, "codecs": rows})
    console = terminal.console()
    if not console.is_terminal:
        console.width = WIDTH
    algo, dataset, model = (plugins.short(choice) for choice in (e.algo, e.dataset, e.model))
    console.print(
        Text(algo, "bold"),
        f"on {dataset}, {model}, P = {where['params']:,}: messages of round {where['round']} "
        f"with client {client} ({where['examples']:,} examples)\n",
    )
    terminal.print_table(console, table(rows))
    for q in kl:
        each = q["bits"] / where["params"]
        text = f"KL(q_k || q_g) of the upload: {q['bits']:,.1f} bits, {each:.2g} a parameter"
        console.print(text + (f" (exchange {q['exchange']})" if len(kl) > 1 else "."))
    for paragraph in FOOTER:
        console.print(paragraph)
    return None


def table(rows: Sequence[Row]) -> Table:
    """Return a table that fits a width of 110. Its first column has each field once, with kind and shape."""

    def over(size: int, floor: float | None) -> str:
        return f"{size / floor:.2f}" if floor else "-"

    out = Table(*(Column(name, no_wrap=True) for name in ("field", "codec")), header_style="bold")
    speeds, losses = ("encode\nMB/s", "decode\nMB/s"), ("largest\nerror", "L2\nerror")
    for name in ("bytes", "ratio", "bits", *speeds, *losses, "indices\n/ floor", "values\n/ floor"):
        out.add_column(name, justify="right")
    for (side, exchange, name), group in groupby(rows, lambda r: (r["direction"], r["exchange"], r["field"])):
        own = list(group)
        labels = [Text(f"{side}.{name}", "bold"), Text("{kind} {shape}".format_map(own[0]), "dim")]
        labels += [Text(f"exchange {exchange}", "dim")] * (exchange > 1) + [Text()] * len(own)
        for label, row in zip(labels, own, strict=False):
            out.add_row(
                label,
                f"{'>' if row['of_the_run'] else ' '} {row['codec']}{' *' * (row['sent'] != row['codec'])}",
                f"{row['bytes']:,}",
                f"{row['ratio']:.2f}",
                f"{row['bits']:.2f}",
                *("-" if (x := row[f"{way}_mb_s"]) is None else f"{x:,.0f}" for way in ("encode", "decode")),
                *("-" if (x := row[key]) is None else f"{x:.1e}" for key in LOSSES),
                over(row["indices_bytes"], row["indices_floor"]),
                over(row["values_bytes"], row["values_floor"]),
            )
        out.add_row()
    return out


# ---- measuring


def measured(message: Message, problem: Problem, fractions: Sequence[float]) -> Iterator[Row]:
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
        field = {
            "direction": message.side,
            "exchange": message.exchange,
            "field": f.name,
            "kind": f.kind.name,
        }
        for c in _candidates(problem, message.side, f, own, fractions):
            ref = reference(c, f.name, context)
            parts = None if c.last and ref is None else c.pack(x, spec, ref)
            if parts is not None:
                yield field | _measure(x, spec, ref, c, parts, c.name == own.name)


def _candidates(
    problem: Problem, side: str, field: Field, own: Codec, fractions: Sequence[float]
) -> Iterator[Codec]:
    """Yield the codecs to compare, in the table's order, including the run's own codec."""
    names = [name for family in CODECS.values() for name in _names(family, fractions)]
    for c in dict.fromkeys([*map(codec, names), own]):
        if not problem.unfit(c, side, field.name, field.kind):
            yield c


def _names(family: CodecFamily, fractions: Sequence[float]) -> list[str]:
    few, most = family.bits or (1, 0)
    bits = [b for b in BITS if few <= b <= most]
    parameters = fractions if family.fraction else STEPS if family.step else bits
    texts = [*map(repr, parameters), *MORE.get(family.name, ())]
    return [f"{family.name}:{text}" for text in texts] or [family.name]


def _measure(
    x: Tensor,
    spec: Spec,
    ref: Tensor | None,
    selected: Codec,
    parts: tuple[tuple[str, memoryview], ...],
    of_the_run: bool,
) -> Row:
    sizes, frames = {layer: part.nbytes for layer, part in parts}, tuple(part for _, part in parts)
    total, dense = sum(sizes.values()), spec.dense_bytes
    worst, l2 = errors(selected.unpack(frames, spec, ref), x) if selected.lossy else (None, None)

    def rate(job: Callable[[], object]) -> float | None:
        return None if selected.name == "dense" else dense / fastest(job) / 1e6

    return {
        "shape": "x".join(map(str, spec.shape)),
        "codec": selected.name,
        "sent": selected.name if total <= dense else "dense",
        "of_the_run": of_the_run,
        "bytes": total,
        "indices_bytes": sizes.get("indices", 0),
        "values_bytes": sizes["values"],
        "dense_bytes": dense,
        "ratio": dense / total,
        "bits": 8 * total / x.numel(),
        "encode_mb_s": rate(lambda: selected.pack(x, spec, ref)),
        "decode_mb_s": rate(lambda: selected.unpack(frames, spec, ref)),
        "max_relative_error": worst,
        "relative_l2_error": l2,
        "indices_floor": indices_floor(selected, spec) if "indices" in sizes else None,
        "values_floor": values_floor(selected, spec, dict(parts)["values"]),
    }


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
