"""Broadcasts coded against the last one that each client got (codec flag +own)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsim.algorithm import Algorithm, Context
from fedsim.errors import UsageError
from fedsim.learning.params import Layout
from fedsim.own_references import OwnReferences
from fedsim.problem import Problem
from fedsim.seeds import RandomStream
from fedsim.wire.message_context import codec_stream, of_broadcast
from fedsim.wire.schema import all_fields, map_tensors
from fedsim.wire.state_file import encode_state
from protocols import REGISTRY, find
from protocols._site_messages import PosteriorInfo, Up as SiteUp
from tests.support.endpoints import three_workers
from tests.support.harness import Run, exchanged, has_setting, play, problem_of
from tests.support.kept_runs import command, kept_run

Class = type[Algorithm[Any, Any, Any, Any]]
STEPS = {"mean": "sigma:10%+own", "precision": "ratio:1+own", "curvature": "ratio:1+own"}
UP = {"up.mean": "sigma:20%+random", "up.precision": "ratio:1+random"}
SCHEDULE = "0.5+gone:0.1+lost:0.2"
MISMATCH = 1e-12
"""The sums are float64: the largest relative difference between a sum and the duals that it is of."""


def down_of(algorithm: Class) -> dict[str, str]:
    """A codec with +own for every field of the broadcast that can have one."""
    fields = {f.name: f for e in algorithm().exchanges for f in all_fields(e.down)}
    whole = [name for name, f in fields.items() if f.kind.dims == ("P",)]
    return {f"down.{name}": STEPS[name] for name in whole if name in STEPS and {*STEPS} & {*whole} - {"mean"}}


def takes(algorithm: Class) -> bool:
    if not down_of(algorithm) or algorithm.centralised:
        return False
    try:
        OwnReferences(algorithm())
    except UsageError:
        return False
    return True


ABLE = [pytest.param(a, id=a.name) for a in REGISTRY if takes(a)]


def problem(algorithm: Class, **changes: Any) -> Problem:
    settings = {"covariance": "diagonal"} if has_setting(algorithm, "covariance") else {}
    described: dict[str, Any] = {"clients": 4, "rounds": 6, "seed": 3, "participation": SCHEDULE} | changes
    described.setdefault("codecs", down_of(algorithm))
    return problem_of(algorithm, settings, **described)


def names(run: Run, field: str) -> list[str]:
    rows = exchanged(run.entries)
    return [e.codec for e in rows if e.direction == "down" and e.field == field and e.layer == "values"]


def test_several_algorithms_take_it() -> None:
    assert {"fedlap_cov", "ivon_admm", "ivon_pvi", "fedgvi"} <= {p.id for p in ABLE}


@pytest.mark.parametrize("name", ["fola", "laplace_offline", "fedcurv", "fedivon", "ba_ivon"])
def test_a_server_that_averages_uploads_as_they_are_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="averages uploads as they are"):
        OwnReferences(find(name)())


def test_the_coding_error_of_a_broadcast_does_not_enter_the_average() -> None:
    """Clients that return the broadcast that they got change nothing, however coarse it was."""
    algorithm, start = OwnReferences(find("ivon_admm")()), torch.tensor([0.5, -1.0, 2.0])
    ctx = Context(start, Layout.named([("w", start)]), (5, 5, 5), 1, 1, RandomStream(0, "server", 1))
    server = algorithm.server_init(ctx)
    exact = algorithm.broadcast(server, ctx)
    coarse = [replace(exact, mean=exact.mean + k, precision=exact.precision * 2.0**k) for k in (1, 3)]
    info = PosteriorInfo(*torch.zeros(4))
    ups = ((k, SiteUp(down.mean, down.precision, info)) for k, down in enumerate(coarse))
    arrivals = (ctx.arrival(k, down, up) for (k, up), down in zip(ups, coarse, strict=True))
    after = algorithm.broadcast(algorithm.server_update(server, exact, arrivals, ctx), ctx)
    for field in ("mean", "precision"):
        torch.testing.assert_close(getattr(after, field), getattr(exact, field), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("algorithm", ABLE)
def test_both_sides_keep_the_same_broadcasts_and_duals_add_up(algorithm: Class, tmp_path: Path) -> None:
    played = problem(algorithm)
    run = play(played, tmp_path / "one")
    assert play(played, tmp_path / "three", None, three_workers, 3).bits == run.bits
    mismatch = played.algorithm.dual_mismatch(run.outcome.server, run.states)
    assert mismatch is None or mismatch < MISMATCH
    got = [client.got for client in run.states]
    assert any(g is not None for g in got)
    for ours, theirs in zip(run.outcome.server.got, got, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or encode_state(ours) == encode_state(theirs)
    assert STEPS["mean"].replace("10%", "10.0%") in names(run, "mean")
    assert run.outcome.model.mean.isfinite().all()


def test_the_first_reference_is_the_new_servers_broadcast(tmp_path: Path) -> None:
    """Without a change there is nothing to send: the first broadcast has no integer other than 0."""
    played = problem(find("fedlap_cov"), rounds=1, participation="full")
    algorithm, new = played.algorithm, played.context(0, 0)
    assert isinstance(algorithm, OwnReferences)
    first = play(played, tmp_path / "run").outcome.server.got[0]
    inner = algorithm.inner.broadcast(algorithm.inner.server_init(new), replace(new, round=1, exchange=1))
    assert encode_state(first) == encode_state(map_tensors(inner, torch.Tensor.float))


@pytest.mark.parametrize("name", ["fedlap_cov", "ivon_admm"])
def test_fine_steps_give_what_dense_broadcasts_give(name: str, tmp_path: Path) -> None:
    """Every decoded broadcast is within half a step: a hundred-thousandth of a standard deviation."""
    fine = {"down.mean": "sigma:2e-5+own", "down.precision": "ratio:2e-5+own"}
    runs = [
        play(problem(find(name), codecs=codecs, participation="0.5"), tmp_path / str(i)).outcome.model
        for i, codecs in enumerate(({}, fine))
    ]
    dense, coded = (model.mean for model in runs)
    assert 0 < float((coded - dense).norm() / dense.norm()) < 1e-3


@pytest.mark.parametrize("flag", ["random", "dither"])
@pytest.mark.parametrize("own", [True, False])
def test_only_broadcasts_coded_for_one_client_have_errors_of_their_own(
    flag: str, own: bool, tmp_path: Path
) -> None:
    """Every client is to get the same values, from the same reference."""
    mean = f"sigma:1+{flag}" + "+own" * own
    codecs = {"down.mean": mean, "down.precision": "ratio:1+own"}
    run = play(problem(find("fedlap_cov"), codecs=codecs, rounds=2, participation="full"), tmp_path / "run")
    means = [got.mean for got in run.outcome.server.got]
    different = len({m.numpy().tobytes() for m in means})
    assert different == (len(means) if own else 1)
    for ours, client in zip(run.outcome.server.got, run.states, strict=True):
        assert encode_state(ours) == encode_state(client.got)


def test_random_numbers_of_a_broadcast_are_not_those_of_an_upload() -> None:
    stream = codec_stream(3, 2, 1)
    contexts = [of_broadcast(None, stream, client) for client in (-1, 0, 1)]
    keys = {known.own.key("random") for known in contexts if known.own is not None}
    keys |= {codec_stream(3, 2, 1, client).key("random") for client in (0, 1)}
    assert len(keys) == 5 and contexts[0].own == stream


@pytest.mark.parametrize("flag", ["", "+random"])
def test_a_run_is_resumed_and_verified(flag: str, tmp_path: Path) -> None:
    down = {field: name.replace("+own", f"{flag}+own") for field, name in down_of(find("fedlap_cov")).items()}
    codecs = UP | down
    options: dict[str, Any] = {"clients": 6, "participation": "2", "codecs": codecs}
    whole, out = kept_run(tmp_path / "whole", rounds=5, **options), tmp_path / "stopped"
    kept_run(out, rounds=3, **options)
    assert command("resume", out, "--rounds", "5", "--quiet").code == 0
    verified = command("verify", out)
    assert verified.code == 0 and "model_sha256 is identical" in verified.out
    assert [(out / f).read_bytes() for f in ("model.safetensors",)] == [
        (whole / f).read_bytes() for f in ("model.safetensors",)
    ]
    assert f"ratio:1.0{flag}+own" in command("codecs", out).out


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("precond_admm", {}, "a round of this algorithm has several"),
        ("fedlap_cov_func", {}, "a part that is one client's own"),
    ],
)
def test_what_it_does_not_fit_says_why(name: str, changes: dict[str, Any], why: str) -> None:
    codecs = {"down.precision": "ratio:1+own"}
    with pytest.raises(UsageError, match=why):
        _ = problem(find(name), **({"codecs": codecs, "participation": "full"} | changes)).tree
