"""Gaussians and Gaussian factors in natural parameters, closed under *, / and **.

A factor is exp(shift . w - 1/2 w' S w) up to a constant, with precision S. The shape of S determines the
family: a float s is isotropic (s I), a vector (P,) is diagonal, and a symmetric matrix (P, P) is full. A site
t_k (or dual) is also a factor, whose precision may be zero or negative. Sign convention: a client minimises
l_k(w) + log t_k(w), so the prior of its local problem is the cavity q / t_k
(docs/references/equations.md#notation-and-signs).

For large vectors, *, /, ** and the methods that return a Gaussian only note the formula. It is evaluated
block by block when shift or precision is read: the intermediate vectors of a formula such as
site * (q_k / q_g) ** rho then stay in the processor's cache, and need no memory. `settled` in
fedsim.learning.blocks evaluates what a state still has to compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import mul
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fedsim.errors import TaskError

BLOCK = 65_536
"""Number of entries of a block: 512 KiB in float64."""
CACHED = 4
"""Vectors of up to this many blocks are not cut: cut, a round takes 6 % longer (docs/benchmarks.md)."""


def product(factors: Iterable[Gaussian]) -> Gaussian:
    """Return the product of at least one factor, multiplied in the order given."""
    return reduce(mul, factors)


def _relative_difference(a: Tensor, b: Tensor) -> float:
    scale = max(float(a.abs().max()), float(b.abs().max()))
    return float((a - b).abs().max()) / scale if scale else 0.0


def kl_divergence(mean: Tensor, precision: Tensor, other_mean: Tensor, other_precision: Tensor) -> float:
    """Return KL(q || p) in nats, with q = N(mean, 1/precision) and p = N(other_mean, 1/other_precision).

    KL = 1/2 sum [log(S / S_p) + S_p / S - 1 + S_p (m - m_p)^2], in float64; all (P,), precisions positive. A
    sample of q can be sent in about KL nats to a receiver that knows p (Havasi et al. 2019,
    https://arxiv.org/abs/1810.00440).
    """
    ratio = other_precision.double() / precision.double()
    distance = mean.double() - other_mean.double()
    return float((ratio - 1 - ratio.log() + other_precision.double() * distance**2).sum()) / 2


@dataclass(frozen=True)
class Point:
    """A model without uncertainty.

    Examples:
        >>> import fedsim, torch
        >>> fedsim.Point(torch.zeros(2)).mean
        tensor([0., 0.])
    """

    mean: Tensor


@dataclass(frozen=True)
class Samples:
    """A posterior as equally weighted draws: values (n, P), n > 0, the latest last; mean (P,).

    Examples:
        >>> import fedsim, torch
        >>> draws = fedsim.Samples(mean=torch.ones(2), values=torch.tensor([[0.0, 0.0], [2.0, 2.0]]))
        >>> list(draws.samples(1, torch.Generator()))
        [tensor([2., 2.])]
    """

    mean: Tensor
    values: Tensor

    def samples(self, count: int, generator: torch.Generator) -> Iterator[Tensor]:
        """Yield the last `count` draws (P,), or all if there are fewer; the generator is not used."""
        yield from self.values[-count:]


@dataclass(frozen=True)
class Gaussian:
    """A Gaussian factor: shift = S m (P,), precision = S, a float, a vector (P,) or a matrix (P, P).

    Examples:
        >>> import fedsim, torch
        >>> p = fedsim.Gaussian.at(torch.tensor([1.0]), torch.tensor([2.0]))
        >>> q = fedsim.Gaussian.at(torch.tensor([4.0]), torch.tensor([4.0]))
        >>> (p * q).mean, (p * q).precision
        (tensor([3.], dtype=torch.float64), tensor([6.], dtype=torch.float64))
        >>> (p * q / q).mean, (p**0.5).precision
        (tensor([1.], dtype=torch.float64), tensor([1.], dtype=torch.float64))
    """

    shift: Tensor
    precision: Tensor | float

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Evaluate a formula that an operator has noted."""
            if name not in ("shift", "precision") or "_pending" not in self.__dict__:
                raise AttributeError(name)
            evaluate([self])
            return self.__dict__[name]

    @staticmethod
    def at(mean: Tensor, precision: Tensor | float) -> Gaussian:
        """Return N(mean, S^-1) in float64, because natural parameters add and subtract large numbers."""
        return _applied(_natural, mean, precision)

    @staticmethod
    def one(like: Tensor, *, full: bool = False) -> Gaussian:
        """Return the factor 1 for vectors like `like` (P,): zero shift and precision, float64."""
        zero = torch.zeros_like(like, dtype=torch.float64)
        return Gaussian(zero, zero.new_zeros(len(zero), len(zero)) if full else zero.clone())

    @staticmethod
    def isotropic(precision: float) -> Gaussian:
        """Return N(0, I/precision), for vectors of any length."""
        return Gaussian(torch.zeros((), dtype=torch.float64), precision)

    @property
    def mean(self) -> Tensor:
        """S^-1 shift.

        Raises:
            TaskError: if a full S is singular.
        """
        if not is_full(self.precision):
            return self.shift / self.precision
        solved = torch.linalg.solve_ex(self.precision, self.shift)
        if int(solved.info):
            raise TaskError("a precision matrix is singular, so its Gaussian has no mean")
        mean: Tensor = solved.result
        return mean

    @property
    def is_proper(self) -> bool:
        """True if the precision is positive (definite), so that the factor is a distribution."""
        if is_full(self.precision):
            return not int(torch.linalg.cholesky_ex(self.precision).info)
        return bool((torch.as_tensor(self.precision) > 0).all())

    def samples(self, count: int, generator: torch.Generator) -> Iterator[Tensor]:
        """Yield `count` draws (P,) of this distribution in the dtype of the mean; the CPU draws the noise.

        Raises:
            TaskError: if the precision is not positive.
        """
        if not self.is_proper:
            raise TaskError("a factor whose precision is not positive cannot be sampled")
        mean = self.mean
        root = torch.linalg.cholesky(self.precision).mT if is_full(self.precision) else None
        for _ in range(count):
            noise = torch.randn(len(mean), generator=generator).to(mean)
            if root is not None:  # S = LL', so L'^-1 noise has covariance S^-1
                yield mean + torch.linalg.solve_triangular(root, noise[:, None], upper=True)[:, 0]
            else:
                precision = self.precision
                yield mean + noise / (precision.sqrt() if isinstance(precision, Tensor) else precision**0.5)

    def __mul__(self, other: Gaussian | Carrier) -> Gaussian:
        return _applied(_product, self, other)

    def __truediv__(self, other: Gaussian | Carrier) -> Gaussian:
        return _applied(_quotient, self, other)

    def __pow__(self, power: float) -> Gaussian:
        return _applied(partial(_power, power), self)

    def floored(self, least: float) -> Gaussian:
        """Return a factor with the same shift and a precision of at least `least` (see `raised`)."""
        return _applied(partial(_floored, least), self)

    def precision_plus(self, curvature: Tensor) -> Tensor:
        """Return S + H, the precision of the Laplace approximation of this factor times a loss."""
        size = _size_to_cut((self, curvature))
        (precision,) = in_blocks(lambda g, H: (H + g.precision,), (self, curvature), size)
        return torch.as_tensor(precision)

    def mismatch(self, other: Gaussian) -> float:
        """Return the largest difference in shift or precision, relative to its largest absolute entry."""
        pairs = ((self.shift, other.shift), (self.precision, other.precision))
        exact = partial(torch.as_tensor, dtype=torch.float64)
        return max(_relative_difference(exact(a), exact(b)) for a, b in pairs)

    def to(self, like: Tensor) -> Gaussian:
        """Return the same factor in the dtype and on the device of `like`."""
        return _applied(partial(_converted, like), self)

    def add_gradient(self, weights: Tensor, grads: Tensor) -> None:
        """Add the gradient of -log factor, S w - shift, to `grads`."""
        if isinstance(self.precision, float | int):
            grads.add_(weights, alpha=self.precision)
        elif is_full(self.precision):
            grads.addmv_(self.precision, weights)
        else:
            grads.addcmul_(self.precision, weights)
        grads.sub_(self.shift)


# ---- formulas, evaluated at once or block by block


class Carrier:
    """A base class of values that have a factor: messages that carry a Gaussian."""

    @property
    def factor(self) -> Gaussian:
        raise NotImplementedError

    def __mul__(self, other: Gaussian | Carrier) -> Gaussian:
        return self.factor * other

    def __truediv__(self, other: Gaussian | Carrier) -> Gaussian:
        return self.factor / other

    def __pow__(self, power: float) -> Gaussian:
        return self.factor**power


class _Pending(NamedTuple):
    """A formula of Gaussians and tensors, elementwise in their vectors, which have `size` entries."""

    formula: Callable[..., Gaussian]
    operands: tuple[Any, ...]
    size: int


def _natural(mean: Tensor, precision: Tensor | float) -> Gaussian:
    exact = precision.double() if isinstance(precision, Tensor) else precision
    return Gaussian(times(exact, mean.double()), exact)


def _product(one: Gaussian, other: Gaussian) -> Gaussian:
    return Gaussian(one.shift + other.shift, _added(one.precision, other.precision))


def _added(one: Tensor | float, other: Tensor | float) -> Tensor | float:
    """Add two precisions; a float s is s I."""
    if isinstance(other, float) and isinstance(one, Tensor) and is_full(one):
        return one + identity(one[0], other, full=True)
    return one + other


def _quotient(one: Gaussian, other: Gaussian) -> Gaussian:
    return Gaussian(one.shift - other.shift, one.precision - other.precision)


def _power(power: float, one: Gaussian) -> Gaussian:
    return Gaussian(power * one.shift, power * one.precision)


def _floored(least: float, one: Gaussian) -> Gaussian:
    return Gaussian(one.shift, raised(torch.as_tensor(one.precision), least))


def _converted(like: Tensor, one: Gaussian) -> Gaussian:
    precision = one.precision.to(like) if isinstance(one.precision, Tensor) else one.precision
    return Gaussian(one.shift.to(like), precision)


def _applied(formula: Callable[..., Gaussian], *operands: Any) -> Gaussian:
    """Return formula(*operands), or a Gaussian that is evaluated when it is read."""
    operands = tuple(o.factor if isinstance(o, Carrier) else o for o in operands)
    size = _size_to_cut(operands)
    if not size:
        return formula(*operands)
    result = object.__new__(Gaussian)
    object.__setattr__(result, "_pending", _Pending(formula, operands, size))
    return result


def _size_to_cut(operands: Iterable[Any]) -> int:
    """Return the length of the operands' vectors; 0 if they are not to be cut (`size_to_cut`)."""
    sizes, tensors = [0], list[Tensor]()
    for value in operands:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, Gaussian) and "_pending" in value.__dict__:
            sizes.append(value.__dict__["_pending"].size)
        elif isinstance(value, Gaussian):
            tensors += [t for t in value.__dict__.values() if isinstance(t, Tensor)]
    return size_to_cut(tensors, max(sizes))


