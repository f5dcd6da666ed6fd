"""Detection of the layer calls that reach a network's outputs, and of parameters that bypass these calls.

A contraction per layer is exact under two conditions. First, every path from the outputs to a trained
parameter passes through the output of one call of the parameter's own layer. A walk through the autograd
graph of each forward pass checks this. The walk starts at the outputs and jumps from the output of a recorded
call to its input, so it meets only parameters that are used elsewhere. Second, each row of a layer's output
belongs to one example. This is checked once per graph structure.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.func import functional_call

from fedsim.errors import UsageError
from fedsim.learning.curvature.layer_rules import GRADIENTS_ALONE, RULES, error

FEW = 3
"""Number of examples in the check that each row of a layer's output belongs to one example."""
SAME = 1e-2
"""Tolerance relative to the largest output; smaller differences of outputs count as rounding."""

_checked: WeakKeyDictionary[nn.Module, set[tuple[object, ...]]] = WeakKeyDictionary()
"""The graph structures of each network for which the first axes have been checked."""


@dataclass(frozen=True, eq=False)
class Call:
    """One call of one layer: its input, and the edges of its output and its input in the autograd graph.

    An edge is None if no gradient passes there. The output's edge is stored and not the output, because an
    in-place activation overwrites the output; the edge still refers to the layer's own output.
    version: number of in-place changes of the input before the call.
    """

    layer: nn.Module
    input: Tensor
    version: int
    output_edge: GradientEdge | None
    input_edge: GradientEdge | None


@contextmanager
def recording(layers: Mapping[nn.Module, str]) -> Iterator[list[Call]]:
    """Record the calls of the layers' own forward methods in this block; hooks of the user are not included.

    A call is not recorded if it has other parameter values (functional_call, a plain tensor as weight), or
    another dtype (autocast), or runs in training mode or inside a torch.func transform.
    """
    calls: list[Call] = []

    def record(m: nn.Module, own: Mapping[str, Tensor | None], *args: Any, **kwargs: Any) -> Any:
        y = type(m).forward(m, *args, **kwargs)
        x = args[0] if args else kwargs["input"]
        if m.training or not all(getattr(m, key, None) is own.get(key) for key in ("weight", "bias")):
            return y
        if not _plain(y, m.weight) or (x.is_floating_point() and not _plain(x, m.weight)):
            return y
        if y._is_view():  # an in-place operation on a view would remove its edge from the graph
            y = y.clone()
        calls.append(Call(m, x.detach(), x._version, _edge(y), _edge(x)))
        return y

    for m in layers:
        vars(m)["forward"] = partial(record, m, dict(m._parameters))
    try:
        yield calls
    finally:
        for m in layers:
            del vars(m)["forward"]


def _plain(x: Tensor, weight: Any) -> bool:
    inside = torch._C._functorch.is_functorch_wrapped_tensor(x)
    return type(x) is Tensor and x.dtype == weight.dtype and not x.is_nested and not inside


def _edge(x: Tensor) -> GradientEdge | None:
    return get_gradient_edge(x) if x.requires_grad else None


def eagerly() -> AbstractContextManager[Any]:
    """Run modules compiled by torch.compile eagerly in this block, so that their layers are called."""
    # Nothing is compiled before torch._dynamo is imported, and its import takes a second.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def checked_forward(
    module: nn.Module, x: Tensor, layers: Mapping[nn.Module, str], places: Tensor | None = None
) -> tuple[Tensor, list[Call]]:
    """Return the outputs for the examples x (n, *shape) and the layer calls that reach them, one per layer.

    Raise a UsageError if the contraction of these calls would not be exact. places: for sequences, the mask
    (n, T) of the positions that count.
    """
    logits, calls, structure = _forward(module, x, layers, places)
    if len(x) > 1 and structure not in _checked.setdefault(module, set()):
        some, called, _ = _forward(module, x[:FEW], layers, None if places is None else places[:FEW])
        with torch.no_grad():
            _check_outputs(some, logits[:FEW])
        if _check_rows(some, called, layers):
            _checked[module].add(structure)
    return logits, calls


