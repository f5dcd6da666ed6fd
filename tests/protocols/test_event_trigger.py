"""Clients that send only what has changed, and broadcasts that are sent only where they have moved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsim.algorithm import Algorithm, At, Task
from fedsim.errors import UsageError, WireError
from fedsim.event_rules import Rule
from fedsim.event_trigger import EventTriggered, measured
from fedsim.experiment import build_algorithm
from fedsim.learning import gaussian
from fedsim.learning.gaussian import Gaussian, kl_divergence
from fedsim.problem import Problem
from fedsim.seeds import RandomStream
from fedsim.wire.state_file import decode_state, encode_state
from protocols import REGISTRY, find
from tests.support.endpoints import three_workers
from tests.support.harness import Run, has_setting, play, problem_of
from workers.storage import client_states

Class = type[Algorithm[Any, Any, Any, Any]]
REFUSED = {
    "mime": "several exchanges",
    "fednova": "a_k, which only an upload tells",
    "bcm": "has one round",
    "fisher_merge": "has one round",
    "fedlap_func": "sends some data only once",
    "fedlap_cov_func": "sends some data only once",
    "fald": "noise is new in every round",
}
"""Algorithms whose clients must send in every round, and why."""
OTHERS = [pytest.param(a, id=a.name) for a in REGISTRY if a.name not in REFUSED and not a.centralised]
EVENTS = "full+gone:0.1+lost:0.2+event:norm:99%"
SETTINGS = {"silent": "last", "covariance": "diagonal"}


def problem(algorithm: Class, participation: str = EVENTS, **changes: Any) -> Problem:
    settings = {name: value for name, value in SETTINGS.items() if has_setting(algorithm, name)}
    described: dict[str, Any] = {"clients": 4, "rounds": 5, "seed": 3} | changes
    return problem_of(algorithm, settings, participation=participation, **described)


def uploads(run: Run) -> tuple[int, int]:
    """The numbers of uploads with fields, and of those without."""
    names = {(e.round, e.client): set[str]() for e in run.entries if e.message == "upload" and e.round}
    for e in run.entries:
        if e.message == "upload" and e.round:
            names[e.round, e.client].add(e.field)
    empty = sum(fields == {""} for fields in names.values())
    return len(names) - empty, empty


# ---- every algorithm


@pytest.mark.parametrize("name", REFUSED)
def test_who_must_send_says_why(name: str) -> None:
    with pytest.raises(UsageError, match=r"\+event") as raised:
        problem(find(name))
    assert REFUSED[name] in str(raised.value)


def test_averages_of_those_who_send_name_the_option() -> None:
    for algorithm in (a for a in REGISTRY if has_setting(a, "silent")):
        with pytest.raises(UsageError, match="--set silent=last"):
            problem_of(algorithm, participation="full+event:norm:1")


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", OTHERS)
def test_events_for_every_algorithm(algorithm: Class, tmp_path: Path) -> None:
    """Bits do not depend on the workers; duals add up, relative 1e-12; some uploads have no fields."""
    played = problem(
        algorithm, EVENTS.replace("99%", "1000" if algorithm.name == "fedlap_func_public" else "99%")
    )
    run = play(played, tmp_path / "one")
    assert play(played, tmp_path / "three", None, three_workers, 3).bits == run.bits
    mismatch = played.algorithm.dual_mismatch(run.outcome.server, run.states)
    assert mismatch is None or mismatch < 1e-12
    sent, empty = uploads(run)
    assert sent and empty
    silent = [(m["round"], k) for m in run.metrics for k in m.get("unchanged", ())]
    assert len(silent) == empty
    second = decode_state(played.algorithm.server_type, encode_state(run.outcome.server), "here")
    assert encode_state(second) == encode_state(run.outcome.server)
    assert run.outcome.model.mean.isfinite().all()


@pytest.mark.parametrize("name", ["fedavg", "fedavgm", "fedlap_cov", "ivon_admm"])
def test_a_threshold_of_zero_changes_no_bit(name: str, tmp_path: Path) -> None:
    schedule = "coin:0.8+gone:0.1+lost:0.2"
    plain = play(problem(find(name), schedule), tmp_path / "plain")
    with_rule = play(problem(find(name), f"{schedule}+event:norm:0"), tmp_path / "zero")
    assert with_rule.bits[0] == plain.bits[0] and with_rule.bits[3:] == plain.bits[3:]
    assert encode_state(with_rule.outcome.server.inner) == encode_state(plain.outcome.server)


@pytest.mark.parametrize(("name", "least"), [("fedlap_cov", 0.3), ("fedavg", 0.3), ("ivon_admm", 1.5)])
@pytest.mark.parametrize("event", ["", "+event:norm:60%"])
def test_a_broadcast_that_has_not_moved_is_not_sent(
    name: str, least: float, event: str, tmp_path: Path
) -> None:
    played = problem(find(name), f"0.8+lost:0.2{event}+quiet:{least}", rounds=8)
    run = play(played, tmp_path / "one")
    assert play(played, tmp_path / "three", None, three_workers, 3).bits == run.bits
    fields = {(e.round, e.client): set[str]() for e in run.entries if e.message == "task"}
    for e in run.entries:
        if e.message == "task":
            fields[e.round, e.client].add(e.field)
    assert any(names == {""} for names in fields.values())
    assert all(names != {""} for (r, _), names in fields.items() if r == 1)
    mismatch = played.algorithm.dual_mismatch(run.outcome.server, run.states)
    assert mismatch is None or mismatch < 1e-12


@pytest.mark.parametrize("name", ["ivon_admm", "fedavgm"])
def test_edge_servers_pass_on_what_is_sent(name: str, tmp_path: Path) -> None:
    """One alone changes no bit; an upload without fields has no share in its sums."""
    flat = play(problem(find(name)), tmp_path / "flat")
    alone = play(problem(find(name), tree="1x4"), tmp_path / "alone")
    assert alone.bits[0] == flat.bits[0] and alone.bits[3] == flat.bits[3]
    two = play(problem(find(name), tree="2x2"), tmp_path / "two")
    mismatch = two.problem.algorithm.dual_mismatch(two.outcome.server, two.states)
    assert mismatch is None or mismatch < 1e-12
    assert uploads(two)[1]


@pytest.mark.parametrize("name", ["scaffold", "feddyn", "fedcurv"])
def test_a_tree_in_which_nobody_sends_changes_nothing(name: str, tmp_path: Path) -> None:
    """They divide by the number of uploads."""
    for tree in ("", "2x2"):
        run = play(problem(find(name), "full+event:norm:1000", tree=tree), tmp_path / f"tree {tree}")
        one = play(problem(find(name), "full", tree=tree, rounds=1), tmp_path / f"one {tree}")
        assert torch.equal(run.outcome.model.mean, one.outcome.model.mean)


def test_a_state_that_was_given_up_keeps_what_the_server_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large z_k may be written over by a commit, but not by an upload that is not sent."""
    monkeypatch.setattr(client_states, "LARGEST_CACHED", 0)
    monkeypatch.setattr(gaussian, "BLOCK", 97)
    played = problem(find("fedadmm"), "full+event:norm:1e9", rounds=2)
    assert played.net.layout.size > 97 * gaussian.CACHED
    run = play(played, tmp_path / "run")
    assert played.algorithm.dual_mismatch(run.outcome.server, run.states) < 1e-12


