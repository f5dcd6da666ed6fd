"""The diagonal of the generalised Gauss-Newton matrix (GGN), in about one backward pass per column.

    diag(GGN) = sum_n diag(J_n' H_n J_n) = sum_n sum_c (J_n' s_{n,c})^2,    J_n = dz_n/dw
    H_n = diag(p_n) - p_n p_n' = S_n S_n',    S_n = diag(sqrt p_n) - p_n sqrt(p_n)',
    p_n = softmax(z_n),    s_{n,c} = column c of S_n

H_n is the Hessian of the cross-entropy in the logits z_n; it does not depend on the label. Each column
s_{n,c} of S_n costs one vector-Jacobian product per example. A sketch has columns S_n r with random signs r;
sum_n (J_n' S_n r)^2 is the diagonal in expectation. The backward pass stops at the OUTPUTS of the layers that
own parameters. Each layer's squares are then computed from its output's gradient and its input. Per-example
gradients are therefore never formed for dense layers, and only for one chunk at a time for other layers. In a
sequence, every position with a target has its own softmax, so H_n is block diagonal and every position has C
columns. The operations between the layers (activations, pooling, sums, dropout in eval mode) are ordinary
autograd and need no rule.

Source: H_k of FedLap-Cov, Eq. 21 of Connecting Federated ADMM to Bayes (arXiv:2501.17325); the released code
computes it with laplace-torch, for the summed loss (BackPACK's DiagGGNExact).
Differs: columns="exact" has the same value. "sign" and "top2_sign" are unbiased estimates, meant for
convolutions and many classes, where exact curvature costs several epochs of training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from fedsim.errors import UsageError, unknown
from fedsim.learning.curvature.layer_calls import Call, checked_forward, eagerly
from fedsim.learning.curvature.layer_rules import RULES, check_layers

COLUMNS = ("exact", "sign", "top2_sign")

SHARE = 8
"""A chunk may take 1 / SHARE of a GPU's memory."""
_of_gpus: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def best_chunk(module: nn.Module, example: Tensor) -> int:
    """Return the fastest number of examples per chunk on the device of `example` (1, *shape).

    On a CPU it is 32 for a network with convolutions (to save memory), else 512; see the measurements in
    docs/references/curvature-and-solvers.md#cost-of-the-diagonal-ggn. On a GPU it is the largest power of two
    from 32 to 1,024 that fits into 1 / SHARE of the memory, because the kernels of a small chunk take as long
    as those of a large one. The number depends on the network's shapes and the type of GPU, as the bits of
    results do anyway, but not on the free memory.
    """
    if example.device.type == "cpu":
        return 32 if any(isinstance(m, nn.Conv2d) for m in module.modules()) else 512
    if module not in _of_gpus:
        memory = torch.cuda.get_device_properties(example.device).total_memory // SHARE
        fitting = memory // max(1, example_bytes(module, example))
        _of_gpus[module] = 1 << min(max(fitting, 32), 1024).bit_length() - 1
    return _of_gpus[module]


