"""A class derived from an algorithm runs with the states, messages and folds of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fedsim
from fedsim.errors import FedsimError
from fedsim.learning.params import Layout
from fedsim.wire.schema import schema
from fedsim.wire.state_file import decode_state, encode_state
from protocols import find

SOURCE = '''
from __future__ import annotations
from dataclasses import dataclass, replace
import torch
from torch import Tensor
import fedsim
from protocols import fedadmm, fedavg, fedlap
from protocols._site_messages import PointInfo

@dataclass(frozen=True)
class Momentum(fedavg.FedAvg):
    """A state of the server of its own, whose class is defined below."""
    beta: float = 0.5

    def server_init(self, ctx) -> Server:
        return Server(ctx.start.double(), torch.zeros_like(ctx.start, dtype=torch.float64))

    def from_sums(self, server, down, sums, ctx):
        velocity = self.beta * server.velocity + sums.into_mean() - server.mean
        return Server(server.mean + velocity, velocity)

@dataclass(frozen=True)
class Server:
    mean: Tensor
    velocity: Tensor

@dataclass(frozen=True)
class SiteUp:
    mean: fedsim.Mean
    again: fedsim.Mean
    info: PointInfo

@dataclass(frozen=True)
class Family(fedadmm.FedADMM):
    """An upload of its own, where the parent chooses its messages by a property."""

    def client_update(self, client, down, shard, task) -> tuple[fedadmm.Client, SiteUp]:
        draft, up = super().client_update(client, down, shard, task)
        return draft, SiteUp(up.mean, up.mean, up.info)

@dataclass(frozen=True)
class Half(fedavg.FedAvg):
    """server_update, where the parent adds."""

    def server_update(self, server, down, arrivals, ctx):
        after = super().server_update(server, down, arrivals, ctx)
        return replace(after, mean=0.5 * (after.mean + server.mean))

@dataclass(frozen=True)
class Whole(Half):
    """Adds, where the parent has server_update; again fedavg."""

    def add(self, sums, a, ctx):
        return sums.plus(a.up.mean, ctx.sizes[a.client])

@dataclass(frozen=True)
class Unnamed(fedlap.FedLap):
    """An upload that no annotation names."""

    def client_update(self, client, down, shard, task):
        draft, up = super().client_update(client, down, shard, task)
        return draft, Up(up.mean, up.train_loss, 1.0)

@dataclass(frozen=True)
class Up(fedlap.Up):
    more: fedsim.Scalar

@dataclass(frozen=True)
class Empty:
    pass

@dataclass(frozen=True)
class NoDual(fedlap.FedLap):
    def client_init(self, ctx, k) -> Empty:
        return Empty()
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    created = tmp_path_factory.mktemp("variants") / "mine.py"
    created.write_text(SOURCE, encoding="utf-8")
    return created


def run(algo: Any, **settings: Any) -> Any:
    return fedsim.run(algo=algo, clients=4, rounds=3, model="logistic", quiet=True, **settings)


def nll(done: Any) -> list[float]:
    return list(done.metrics["test_nll"])


def test_a_server_of_its_own_is_stored_and_folded(file: Path) -> None:
    spec = f"{file}:Momentum"
    rng = fedsim.RandomStream(seed=0, purpose="server", round=1)
    layout = Layout.named([("w", torch.zeros(2))])
    state = find(spec)().server_init(fedsim.Context(torch.zeros(2), layout, (3, 3), 1, 1, rng))
    assert decode_state(find(spec).server_type, encode_state(state), "state").velocity.tolist() == [0, 0]
    assert nll(run(spec)) != nll(run("fedavg"))
    assert nll(run(spec, hyperparameters={"beta": 0.0})) == pytest.approx(nll(run("fedavg")), rel=1e-6)


def test_an_upload_of_its_own_replaces_the_one_of_a_family(file: Path) -> None:
    assert [f.name for f in schema(find(f"{file}:Family")().exchanges[0].up)] == ["mean", "again", "info"]
    done = run(f"{file}:Family")
    assert nll(done) == nll(run("fedadmm"))
    assert set(done.ledger.query("message == 'upload'")["field"]) >= {"mean", "again"}


def test_server_update_and_sums_replace_each_other(file: Path) -> None:
    average = nll(run("fedavg"))
    assert nll(run(f"{file}:Half")) != average
    assert nll(run(f"{file}:Whole")) == average
    assert nll(run(f"{file}:Whole", tree="2x2")) == nll(run("fedavg", tree="2x2"))


WRONG = {
    "Half": ({"tree": "2x2"}, "mine:Half needs every upload by itself"),
    "Momentum": ({"asynchronous": "fedbuff:2", "compute": "1ms"}, "mine:Momentum has no rule for an upload"),
    "Unnamed": ({}, r"a Up of fedlap.py; it returned a Up of mine.py. A variant .* in the annotation"),
    "NoDual": ({}, "`duals` names 'dual', and Empty has no dual"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_variant_cannot_do_is_refused(name: str, file: Path) -> None:
    settings, words = WRONG[name]
    with pytest.raises(FedsimError, match=words):
        run(f"{file}:{name}", **settings)