def test_a_set_up_is_no_broadcast_that_stays(tmp_path: Path) -> None:
    played = problem(find("precond_admm"), "0.5+quiet:0.1", rounds=4)
    run = play(played, tmp_path / "one")
    assert play(played, tmp_path / "three", None, three_workers, 3).bits == run.bits


def test_what_a_receiver_refuses_is_sent(quadratics: Any) -> None:
    """Also where the norm does not see it: the fold says whose upload it is."""
    played, _ = federation(quadratics, "fedlap_cov", Rule("norm", 1e9), covariance="diagonal", rho=0.25)
    played.play()
    client, up = played.clients[0], played.uploads[0]
    task = Task(played.start, played.sizes, 2, 1, 0, RandomStream(0, "client.1", 2, 0), 1, 4)
    down = played.algorithm.broadcast(played.server, played.context())
    good, bad = (replace(up, train_loss=loss) for loss in (1.0, float("nan")))
    algorithm = played.algorithm
    sends = [algorithm.decide(algorithm, client, down, x, task, size=1, fresh=True)[1] for x in (good, bad)]
    assert sends == [False, True]


def test_a_first_upload_has_fields(quadratics: Any) -> None:
    played, _ = federation(quadratics, "fedlap_cov", Rule("norm", 1.0), covariance="full", rho=0.25)
    ctx = replace(played.context(), round=1)
    down = played.algorithm.broadcast(played.server, ctx)
    with pytest.raises(WireError, match="client 2's first upload, in round 1, has no fields"):
        played.algorithm.server_update(played.server, down, [ctx.arrival(2, down, None)], ctx)


def test_a_damped_step_needs_sums() -> None:
    class Alone(type(find("fedlap")())):  # type: ignore[misc]
        exchanges = (replace(find("fedlap")().exchanges[0], sums=None),)

    with pytest.raises(UsageError, match="define add and from_sums"):
        EventTriggered(Alone(), Rule("norm", 1.0), None).check_sums(At((1, 1)))


def test_other_options_that_do_not_fit() -> None:
    with pytest.raises(UsageError, match="fedavg counts every client's last upload again"):
        problem(find("fedavg"), tree="2x2")
    with pytest.raises(UsageError, match="counts for every round in which its client sent nothing"):
        problem(find("fedlap_cov"), tree="2x2")
    with pytest.raises(UsageError, match="uploads of fedavg have no precision"):
        problem(find("fedavg"), "full+event:kl:1")
    with pytest.raises(UsageError, match="broadcasts no precision"):
        problem(find("fedavg"), "full+quiet:kl:1")
    with pytest.raises(UsageError, match="\\+quiet: fola has no rule"):
        problem(find("fola"), "full+quiet:1")
    with pytest.raises(UsageError, match="averages the q_k of a round"):
        problem_of(find("ivon_admm"), participation="full+quiet:1")