def size_to_cut(tensors: Sequence[Tensor], least: int = 0) -> int:
    """Return the length of the vectors among these tensors, at least `least`; 0 if they are not to be cut.

    They are not if they fit into the cache, are on a GPU, or if one of them is a matrix."""
    size = max((t.numel() for t in tensors), default=0)
    size = max(size, least)
    return size if size > CACHED * BLOCK and all(can_be_cut(t, size) for t in tensors) else 0


def can_be_cut(tensor: Tensor, size: int) -> bool:
    """Return whether a tensor is a number or a vector of `size` entries, on the CPU."""
    return tensor.device.type == "cpu" and (not tensor.dim() or tuple(tensor.shape) == (size,))


def _block(value: Any, part: slice) -> Any:
    """Return a block of a tensor or Gaussian; of a pending one, the formula of the operands' blocks."""
    if isinstance(value, Tensor):
        return value[part] if value.dim() else value
    if not isinstance(value, Gaussian):
        return value
    pending = value.__dict__.get("_pending")
    if pending is None:
        return Gaussian(_block(value.shift, part), _block(value.precision, part))
    return pending.formula(*(_block(o, part) for o in pending.operands))


def in_blocks(
    formula: Callable[..., tuple[Any, ...]],
    operands: Sequence[Any],
    size: int,
    into: Sequence[Tensor | None] = (),
    cut: Callable[[Any, slice], Any] = _block,
) -> tuple[Any, ...]:
    """Return formula(*operands), a tuple of tensors and numbers, computed block by block.

    size: the length of the vectors; 0 to compute all at once. into: tensors that the results may overwrite;
    all blocks at a place are read before one is written. cut: returns a block of an operand.
    """
    if not size:
        return formula(*operands)
    wholes: list[Any] = []
    for at in range(0, size, BLOCK):
        part = slice(at, at + BLOCK)
        pieces = formula(*(cut(o, part) for o in operands))
        if not wholes:
            outs = into if len(into) == len(pieces) else (None,) * len(pieces)
            wholes = [_whole(piece, out, size) for piece, out in zip(pieces, outs, strict=True)]
        for whole, piece in zip(wholes, pieces, strict=True):
            if isinstance(piece, Tensor) and piece.dim():
                whole[part] = piece
    return tuple(wholes)


