"""fedsim describe: facts about an algorithm or a model, read from its code."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from rich.text import Text

from fedsim.errors import UsageError
from fedsim.event_rules import Rule
from fedsim.event_trigger import EventTriggered
from fedsim.experiment import Experiment, build_algorithm, resolved_hyperparameters
from fedsim.learning.frozen import frozen_tensors
from fedsim.problem import Problem
from fedsim.wire.schema import Field, optional_group, schema
from launch.table import Table
from launch.terminal import console, print_json
from protocols import REGISTRY, AnyAlgorithm, find

MESSAGES = ("message", "field", "kind", "shape", "type")
"""The columns of the table of messages."""


def cost_in_p(message: type) -> str:
    """Return the cost of one message as text: '2P', 'P + P(P+1)/2', '0' (scalars are left out)."""
    terms: dict[str, int] = {}
    for field in schema(message):
        if field.kind.dims:
            product = " ".join(field.kind.dims)
            terms[product] = terms.get(product, 0) + 1
    return " + ".join((f"{n}" if n > 1 else "") + dims for dims, n in terms.items()) or "0"


def wire_cost(algorithm: AnyAlgorithm) -> str:
    """Return the cost of a round per client in both directions, over all exchanges."""
    return f"{all_exchanges(algorithm, 'down')} down, {all_exchanges(algorithm, 'up')} up"


def all_exchanges(algorithm: AnyAlgorithm, side: str) -> str:
    """Return a round's cost per client in one direction ("down" or "up")."""
    if algorithm.centralised:
        return "0"
    return " + ".join(cost_in_p(getattr(e, side)) for e in algorithm.exchanges)


def cost_once(algorithm: AnyAlgorithm) -> str:
    """Return a client's one-time cost: set-up and optional parts of the first messages; '' if none."""

    def total(side: str) -> str:
        kinds = [getattr(e, side) for e in algorithm.setup]
        parts = [optional_group(getattr(e, side)) for e in algorithm.exchanges]
        costs = [cost_in_p(kind) for kind in [*kinds, *(p.message for p in parts if p)]]
        return " + ".join(c for c in costs if c != "0") or "0"

    down, up = total("down"), total("up")
    return "" if down == up == "0" else f"{down} down, {up} up"


UNSENT = {
    "dual": "its dual stays in the server's sum",
    "zero": "its increment counts as 0",
    "last": "its last upload counts again",
}


def unsent(algorithm: AnyAlgorithm) -> str:
    """Return what the server uses for a client that sends nothing, or why there is no such client."""
    if algorithm.centralised:
        return "there are no clients"
    try:
        return UNSENT[EventTriggered(algorithm, Rule("norm", 0.0), None).unsent()]
    except UsageError as e:
        return f"refused: {str(e).removeprefix('+event: ')}"


def _text(kind: type[AnyAlgorithm]) -> str:
    """Return the docstring of an algorithm: of its module or, in a user's file, of the class; for a variant,
    also the algorithm from which it is derived."""
    known = next((parent for parent in kind.__mro__ if parent in REGISTRY), None)
    texts = [inspect.getmodule(kind).__doc__]
    if known is not kind and not (kind.__doc__ or "").startswith(f"{kind.__name__}("):  # not the dataclass's
        texts.append(inspect.getdoc(kind))
    if known not in (None, kind):
        texts.append(f"A variant of {known.name} ({known.paper}).")
    return "\n\n".join(inspect.cleandoc(text).strip() for text in texts if text)


def to_json(name: str) -> dict[str, Any]:
    """Return an algorithm's docstring, messages and hyperparameters, for --json."""
    kind = find(name)
    algorithm = kind()
    rows = zip(hyperparameter_rows(algorithm), resolved_hyperparameters(algorithm).items(), strict=True)
    return {
        "name": kind.name,
        "text": _text(kind),
        "url": kind.url,
        "messages": [dict(zip(MESSAGES, row, strict=True)) for row in message_rows(algorithm)],
        "down": all_exchanges(algorithm, "down"),
        "up": all_exchanges(algorithm, "up"),
        "once": cost_once(algorithm),
        "model": kind.default_model,
        "event": unsent(algorithm),
        "hyperparameters": [
            {"name": key, "default": value, "values": values, "meaning": meaning}
            for (_, _, values, meaning), (key, value) in rows
        ],
    }


def describe(name: str, as_json: bool = False) -> None:
    """Print an algorithm's docstring, messages and hyperparameters."""
    if as_json:
        return print_json(to_json(name))
    kind = find(name)
    algorithm = kind()
    out = console()
    out.print(_text(kind), soft_wrap=True)
    out.print(kind.url, soft_wrap=True)
    out.print()
    Table(MESSAGES, list(message_rows(algorithm)), len(MESSAGES)).print(out)
    once = f", and once {cost_once(algorithm)}" if cost_once(algorithm) else ""
    cost = (wire_cost(algorithm), "bold")
    out.print(Text.assemble("\ncost per client and round: ", cost, f"{once}; model: {kind.default_model}"))
    out.print(f"a client that sends nothing (+event): {unsent(algorithm)}", soft_wrap=True)
    out.print()
    heads = ("hyperparameter", "default", "values", "meaning")
    Table(heads, list(hyperparameter_rows(algorithm)), len(heads)).print(out)
    return None


