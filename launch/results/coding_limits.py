"""Megabytes that a run's messages could have cost, so far, at the limits that its rounds have measured.

    MB entropy   both directions at the zeroth-order entropy of their integers
    MB KL        uploads at KL(q_k || q_g), which is what a sample of the client's posterior would cost

A round measures one upload and its broadcast (fedsim.wire.limits); all messages of that direction count in
the same proportion, headers included. A direction without coded fields counts whole, as its first broadcast
may be; of a message with coded and other fields the others count in the proportion of the coded ones.
Source: docs/compression.md#the-limit-as-a-column.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from launch.runs.tables import Curve


def _entropy(line: Mapping[str, Any]) -> float:
    """Bytes of both directions at the entropy of their fields."""
    total = 0.0
    for side in ("down", "up"):
        fields = line.get("limits", {}).get(side, {}).values()
        sent = sum(field["bits"] for field in fields)
        total += line[f"bytes_{side}"] * (sum(field["entropy"] for field in fields) / sent if sent else 1.0)
    return total


def _divergence(line: Mapping[str, Any]) -> float:
    """Bytes of the uploads at the divergence of one.

    A parameter has one value in every field, so that the sum of bits per value are bits per parameter.
    """
    limits = line.get("limits", {})
    sent = sum(field["bits"] for field in limits.get("up", {}).values())
    return float(limits["kl"] / sent * line["bytes_up"]) if sent and "kl" in limits else math.nan


LIMITS = {"MB entropy": _entropy, "MB KL": _divergence}
"""Bytes of one round, by the limit's name."""


def at_limit(curve: Curve, name: str) -> list[float]:
    """One value per evaluated round, summed over the rounds so far; NaN from the first round without a KL.

    Args:
        curve: A run of which every round was evaluated: a round that was not has no line.
        name: One of LIMITS.
    """
    rounds = (LIMITS[name](line) if line["round"] else 0.0 for line in curve.lines)
    return [1e-6 * so_far for so_far in accumulate(rounds)]
