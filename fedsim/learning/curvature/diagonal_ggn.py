"""The diagonal of the generalised Gauss-Newton matrix (GGN), in about one backward pass per column.

    diag(GGN) = sum_n diag(J_n' H_n J_n) = sum_n sum_c (J_n' s_{n,c})^2,    J_n = dz_n/dw
    H_n = diag(p_n) - p_n p_n' = S_n S_n',    S_n = diag(sqrt p_n) - p_n sqrt(p_n)',
    p_n = softmax(z_n),    s_{n,c} = column c of S_n

H_n is the Hessian of the cross-entropy in the logits z_n; it does not depend on the label. Each
column s_{n,c} of S_n is one vector-Jacobian product per example. The backward pass stops at the
OUTPUTS of the layers that own parameters; the square is contracted layer by layer with the layer's
recorded input, so per-example gradients never exist for dense layers, and only per chunk for the
others. Of a sequence every place t that counts has a softmax of its own, H_n is block diagonal, and the
columns are those of all places. What lies between the layers (activations, pooling, sums, dropout in
eval mode) is ordinary autograd and needs no rule.

Source: H_k of FedLap-Cov, Eq. 21 of Connecting Federated ADMM to Bayes (arXiv:2501.17325); the
released code has it from laplace-torch, on the sum scale (BackPACK's DiagGGNExact).
Differs: not in value for columns="exact". "sign" and "top2_sign" are unbiased estimates, for
convolutions and many classes, where exact curvature costs several epochs of training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.modules.batchnorm import _BatchNorm

from fedsim.errors import UsageError, unknown
from fedsim.learning.curvature.columns import columns_of, columns_of_places

COLUMNS = ("exact", "sign", "top2_sign")


def best_chunk(module: nn.Module) -> int:
    """The fastest number of examples per chunk: 32 with convolutions (memory), else 512.

    Measured in docs/references/curvature-and-solvers.md#cost-of-the-diagonal-ggn.
    """
    return 32 if any(isinstance(m, nn.Conv2d) for m in module.modules()) else 512


def diagonal_ggn(
    module: nn.Module,
    chunks: Iterable[Tensor],
    *,
    columns: str = "exact",
    generator: torch.Generator | None = None,
    counted: Iterable[Tensor] | None = None,
) -> Tensor:
    """diag(sum_n J_n' H_n J_n) of the SUMMED cross-entropy, over the trained module.parameters().

    Args:
        module: maps (m, *shape) to logits (m, C), examples independent of each other in eval mode; or
            to logits (m, T, C) of the places of a sequence.
            It runs in eval mode; every submodule's own mode is restored, also after an exception.
            Parameters and their .grad are not touched.
        chunks: batches (m, *shape) in the parameters' dtype, on their device. The exact result does
            not depend on how the examples are cut into chunks; `best_chunk` gives the fastest size.
        columns: "exact", C backward passes per chunk; "sign", a random-sign sketch, one pass;
            "top2_sign", the two largest columns exactly and a sketch of the rest, three passes. The
            sketches are unbiased. Of sequences "exact" takes T C passes, and "top2_sign" sketches over
            the places.
        generator: for the two sketches, and then required.
        counted: of sequences, per chunk which places have a target, bool (m, T).

    Returns:
        (P,) in the parameters' dtype (where it is accumulated) and on their device; >= 0. The unit
        is nats per squared unit of the parameter.

    Raises:
        UsageError: for a module whose curvature would be wrong or missing: parameters outside
            Linear, Conv2d, GroupNorm, BatchNorm2d, LayerNorm, Embedding; shared parameters; a module
            called twice, or never, in one forward pass; padding other than by zeros and numbers,
            grouped convolutions; batch statistics in eval mode; examples mixed along the first
            axis; a layer's input changed in place after its use.
    """
    if columns not in COLUMNS:
        raise unknown("columns", columns, COLUMNS)
    if columns != "exact" and generator is None:
        raise UsageError(f"diagonal_ggn: columns={columns!r} is random; pass a generator")
    layers = _check_layers(module)
    total, slots = _accumulators(module)
    with _eval_mode(module), _recording(layers) as records:
        for x, places in zip(chunks, repeat(None) if counted is None else counted, strict=False):
            if len(x) == 0:
                continue
            records.clear()
            with torch.enable_grad():
                logits = module(x)
            with torch.no_grad():
                _check_forward(logits, len(x), layers, records, places)
                if places is None:
                    _add_chunk(logits, columns_of(logits, columns, generator), records, slots)
                else:
                    _add_chunk(logits, columns_of_places(logits, places, columns, generator), records, slots)
    return total


def contracts(module: nn.Module) -> bool:
    """Whether every layer of the module has a rule here."""
    try:
        _check_layers(module)
    except UsageError:
        return False
    return True


def squared_pullback(module: nn.Module, inputs: Tensor, cotangent: Callable[[Tensor], Tensor]) -> Tensor:
    """sum_n (J_n' r_n)^2 with the rows r_n of `cotangent(outputs)`, outputs (n, C) of the inputs (n, *shape):
    (P,), by one backward pass in eval mode.

    Raises: UsageError as diagonal_ggn.
    """
    layers = _check_layers(module)
    total, slots = _accumulators(module)
    with _eval_mode(module), _recording(layers) as records:
        with torch.enable_grad():
            outputs = module(inputs)
        with torch.no_grad():
            _check_forward(outputs, len(inputs), layers, records)
            _add_chunk(outputs, [cotangent(outputs.detach())], records, slots)
    return total


@dataclass(frozen=True, eq=False)
class _Record:
    """One call of one layer: its input, and the edge of the graph where its output appears.

    An edge, not the output tensor: after an in-place activation the tensor stands for the activated
    value, the edge still for the layer's own output.
    """

    input: Tensor
    version: int
    edge: GradientEdge


@dataclass(frozen=True, eq=False)
class _Rule:
    """How one layer type turns output gradients d (n, ...) into summed squared gradients.

    `prepare(module, input)` gives what does not depend on the column;
    `squares(prepared, d, weight)` gives the part of the weight, in any shape with its number of
    elements in its order, and the part of the bias, both summed over n.
    """

    prepare: Callable[[Any, Tensor], Tensor]
    squares: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _linear_squares(a: Tensor, d: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """a (n, T, I), d (n, ..., O): per example g = sum_t d_t a_t', then sum_n g^2."""
    d = d.reshape(len(d), -1, weight.shape[0])
    g = torch.bmm(d.transpose(1, 2), a)
    return g.square_().sum(0), d.sum(1).square_().sum(0)


def _conv_squares(u: Tensor, d: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """u (n, I*kh*kw, L) from unfold, d (n, O, h, w): per example g = d u', then sum_n g^2."""
    d = d.flatten(2)
    g = torch.bmm(d, u.transpose(1, 2))
    return g.square_().sum(0), d.sum(2).square_().sum(0)


def _channel_squares(xhat: Tensor, d: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """xhat, d (n, C, ...): one scale and one shift per channel, summed over positions."""
    n, channels = d.shape[:2]
    gamma = (d * xhat).reshape(n, channels, -1).sum(2)
    return gamma.square_().sum(0), d.reshape(n, channels, -1).sum(2).square_().sum(0)


def _layer_norm_squares(xhat: Tensor, d: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """xhat, d (n, ..., *weight.shape): summed over the positions that share the parameters."""
    gamma = (d * xhat).reshape(len(d), -1, weight.numel()).sum(1)
    return gamma.square_().sum(0), d.reshape(len(d), -1, weight.numel()).sum(1).square_().sum(0)


def _embedding_squares(ids: Tensor, d: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """ids (n, ...), d (n, ..., D): per example the sum of d over the places of each id, then sum_n of its
    square. An id of len(weight) is padding, whose row is not trained."""
    rows, n = len(weight) + 1, len(ids)
    keys = (torch.arange(n, device=ids.device)[:, None] * rows + ids.reshape(n, -1)).reshape(-1)
    known, at = torch.unique(keys, return_inverse=True)
    sums = d.new_zeros(len(known), weight.shape[1]).index_add_(0, at, d.reshape(-1, weight.shape[1]))
    squares = d.new_zeros(rows, weight.shape[1]).index_add_(0, known % rows, sums.square_())
    return squares[:-1], d.new_zeros(0)


def _ids(m: nn.Embedding, x: Tensor) -> Tensor:
    return x if m.padding_idx is None else x.masked_fill(x == m.padding_idx, m.num_embeddings)


def _unfold(m: nn.Conv2d, x: Tensor) -> Tensor:
    # Module attributes are typed as tuples of any length.
    return F.unfold(x, m.kernel_size, m.dilation, cast("tuple[int, int]", m.padding), m.stride)


def _batch_norm_input(m: nn.BatchNorm2d, x: Tensor) -> Tensor:
    return F.batch_norm(x, m.running_mean, m.running_var, training=False, eps=m.eps)


_RULES: Mapping[type[nn.Module], _Rule] = {
    nn.Linear: _Rule(lambda m, x: x.reshape(len(x), -1, m.in_features), _linear_squares),
    nn.Conv2d: _Rule(_unfold, _conv_squares),
    nn.GroupNorm: _Rule(lambda m, x: F.group_norm(x, m.num_groups, eps=m.eps), _channel_squares),
    nn.BatchNorm2d: _Rule(_batch_norm_input, _channel_squares),
    nn.LayerNorm: _Rule(lambda m, x: F.layer_norm(x, m.normalized_shape, eps=m.eps), _layer_norm_squares),
    nn.Embedding: _Rule(_ids, _embedding_squares),
}


def _error(name: str, module: nn.Module, why: str) -> UsageError:
    where = f"layer {name!r}" if name else "the model itself"
    return UsageError(f"diagonal_ggn cannot handle {where} ({type(module).__name__}): {why}")


def _check_layers(module: nn.Module) -> dict[nn.Module, str]:
    """The modules that own parameters, with their names; UsageError for what has no exact rule."""
    layers: dict[nn.Module, str] = {}
    owners: dict[int, str] = {}
    for name, m in module.named_modules():
        if isinstance(m, _BatchNorm) and m.running_mean is None:
            raise _error(name, m, "without running statistics it mixes the examples of a batch")
        own = dict(m.named_parameters(recurse=False, remove_duplicate=False))
        if not any(p.requires_grad for p in own.values()):
            continue  # frozen layers only have to pass gradients on
        # The exact type: a subclass may compute something else from the same parameters.
        if type(m) not in _RULES or not own.keys() <= {"weight", "bias"}:
            known = ", ".join(t.__name__ for t in _RULES)
            raise _error(name, m, f"parameters {sorted(own)} are not those of one of {known}")
        if isinstance(m, nn.Conv2d):
            if m.padding_mode != "zeros" or isinstance(m.padding, str):
                raise _error(name, m, "only padding by a number of zeros is supported")
            if m.groups != 1:
                raise _error(name, m, "grouped convolutions are not supported")
        if isinstance(m, nn.Embedding) and (m.max_norm is not None or m.scale_grad_by_freq or m.sparse):
            raise _error(name, m, "max_norm, scale_grad_by_freq and sparse gradients are not supported")
        for key, parameter in own.items():
            if id(parameter) in owners:
                raise _error(name, m, f"its {key} is shared with {owners[id(parameter)]!r}")
            owners[id(parameter)] = f"{name}.{key}".lstrip(".")
        layers[m] = name
    if not layers:
        raise _error("", module, "it has no trained parameters")
    return layers


def _check_forward(
    logits: Tensor,
    n: int,
    layers: Mapping[nn.Module, str],
    records: Mapping[nn.Module, _Record],
    places: Tensor | None = None,
) -> None:
    """UsageError where the recorded forward pass of n examples does not fit the contraction."""
    if places is not None and (logits.dim() != 3 or logits.shape[:2] != places.shape):
        raise UsageError(
            f"diagonal_ggn: the model must return logits {(*places.shape, 'classes')} for {n} sequences, "
            f"got shape {tuple(logits.shape)}"
        )
    if places is None and (logits.dim() != 2 or len(logits) != n):
        raise UsageError(
            f"diagonal_ggn: the model must return logits ({n}, classes) for {n} examples, "
            f"got shape {tuple(logits.shape)}"
        )
    for m, name in layers.items():
        record = records.get(m)
        if record is None:
            raise _error(name, m, "it was not called; its parameters may be used elsewhere")
        if record.input.dim() < 2 or len(record.input) != n:
            raise _error(name, m, "the first axis of its input is not the examples")
        if record.input._version != record.version:
            raise _error(name, m, "its input was changed in place after its use")


@contextmanager
def _eval_mode(module: nn.Module) -> Iterator[None]:
    modes = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for m, training in modes:
            m.training = training


@contextmanager
def _recording(layers: Mapping[nn.Module, str]) -> Iterator[dict[nn.Module, _Record]]:
    """Forward hooks on `layers` that fill the yielded table; cleared by the caller per forward."""
    records: dict[nn.Module, _Record] = {}

    def hook(m: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
        if m in records:
            # The cross terms between two uses would be lost.
            raise _error(layers[m], m, "it is called twice in one forward pass")
        x: Tensor = args[0] if args else kwargs["input"]
        records[m] = _Record(x.detach(), x._version, get_gradient_edge(out))

    handles = [m.register_forward_hook(hook, with_kwargs=True) for m in layers]
    try:
        yield records
    finally:
        for handle in handles:
            handle.remove()


def _accumulators(module: nn.Module) -> tuple[Tensor, dict[int, Tensor]]:
    """A zero vector (P,) and, by id of the trained parameter, its slices as one-dimensional views."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    total = torch.zeros(
        sum(p.numel() for p in parameters), dtype=parameters[0].dtype, device=parameters[0].device
    )
    parts = torch.split(total, [p.numel() for p in parameters])
    return total, {id(p): part for p, part in zip(parameters, parts, strict=True)}


def _add_chunk(
    logits: Tensor,
    columns: Sequence[Tensor],
    records: Mapping[nn.Module, _Record],
    slots: Mapping[int, Tensor],
) -> None:
    """Add sum_n sum_columns (J_n' column_n)^2 of one forward pass to the parameters' slots."""
    edges = [record.edge for record in records.values()]
    # Dense layers on vectors need no gradient per example: (d_o a_i)^2 = d_o^2 a_i^2, so only d^2
    # is summed over the columns, and one product with a^2 follows.
    dense: dict[nn.Module, Tensor] = {}
    prepared: dict[nn.Module, Tensor] = {}
    for m, record in records.items():
        prepared[m] = _RULES[type(m)].prepare(m, record.input)
        if isinstance(m, nn.Linear) and prepared[m].shape[1] == 1:
            prepared[m] = prepared[m].squeeze(1)
            dense[m] = prepared[m].new_zeros(len(prepared[m]), m.out_features)
    for i, column in enumerate(columns):
        # The column enters as a factor and not as grad_outputs: the values are the same, and torch's
        # first call with grad_outputs imports sympy (0.4 CPU-seconds and 8 MB in every worker).
        # A layer that does not reach the logits has no gradient and no curvature: None.
        with torch.enable_grad():
            seeded = (logits * column).sum()
        gradients: tuple[Tensor | None, ...] = torch.autograd.grad(
            seeded, edges, retain_graph=i < len(columns) - 1, allow_unused=True
        )
        for m, d in zip(records, gradients, strict=True):
            if d is None:
                continue
            if m in dense:
                d = d.reshape(dense[m].shape)
                dense[m].addcmul_(d, d)
            else:
                _add(m, *_RULES[type(m)].squares(prepared[m], d, cast(Tensor, m.weight)), slots)
    for m, q in dense.items():
        _add(m, q.T @ (prepared[m] * prepared[m]), q.sum(0), slots)


def _add(m: nn.Module, weight: Tensor, bias: Tensor, slots: Mapping[int, Tensor]) -> None:
    """Add the squares to the slots of the parameters that the layer has."""
    own = dict(m.named_parameters(recurse=False))
    for key, part in (("weight", weight), ("bias", bias)):
        if key in own and own[key].requires_grad:
            slots[id(own[key])].add_(part.reshape(-1))
