"""Evaluation with posterior samples: against an average by hand, over the wire, and in metrics.jsonl."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

import fedsim.evaluation
from fedsim.errors import WireError
from fedsim.evaluation import CHUNK, ChunkScore
from fedsim.experiment import Experiment, build_algorithm
from fedsim.learning.gaussian import Gaussian, Point, Samples
from fedsim.learning.likelihoods import LIKELIHOODS, added
from fedsim.learning.solvers.first_order import LocalTraining, minimise
from fedsim.participation import Participation
from fedsim.problem import Problem
from fedsim.seeds import RandomStream
from fedsim.wire.envelope import VERSION, Envelope, Header, decode, encode, pack, unpack
from launch.cli import main
from protocols.fedavg import FedAvg
from protocols.ivon_admm import IvonADMM
from tests.support.harness import listed, play
from tests.support.tolerances import gamma
from workers.protocol_messages import (
    Evaluate,
    EvaluateFull,
    EvaluateSamples,
    ToEvaluate,
    pack_score,
    to_evaluate,
    to_score,
    unpack_score,
)
from workers.worker.runtime import WorkerRuntime

P, CLASSES, SAMPLES, ROUND = 640, 10, 7, 3
EQUAL = gamma(4 * (64 + 20))
"""Relative, of a sum of NLL: a logit is a float32 sum of 64 terms, in an order of BLAS's own, whose absolute
values add up to about four times the loss; the loss has some twenty operations more."""


def problem_of(algorithm: type[Any] = FedAvg, samples: int = SAMPLES, **changes: Any) -> Problem:
    described: dict[str, Any] = {"model": "logistic", "clients": 1, "rounds": 2} | changes
    experiment = Experiment(algo=algorithm.name, eval_samples=samples, **described)
    return Problem.build(experiment, build_algorithm(algorithm, changes.get("hyperparameters", {})), None)


@pytest.fixture(scope="module", autouse=True)
def _numerics() -> Iterator[None]:
    """A launch in this process changes torch's settings, which other tests must not feel."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)


@pytest.fixture(scope="module")
def problem() -> Problem:
    return problem_of()


@pytest.fixture(scope="module")
def mean(problem: Problem) -> Tensor:
    """A model that has learned something: (P,) float32."""
    shard, how = problem.shard(0), LocalTraining(epochs=5, lr=1e-2)
    return minimise(shard, problem.start, how=how, rng=RandomStream(0, "fit"), round=1).weights


def narrow(draws: int = 1) -> Tensor:
    """Diagonal precisions from about 3 to 60: (P,) float32."""
    return (1 + torch.rand(P, generator=torch.Generator().manual_seed(draws))).exp() ** 2


def wide() -> Tensor:
    """A full precision whose entries float32 holds: (P, P)."""
    factors = torch.randn(P, 30, generator=torch.Generator().manual_seed(2)) / 3
    return torch.diag(narrow()) + factors @ factors.mT


def posterior(mean: Tensor, kind: str) -> Gaussian:
    precision: dict[str, Tensor | float] = {"isotropic": 25.0, "diagonal": narrow(), "full": wide()}
    return Gaussian.at(mean, precision[kind])


def held_out(problem: Problem) -> tuple[Tensor, Tensor]:
    inputs = torch.tensor(problem.dataset.test_inputs).flatten(1).float() / 16
    return inputs, torch.tensor(problem.dataset.test_targets)


def by_hand(problem: Problem, q: Gaussian, count: int = SAMPLES) -> ChunkScore:
    """Softmax of x W', averaged over m + R^-1 noise with S = R'R, from the stream of this round."""
    inputs, targets = held_out(problem)
    noise = RandomStream(problem.experiment.seed, "posterior", ROUND).torch("samples")
    precision = torch.as_tensor(q.precision, dtype=torch.float64)
    root = (
        torch.linalg.cholesky(precision).mT
        if precision.dim() == 2
        else torch.diag(precision.expand(P)).sqrt()
    )
    average = torch.zeros(len(targets), CLASSES, dtype=torch.float64)
    for _ in range(count):
        z = torch.randn(P, generator=noise).double()
        weights = q.mean + torch.linalg.solve(root, z)
        average += (inputs.double() @ weights.reshape(CLASSES, -1).mT).softmax(dim=1) / count
    at_mean = (inputs.double() @ q.mean.reshape(CLASSES, -1).mT).softmax(dim=1)
    rows = torch.arange(len(targets))
    right = [int((p.argmax(dim=1) == targets).sum()) for p in (at_mean, average)]
    nll = [-float(p[rows, targets].log().sum()) for p in (at_mean, average)]
    # of the tally the first part alone: tests/fedsim/learning/test_calibration.py has the others
    mine, ensemble = ((float(len(targets)), float(r), n) for r, n in zip(right, nll, strict=True))
    return ChunkScore(mine, ensemble)


NLL = 2
"""Its place in a tally: examples, correct, nll."""

WIDTH = LIKELIHOODS["categorical"].width(CLASSES)


