"""Selection of the rows on which a run is evaluated, and of public inputs.

Held-out training rows make it possible to choose hyperparameters without the test set.

    test          the data set's own test rows
    unused:N      N random training rows that no client has (with --fraction below 1)
    fold:I/N      fold I (from 1 to N) of N random folds of the clients' rows, removed from the clients
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedsim.errors import DataError
from fedsim.specs import Form, parse, whole

_FORMS = {
    "test": Form("test"),
    "unused": Form("unused", ("N",), help="N training rows that no client has"),
    "fold": Form("fold", ("I/N",), help="such as fold:1/5 to fold:5/5 for five folds"),
}

Rows = npt.NDArray[np.int64]


def hold_out(
    spec: str, examples: int, clients: tuple[Rows, ...], seed: int
) -> tuple[tuple[Rows, ...], Rows | None]:
    """Return the clients' rows, and the training rows to evaluate on (None: the test set).

    The result depends only on the arguments. The N folds of a seed are disjoint and cover the clients' rows.
    """
    name, arguments = parse(spec, "--evaluate-on", _FORMS)
    if name == "test":
        return clients, None
    used = np.zeros(examples, dtype=bool)
    for rows in clients:
        used[rows] = True
    draws = np.random.Generator(np.random.PCG64([seed, 0x5C0]))
    if name == "unused":
        free, count = np.flatnonzero(~used), whole(arguments[0])
        if count < 0:
            raise _FORMS[name].misuse("--evaluate-on", spec)
        if not 0 < count <= len(free):
            raise DataError(f"evaluate_on {spec!r}: the clients leave {len(free)} training rows unused")
        return clients, np.sort(draws.choice(free, count, replace=False))
    fold, folds = (whole(text) for text in arguments[0].partition("/")[::2])
    if folds < 2 or not 1 <= fold <= folds:
        raise _FORMS[name].misuse("--evaluate-on", spec)
    taken = np.zeros(examples, dtype=bool)
    taken[draws.permutation(np.flatnonzero(used))[fold - 1 :: folds]] = True
    kept = tuple(rows[~taken[rows]] for rows in clients)
    if empty := [k for k, rows in enumerate(kept) if not len(rows)]:
        raise DataError(f"evaluate_on {spec!r} leaves client {empty[0]} without training examples")
    return kept, np.flatnonzero(taken)


def set_aside(count: int, clients: tuple[Rows, ...], seed: int) -> tuple[tuple[Rows, ...], Rows]:
    """Remove `count` random rows from the clients; return the clients' remaining rows and the removed rows.

    The inputs of the removed rows become public, without labels. Rows without a client are not removed,
    because they may be held out for evaluation. The result depends only on the arguments.
    """
    used = np.unique(np.concatenate(clients))
    draws = np.random.Generator(np.random.PCG64([seed, 0x9B1]))
    public = np.sort(draws.choice(used, min(count, len(used)), replace=False))
    kept = tuple(rows[~np.isin(rows, public)] for rows in clients)
    if empty := [k for k, rows in enumerate(kept) if len(clients[k]) and not len(rows)]:
        raise DataError(f"{count:,} public inputs leave client {empty[0]} without training examples")
    return kept, public