def _whole(piece: Any, out: Tensor | None, size: int) -> Any:
    """Return the vector for these pieces: `out` if its dtype and shape match, else a new one."""
    if not isinstance(piece, Tensor) or not piece.dim():
        return piece
    fits = out is not None and out.dtype == piece.dtype and tuple(out.shape) == (size,)
    return out if fits else piece.new_empty(size)


def evaluate(gaussians: Sequence[Gaussian], into: Sequence[Tensor | None] = ()) -> None:
    """Evaluate pending Gaussians of one length together (`in_blocks`).

    into: for each Gaussian, two tensors that its shift and precision may overwrite, or None."""
    size = max(g.__dict__["_pending"].size for g in gaussians)

    def parts(*blocks: Gaussian) -> tuple[Any, ...]:
        return tuple(value for g in blocks for value in (g.shift, g.precision))

    values = in_blocks(parts, gaussians, size, into)
    for g, shift, precision in zip(gaussians, values[::2], values[1::2], strict=True):
        object.__delattr__(g, "_pending")
        object.__setattr__(g, "shift", shift)
        object.__setattr__(g, "precision", precision)


# ---- precisions


def is_full(precision: Tensor | float) -> bool:
    """Return whether a precision is a matrix."""
    return isinstance(precision, Tensor) and precision.dim() == 2