def assert_same(result: ChunkScore, expected: ChunkScore, tolerance: float = EQUAL) -> None:
    for one, other in ((result.tally, expected.tally), (result.ensemble, expected.ensemble)):
        assert one[:NLL] == other[:NLL]
        assert one[NLL] == pytest.approx(other[NLL], rel=tolerance)


# ---- the average


@pytest.mark.parametrize("kind", ["isotropic", "diagonal", "full"])
def test_an_ensemble_is_the_softmax_averaged_over_the_streams_samples(
    kind: str, problem: Problem, mean: Tensor
) -> None:
    q = posterior(mean, kind)
    result = problem.evaluation.score(q, 0, ROUND)
    assert_same(result, by_hand(problem, q))
    assert abs(result.ensemble[NLL] / result.tally[NLL] - 1) > 0.01  # it is another number than the mean's
    assert problem.evaluation.score(q, 0, ROUND) == result
    other = problem.evaluation.score(q, 0, ROUND + 1)
    assert other.tally == result.tally
    assert other.ensemble[NLL] != result.ensemble[NLL]


@pytest.mark.parametrize("kind", ["diagonal", "full"])
def test_an_ensemble_does_not_depend_on_the_chunks(
    kind: str, problem: Problem, mean: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = posterior(mean, kind)
    whole = problem.evaluation.score(q, 0, ROUND)
    assert problem.evaluation.chunks == 1 and whole.tally[0] < CHUNK
    monkeypatch.setattr(fedsim.evaluation, "CHUNK", 100)
    assert problem.evaluation.chunks == 4
    parts = [problem.evaluation.score(q, chunk, ROUND) for chunk in (3, 1, 0, 2)]
    tally, ensemble, _ = (reduce(added, tallies) for tallies in zip(*parts, strict=True))
    assert_same(ChunkScore(tally, ensemble), whole)


def test_a_point_or_no_samples_have_no_ensemble(problem: Problem, mean: Tensor) -> None:
    q = posterior(mean, "diagonal")
    for score in (
        problem.evaluation.score(Point(q.mean), 0, ROUND),
        problem_of(samples=0).evaluation.score(q, 0, ROUND),
    ):
        assert score == ChunkScore(problem.evaluation.score(q, 0, ROUND).tally)


@pytest.mark.parametrize("kind", ["isotropic", "diagonal", "full"])
def test_a_mean_that_is_not_a_number_has_a_score_that_is_none(
    kind: str, problem: Problem, mean: Tensor
) -> None:
    rejected = mean.clone()
    rejected[::64] = math.nan  # one weight of every class
    result = problem.evaluation.score(posterior(rejected, kind), 0, ROUND)
    assert math.isnan(result.tally[NLL]) and math.isnan(result.ensemble[NLL])
    assert result.tally[0] == len(problem.dataset.test_targets)
    assert math.isnan(problem.evaluation.score(Point(rejected), 0, ROUND).tally[NLL])
    carried = unpack_score(reply(pack_score(result)), WIDTH, sampled=True)
    assert math.isnan(carried.tally[NLL]) and math.isnan(carried.ensemble[NLL])
    assert carried.tally[:NLL] == result.tally[:NLL]


# ---- over the wire


def reply(*frames: bytes) -> Envelope:
    return Envelope(Header(VERSION, "score", "run"), b"", frames)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("width", [2, 3, 1505])
def test_a_score_crosses_the_wire_whole_and_only_in_its_own_length(width: int, sampled: bool) -> None:
    tally = tuple(float(i) / 3 for i in range(width))
    score = ChunkScore(tally, tuple(-x for x in tally) if sampled else ())
    data = pack_score(score)
    assert len(data) == 8 * width * (1 + sampled)
    assert unpack_score(reply(data), width, sampled) == score
    for wrong in ((data[:-8],), (data + b"x",), (data, data), (), (b"",)):
        with pytest.raises(WireError, match="instead of"):
            unpack_score(reply(*wrong), width, sampled)
    with pytest.raises(WireError):
        unpack_score(reply(data), width, not sampled)


def carried(message: ToEvaluate, problem: Problem) -> Any:
    return decode(type(message), envelope_of(message, problem), {}, problem.messages.dims, "here")


def envelope_of(message: ToEvaluate, problem: Problem) -> Envelope:
    payload = encode(message, {}, problem.messages.dims)
    sent = pack(Header(VERSION, "evaluate", "run", 1, ROUND, 0, fields=payload.fields), payload.frames)
    return unpack([bytes(f) for f in (sent.head, *sent.frames)], "here")


@pytest.mark.parametrize("kind", ["point", "isotropic", "diagonal", "full"])
def test_a_worker_scores_as_its_problem_does(
    kind: str, problem: Problem, mean: Tensor, tmp_path: Path
) -> None:
    model = Point(mean) if kind == "point" else posterior(mean, kind)
    envelope = envelope_of(to_evaluate(model, SAMPLES), problem)
    replies = [WorkerRuntime(problem_of(), tmp_path, "run", w).handle(envelope) for w in (0, 1)]
    assert [r.header.kind for r in replies] == ["score", "score"]
    assert bytes(replies[0].frames[0]) == bytes(replies[1].frames[0])
    direct, remote = (
        problem.evaluation.score(model, 0, ROUND),
        unpack_score(replies[0], WIDTH, sampled=kind != "point"),
    )
    if kind == "point":
        assert remote == direct
    else:
        assert_same(remote, direct)


def test_a_model_of_samples_scores_the_same_over_the_wire_and_averages_them(
    problem: Problem, mean: Tensor, tmp_path: Path
) -> None:
    """The last of them, as many as are asked for; their average is that of their softmaxes."""
    draws = torch.Generator().manual_seed(3)
    values = mean + 0.1 * torch.randn((SAMPLES + 2, len(mean)), generator=draws)
    model = Samples(mean, values.double())
    message = to_evaluate(model, SAMPLES)
    assert isinstance(message, EvaluateSamples) and len(message.samples) == SAMPLES
    direct, remote = (
        problem.evaluation.score(model, 0, ROUND),
        problem.evaluation.score(to_score(carried(message, problem)), 0, ROUND),
    )
    assert remote == direct
    reply = WorkerRuntime(problem_of(), tmp_path, "run", 0).handle(envelope_of(message, problem))
    assert unpack_score(reply, WIDTH, sampled=True) == direct
    alone = problem.evaluation.score(Samples(mean, values[-1:]), 0, ROUND)
    assert alone.ensemble == pytest.approx(
        problem.evaluation.score(Point(values[-1]), 0, ROUND).tally, rel=1e-12
    )
    assert direct.ensemble != alone.ensemble
    assert isinstance(to_evaluate(model, 0), Evaluate)


def test_a_precision_is_sent_only_if_it_is_sampled(mean: Tensor) -> None:
    q = posterior(mean, "diagonal")
    for message in (
        to_evaluate(q, 0),
        to_evaluate(Point(mean), SAMPLES),
        to_evaluate(posterior(mean, "full"), 0),
    ):
        assert isinstance(message, Evaluate)
        assert message.spread is None
        assert isinstance(to_score(message), Point)
    sampled = to_evaluate(q, SAMPLES)
    assert isinstance(sampled, Evaluate) and sampled.spread is not None
    assert isinstance(to_evaluate(posterior(mean, "full"), SAMPLES), EvaluateFull)


# ---- what metrics.jsonl says


ENSEMBLE = {"ensemble_accuracy", "ensemble_nll", "ensemble_ece", "ensemble_brier"}


def test_a_line_has_an_ensemble_where_the_model_is_a_distribution(tmp_path: Path) -> None:
    """The start is a point, and so is every model of FedAvg."""
    settings = {"epochs": 1}
    everyone = listed(Participation((0, 1)), Participation((0, 1)))

    def lines(algorithm: type[Any], samples: int, name: str) -> list[dict[str, Any]]:
        selected = problem_of(algorithm, samples, clients=2, hyperparameters=settings)
        return play(selected, tmp_path / name, everyone).metrics

    sampled = lines(IvonADMM, 3, "sampled")
    assert [ENSEMBLE & set(line) for line in sampled] == [set(), ENSEMBLE, ENSEMBLE]
    assert all(0 < line["ensemble_nll"] < 10 and 0 < line["ensemble_accuracy"] <= 1 for line in sampled[1:])
    off = lines(IvonADMM, 0, "off")
    assert not any(ENSEMBLE & set(line) for line in off)
    assert [line["test_nll"] for line in off] == [line["test_nll"] for line in sampled]
    assert not any(ENSEMBLE & set(line) for line in lines(FedAvg, 3, "points"))


@pytest.mark.parametrize(("option", "resolved"), [(None, 32), ("0", 0), ("2", 2)], ids=str)
def test_the_command_line_overrides_the_algorithms_number_of_samples(
    option: str | None, resolved: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path / "cache"))
    assert IvonADMM.eval_samples == 32
    out = tmp_path / "run"
    arguments = ["--algo", "ivon_admm", "--model", "logistic", "--clients", "2", "--rounds", "1"]
    arguments += ["--set", "epochs=1", *(["--eval-samples", option] if option else [])]
    arguments += ["--workers", "0", "--out", str(out)]
    done = CliRunner(catch_exceptions=False).invoke(main, ["launch", *arguments])
    assert done.exit_code == 0, done.output
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["experiment"]["eval_samples"] == resolved
    last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    assert ENSEMBLE & set(last) == (ENSEMBLE if resolved else set())


# ---- the server's own network


def test_the_server_has_a_network_of_its_own(problem: Problem, mean: Tensor) -> None:
    ctx = problem.context(1, 1)
    inputs = ctx.read(torch.tensor(problem.dataset.test_inputs[:5]))
    assert torch.equal(inputs.flatten(1), held_out(problem)[0][:5])
    flat = torch.tensor(problem.dataset.test_inputs[:5]).flatten(1)
    assert torch.equal(ctx.read(flat), inputs)
    assert ctx.net is not problem.net
    assert ctx.net is problem.context(2, 1).net
    before = problem.net.snapshot()
    outputs = ctx.net.logits(mean, inputs)
    assert torch.equal(problem.net.weights, before)
    assert torch.equal(outputs, problem.net.logits(mean, inputs))
    assert problem.server_net.layout == problem.net.layout
