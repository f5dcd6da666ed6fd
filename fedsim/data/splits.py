"""The arithmetic of the splits, which divide the training rows among clients.

Every function returns one int64 array of row indices per client, in the order the client sees
them, and draws from a legacy numpy RandomState that it gets freshly seeded. Legacy because the
published splits are a function of the seed and that generator, and because numpy promises never
to change its stream, which it does not promise of the newer one.

`targets` is (n,) int64. A client may come out empty; the caller decides what that means.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedsim.errors import UsageError

Indices = npt.NDArray[np.int64]
Split = tuple[Indices, ...]
RandomState = np.random.RandomState

# Classes of the published two-class split are "used" at most this often as a second class.
_TWO_CLASSES_CAP = 20

# Per client (negative, positive) points: docs/references/published-numbers.md#uci-credit.
CREDIT_TABLES: dict[str, tuple[tuple[int, int], ...]] = {
    "credit_het": ((34, 2),) * 5 + ((22, 45),) * 5,
    # The last 24 becomes 23: the training split has 236 positives and the table asks for 237.
    "credit_hom": ((28, 23),) * 3 + ((28, 24),) * 7,
    "credit_two": ((142, 118),) * 2,
}

# The coarse class (0..19) of each of CIFAR-100's fine classes, as in its own files (Krizhevsky 2009).
CIFAR100_COARSE = (
    *(4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11),
    *(6, 11, 5, 10, 7, 6, 13, 15, 3, 15, 0, 11, 1, 10, 12, 14, 16, 9, 11, 5),
    *(5, 19, 8, 8, 15, 13, 14, 17, 18, 10, 16, 4, 17, 4, 2, 0, 17, 4, 18, 17),
    *(10, 3, 2, 12, 12, 16, 12, 1, 9, 19, 2, 10, 0, 1, 16, 12, 9, 13, 15, 13),
    *(16, 19, 2, 4, 6, 19, 5, 5, 8, 19, 18, 1, 2, 15, 6, 0, 17, 8, 14, 13),
)


def iid(rng: RandomState, examples: int, clients: int, fraction: float) -> Split:
    """A shuffled `fraction` of all rows in parts whose sizes differ by one at most.

    Differs: the papers' homogeneous split fixes the class counts too; that one is
    two_dirichlet with both concentrations 1e15.
    """
    rows = rng.permutation(examples)[: round(fraction * examples)].astype(np.int64)
    return tuple(np.array_split(rows, clients))


def two_dirichlet(
    rng: RandomState,
    targets: Indices,
    classes: int,
    clients: int,
    fraction: float,
    size_alpha: float,
    class_alpha: float,
) -> Split:
    """The papers' heterogeneous split (FedLap, arXiv:2501.17325, App. E.1).

        p ~ Dir(size_alpha) over clients;  Q_k ~ Dir(class_alpha) over classes;  M_kc = p_k Q_kc
        n_kc = round(n_c * fraction * M_kc / sum_k' M_k'c),  1 becomes 2

    Of every shuffled class, clients take consecutive slices of n_kc rows; at the end of a class
    slices are cut short or a few rows stay unused. A client sees its rows class by class.

    The two draws are the first use of the generator, so the sizes equal the published ones for
    the published seeds.

    Differs: the release shuffles CIFAR's classes with torch, here numpy does. It leaves a client
    without rows as it is (19 of the seeds 62..161 with 100 clients and 60000 rows, none of 62, 63,
    64); here such a client takes 2 rows from the client that has most.
    """
    sizes = rng.dirichlet([size_alpha] * clients)
    mixes = rng.dirichlet([class_alpha] * classes, clients)
    if not (np.isfinite(sizes).all() and np.isfinite(mixes).all()):
        raise UsageError(
            f"two_dirichlet:{size_alpha:g},{class_alpha:g}: a concentration this small cannot be "
            "drawn; use at least 0.01"
        )
    shares = sizes[:, None] * mixes
    totals = shares.sum(axis=0)
    parts: list[list[Indices]] = [[] for _ in range(clients)]
    for label in range(classes):
        rows = _shuffled_class(rng, targets, label)
        # This order of operations, because another one may round differently.
        counts = np.round(len(rows) * fraction * shares[:, label] / totals[label]).astype(int)
        counts[counts == 1] = 2
        _deal(parts, rows, counts.tolist())
    return _none_empty(_joined(parts))


def two_classes(rng: RandomState, targets: Indices, classes: int, clients: int, points: int) -> Split:
    """`points` rows of each of two classes per client (S6, docs/references/published-numbers.md#splits).

    First class: the one used least so far. Second: random, another one, used fewer than 20 times
    (or often enough for all clients, if that is more). Where a class runs out, a client gets its
    LAST `points` rows, which others hold too: on MNIST (5421 fives) clients overlap, as released.

    Differs: if no second class qualifies, where the release never returns, the least used one
    other than the first is taken.
    """
    cap = max(_TWO_CLASSES_CAP, -(-2 * clients // classes))
    used = np.zeros(classes, dtype=np.int64)
    counts = np.zeros((clients, classes), dtype=np.int64)
    for k in range(clients):
        first = int(np.argmin(used))
        used[first] += 1
        free = used < cap
        free[first] = False
        if free.any():
            second = first
            while not free[second]:
                second = int(rng.choice(classes, 1, replace=False)[0])
        else:
            second = min((c for c in range(classes) if c != first), key=lambda c: int(used[c]))
        used[second] += 1
        counts[k, [first, second]] = points
    parts: list[list[Indices]] = [[] for _ in range(clients)]
    for label in range(classes):
        rows = _shuffled_class(rng, targets, label)
        start = 0
        for k in np.flatnonzero(counts[:, label]).tolist():
            part = rows[start : start + points]
            parts[k].append(part if len(part) == points else rows[-points:])
            start += points
    return _joined(parts)


def dirichlet(
    rng: RandomState, targets: Indices, classes: int, clients: int, fraction: float, alpha: float
) -> Split:
    """Every class is divided over the clients in proportions ~ Dir(alpha) (Wang et al., arXiv:2002.06440).

    Nothing is left over: a class is cut at its rounded cumulative proportions. A client that gets
    nothing (usual for alpha = .01, where a class goes to one or two clients) takes 2 rows from the
    client that has most. With `fraction`, of every class a random part that large is divided.

    Differs: Wang et al. draw again until every client has 10 rows; the Gaussian-product release
    truncates each share, drops what is left, and gives an empty client a point of class 0 that
    another client may hold too (docs/references/published-numbers.md#splits).
    """
    parts: list[list[Indices]] = [[] for _ in range(clients)]
    for label in range(classes):
        rows = _shuffled_class(rng, targets, label)
        rows = rows[: round(fraction * len(rows))]
        cuts = np.round(np.cumsum(_small_dirichlet(rng, alpha, clients)) * len(rows)).astype(int)
        cuts[-1] = len(rows)
        _deal(parts, rows, np.diff(cuts, prepend=0).tolist())
    return _none_empty(_joined(parts))


def natural(rng: RandomState, centres: Indices, clients: int, fraction: float) -> Split:
    """Client k has centre k, rows in file order; of each a random `fraction`. Further centres are unused."""
    # sorted once: thousands of centres times a million rows would take seconds
    by_centre = np.argsort(centres, kind="stable").astype(np.int64)
    ends = np.cumsum(np.bincount(centres))[:clients]
    split = []
    for rows in np.split(by_centre, ends)[:clients]:
        if fraction < 1:
            rows = np.sort(rng.permutation(rows)[: round(fraction * len(rows))])
        split.append(rows)
    return tuple(split)


def pachinko(
    rng: RandomState, targets: Indices, clients: int, coarse_alpha: float, fine_alpha: float, points: int
) -> Split:
    """CIFAR-100's two-step LDA split (Reddi et al. 2021, arXiv:2003.00295, App. F; Li & McCallum 2006).

    Each client draws a mix of the coarse classes ~ Dir(coarse_alpha) and, of every coarse class, a mix
    of its fine classes ~ Dir(fine_alpha). Each of its `points` examples: a coarse class, a fine class of
    it, and one of this class's remaining examples, all at random. What has no example left is taken out
    and the mixes renormalised. Rows are in the order drawn.

    Differs: a published file holds one draw of this (data set cifar100_lda); here it depends on the seed.
    """
    left = [_shuffled_class(rng, targets, label).tolist() for label in range(len(CIFAR100_COARSE))]
    fine_of = [np.flatnonzero(np.array(CIFAR100_COARSE) == coarse).tolist() for coarse in range(20)]
    open_fine = [[bool(left[label]) for label in labels] for labels in fine_of]
    open_coarse = [any(there) for there in open_fine]
    split = []
    for _ in range(clients):
        coarse_mix = _mix(rng, coarse_alpha, len(fine_of))
        fine_mix = [_mix(rng, fine_alpha, len(labels)) for labels in fine_of]
        rows = []
        for coarse_draw, fine_draw in rng.random_sample((points, 2)).tolist():
            coarse = _picked(coarse_mix, open_coarse, coarse_draw)
            fine = _picked(fine_mix[coarse], open_fine[coarse], fine_draw)
            remaining = left[fine_of[coarse][fine]]
            rows.append(remaining.pop())
            open_fine[coarse][fine] = bool(remaining)
            open_coarse[coarse] = any(open_fine[coarse])
        split.append(np.array(rows, dtype=np.int64))
    return tuple(split)


def _mix(rng: RandomState, alpha: float, n: int) -> list[float]:
    """A draw of Dir(alpha, ..., alpha) without zeros: the last class left may be one of tiny share."""
    return np.maximum(_small_dirichlet(rng, alpha, n), 1e-300).tolist()  # type: ignore[no-any-return]


def _picked(mix: Sequence[float], still: Sequence[bool], draw: float) -> int:
    """The index of an available entry, drawn by its share: `draw` is in [0, 1), `still` marks available
    ones."""
    open_ = [i for i, there in enumerate(still) if there]
    target = draw * sum(mix[i] for i in open_)
    for i in open_:
        target -= mix[i]
        if target < 0:
            return i
    return open_[-1]  # rounding


def by_table(rng: RandomState, targets: Indices, table: Sequence[tuple[int, int]]) -> Split:
    """Client k gets table[k] = (negative, positive) rows of a shuffle per class, negative first.

    At the end of a class the last clients get what is left.
    """
    parts: list[list[Indices]] = [[] for _ in table]
    for label in (0, 1):
        _deal(parts, _shuffled_class(rng, targets, label), [row[label] for row in table])
    return _joined(parts)


def _shuffled_class(rng: RandomState, targets: Indices, label: int) -> Indices:
    rows = np.flatnonzero(targets == label).astype(np.int64)
    rng.shuffle(rows)
    return rows


def _deal(parts: list[list[Indices]], rows: Indices, counts: Sequence[int]) -> None:
    """Append consecutive slices of `rows` to the clients' parts; slices past the end are short."""
    start = 0
    for part, count in zip(parts, counts, strict=True):
        part.append(rows[start : start + count])
        start += count


def _none_empty(split: Split) -> Split:
    """Every client without rows, in order, takes the last 2 of the (first) largest client.

    It takes 1 if the largest has only 2 or 3, and none if it has 1: there are then too few rows.
    """
    filled = list(split)
    for k, rows in enumerate(split):
        if len(rows) == 0:
            richest = max(range(len(filled)), key=lambda j: len(filled[j]))
            kept = len(filled[richest]) - min(2, len(filled[richest]) // 2)
            filled[k], filled[richest] = filled[richest][kept:], filled[richest][:kept]
    return tuple(filled)


def _joined(parts: Sequence[Sequence[Indices]]) -> Split:
    return tuple(np.concatenate(part) for part in parts)


def _small_dirichlet(rng: RandomState, alpha: float, n: int) -> npt.NDArray[np.float64]:
    """(n,) draw of Dir(alpha, ..., alpha), exact also where Gamma(alpha) underflows to zero.

    Gamma(a) = Gamma(a + 1) * U ** (1 / a), kept as a logarithm until the largest is divided out.
    """
    log = np.log(rng.standard_gamma(alpha + 1, n)) + np.log1p(-rng.random_sample(n)) / alpha
    weights = np.exp(log - log.max())
    return np.asarray(weights / weights.sum())