# ---- identities on quadratics


def federation(
    quadratics: Any, name: str, rule: Rule | None, quiet: Rule | None = None, **settings: Any
) -> Any:
    algorithm = build_algorithm(find(name), {"optimiser": "exact"} | settings)
    shards = quadratics.regressions(clients=4, dims=6)
    wrapped = EventTriggered(algorithm, rule, quiet) if rule or quiet else algorithm
    return quadratics.Federation(wrapped, shards), shards


def test_event_based_admm_stops_within_its_threshold_of_the_minimiser(quadratics: Any) -> None:
    """Er et al. 2025, Theorem: the error is proportional to the threshold; the duals are kept by clients."""
    errors, sends = [], []
    for threshold in (1e-1, 1e-3, 1e-5):
        played, shards = federation(quadratics, "fedadmm", Rule("norm", threshold), silent="last", rho=20.0)
        exact = quadratics.minimiser(shards, 0.1)
        for _ in range(300):
            played.play()
        errors.append(quadratics.error(played.mean, exact))
        sends.append(sum(c.trigger.sent for c in played.clients))
    assert sends[0] < sends[1] < sends[2] < 4 * 300
    for error, threshold in zip(errors, (1e-1, 1e-3, 1e-5), strict=True):
        assert error < 10 * threshold


def test_a_silent_client_of_the_admm_family_moves_its_own_dual(quadratics: Any) -> None:
    """z_k waits for the upload; the server's product is that of all z_k, relative 1e-12."""
    played, _ = federation(quadratics, "bayes_admm", Rule("norm", 1e9), silent="last", covariance="full")
    played.play()
    z, site = played.clients[0].inner.dual.z, played.clients[0].inner.dual.site
    played.play()
    now = played.clients[0].inner.dual
    assert torch.equal(now.z.shift, z.shift) and not torch.equal(now.site.shift, site.shift)
    assert played.server.inner.total.mismatch(_all(played, "z")) < 1e-12


def _all(played: Any, name: str) -> Gaussian:
    first, *rest = (getattr(c.inner.dual, name) for c in played.clients)
    total = first
    for factor in rest:
        total = total * factor
    return total


def test_a_broadcast_that_stays_is_what_clients_answer(quadratics: Any) -> None:
    """Under a threshold that nothing reaches, every round answers the first broadcast."""
    played, _ = federation(quadratics, "fedlap_cov", None, Rule("norm", 1e9), covariance="full", rho=0.25)
    for _ in range(4):
        played.play()
    assert played.server.got_in.tolist() == [1, 1, 1, 1] and len(played.server.got) == 1
    assert all(c.got_in == 1 for c in played.clients)
    assert played.algorithm.dual_mismatch(played.server, played.clients) < 1e-12


def test_a_damped_dual_step_counts_for_the_rounds_without_an_upload(quadratics: Any) -> None:
    """Round 1 sends by d; after two silent rounds the step is 3 d, and of ten at most 1, on both sides."""
    for silent, times in ((2, 3.0), (10, 4.0)):
        played, _ = federation(quadratics, "fedlap_cov", Rule("norm", 1e9), covariance="full", rho=0.25)
        for _ in range(1 + silent):
            played.play()
        before = played.clients[0].inner.site
        down = played.algorithm.broadcast(played.server, played.context())
        played.algorithm = replace(played.algorithm, up=Rule("norm", 0.0))
        played.play()
        up = played.uploads[0]
        q_k, q_g = (message.factor for message in (up, down))
        assert played.clients[0].inner.site.mismatch(before * (q_k / q_g) ** (0.25 * times)) < 1e-12
        assert played.algorithm.dual_mismatch(played.server, played.clients) < 1e-12


def test_what_a_rule_measures() -> None:
    generator = torch.Generator().manual_seed(0)
    mean, other = (torch.randn(7, generator=generator, dtype=torch.float64) for _ in range(2))
    S, S_p = (torch.rand(7, generator=generator, dtype=torch.float64) + 0.5 for _ in range(2))
    q, p = Gaussian.at(mean, S), Gaussian.at(other, S_p)
    assert measured(Rule("norm", 1.0), q, p) == pytest.approx(float((mean - other).norm()), rel=1e-12)
    expected = kl_divergence(mean, S, other, S_p) / 7
    assert measured(Rule("kl", 1.0), q, p) == pytest.approx(expected, rel=1e-12)
    full = (Gaussian.at(m, torch.diag(s)) for m, s in ((mean, S), (other, S_p)))
    assert measured(Rule("kl", 1.0), *full) == pytest.approx(expected, rel=1e-12)
    assert measured(Rule("kl", 1.0), q, Gaussian(p.shift, -S_p)) == float("inf")
