"""fedsim codecs: size, error and speed of every codec on a run's next messages."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.text import Text
from torch import Tensor

from fedsim import plugins
from fedsim.problem import Problem
from fedsim.wire.codecs import CODECS, Codec, CodecFamily, Spec, codec
from fedsim.wire.envelope import field_spec, reference
from fedsim.wire.limits import divergence
from fedsim.wire.message_context import SCALES, scale_of
from fedsim.wire.schema import DTYPES, Field, values_of
from launch import terminal
from launch.numbers import optional
from launch.runs.restored import Message, RestoredRun
from launch.table import Table

WIDTH = 110
"""Width of the output in columns if there is no terminal."""
STEPS = (0.005, 0.02, 0.25)
"""Steps of codecs that have a step."""
MORE = {"sigma": ("5.0%+random", "10.0%"), "ratio": ("1.5+random",)}
"""Additional parameters, by codec."""
BITS = (2, 4, 8)
"""Numbers of bits of codecs that have such a parameter."""
Row = dict[str, Any]
"""One codec on one field, by the keys of --json (docs/reference.toml). Errors are None for an exact codec,
and rates are None for dense, which copies nothing."""
LOSSES = ("max_relative_error", "relative_l2_error")
FOOTER = (
    "> the run's own codec; * not smaller than dense, which is sent in its place; bits for each value; MB/s "
    "of the dense tensor; errors relative to values that are not 0, and to the norm; - exact. A sample of "
    "q_k costs about KL bits; its parameters, from which duals follow, cost more."
)


def codecs(folder: Path, data_dir: Path | None, fractions: Sequence[float], as_json: bool = False) -> None:
    """Compare all codecs on the messages that the run would send next; print the table or JSON."""
    for fraction in fractions:
        codec(f"topk:{fraction!r}")  # refuses an invalid fraction before anything is computed
    run = RestoredRun.open(folder, data_dir)
    client, problem, e = run.largest_participant(), run.problem, run.problem.experiment
    sent = list(run.next_messages(client))
    rows = [row for message in sent for row in measured(message, problem, fractions)]
    kl = [
        {"exchange": up.exchange, "bits": each * problem.net.layout.size}
        for down, up in zip(sent[::2], sent[1::2], strict=True)
        if (each := divergence(up.value, down.value)) is not None
    ]
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
    table(rows).print(console)
    for q in kl:
        each = q["bits"] / where["params"]
        text = f"KL(q_k || q_g) of the upload: {q['bits']:,.1f} bits, {each:.2g} a parameter"
        console.print(text + (f" (exchange {q['exchange']})" if len(kl) > 1 else "."))
    return console.print(FOOTER)


def table(rows: Sequence[Row]) -> Table:
    """Return a table that fits a width of 110. Its first column has each field once, with kind and shape."""
    heads = (
        "field",
        "codec",
        "bytes",
        "ratio",
        "bits",
        "encode\nMB/s",
        "decode\nMB/s",
        "largest\nerror",
        "L2\nerror",
    )
    lines: list[tuple[str, ...]] = []
    best: set[tuple[int, int]] = set()
    for (side, exchange, name), group in groupby(rows, lambda r: (r["direction"], r["exchange"], r["field"])):
        own = list(group)
        labels = [f"{side}.{name}", "{kind} {shape}".format_map(own[0])]
        labels += [f"exchange {exchange}"] * (exchange > 1) + [""] * len(own)
        best.add((len(lines), 0))
        for label, row in zip(labels, own, strict=False):
            codec = (
                f"{'>' if row['of_the_run'] else ' '} {row['codec']}{' *' * (row['sent'] != row['codec'])}"
            )
            sizes = f"{row['bytes']:,}", f"{row['ratio']:.2f}", f"{row['bits']:.2f}"
            rates = (optional(row[f"{way}_mb_s"], ",.0f", "-") for way in ("encode", "decode"))
            lines.append((label, codec, *sizes, *rates, *(optional(row[key], ".1e", "-") for key in LOSSES)))
        lines.append(("",) * len(heads))
    return Table(heads, lines, 2, best=best)


# ---- measuring


def measured(message: Message, problem: Problem, fractions: Sequence[float]) -> Iterator[Row]:
    """Measure every tensor of a message with every codec that fits it, except scalars and empty tensors."""
    for f, x in values_of(message.value):
        if not isinstance(x, Tensor) or not f.kind.dims or not x.numel():
            continue
        context, own = message.context, codec(problem.messages.codecs[message.side].get(f.name, "dense"))
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
        if not problem.messages.unfit(c, side, field.name, field.kind):
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