def times(precision: Tensor | float, vector: Tensor) -> Tensor:
    """Return the product S x, (P,), for any family."""
    return precision @ vector if is_full(precision) else precision * vector  # type: ignore[operator]


def diagonal(precision: Tensor | float, like: Tensor) -> Tensor:
    """Return the diagonal of S as a vector (P,) in the dtype of `like` (P,)."""
    if is_full(precision):
        return precision.diagonal().to(like)  # type: ignore[union-attr]
    # torch.as_tensor would round a float to float32
    return torch.ones_like(like) * precision


def identity(like: Tensor, scale: float, *, full: bool) -> Tensor:
    """Return scale * I in float64: (P,) for the diagonal family, (P, P) for the full family."""
    values = torch.full((len(like),), scale, dtype=torch.float64, device=like.device)
    return torch.diag(values) if full else values


def raised(precision: Tensor, least: float) -> Tensor:
    """Raise a precision that rounding has lowered to at least `least` > 0.

    The entries of a diagonal precision are clamped. The eigenvalues of a full precision are clamped if a
    Cholesky factorisation shows that one of them is below least / 2. The threshold is below `least`, because
    directions without data have the eigenvalue `least` up to rounding.
    """
    if not is_full(precision):
        return precision.clamp(min=least)
    if _exceeds(precision, least / 2):
        return precision
    values, axes = torch.linalg.eigh(precision)
    higher: Tensor = (axes * values.clamp(min=least)) @ axes.mT
    return higher