def example_bytes(module: nn.Module, example: Tensor) -> int:
    """Return the bytes that diagonal_ggn needs for one example (1, *shape).
    Each layer needs its prepared input, its output, the output's gradient, and twice its parameters' size."""
    numbers = 0

    def count(m: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        nonlocal numbers
        x = args[0] if args else kwargs["input"]
        own = sum(p.numel() for p in m.parameters(recurse=False))
        numbers += RULES[type(m)].prepare(m, x).numel() + 2 * output.numel() + 2 * own

    layers = [m for m in module.modules() if type(m) in RULES]
    hooks = [m.register_forward_hook(count, with_kwargs=True) for m in layers]
    try:
        with _eval_mode(module), torch.no_grad(), eagerly():
            module(example)
    finally:
        for hook in hooks:
            hook.remove()
    return 4 * numbers


def diagonal_ggn(
    module: nn.Module,
    chunks: Iterable[Tensor],
    *,
    columns: str = "exact",
    generator: torch.Generator | None = None,
    counted: Iterable[Tensor] | None = None,
) -> Tensor:
    """Return diag(sum_n J_n' H_n J_n) of the SUMMED cross-entropy, over the trained module.parameters().

    Args:
        module: network from (m, *shape) to logits (m, C), or to logits (m, T, C) at the positions of
            sequences. Examples must be independent of each other in eval mode. The network runs in eval
            mode; every submodule's mode is restored, also after an exception. Parameters and their .grad do
            not change.
        chunks: batches (m, *shape) in the parameters' dtype, on their device. The exact result does
            not depend on how the examples are cut into chunks; `best_chunk` gives the fastest size.
        columns: "exact" takes C backward passes per chunk, for sequences T C. "sign" takes one pass with a
            random-sign sketch. "top2_sign" takes three passes: the two largest columns exactly (with random
            signs of the positions, for sequences) and a sketch of the rest. The sketches are unbiased.
        generator: random generator, required for the two sketches.
        counted: masks of the positions that have a target, bool (m, T), one per chunk of sequences.

    Returns:
        Vector (P,), non-negative, accumulated in the parameters' dtype and on their device.
        The unit is nats per squared unit of the parameter.

    Raises:
        UsageError: for a module whose curvature would be wrong or missing: parameters outside
            Linear, Conv2d, GroupNorm, BatchNorm1d and 2d, LayerNorm, Embedding; shared parameters; parameters
            that reach the outputs in another way than through their own layer; a module called twice in one
            forward pass; padding as a string or not with zeros; grouped convolutions; batch statistics in
            eval mode; examples mixed along the first axis; a layer's input changed in place after its use.
    """
    if columns not in COLUMNS:
        raise unknown("columns", columns, COLUMNS)
    if columns != "exact" and generator is None:
        raise UsageError(f"diagonal_ggn: columns={columns!r} is random; pass a generator")
    layers = check_layers(module)
    total, slots = _accumulators(module)
    with _eval_mode(module):
        for x, places in zip(chunks, repeat(None) if counted is None else counted, strict=False):
            if len(x) == 0:
                continue
            logits, calls = checked_forward(module, x, layers, places)
            with torch.no_grad():
                _add_chunk(logits, _columns(logits, places, columns, generator), calls, slots)
    return total


def _columns(
    logits: Tensor, places: Tensor | None, columns: str, generator: torch.Generator | None
) -> Sequence[Tensor]:
    """Return columns, shaped as the logits, whose squared pullbacks sum to the diagonal or estimate it.

    For sequences, with logits (n, T, C), only the positions in the mask `places` (n, T) count. The signs of a
    sketch are independent between positions.
    """
    p = logits.softmax(-1)
    classes = p.shape[-1]
    if places is not None and columns == "exact":
        return _EachPlace(p, places)
    root = p.sqrt()
    # With at most two classes the two largest columns are all columns.
    if places is None and (columns == "exact" or (columns == "top2_sign" and classes <= 2)):
        unit = torch.eye(classes, dtype=p.dtype, device=p.device)
        return list(root.T[:, :, None] * (unit[:, None, :] - p))
    if places is not None:
        root = root * places[:, :, None]

    def times(r: Tensor) -> Tensor:
        """Return S_n r_n for r of the logits' shape."""
        scaled = root * r
        return scaled - p * scaled.sum(-1, keepdim=True)

    assert generator is not None
    # The generator's device draws the bits, so that they do not depend on the model's device.
    bits = torch.randint(2, tuple(p.shape), generator=generator, device=generator.device)
    signs = (2 * bits - 1).to(device=p.device, dtype=p.dtype)
    if columns == "sign":
        return [times(signs)]
    # |s_c|^2 = p_c (1 - 2 p_c + sum_j p_j^2)
    norms = p * (1 - 2 * p + p.square().sum(-1, keepdim=True))
    largest = norms.topk(min(2, classes), dim=-1).indices
    units = [F.one_hot(each, classes).to(p.dtype) for each in largest.unbind(-1)]
    if places is not None:
        units = [signs * unit for unit in units]
    return [*map(times, units), times(signs.scatter(-1, largest, 0.0))]


@dataclass(frozen=True, eq=False)
class _EachPlace(Sequence[Tensor]):
    """The T C exact columns (n, T, C) of sequences, computed one by one. p: (n, T, C). places: (n, T)."""

    p: Tensor
    places: Tensor

    def __len__(self) -> int:
        return self.p.shape[1] * self.p.shape[2]

    def __getitem__(self, i: Any) -> Any:
        place, c = divmod(i, self.p.shape[2])
        column, p = torch.zeros_like(self.p), self.p[:, place]
        unit = F.one_hot(torch.tensor(c, device=p.device), p.shape[1]).to(p.dtype)
        column[:, place] = self.places[:, place, None] * p[:, c, None].sqrt() * (unit - p)
        return column


def contracts(module: nn.Module) -> bool:
    """Return whether every layer of the module has a rule in RULES."""
    try:
        check_layers(module)
    except UsageError:
        return False
    return True


def squared_pullback(module: nn.Module, inputs: Tensor, cotangent: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute sum_n (J_n' r_n)^2, (P,), by one backward pass in eval mode.
    r_n: row n of `cotangent(outputs)`, with the outputs (n, C) for the inputs (n, *shape).

    Raises:
        UsageError: as in diagonal_ggn.
    """
    layers = check_layers(module)
    total, slots = _accumulators(module)
    with _eval_mode(module):
        outputs, calls = checked_forward(module, inputs, layers)
        with torch.no_grad():
            _add_chunk(outputs, [cotangent(outputs.detach())], calls, slots)
    return total


@contextmanager
def _eval_mode(module: nn.Module) -> Iterator[None]:
    modes = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for m, training in modes:
            m.training = training


def _accumulators(module: nn.Module) -> tuple[Tensor, dict[int, Tensor]]:
    """Return a zero vector (P,), and its slices (one-dimensional views) by the id of their parameter."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    total = torch.zeros(
        sum(p.numel() for p in parameters), dtype=parameters[0].dtype, device=parameters[0].device
    )
    parts = torch.split(total, [p.numel() for p in parameters])
    return total, {id(p): part for p, part in zip(parameters, parts, strict=True)}


def _add_chunk(
    logits: Tensor, columns: Sequence[Tensor], calls: Sequence[Call], slots: Mapping[int, Tensor]
) -> None:
    """Add sum_n sum_columns (J_n' column_n)^2 of one forward pass to the parameters' slots."""
    if not calls:  # no trained parameter reaches the outputs
        return
    edges = [cast(GradientEdge, call.output_edge) for call in calls]
    # Dense layers on vectors need no gradient per example, because (d_o a_i)^2 = d_o^2 a_i^2: d^2 is summed
    # over the columns and then multiplied by a^2.
    dense: dict[nn.Module, Tensor] = {}
    prepared: dict[nn.Module, Tensor] = {}
    for call in calls:
        m = call.layer
        prepared[m] = RULES[type(m)].prepare(m, call.input)
        if isinstance(m, nn.Linear) and prepared[m].shape[1] == 1:
            prepared[m] = prepared[m].squeeze(1)
            dense[m] = prepared[m].new_zeros(len(prepared[m]), m.out_features)
    for i, column in enumerate(columns):
        # The column is a factor and not grad_outputs, with the same values: torch's first call with
        # grad_outputs imports sympy (0.4 CPU-seconds and 8 MB in every worker).
        with torch.enable_grad():
            seeded = (logits * column).sum()
        gradients: tuple[Tensor | None, ...] = torch.autograd.grad(
            seeded, edges, retain_graph=i < len(columns) - 1, allow_unused=True
        )
        for m, d in zip(prepared, gradients, strict=True):
            if d is None:
                continue
            if m in dense:
                d = d.reshape(dense[m].shape)
                dense[m].addcmul_(d, d)
            else:
                _add(m, *RULES[type(m)].squares(prepared[m], d, cast(Tensor, m.weight)), slots)
    for m, q in dense.items():
        _add(m, q.T @ (prepared[m] * prepared[m]), q.sum(0), slots)


def _add(m: nn.Module, weight: Tensor, bias: Tensor, slots: Mapping[int, Tensor]) -> None:
    """Add the squares to the slots of the layer's trained parameters."""
    own = dict(m.named_parameters(recurse=False))
    for key, part in (("weight", weight), ("bias", bias)):
        if key in own and own[key].requires_grad:
            slots[id(own[key])].add_(part.reshape(-1))
