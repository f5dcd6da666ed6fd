"""Error feedback around algorithms that upload increments."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsim.algorithm import Algorithm, Task
from fedsim.error_feedback import ErrorFeedback, error_feedback
from fedsim.errors import UsageError
from fedsim.experiment import build_algorithm
from fedsim.seeds import RandomStream
from fedsim.wire.state_file import decode_state, encode_state
from protocols import REGISTRY, find

KEEPS_A_TENTH = {"down": {}, "up": {"delta": "topk:0.1"}}


def descent() -> Algorithm[Any, Any, Any, Any]:
    """Plain distributed gradient descent: every client sends its gradient."""
    return build_algorithm(find("mbsgd"), {"server_lr": 0.02, "beta": 0.0, "batch_size": 0})


def test_a_sparse_descent_reaches_the_minimiser_only_with_feedback(quadratics: Any) -> None:
    shards = quadratics.regressions(clients=3, dims=20, spread=0.2)
    exact = quadratics.minimiser(shards, 0.0)
    step = {"server_lr": 0.001, "beta": 0.0, "batch_size": 0}
    algorithm = build_algorithm(find("mbsgd"), step)
    errors = {}
    for name, selected in {
        "dense": (algorithm, None),
        "sparse": (algorithm, KEEPS_A_TENTH),
        "fed back": (error_feedback(algorithm, frozenset({"delta"})), KEEPS_A_TENTH),
    }.items():
        federation = quadratics.Federation(selected[0], shards, codecs=selected[1])
        for _ in range(1000):
            federation.play()
        errors[name] = quadratics.error(federation.mean, exact)
    assert errors["dense"] < 1e-4
    assert errors["fed back"] < 0.1  # it hovers within a step times the residual
    assert errors["sparse"] > 5 * errors["fed back"]


def test_sent_and_owed_add_up_to_what_was_meant(quadratics: Any) -> None:
    """Relative 1e-12, under partial participation; a lost upload leaves the residual as it was."""
    shards = quadratics.regressions(clients=3)
    wrapped = error_feedback(descent(), frozenset({"delta"}))
    meant = [torch.zeros(20, dtype=torch.float64) for _ in shards]
    sent = [torch.zeros(20, dtype=torch.float64) for _ in shards]
    federation = quadratics.Federation(wrapped, shards, codecs=KEEPS_A_TENTH)
    plans = [((0, 1, 2), ()), ((0, 2), (2,)), ((1, 2), ()), ((0, 1, 2), (0,)), ((0, 1, 2), ())]
    for participants, lost in plans:
        before = [c.residuals[0] for c in federation.clients]
        mean = federation.mean.float()
        federation.play(participants, lost)
        for k in participants:
            if k in lost:
                assert torch.equal(federation.clients[k].residuals[0], before[k])
            else:
                meant[k] += shards[k].gradient(mean) / shards[k].size
                sent[k] += federation.uploads[k].delta.double()
    for k in range(3):
        owed = federation.clients[k].residuals[0]
        assert owed.norm() > 0
        assert (sent[k] + owed - meant[k]).norm() <= 1e-12 * meant[k].norm()


def test_what_is_not_sent_is_owed(quadratics: Any) -> None:
    """All of p_k = gradient + e_k, if the client's rule sends nothing (+event)."""
    wrapped = error_feedback(descent(), frozenset({"delta"}))
    federation = quadratics.Federation(wrapped, quadratics.regressions(clients=2), codecs=KEEPS_A_TENTH)
    federation.play()
    client, down = federation.clients[0], wrapped.broadcast(federation.server, federation.context())
    rng = RandomStream(0, "client.1", 2, 0)
    task = Task(federation.start, federation.sizes, round=2, exchange=1, client=0, rng=rng)
    draft, up = wrapped.client_update(client, down, federation.shards[0], task)
    after = wrapped.client_unsent(draft, down, replace(up, delta=up.delta / 2), task)
    fresh = federation.shards[0].gradient(down.mean) / federation.shards[0].size
    assert client.residuals[0].any()
    assert torch.equal(after.residuals[0], fresh.double() + client.residuals[0])


def test_without_a_loss_nothing_is_owed_and_nothing_changes(quadratics: Any) -> None:
    shards = quadratics.regressions(clients=3)
    plain = quadratics.Federation(descent(), shards)
    wrapped = quadratics.Federation(ErrorFeedback(descent(), ((1, "delta"),)), shards)
    for _ in range(3):
        plain.play()
        wrapped.play()
    assert torch.equal(plain.mean, wrapped.mean)
    assert all(not c.residuals[0].any() for c in wrapped.clients)


def test_its_client_state_goes_through_a_file(quadratics: Any) -> None:
    wrapped = error_feedback(build_algorithm(find("fedavgm"), {"optimiser": "exact"}), frozenset({"delta"}))
    federation = quadratics.Federation(wrapped, quadratics.regressions(clients=2), codecs=KEEPS_A_TENTH)
    federation.play()
    state = federation.clients[0]
    second = decode_state(wrapped.client_type, encode_state(state), "here")
    assert encode_state(second) == encode_state(state)


def test_only_algorithms_whose_uploads_are_increments_have_it() -> None:
    having = {a.name for a in REGISTRY if a.fed_back}
    assert having == {"fedavgm", "fedadam", "fedyogi", "fedadagrad", "fedpa", "mbsgd", "fednova"}
    with pytest.raises(UsageError, match="fedlap_cov uploads no plain increments"):
        error_feedback(find("fedlap_cov")(), frozenset({"precision"}))
    with pytest.raises(UsageError, match=r"--codec up\.delta=topk:0\.1"):
        error_feedback(descent(), frozenset())


def test_a_run_has_it_from_its_configuration(launched: Any) -> None:
    """Over the real wire: bytes are those of the codec, and the model is better for it."""
    import json

    runs: dict[bool, dict[str, Any]] = {}
    for on in (False, True):
        folder: Path = launched(
            f"feedback-{on}",
            algo="fedavgm",
            rounds=12,
            clients=4,
            codecs={"up.delta": "topk:0.02"},
            error_feedback=on,
            hyperparameters={"beta": 0.0},
        )
        runs[on] = json.loads((folder / "summary.json").read_text())
        hyperparameters = json.loads((folder / "manifest.json").read_text())["experiment"]["hyperparameters"]
        assert hyperparameters["server.beta"] == 0.0
    up = [runs[on]["bytes"]["algorithm"]["up"]["delta"] for on in (False, True)]
    assert all(sum(layers.values()) < 0.05 * 4 * 12 * 4 * runs[True]["params"] for layers in up)
    assert runs[True]["test_nll"] < runs[False]["test_nll"]
