"""Rules that decide whether a message is sent: +event:RULE and +quiet:RULE of --participation.

    norm:C      the Euclidean norm of the change, in units of the weights, is at least C
    norm:P%     the norm of the change is at least P % of the norm of the last change that was sent
    kl:C        KL(q_k || the distribution that the receiver has) is at least C nats per parameter
    budget:B    the norm is at least a threshold that adapts to B bytes (or P % of an upload) per round

The first message is always sent. This module imports no large packages, because options are
resolved before the fork server starts.
"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass, replace
from typing import Literal

from fedsim.errors import UsageError
from fedsim.specs import number

EVENT, QUIET = "event", "quiet"
MODIFIERS = (EVENT, QUIET)
FORMS = "event:RULE or quiet:RULE"
KINDS = {EVENT: ("norm", "kl", "budget"), QUIET: ("norm", "kl")}
GAIN, START = 0.5, 0.25
"""GAIN: change of log(threshold) per upload above or below budget. START: first threshold / first change."""


@dataclass(frozen=True)
class Rule:
    """One rule. value: C, P / 100 or B. share: True if the value was written as a percentage."""

    kind: Literal["norm", "kl", "budget"]
    value: float
    share: bool = False


@dataclass(frozen=True)
class Trigger:
    """The state of a client's rule.

    sent: the number of messages sent so far. change: the change in the last message. threshold: the threshold
    of rule budget, in the units of the change. waited: the number of rounds since the last message.
    """

    sent: int = 0
    change: float = 0.0
    threshold: float = 0.0
    waited: int = 0

    def sends(self, rule: Rule, change: float) -> bool:
        """Return whether a message with this change is sent."""
        if not self.sent:
            return True
        if rule.kind == "budget":
            return change != 0 and not change < self.threshold
        least = rule.value * self.change if rule.share and rule.kind == "norm" else rule.value
        return not change < least

    def after(self, rule: Rule, change: float, size: int, sends: bool) -> Trigger:
        """Return the state after the decision. size: the bytes of the upload, even if it is not sent.

        On a logarithmic scale, the threshold of a budget rises by GAIN (1 - B / size) if the upload is sent,
        and falls by GAIN B / size if it is not. The bytes sent in n rounds, counted from the second round on,
        therefore differ from n B by size |log(threshold / first threshold)| / GAIN. This is an integral
        controller of the participation, as in Cummins et al., FedBack,
        https://github.com/michael-cummins/FedBack. Differs: in FedBack the controller is additive, and the
        server has the threshold, which applies to the distance of the global model.
        """
        sent = replace(self, sent=self.sent + 1, change=change, waited=0)
        now = sent if sends else replace(self, waited=self.waited + 1)
        if rule.kind != "budget":
            return now
        if not self.threshold:
            return replace(now, threshold=START * change)
        budget = rule.value if rule.share else rule.value / max(size, 1)
        threshold = self.threshold * math.exp(GAIN * (sends - budget))
        return replace(now, threshold=max(threshold, sys.float_info.min))


def split(spec: str) -> tuple[str, Rule | None, Rule | None]:
    """Split a schedule into the schedule without rules, the rule of +event and the rule of +quiet.

    Raises:
        UsageError: If a rule is invalid, or occurs twice.
    """
    head, *parts = re.split(r"(?<![0-9.]e)\+", spec)  # 1e+3 is a number
    rest, rules = [head], dict[str, Rule]()
    for part in parts:
        name, _, text = part.partition(":")
        if name not in MODIFIERS:
            rest.append(part)
            continue
        if name in rules:
            raise UsageError(f"--participation {spec!r}: +{name} is given twice; give it once")
        rules[name] = _rule(name, text)
    return "+".join(rest), rules.get(EVENT), rules.get(QUIET)


def _rule(name: str, text: str) -> Rule:
    kind, colon, amount = text.partition(":")
    if name == QUIET and not colon:
        kind, amount = "norm", text
    known = KINDS[name]
    share = amount.endswith("%") and kind != "kl" and name == EVENT
    value = number(amount[:-1]) / 100 if share else number(amount)
    if kind not in known or not 0 <= value < math.inf or (kind == "budget" and not value):
        forms = {"norm": "norm:0.5", "kl": "kl:0.001", "budget": "budget:2000 (bytes) or budget:30%"}
        also = ", norm:30%" if name == EVENT else " (or just 0.5)"
        raise UsageError(
            f"--participation +{name}{text and ':'}{text}: write a rule such as norm:0.5{also}, "
            + ", ".join(forms[k] for k in known if k != "norm")
        )
    return Rule(kind, value, share)  # type: ignore[arg-type]