def _forward(
    module: nn.Module, x: Tensor, layers: Mapping[nn.Module, str], places: Tensor | None
) -> tuple[Tensor, list[Call], tuple[object, ...]]:
    """Run checked_forward without its one-time checks; also return the structure of the graph."""
    with torch.enable_grad(), eagerly(), recording(layers) as recorded:
        logits = module(x)
    _check_shape(logits, len(x), places)
    calls, leaves, nodes = _reached(logits, recorded)
    _check_parameters(module, layers, recorded, leaves, nodes)
    _check_calls(calls, len(x), layers)
    return logits, calls, (*((layers[c.layer], *c.input.shape[1:]) for c in calls), len(nodes))


def _reached(logits: Tensor, recorded: list[Call]) -> tuple[list[Call], list[Tensor], set[Node]]:
    """Return the recorded calls that reach the outputs, in order, and the leaves and nodes on the walk.
    The walk starts at the outputs and jumps from the output of a recorded call to its input."""
    outputs = {(c.output_edge.node, c.output_edge.output_nr): c for c in recorded if c.output_edge}
    reaching: set[Call] = set()
    leaves: list[Tensor] = []
    nodes: set[Node] = set()
    edge = _edge(logits)
    pending: list[tuple[Node | None, int]] = [(edge.node, edge.output_nr)] if edge else []
    while pending:
        node, number = pending.pop()
        if node is None:
            continue
        call = outputs.get((node, number))
        if call is not None:
            if call not in reaching and call.input_edge is not None:
                pending.append((call.input_edge.node, call.input_edge.output_nr))
            reaching.add(call)
        elif node not in nodes:
            nodes.add(node)
            pending.extend(node.next_functions)
            if node.name() == "torch::autograd::AccumulateGrad":
                leaves.append(node.variable)  # type: ignore[attr-defined]
    return [c for c in recorded if c in reaching], leaves, nodes


def _check_shape(logits: Any, n: int, places: Tensor | None) -> None:
    shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if places is not None and (len(shape) != 3 or shape[:2] != places.shape):
        raise UsageError(
            f"diagonal_ggn: the model must return logits {(*places.shape, 'classes')} for {n} sequences, "
            f"got shape {shape}"
        )
    if places is None and (len(shape) != 2 or shape[0] != n):
        raise UsageError(
            f"diagonal_ggn: the model must return logits ({n}, classes) for {n} examples, got shape {shape}"
        )


def _check_parameters(
    module: nn.Module,
    layers: Mapping[nn.Module, str],
    recorded: list[Call],
    leaves: list[Tensor],
    nodes: set[Node],
) -> None:
    """Raise a UsageError if a parameter reaches, or may reach, the outputs outside a recorded call."""
    used = {id(leaf) for leaf in leaves}
    called = {call.layer for call in recorded}
    for m, name in layers.items():
        for key, parameter in m._parameters.items():
            if parameter is None or not parameter.requires_grad or id(parameter) not in used:
                continue
            also = "also " if m in called else ""
            why = (
                f"its {key} {also}reaches the outputs outside a plain call of the layer (a tied or "
                "functional use, its norm, a hook), and terms of the curvature would be lost"
            )
            raise error(name, m, why)
    kinds: set[type] = {type(node) for node in nodes}
    hiding = {kind.__name__ for kind in kinds if issubclass(kind, BackwardCFunction)}
    if "CheckpointFunctionBackward" in hiding:
        raise UsageError(
            "diagonal_ggn: torch.utils.checkpoint hides the model's parameters from the graph; call it with "
            "use_reentrant=False"
        )
    for call in recorded if hiding else ():
        if call.output_edge is None:
            why = (
                f"it is called without gradients, or {sorted(hiding)[0]} hides its parameters from the graph"
            )
            raise error(layers[call.layer], call.layer, why)


