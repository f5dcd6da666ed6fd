"""The names of scores, which are keys of metrics.jsonl.

This module does not import torch, because programs that only read a run need these names.
"""

from __future__ import annotations

CALIBRATION = ("test_ece", "test_brier")
"""Keys of metrics.jsonl for all likelihoods but gaussian (fedsim.learning.calibration)."""

EXTRA = ("recall_at_5", "micro_recall_at_5", "precision", "micro_f1", "macro_f1")
"""Keys of metrics.jsonl that only some likelihoods have (fedsim.learning.likelihoods)."""

CLIENT_NUMBERS = (
    *("client_accuracy_mean", "client_accuracy_worst", "client_accuracy_spread"),
    *("client_nll_mean", "client_nll_worst", "client_nll_spread"),
)
"""Keys of scores summarised over clients."""

CLIENT_LISTS = ("client_accuracies", "client_nlls")
"""Keys of lists with a score for each client."""
