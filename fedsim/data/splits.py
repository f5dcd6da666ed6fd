"""Compute splits, which divide the training rows among clients.

Every function returns one int64 array of row indices per client, in the order in which the client sees the
rows. It draws from a freshly seeded legacy numpy RandomState, because the published splits depend on that
generator and because numpy guarantees its stream; numpy does not guarantee the stream of the newer Generator.

`targets` is (n,) int64. A client may have no rows; the caller decides whether that is an error.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedsim.errors import UsageError

Indices = npt.NDArray[np.int64]
Split = tuple[Indices, ...]
RandomState = np.random.RandomState

# In the published two-class split, a class used this many times is no longer drawn as a second class.
_TWO_CLASSES_CAP = 20

# Numbers of (negative, positive) rows of every client: docs/references/published-numbers.md#uci-credit.
CREDIT_TABLES: dict[str, tuple[tuple[int, int], ...]] = {
    "credit_het": ((34, 2),) * 5 + ((22, 45),) * 5,
    # The last client gets 23 positive rows: the table adds up to 237, but the training split has 236.
    "credit_hom": ((28, 23),) * 3 + ((28, 24),) * 7,
    "credit_two": ((142, 118),) * 2,
}


def iid(rng: RandomState, examples: int, clients: int, fraction: float) -> Split:
    """Divide a random `fraction` of all rows, shuffled, into parts whose sizes differ by at most one.

    Differs: the papers' homogeneous split also fixes the class counts; two_dirichlet with both concentrations
    1e15 gives that split.
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
    """Draw the papers' heterogeneous split (FedLap, arXiv:2501.17325, App. E.1).

        p ~ Dir(size_alpha) over clients;  Q_k ~ Dir(class_alpha) over classes;  M_kc = p_k Q_kc
        n_kc = round(n_c * fraction * M_kc / sum_k' M_k'c),  1 becomes 2

    The n_c rows of class c are shuffled, and clients take consecutive slices of n_kc rows. At the end of a
    class, slices are shorter or a few rows stay unused. A client sees its rows class by class.

    The generator first draws p and Q, so the sizes equal the published sizes for the published seeds.

    Differs: the release shuffles CIFAR's classes with torch; here numpy does. The release accepts clients
    without rows (with 100 clients and 60000 rows, they occur in 19 of the seeds 62..161, but not in 62, 63,
    64); here such a client takes 2 rows from the client with the most rows.
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
        # Keep this order of operations: another order may round differently.
        counts = np.round(len(rows) * fraction * shares[:, label] / totals[label]).astype(int)
        counts[counts == 1] = 2
        _deal(parts, rows, counts.tolist())
    return _none_empty(_joined(parts))


def two_classes(rng: RandomState, targets: Indices, classes: int, clients: int, points: int) -> Split:
    """Give clients `points` rows of each of two classes (S6, docs/references/published-numbers.md#splits).

    A client's first class is the one that is least used so far. The second is a different class, drawn at
    random from the classes used fewer than max(20, ceil(2 * clients / classes)) times. If a class runs out, a
    client gets the LAST `points` rows of the class, which other clients also have: on MNIST (5421 fives)
    clients overlap, as in the release.

    Differs: if no second class qualifies, the release never returns; here it is the least used other class.
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
    """Divide every class among the clients in proportions ~ Dir(alpha) (Wang et al., arXiv:2002.06440).

    A random `fraction` of every class is divided completely, at the rounded cumulative proportions.
    A client without rows (usual for alpha = .01, where a class goes to one or two clients) takes 2 rows from
    the client with the most rows.

    Differs: Wang et al. draw again until every client has 10 rows. The Gaussian-product release truncates
    each share, drops the remaining rows, and gives a client without rows a row of class 0 that another client
    may also have (docs/references/published-numbers.md#splits).
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
    """Give client k a random `fraction` of the rows of centre k, in file order; skip the other centres."""
    # Sort once: with thousands of centres and a million rows, one search per centre would take seconds.
    by_centre = np.argsort(centres, kind="stable").astype(np.int64)
    ends = np.cumsum(np.bincount(centres))[:clients]
    split = []
    for rows in np.split(by_centre, ends)[:clients]:
        if fraction < 1:
            rows = np.sort(rng.permutation(rows)[: round(fraction * len(rows))])
        split.append(rows)
    return tuple(split)


def by_table(rng: RandomState, targets: Indices, table: Sequence[tuple[int, int]]) -> Split:
    """Give client k table[k] = (negative, positive) rows, negative first; both classes are shuffled.

    If a class runs out, the last clients get the remaining rows.
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
    """Append consecutive slices of `rows` to the clients' parts; slices at the end may be shorter."""
    start = 0
    for part, count in zip(parts, counts, strict=True):
        part.append(rows[start : start + count])
        start += count


def _none_empty(split: Split) -> Split:
    """Give each client without rows, in order, the last 2 rows of the (first) largest client.

    The client gets 1 row if the largest client has only 2 or 3, and none if the largest client has 1.
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
    """Draw from Dir(alpha, ..., alpha), (n,); exact even if Gamma(alpha) underflows to zero.

    Gamma(a) = Gamma(a + 1) * U ** (1 / a) is drawn as a logarithm, and all draws are divided by the largest.
    """
    log = np.log(rng.standard_gamma(alpha + 1, n)) + np.log1p(-rng.random_sample(n)) / alpha
    weights = np.exp(log - log.max())
    return np.asarray(weights / weights.sum())
