"""Differences between configurations, paired by seed: interval, test, and a verdict in words.

Two runs with one seed have the same split and, with the same model, the same initial parameters. Their
difference has less variance than a difference of unpaired runs. For n differences d_i with mean D and sample
standard deviation s, and m comparisons:

    interval      D ± t(n - 1, 1 - 0.025 / m) s / sqrt(n)        simultaneous, 95 %, by Bonferroni
    p             two-sided paired t-test, as in scipy.stats.ttest_rel
    p, permuted   all 2^n sign flips of d (scipy.stats.permutation_test) for n from 6 to 12; 2^12 random sign
                  flips for n >= 13; not corrected
    p, Holm       p, corrected for all comparisons of the family (Holm 1979)

The family is all pairs of configurations if the reference is the best one, because the data select it; an
interval of one row alone would then cover too rarely (91.6 % of 5 rows, 88.4 % of 10). If the user names the
reference, the family is one pair per row. Pairs without a test do not count. With fewer than LEAST seeds
there is no test, and the interval is the range of the differences. (Source: docs/what-a-number-is-worth.md.)
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, stdev
from typing import TypeVar

LEAST = 5
"""The minimum number of seeds for a ranking of configurations."""
LEAST_FLIPS = 6
"""The minimum number n of seeds with which a permutation test can reach p < 0.05; its least p is 2 / 2^n."""
MOST_FLIPS = 12
"""With more seeds, the permutation test draws 2^12 flips instead of all."""
ALPHA = 0.05
ROUNDING = 1e-12
"""Tolerance for the rounding error of a share or of a mean; a smaller difference counts as equality."""
Key = TypeVar("Key", bound=Hashable)
"""The key of a pair: the seed, and other settings that must be equal."""
SAME = "not distinguishable"


@dataclass(frozen=True)
class Difference:
    """The differences of one configuration from the reference, one value per common seed.

    low, high: the ends of the interval of the mean, for all comparisons of the family together, or, with
    fewer than LEAST values, the ends of their range. p, permuted, holm: NaN if there is no test. family: the
    number of comparisons.
    """

    values: tuple[float, ...]
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan
    permuted: float = math.nan
    holm: float = math.nan
    family: int = 0

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float:
        return fmean(self.values) if self.values else math.nan

    @property
    def ranked(self) -> bool:
        """True if there are enough seeds for a test."""
        return not math.isnan(self.holm)

    @property
    def distinguishable(self) -> bool:
        return self.ranked and self.holm < ALPHA

    def verdict(self, more: str = "higher", less: str = "lower", missing: str = "diverged") -> str:
        """Return the result of the test in words.

        more, less: words for a positive and a negative difference. missing: the meaning of a NaN.
        """
        if not self.values:
            return "no common split"
        if any(map(math.isnan, self.values)):
            return f"{sum(map(math.isnan, self.values))} of {self.n} {missing}: no ranking"
        if not self.ranked:
            return f"n = {self.n}: no ranking"
        return (more if self.mean > 0 else less) if self.distinguishable else SAME


def differences(
    scores: Sequence[Mapping[Key, float]], reference: int, *, all_pairs: bool
) -> list[Difference]:
    """Compare every configuration, including the reference itself, with the reference.

    scores: the scores of each configuration, by seed or another key of pairs. reference: the index of the
    reference. all_pairs: whether the family is all pairs, because the data selected the reference.
    """
    values = _paired(scores, reference, all_pairs)
    ps = p_values(values)
    corrected, family = holm(ps), sum(not math.isnan(p) for p in ps)
    result = []
    for d, p, of_holm in list(zip(values, ps, corrected, strict=True))[: len(scores) - 1]:
        if not math.isnan(p):
            half = half_width(d, family)
            ends = fmean(d) - half, fmean(d) + half
            result.append(Difference(d, *ends, p, _permuted(d), of_holm, family))
        elif not d or any(map(math.isnan, d)):
            result.append(Difference(d, family=family))
        else:
            result.append(Difference(d, min(d), max(d), family=family))
    zeros = tuple(0.0 * x for x in scores[reference].values())
    result.insert(reference, Difference(zeros, 0.0, 0.0, family=family))
    return result


def best(scores: Sequence[Mapping[Key, float]], *, least: bool = False) -> int | None:
    """Return the index of the best configuration; None if fewer than two have scores without NaN.

    If two or more configurations have at least LEAST scores, only these are compared. The best is chosen by
    the mean over the seeds that the compared ones share. least: whether the lowest score is the best.
    """
    finite = [n for n, s in enumerate(scores) if s and not any(map(math.isnan, s.values()))]
    many = [n for n in finite if len(scores[n]) >= LEAST]
    eligible = many if len(many) > 1 else finite
    if len(eligible) < 2:
        return None
    shared = set.intersection(*(set(scores[n]) for n in eligible))
    sign = -1 if least else 1
    return max(
        eligible, key=lambda n: sign * fmean(v for k, v in scores[n].items() if k in (shared or scores[n]))
    )


def leaders(scores: Sequence[Mapping[Key, float]], *, least: bool = False) -> frozenset[int]:
    """Return the indices of the best configuration and of those that are not distinguishable from it and
    whose mean is better than that of every configuration that is.

    scores, least: as in `best`. Configurations that cannot be tested against the best are not leaders. The
    result is empty if no configuration is distinguishable from the best, or if one is that is better in the
    seeds that the two share.
    """
    reference = best(scores, least=least)
    if reference is None:
        return frozenset()
    others = [n for n in range(len(scores)) if n != reference]
    values = _paired(scores, reference, all_pairs=True)
    sign = 1 if least else -1
    pairs = zip(others, values, holm(p_values(values)), strict=False)  # the pairs of others follow
    tested = [(n, sign * fmean(d), p) for n, d, p in pairs if not math.isnan(p)]
    bound = min((behind for _, behind, p in tested if p < ALPHA), default=0.0)
    if bound <= 0:
        return frozenset()
    return frozenset([reference, *(n for n, behind, p in tested if p >= ALPHA and behind < bound)])


def p_values(values: Sequence[Sequence[float]]) -> list[float]:
    """Return the p-values of two-sided paired t-tests; NaN for fewer than LEAST values, or with a NaN."""
    result = [math.nan] * len(values)
    for n in sorted({len(v) for v in values if len(v) >= LEAST}):
        from scipy import stats

        at = [i for i, v in enumerate(values) if len(v) == n]
        with warnings.catch_warnings(action="ignore"):  # equal in every seed, such as deterministic costs
            ps = stats.ttest_1samp([values[i] for i in at], 0.0, axis=1).pvalue
        for i, p in zip(at, ps, strict=True):
            result[i] = float(p) if any(values[i]) else 1.0
    return result


def holm(ps: Sequence[float]) -> list[float]:
    """Return the p-values corrected for their number; the NaN of a pair without a test stays NaN."""
    order = sorted((n for n, p in enumerate(ps) if not math.isnan(p)), key=lambda n: ps[n])
    result, largest = [math.nan] * len(ps), 0.0
    for place, n in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - place) * ps[n]))
        result[n] = largest
    return result


def half_width(values: Sequence[float], family: int = 1) -> float:
    """Return half the width of the 95 % interval of a mean, by Student's t.

    family: the number of simultaneous intervals, by Bonferroni. The result is NaN for fewer than two values,
    or if a value is NaN.
    """
    if len(values) < 2 or any(map(math.isnan, values)):
        return math.nan
    from scipy import stats

    quantile = float(stats.t.ppf(1 - ALPHA / (2 * family), len(values) - 1))
    return quantile * stdev(values) / math.sqrt(len(values))


def median(spent: Sequence[float], ended: Sequence[float]) -> float:
    """Return the Kaplan-Meier estimate of a median; inf if too few values are known.

    spent: the known values. ended: lower bounds of the others, which are censored. If the estimated share
    above is one half between two values, the median is their midpoint.
    """
    if not spent or not ended:
        return float(statistics.median(spent)) if spent else math.inf
    from scipy import stats

    above = stats.ecdf(stats.CensoredData(uncensored=spent, right=ended)).sf
    events = sorted(set(spent))
    shares = dict(zip(above.quantiles.tolist(), above.probabilities.tolist(), strict=True))
    half = [x for x in events if shares[x] <= 0.5 + ROUNDING]
    if not half or (shares[half[0]] >= 0.5 - ROUNDING and len(half) == 1):
        return math.inf
    return float(half[0]) if shares[half[0]] < 0.5 - ROUNDING else (half[0] + half[1]) / 2


def _paired(
    scores: Sequence[Mapping[Key, float]], reference: int, all_pairs: bool
) -> list[tuple[float, ...]]:
    """Return the differences of the others from the reference; with all_pairs, all other pairs follow."""
    others = [n for n in range(len(scores)) if n != reference]
    pairs = [(n, reference) for n in others] + (list(combinations(others, 2)) if all_pairs else [])
    return [tuple(scores[a][k] - scores[b][k] for k in scores[a] if k in scores[b]) for a, b in pairs]


def _permuted(values: Sequence[float]) -> float:
    """Return the p-value of the permutation test: the share of sign flips with a mean at least as extreme."""
    if len(values) < LEAST_FLIPS:
        return math.nan
    import numpy as np
    from scipy import stats

    test = stats.permutation_test(
        (np.array(values),),
        np.mean,
        permutation_type="samples",
        n_resamples=2 ** min(len(values), MOST_FLIPS),
        rng=np.random.default_rng(0),
    )
    return float(test.pvalue)