def count_raised(one: Gaussian, least: float) -> int:
    """Count the entries below `least` of least I + S, for a diagonal S.
    For a full S, count the eigenvalues below least / 2, the threshold of `raised`."""
    precision = torch.as_tensor(one.precision)
    if not is_full(precision):
        return int((precision < 0).sum())
    if _exceeds(precision, -least / 2):
        return 0
    return int((torch.linalg.eigvalsh(precision) < -least / 2).sum())


def _exceeds(precision: Tensor, least: float) -> bool:
    """Return whether all eigenvalues of a full precision exceed `least`."""
    return Gaussian(precision[0], precision - identity(precision[0], least, full=True)).is_proper


def relative(matrix: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
    """Return ratios (P,) and axes (P, P) with matrix = axes diag(ratios) axes' and unit = axes axes'.

    matrix: (P, P), symmetric. unit: (P, P), symmetric positive definite.
    """
    root = torch.linalg.cholesky(unit)
    half = torch.linalg.solve_triangular(root, matrix, upper=False)
    whitened = torch.linalg.solve_triangular(root, half.mT, upper=False)  # L^-1 M L^-T
    ratios, vectors = torch.linalg.eigh((whitened + whitened.mT) / 2)
    return ratios, root @ vectors


def packed(matrix: Tensor) -> Tensor:
    """Return the lower triangle of a symmetric matrix (P, P), row by row, (P(P+1)/2,).
    The two triangles are averaged, because rounding may make them differ."""
    rows, columns = torch.tril_indices(*matrix.shape, device=matrix.device)
    return (matrix[rows, columns] + matrix[columns, rows]) / 2


def unpacked(triangle: Tensor) -> Tensor:
    """Return the symmetric matrix (P, P) of a lower triangle (P(P+1)/2,); the inverse of `packed`."""
    size = side_of(len(triangle))
    rows, columns = torch.tril_indices(size, size, device=triangle.device)
    matrix = triangle.new_empty((size, size))
    matrix[rows, columns] = triangle
    matrix[columns, rows] = triangle
    return matrix


def side_of(count: int) -> int:
    """Return the side P of a matrix whose triangle has `count` = P(P+1)/2 entries."""
    return int(((8 * count + 1) ** 0.5 - 1) / 2 + 0.5)


@dataclass(frozen=True)
class Distance:
    """The penalty (strength / 2) ||w - centre||, with the norm NOT squared.

    The released code of the FedLap paper computes this penalty where the paper has the squared norm
    (docs/references/misprints.md). The gradient at w = centre (at the start of a round) is defined as 0.
    """

    centre: Tensor
    strength: float

    def to(self, like: Tensor) -> Distance:
        return Distance(self.centre.to(like), self.strength)

    def add_gradient(self, weights: Tensor, grads: Tensor) -> None:
        step = weights - self.centre
        length = torch.linalg.vector_norm(step)
        grads.add_(step / length.clamp(min=torch.finfo(length.dtype).tiny), alpha=self.strength / 2)


Penalty = Gaussian | Distance


def constant_part(penalty: Penalty) -> tuple[object, ...]:
    """Return a penalty's part of a recording's key: its Python numbers and the shape of its precision."""
    if isinstance(penalty, Distance):
        return "distance", penalty.strength
    precision = penalty.precision
    return "gaussian", tuple(precision.shape) if isinstance(precision, Tensor) else precision


Plain = Point | Gaussian | Samples
"""The kinds of models that an algorithm returns for evaluation."""


@dataclass(frozen=True)
class Normalised:
    """A model of a network with batch normalisation, and its running statistics (R,) float32."""

    model: Plain
    statistics: Tensor

    @property
    def mean(self) -> Tensor:
        """The mean of the weights (P,)."""
        return self.model.mean


Model = Plain | Normalised
"""The kinds of models that are evaluated."""


def taken_apart(model: Model) -> tuple[Plain, Tensor | None]:
    """Return the plain model and its running statistics, or None if it has none."""
    return (model.model, model.statistics) if isinstance(model, Normalised) else (model, None)
