"""An algorithm states its types once, and the ADMM family's formulas agree with its exponents."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from fedsim.algorithm import Algorithm, At, Context, Exchange
from fedsim.errors import UsageError
from fedsim.learning import gaussian
from fedsim.learning.gaussian import Gaussian
from fedsim.learning.ownership import spent
from fedsim.learning.params import Layout
from fedsim.seeds import RandomStream
from fedsim.wire.schema import schema
from protocols._dual_rule import MeanFactor
from protocols.bayes_admm import BayesADMM
from protocols.fedadmm import FedADMM
from protocols.fedlap import Client, Down, FedLap, Server, Up
from protocols.ivon_admm import IvonADMM
from protocols.precond_admm import PrecondADMM
from protocols.related.scaffold import Scaffold, Sums


def test_the_types_are_read_from_the_generic_base() -> None:
    assert (FedLap.server_type, FedLap.client_type) == (Server, Client)
    (exchange,) = FedLap().exchanges
    assert exchange == Exchange(Down, Up, exchange.sums)


def test_the_message_of_sums_follows_from_what_add_returns() -> None:
    """A Tensor is sent under the name of the server's field in `duals`; a message is sent as it is."""
    (tensor,), (message,) = FedLap().exchanges, Scaffold().exchanges
    assert message.sums is Sums
    assert tensor.sums is not None
    assert [(f.name, f.kind.dtype) for f in schema(tensor.sums)] == [("dual", "f64")]


def test_sums_are_written_over_while_uploads_are_added_and_are_the_servers_alone_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gaussian, "BLOCK", 7)
    algorithm, ctx = (
        FedLap(rho=0.5),
        Context(torch.zeros(50), Layout(()), (1, 1), 1, 1, RandomStream(0, "fold", 1)),
    )
    server, down = algorithm.server_init(ctx), Down(torch.zeros(50))
    sums = algorithm.sums(server, down, ctx)
    assert sums is not server.dual
    after = algorithm.added(sums, (ctx.arrival(k, down, Up(torch.ones(50), 0.0)) for k in (0, 1)), ctx)
    assert after is sums
    assert torch.equal(after, torch.ones(50, dtype=torch.float64))
    assert spent(after) is None
    assert not server.dual.any()


def test_sums_without_a_message_need_a_field_of_the_server() -> None:
    class Nameless(FedLap):
        duals: ClassVar[dict[str, str]] = {}

    with pytest.raises(UsageError, match="duals names one field of Server"):
        _ = Nameless().exchanges


def test_types_that_a_class_states_itself_count_first() -> None:
    class Explicit(Algorithm[Server, Client, Down, Up]):
        server_type: ClassVar[type] = dict
        client_type: ClassVar[type] = list

    assert (Explicit.server_type, Explicit.client_type) == (dict, list)


def test_a_subclass_keeps_the_types_of_its_base() -> None:
    class Derived(FedLap):
        pass

    assert (Derived.server_type, Derived.client_type) == (Server, Client)


def test_any_is_no_type() -> None:
    class Untyped(Algorithm[Any, Any, Any, Any]):
        pass

    assert not hasattr(Untyped, "server_type")
    Untyped.__abstractmethods__ = frozenset()
    with pytest.raises(UsageError, match="Untyped names no messages"):
        _ = Untyped().exchanges  # type: ignore[abstract]


SIZES = (3, 5, 2)
SILENT = [FedADMM(), PrecondADMM(), BayesADMM(), BayesADMM(rho="1/K"), IvonADMM(), IvonADMM(rho_server=0.25)]


@pytest.mark.parametrize("algorithm", SILENT, ids=lambda a: a.name)
def test_the_exponents_are_those_of_the_formulas(algorithm: Any) -> None:
    """(q_k / q_g)^gamma is the dual step; q_k^rho_server is what the server's step has of every client."""
    at = At(SIZES)
    rho_server, gamma = algorithm.exponents(at)
    ones = torch.ones(2, dtype=torch.float64)
    one, unit = Gaussian(0 * ones, 0 * ones), Gaussian(ones, ones)
    assert torch.equal(algorithm.dual_step(unit, one, at).shift, gamma * ones)
    by_means = algorithm.server_step(one, one, MeanFactor(unit, 1), at)
    by_sites = algorithm.server_step(one, unit ** (rho_server * at.K), MeanFactor(None, 3), at)
    assert torch.equal(by_means.shift, by_sites.shift)
    assert torch.equal(by_means.precision, by_sites.precision)