def _check_calls(calls: list[Call], n: int, layers: Mapping[nn.Module, str]) -> None:
    """Raise a UsageError if a call that reaches the outputs for n examples does not fit the contraction."""
    layers_of = [call.layer for call in calls]
    for call in calls:
        m, name, x = call.layer, layers[call.layer], call.input
        if layers_of.count(m) > 1:
            # The contraction would lose the cross terms between two calls.
            raise error(name, m, "it is called twice in one forward pass")
        if x.dim() < RULES[type(m)].axes(m) or len(x) != n:
            raise error(name, m, "the first axis of its input is not the examples")
        if x._version != call.version:
            raise error(name, m, "its input was changed in place after its use")


def _check_outputs(some: Tensor, same: Tensor) -> None:
    """Raise a UsageError if outputs in a small batch, `some`, differ from `same`, those in a larger batch."""
    apart = (some - same).abs().nan_to_num(0.0)
    scale = same.abs().nan_to_num(0.0, 0.0, 0.0).amax()
    if bool((apart > SAME * scale).any()):
        raise UsageError(
            "the model's outputs for an example depend on the rest of the batch, or change from one forward "
            "pass to the next (batch statistics, dropout that is always active), and an example has no "
            f"curvature of its own; {GRADIENTS_ALONE}"
        )


def check_functional(module: nn.Module, values: Mapping[str, Tensor], x: Tensor) -> None:
    """Raise a UsageError unless torch.func can differentiate a network in the parameters `values` at x.

    It cannot if the forward pass refers to a trained parameter where functional_call does not replace it, or
    if the outputs for an example depend on other examples.
    """
    with torch.enable_grad(), eagerly():
        outputs = functional_call(module, dict(values), (x[: 2 * FEW],))
        leaves = {id(leaf) for leaf in _reached(outputs, [])[1]}
        for name, parameter in module.named_parameters():
            if name in values and id(parameter) in leaves:
                raise UsageError(
                    f"the model uses {name} from a list or a closure, and a part of its curvature would be "
                    f"lost; use it as an attribute of its module, or {GRADIENTS_ALONE}"
                )
        _check_outputs(functional_call(module, dict(values), (x[:FEW],)).detach(), outputs[:FEW].detach())


@contextmanager
def torch_func_errors(what: str) -> Iterator[None]:
    """Turn a RuntimeError of torch.func in this block into a UsageError."""
    try:
        yield
    except RuntimeError as e:
        reason = (str(e).splitlines() or [""])[0][:200]
        raise UsageError(
            f"{what}: torch.func cannot differentiate this model by example ({reason}); {GRADIENTS_ALONE}"
        ) from e


def _check_rows(logits: Tensor, calls: list[Call], layers: Mapping[nn.Module, str]) -> bool:
    """Return whether every example reaches exactly one row of every call's output.

    An example may reach no row, because gradients can be zero. Raise a UsageError if an example reaches two
    rows of an output, or if two examples reach the same row.
    """
    edges = [call.output_edge for call in calls if call.output_edge is not None]
    if not edges:
        return True
    weights = torch.linspace(1, 2, logits[0].numel(), dtype=logits.dtype, device=logits.device)
    taken = [torch.zeros(len(logits), dtype=torch.bool, device=logits.device) for _ in calls]
    seen = True
    for i, one in enumerate(logits):
        with torch.enable_grad():
            value = (one.reshape(-1) * weights).sum()
        slopes = torch.autograd.grad(value, edges, retain_graph=i < len(logits) - 1, allow_unused=True)
        for call, rows, d in zip(calls, taken, slopes, strict=True):
            reached = torch.zeros_like(rows) if d is None else (d.flatten(1).abs() > 0).any(1)
            if int(reached.sum()) > 1 or bool((reached & rows).any()):
                why = "the first axis of its input is not the examples: a row has part in several of them"
                raise error(layers[call.layer], call.layer, why)
            rows |= reached
            seen = seen and bool(reached.any())
    return seen
