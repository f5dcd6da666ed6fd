"""Gaussians and Gaussian factors in natural parameters, closed under *, / and **.

A factor is exp(shift . w - 1/2 w' S w) up to a constant, with precision S. The shape of S determines the
family: a float s is isotropic (s I), a vector (P,) is diagonal, and a symmetric matrix (P, P) is full. A site
t_k (or dual) is also a factor, whose precision may be zero or negative. Sign convention: a client minimises
l_k(w) + log t_k(w), so the prior of its local problem is the cavity q / t_k
(docs/references/equations.md#notation-and-signs).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial, reduce
from operator import mul

import torch
from torch import Tensor

from fedsim.errors import TaskError


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

    @staticmethod
    def at(mean: Tensor, precision: Tensor | float) -> Gaussian:
        """Return N(mean, S^-1) in float64, because natural parameters add and subtract large numbers."""
        exact = precision.double() if isinstance(precision, Tensor) else precision
        return Gaussian(times(exact, mean.double()), exact)

    @staticmethod
    def one(like: Tensor) -> Gaussian:
        """Return the factor 1 of the diagonal family: zero shift and precision, (P,) float64."""
        zero = torch.zeros_like(like, dtype=torch.float64)
        return Gaussian(zero, zero)

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

    def __mul__(self, other: Gaussian) -> Gaussian:
        return Gaussian(self.shift + other.shift, self.precision + other.precision)

    def __truediv__(self, other: Gaussian) -> Gaussian:
        return Gaussian(self.shift - other.shift, self.precision - other.precision)

    def __pow__(self, power: float) -> Gaussian:
        return Gaussian(power * self.shift, power * self.precision)

    def floored(self, least: float) -> Gaussian:
        """Return a factor with the same shift and a precision of at least `least` (see `raised`)."""
        return Gaussian(self.shift, raised(torch.as_tensor(self.precision), least))

    def mismatch(self, other: Gaussian) -> float:
        """Return the largest difference in shift or precision, relative to its largest absolute entry."""
        pairs = ((self.shift, other.shift), (self.precision, other.precision))
        exact = partial(torch.as_tensor, dtype=torch.float64)
        return max(_relative_difference(exact(a), exact(b)) for a, b in pairs)

    def to(self, like: Tensor) -> Gaussian:
        """Return the same factor in the dtype and on the device of `like`."""
        precision = self.precision.to(like) if isinstance(self.precision, Tensor) else self.precision
        return Gaussian(self.shift.to(like), precision)

    def add_gradient(self, weights: Tensor, grads: Tensor) -> None:
        """Add the gradient of -log factor, S w - shift, to `grads`."""
        if isinstance(self.precision, float | int):
            grads.add_(weights, alpha=self.precision)
        elif is_full(self.precision):
            grads.addmv_(self.precision, weights)
        else:
            grads.addcmul_(self.precision, weights)
        grads.sub_(self.shift)


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


def count_raised(precision: Tensor, least: float) -> int:
    """Count the entries below `least` of the diagonal precision least I + `precision`.
    For a full precision, count the eigenvalues below least / 2, the threshold of `raised`."""
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
