"""What edge servers send of Gaussian factors: sums of natural parameters, in float64.

    shift, precision                    of the product of what some clients' uploads change in the server's
    product_shift, product_precision    of prod q_k over their `count` uploads, for servers that average them

They are not rounded to float32 on their way, or the server's sums would no longer be those of the clients'
duals. Where the precision is fixed there is none.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedsim.wire.schema import Count, FullSum, Sum


@dataclass(frozen=True)
class PointSum:
    shift: Sum


@dataclass(frozen=True)
class PointSums:
    shift: Sum
    product_shift: Sum
    count: Count


@dataclass(frozen=True)
class DiagonalSum:
    shift: Sum
    precision: Sum


@dataclass(frozen=True)
class DiagonalSums:
    shift: Sum
    precision: Sum
    product_shift: Sum
    product_precision: Sum
    count: Count


@dataclass(frozen=True)
class TriangleSum:
    shift: Sum
    precision: FullSum


@dataclass(frozen=True)
class TriangleSums:
    shift: Sum
    precision: FullSum
    product_shift: Sum
    product_precision: FullSum
    count: Count