def message_rows(algorithm: AnyAlgorithm) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield message, field, kind, shape and type of every field on the wire; for a group, of each member."""
    for label, message, fields_ in _messages(algorithm):
        for field in fields_:
            shape = f"({', '.join(field.kind.dims)})" if field.kind.dims else "scalar"
            if not field.members:
                yield label, field.name, field.kind.name, shape, " | ".join(field.dtypes)
            for member in field.members:  # a group of diagnostics is sent as one field
                yield label, f"{field.name}.{member.name}", "info", "scalar", " | ".join(field.dtypes)
        if not fields_:
            yield label, "", f"({message.__name__} has no fields)", "", ""


def hyperparameter_rows(algorithm: AnyAlgorithm) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, default, allowed values and meaning of every hyperparameter."""
    hints = _hints(type(algorithm))
    for key, value in resolved_hyperparameters(algorithm).items():
        default = str(value).lower() if isinstance(value, bool) else f"{value}"
        yield key.rpartition(".")[2], default, _words(hints[key]), description(hints[key])


def description(hint: Any) -> str:
    """Return the meaning in a field's annotation; '' if it has none."""
    if get_origin(hint) is not Annotated:
        return ""
    inner, *metas = get_args(hint)
    return next((str(m.description) for m in metas if getattr(m, "description", None)), description(inner))


def _messages(algorithm: AnyAlgorithm) -> Iterator[tuple[str, type, tuple[Field, ...]]]:
    """Yield label, type and fields of every message on the wire; optional parts are separate."""
    for setup, exchanges in ((True, algorithm.setup), (False, algorithm.exchanges)):
        for n, exchange in enumerate(exchanges, 1):
            of = f" {n}" if len(exchanges) > 1 else ""
            for side in ("down", "up"):
                message = getattr(exchange, side)
                label = f"set-up {side}{of}" if setup else f"{side}{of}"
                yield label, message, schema(message)
                part = optional_group(message)
                if part is not None:
                    yield f"{label}, once", part.message, schema(part.message)


def _hints(kind: Any, prefix: str = "") -> dict[str, Any]:
    """Return the annotation of each hyperparameter, by dotted name."""
    hints = get_type_hints(kind, include_extras=True)
    out: dict[str, Any] = {}
    for f in fields(kind):
        hint = hints[f.name]
        if is_dataclass(hint) and isinstance(hint, type):
            out |= _hints(hint, f"{prefix}{f.name}.")
        else:
            out[prefix + f.name] = hint
    return out


def _words(hint: Any) -> str:
    if get_origin(hint) is Annotated:
        base, *metas = get_args(hint)
        if titled := [m.title for m in metas if getattr(m, "title", None)]:
            return str(titled[0])
        limits = [
            f"{sign} {limit:g}"
            for meta in metas
            for sign, limit in ((">", meta.gt), (">=", meta.ge), ("<", meta.lt), ("<=", meta.le))
            if limit is not None
        ]
        return " ".join([_words(base), *limits])
    if get_origin(hint) is Literal:
        return " | ".join(str(v) for v in get_args(hint))
    if get_args(hint):
        return " | ".join(_words(a) for a in get_args(hint))
    return {float: "number", int: "whole number", bool: "true | false"}.get(
        hint, getattr(hint, "__name__", str(hint))
    )


def parameters_of(experiment: Experiment, data_dir: Path | None) -> dict[str, Any]:
    """Return facts about a model; `parameters` has a row per parameter and frozen buffer."""
    problem = Problem.outline(experiment, build_algorithm(find(experiment.algo), {}), data_dir)
    module = problem.net.module
    rows = [
        {"name": name, "shape": list(p.shape), "count": p.numel(), "trained": p.requires_grad}
        for name, p in module.named_parameters()
    ]
    known = {row["name"] for row in rows}
    rows += [
        {"name": name, "shape": list(t.shape), "count": t.numel(), "trained": False}
        for name, t in frozen_tensors(module, problem.net.kept)
        if name not in known
    ]
    return {
        "model": problem.experiment.model,
        "dataset": experiment.dataset,
        "params": problem.net.layout.size,
        "frozen": sum(row["count"] for row in rows if not row["trained"]),
        "frozen_sha256": problem.frozen_digest,
        "running_statistics": len(problem.statistics),
        "parameters": rows,
    }


def _treatment(row: dict[str, Any]) -> str:
    return "trained" if row["trained"] else "frozen"


def describe_model(experiment: Experiment, data_dir: Path | None, as_json: bool) -> None:
    document = parameters_of(experiment, data_dir)
    if as_json:
        return print_json(document)
    rows = [
        (row["name"], " x ".join(map(str, row["shape"])) or "scalar", f"{row['count']:,}", _treatment(row))
        for row in document["parameters"]
    ]
    out = console()
    Table(("parameter", "shape", "count", ""), rows, 2).print(out)
    params, frozen = document["params"], document["frozen"]
    out.print(f"\nP = {params:,}: a vector of P has {4 * params:,} bytes as float32")
    if frozen:
        out.print(f"frozen: {frozen:,}, which never cross the wire; sha256 {document['frozen_sha256'][:16]}")
    if running := document["running_statistics"]:
        where = "stay with their client" if experiment.statistics == "local" else "travel beside the vector"
        out.print(f"running statistics: {running:,}, which {where}")
    return None
