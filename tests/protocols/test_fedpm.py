"""FedPM: its server's Beta distribution, its fixed weights, and runs with masks on the wire."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedsim.errors import UsageError
from fedsim.experiment import Experiment
from fedsim.learning.params import Layout, Slice
from fedsim.learning.solvers.mask_training import signed_constants
from fedsim.problem import Problem
from launch.runs.folder import RunFolder
from protocols.fedpm import FedPM, Server, Up

D = 6


def context(quadratics: SimpleNamespace, round: int, asked: int) -> Any:
    federation = quadratics.Federation(FedPM(), quadratics.regressions(4, D))
    federation.round = round
    return federation.context(asked=asked)


def test_theta_is_the_mean_of_the_masks_since_the_last_reset(quadratics: SimpleNamespace) -> None:
    """Two of four clients a round: the counts begin anew every second round."""
    draws = torch.Generator().manual_seed(0)
    member, kept = FedPM(), []
    server = member.server_init(context(quadratics, 0, 0))
    assert torch.equal(server.theta, torch.full((D,), 0.5, dtype=torch.float64))
    for r in range(1, 6):
        masks = [(torch.rand(D, generator=draws) < 0.5).float() for _ in range(2)]
        kept = masks if r % 2 == 1 else kept + masks
        ups = [(k, Up(m, 0.0)) for k, m in enumerate(masks)]
        server = member.server_update(server, None, iter(ups), context(quadratics, r, 2))
        assert torch.equal(server.theta, torch.stack(kept).double().mean(0))
        assert torch.equal(server.alpha + server.beta, torch.full((D,), 2.0 + len(kept), dtype=torch.float64))


def test_a_reset_is_not_lost_with_the_uploads_of_its_round(quadratics: SimpleNamespace) -> None:
    """Round 3 would begin anew and folds nothing; round 4 does it then."""
    member, one = FedPM(), [(0, Up(torch.ones(D), 0.0)), (1, Up(torch.ones(D), 0.0))]
    server = member.server_init(context(quadratics, 0, 0))
    for r in (1, 2, 4):
        server = member.server_update(server, None, iter(one), context(quadratics, r, 2))
    assert torch.equal(server.alpha, torch.full((D,), 3.0, dtype=torch.float64))


def test_fixed_weights_are_signs_times_the_constant_of_their_layer() -> None:
    layout = Layout((Slice("a", (4, 8), 0, 32), Slice("b", (4,), 32, 4), Slice("c", (2, 3, 5, 5), 36, 150)))
    start = torch.randn(186, generator=torch.Generator().manual_seed(1))
    fixed = signed_constants(start, layout)
    assert torch.equal(fixed.sign(), start.sign())
    expected = torch.cat([torch.full((36,), 0.5), torch.full((150,), (2 / 75) ** 0.5)])
    assert torch.allclose(fixed.abs(), expected)


def test_a_quadratic_loss_has_no_mask(quadratics: SimpleNamespace) -> None:
    federation = quadratics.Federation(FedPM(), quadratics.regressions(4, D))
    with pytest.raises(UsageError, match="no network"):
        federation.play()


def test_masks_go_up_unless_the_user_says_otherwise() -> None:
    def codecs(**options: str) -> Mapping[str, Mapping[str, str]]:
        experiment = Experiment(algo="fedpm", model="logistic", codecs=options)
        return Problem.build(experiment, FedPM(), None).codecs

    assert codecs() == {"down": {}, "up": {"probability": "bernoulli"}, "edge": {}}
    dense = {"probability": "dense"}
    assert codecs(**dense) == {"down": dense, "up": dense, "edge": {}}
    assert Server(torch.ones(1), torch.ones(1)).theta.item() == 0.5


@pytest.mark.parametrize(
    ("codecs", "most"),
    [
        ({}, 1.0),
        ({"up.probability": "mrc:6"}, 0.2),
        ({"up.probability": "mrc:6", "down.probability": "mrc:6x10+last"}, 0.2),
        ({"up.probability": "mrc:6", "down.probability": "levels:4"}, 0.2),
    ],
)
def test_masks_learn_with_few_bits(
    launched: Callable[..., Path], codecs: dict[str, str], most: float
) -> None:
    """Upwards at most so many bits a parameter, with headers; digits, a network of 185,810 random weights."""
    folder = launched(
        f"masks{len(codecs)}{max(codecs.values(), default='')}".replace(":", "").replace("+", ""),
        algo="fedpm",
        model="mlp_500_300",
        rounds=4,
        clients=4,
        codecs=codecs,
    )
    run = RunFolder.open(folder)
    rounds, clients, params = 4, 4, run.params
    assert 8 * run.summary["bytes_up"] / (rounds * clients * params) < most
    assert run.summary["test_accuracy"] > 0.7
