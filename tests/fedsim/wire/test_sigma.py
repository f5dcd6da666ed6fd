"""Codecs of a few bits: integers near their entropy, means by their deviation, precisions by their ratio."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings, strategies as st
from torch import Tensor

from fedsim.errors import UsageError, WireError
from fedsim.experiment import Experiment
from fedsim.wire.codecs import Spec, codec
from fedsim.wire.codecs.entropy import LARGEST, decode_integers, encode_integers, entropy_bits
from fedsim.wire.codecs.sigma import _level
from fedsim.wire.message_context import SCALES, codec_stream, scale_of
from launch.cli import main
from launch.configuration.execution import Execution
from launch.runs.folder import RunFolder
from launch.session.run import launch

fixed = settings(deadline=None, derandomize=True, database=None, max_examples=60)
DRAWS = np.random.Generator(np.random.Philox(key=5))


# ---- integers


@fixed
@given(
    st.lists(st.integers(-40, 40) | st.integers(-LARGEST, LARGEST), max_size=60),
    st.integers(0, 300),
    st.binary(max_size=5),
)
def test_integers_come_back_and_say_where_they_end(some: list[int], zeros: int, behind: bytes) -> None:
    integers = np.array([*some, *[0] * zeros], dtype=np.int64)
    data = encode_integers(integers)
    back, used = decode_integers(memoryview(data + behind), len(integers))
    assert back.tolist() == integers.tolist()
    assert used == len(data)


@pytest.mark.parametrize("width", [0.3, 2.0, 400.0])
@pytest.mark.parametrize("shape", ["normal", "laplace"])
def test_they_cost_at_most_three_percent_more_than_their_entropy(width: float, shape: str) -> None:
    integers = np.rint(getattr(DRAWS, shape)(0.0, width, 80_000)).astype(np.int64)
    bits = 8 * len(encode_integers(integers))
    assert entropy_bits(integers) <= bits <= 1.03 * entropy_bits(integers)


def test_damaged_bytes_are_an_error_or_integers() -> None:
    random = Random(0)
    sound = encode_integers(np.rint(DRAWS.normal(0, 30, 500)).astype(np.int64))
    refused = 0
    for _ in range(400):
        data = bytearray(sound)
        for _ in range(random.randint(1, 4)):
            data[random.randrange(len(data))] = random.randrange(256)
        data = data[: random.randint(0, len(data))] if random.random() < 0.3 else data
        try:
            back, used = decode_integers(memoryview(bytes(data)), 500)
        except WireError:
            refused += 1
        else:
            assert len(back) == 500 and used <= len(data) and np.abs(back).max() <= 2 * LARGEST
    assert refused > 100


# ---- means and precisions


def spec(count: int, scale: Tensor | None = None) -> Spec:
    return replace(Spec.of((count,), torch.float32), scale=scale)


def round_trip(name: str, x: Tensor, known: Spec, ref: Tensor | None = None) -> Tensor:
    parts = codec(name).pack(x, known, ref)
    assert parts is not None
    return codec(name).unpack(tuple(memoryview(bytes(data)) for _, data in parts), known, ref)


@pytest.mark.parametrize("c", [0.005, 3.0])
@pytest.mark.parametrize("refers", [True, False])
def test_a_mean_is_off_by_half_a_step_of_its_deviation(c: float, refers: bool) -> None:
    draws = torch.Generator().manual_seed(3)
    precision = torch.exp(4 * torch.randn(5000, generator=draws))
    ref = torch.randn(5000, generator=draws) if refers else None
    x = (ref if ref is not None else 0) + torch.randn(5000, generator=draws) / precision.sqrt()
    error = (round_trip(f"sigma:{c}", x, spec(5000, precision), ref) - x).double() * precision.double().sqrt()
    rounding = 2e-7 * float((x.abs() * precision.sqrt()).max())  # of float32 itself
    assert 0.4 * c < float(error.abs().max()) <= c / 2 + rounding


@pytest.mark.parametrize("e", [0.01, 2.0])
@pytest.mark.parametrize("refers", [True, False])
def test_a_precision_has_a_bounded_relative_error_and_its_zeros(e: float, refers: bool) -> None:
    draws = torch.Generator().manual_seed(4)
    ref = torch.exp(4 * torch.randn(5000, generator=draws)) if refers else None
    x = (ref if ref is not None else 1) * torch.exp(torch.randn(5000, generator=draws))
    x[::7] = 0
    back = round_trip(f"ratio:{e}", x, spec(5000), ref)
    assert torch.equal(back == 0, x == 0)
    kept = x > 0
    ratio = (back[kept].double() / x[kept].double()).log().abs()
    assert 0.45 * e < float(ratio.max()) <= e / 2 + 1e-6


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_a_ratio_does_not_stand_for_what_is_no_precision(bad: float) -> None:
    x = torch.arange(1.0, 101)
    x[5] = bad
    assert codec("ratio:0.25").pack(x, spec(100)) is None


def test_extreme_precisions_stay_positive_or_are_sent_dense() -> None:
    for smallest in (1e-30, 1e-38, 1e-44):
        x = torch.tensor([smallest, 1.0, 3e38])
        parts = codec("ratio:1.0").pack(x, spec(3))
        assert parts is None or (round_trip("ratio:1.0", x, spec(3)) > 0).all()


def test_levels_are_rounded_correctly() -> None:
    """The numbers of the series of exp to fifty digits, rounded once."""
    assert _level(0.25, 0) == 0.0
    assert _level(0.25, 1) == 1.0
    assert _level(0.25, 5) == 2.718281828459045
    assert _level(0.25, -4) == 0.36787944117144233


def test_a_mean_without_a_precision_is_sent_dense_and_not_read() -> None:
    assert codec("sigma:0.1").pack(torch.ones(4), spec(4)) is None
    with pytest.raises(WireError, match="sigma needs"):
        codec("sigma:0.1").unpack((memoryview(bytes(2)),), spec(4))


@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize("bad", [[0.0] * 4, [1.0, math.nan, 1, 1], [1.0, math.inf, 1, 1], []])
def test_what_is_no_precision_measures_nothing(name: str, bad: list[float]) -> None:
    assert scale_of(name, torch.tensor(bad)) is None


def test_zeros_of_a_curvature_count_as_a_thousandth_of_its_mean() -> None:
    x = torch.tensor([0.0, 1.0, 3.0, 0.0])
    seen = scale_of("curvature", x)
    assert seen is not None and seen.tolist() == pytest.approx([1e-3, 1.0, 3.0, 1e-3])
    assert scale_of("precision", x) is None


def dithered(c: float, x: Tensor, precision: Tensor, client: int) -> Tensor:
    known = replace(spec(len(x), precision), stream=codec_stream(7, 3, 1, client))
    return round_trip(f"sigma:{c}+dither", x, known)


def test_dither_makes_the_error_uniform_independent_and_unbiased() -> None:
    """A mean of a tenth of a step: rounding would lose it in every client, dither keeps it on average."""
    n, c = 4000, 1.0
    precision = torch.full((n,), 4.0)
    x = torch.full((n,), 0.1 * c / 2)
    assert not round_trip(f"sigma:{c}", x, spec(n, precision)).any()
    errors = torch.stack([dithered(c, x, precision, k) - x for k in range(25)]).double() * 2 / c
    assert float(errors.abs().max()) <= 0.5 + 1e-6
    assert abs(float(errors.mean())) < 4 / math.sqrt(12 * errors.numel())
    assert float(errors.var()) == pytest.approx(1 / 12, rel=0.02)
    assert abs(float((errors[0] * errors[1]).mean())) < 4 / 12 / math.sqrt(n)


def at_random(name: str, x: Tensor, precision: Tensor, ref: Tensor | None, client: int) -> Tensor:
    known = replace(spec(len(x), precision), stream=codec_stream(7, 3, 1, client))
    return round_trip(name, x, known, ref).double()


DECODED = 400
"""Messages over which a decoded value is averaged."""


@pytest.mark.parametrize("step", ["2.0", "25%"])
def test_a_mean_rounded_at_random_is_unbiased_and_off_by_less_than_a_step(step: str) -> None:
    draws = torch.Generator().manual_seed(6)
    precision = torch.exp(torch.randn(1000, generator=draws))
    x = torch.randn(1000, generator=draws) / precision.sqrt()
    x[::10] = 0
    c = 2.0 if step == "2.0" else float((x * precision.sqrt()).abs().mean()) / 0.25
    decoded = [at_random(f"sigma:{step}+random", x, precision, None, k) for k in range(DECODED)]
    errors = (torch.stack(decoded) - x.double()) * precision.double().sqrt() / c
    assert 0.9 < float(errors.abs().max()) < 1 + 1e-5
    assert not errors[:, ::10].any()  # a zero stays zero
    # the variance of one error is at most 1/4 of a step squared
    assert float(errors.mean(dim=0).abs().max()) < 5 / math.sqrt(4 * DECODED)
    assert abs(float(errors.mean())) < 5 / math.sqrt(4 * errors.numel())


@pytest.mark.parametrize("e", [0.25, 1.5])
def test_a_precision_rounded_at_random_is_unbiased_itself_not_in_its_logarithm(e: float) -> None:
    draws = torch.Generator().manual_seed(7)
    ref = torch.exp(torch.randn(1000, generator=draws))
    x = ref * torch.exp(torch.randn(1000, generator=draws))
    x[::10] = 0
    decoded = torch.stack([at_random(f"ratio:{e}+random", x, ref, ref, k) for k in range(DECODED)])
    assert not decoded[:, ::10].any()
    kept = x > 0
    errors = decoded[:, kept] / x[kept].double() - 1
    largest = math.expm1(e)
    assert -1 + math.exp(-e) - 1e-5 < float(errors.min()) and float(errors.max()) < largest + 1e-5
    # between two levels of ratio exp(e), the variance is at most that of the middle: largest^2 / 4
    assert float(errors.mean(dim=0).abs().max()) < 5 * largest / math.sqrt(4 * DECODED)
    assert abs(float(errors.mean())) < 5 * largest / math.sqrt(4 * errors.numel())


@pytest.mark.parametrize(("flag", "magnitude"), [("+random", 0.0), ("", 0.1)])
def test_the_share_of_numbers_that_are_not_zero_fixes_the_bits(flag: str, magnitude: float) -> None:
    """A tenth of normal numbers: the entropy of which, and of signs. Few of the rounded ones are beyond 1."""
    n, p = 100_000, 0.1
    x = torch.from_numpy(DRAWS.normal(0.0, 1.0, n).astype(np.float32))
    x[0] = 1e6  # an outlier makes the step no larger than its share of the mean
    known = replace(spec(n, torch.ones(n)), stream=codec_stream(7, 3, 1, 0))
    parts = codec(f"sigma:10%{flag}").pack(x if not flag else x.clamp(max=5), known)
    assert parts is not None
    back = round_trip(f"sigma:10%{flag}", x if not flag else x.clamp(max=5), known)
    assert float((back != 0).double().mean()) == pytest.approx(p, rel=0.05)
    entropy = -(1 - p) * math.log2(1 - p) - p * math.log2(p / 2)
    assert entropy * 0.97 < 8 * parts[0][1].nbytes / n < entropy * (1.03 + magnitude)


@pytest.mark.parametrize("share", ["1%", "10%", "33%", "100%"])
def test_a_step_by_share_sends_numbers_of_equal_size(share: str) -> None:
    """The smallest number that is sent is half a step: it must not be rounded to 0."""
    x = 0.1 * (1 - 2 * (torch.arange(1000) % 2))
    back = round_trip(f"sigma:{share}", x, spec(1000, torch.ones(1000)))
    torch.testing.assert_close(back, 2 * x, rtol=1e-5, atol=0)  # a step is twice the smallest


@pytest.mark.parametrize("flag", ["", "+dither"])
@pytest.mark.parametrize("size", [1e-4, 1.0, 30.0])
def test_an_automatic_step_rounds_by_a_tenth_of_the_change(flag: str, size: float) -> None:
    draws = torch.Generator().manual_seed(5)
    precision = torch.exp(torch.randn(8000, generator=draws))
    change = size * torch.randn(8000, generator=draws) / precision.sqrt()
    known = replace(spec(8000, precision), stream=codec_stream(7, 3, 1, 0))
    error = (round_trip(f"sigma:auto{flag}", change, known) - change).double() * precision.double().sqrt()
    own = change.double() * precision.double().sqrt()
    assert float(error.norm() / own.norm()) == pytest.approx(0.1, rel=0.03)


@pytest.mark.parametrize("step", [0.0, -1.0, math.nan, math.inf])
def test_a_forged_step_is_refused(step: float) -> None:
    with pytest.raises(WireError, match="a step of"):
        codec("sigma:auto").unpack((memoryview(struct.pack("<f", step) + bytes(2)),), spec(4, torch.ones(4)))


def test_dither_needs_a_stream_and_clients_have_their_own() -> None:
    x, precision = torch.ones(50), torch.ones(50)
    for name in ("sigma:0.1+dither", "sigma:0.1+random", "ratio:0.1+random"):
        with pytest.raises(WireError, match="needs the random stream"):
            codec(name).pack(x, spec(50, precision), x)
    assert not torch.equal(dithered(0.1, x, precision, 0), dithered(0.1, x, precision, 1))
    assert torch.equal(dithered(0.1, x, precision, 0), dithered(0.1, x, precision, 0))


@pytest.mark.parametrize("text", ["sigma", "sigma:nan", "sigma:17rms", "ratio:1%", "sigma:1+dither+random"])
def test_a_step_is_a_positive_number(text: str) -> None:
    with pytest.raises(UsageError, match="a positive number, such as"):
        codec(text)


# ---- runs


@pytest.mark.parametrize(
    ("algo", "codecs", "what"),
    [
        ("fedavg", {"mean": "sigma:0.1"}, "has a precision or curvature of all parameters to measure it by"),
        (
            "fedlap_cov",
            {"mean": "sigma:0.1+last"},
            "refers to its broadcast, not to the last one; write sigma:0.1$",
        ),
        ("precond_admm", {"down.precision": "ratio:0.1+last"}, "a round of this algorithm has several"),
        ("fedlap_cov", {"precision": "sigma:0.1"}, "measures a mean"),
        ("fedlap_cov", {"mean": "ratio:0.1"}, "for a precision or a curvature"),
    ],
)
def test_a_field_that_does_not_fit_is_refused(algo: str, codecs: dict[str, str], what: str) -> None:
    experiment = Experiment(algo=algo, codecs=codecs, model="logistic")
    with pytest.raises(UsageError, match=what):
        launch(experiment, Execution(workers=0), quiet=True)


LAST = {
    "down.mean": "sigma:0.01+last",
    "down.precision": "ratio:0.25+last",
    "up.mean": "sigma:0.01+dither",
    "up.precision": "ratio:0.25",
}
DIGESTS = ("model_sha256", "clients_sha256", "bytes_up", "bytes_down")


def few_bits(rounds: int = 4, codecs: dict[str, str] = LAST, **changes: Any) -> Experiment:
    return Experiment(algo="fedlap_cov", clients=4, rounds=rounds, codecs=codecs, **changes)


def run(experiment: Experiment, out: Path, workers: int = 0, **changes: Any) -> RunFolder:
    launch(experiment, Execution(workers=workers, out=str(out), devices="cpu", **changes), quiet=True)
    return RunFolder.open(out)


def sent_down(run: RunFolder, field: str) -> dict[tuple[int, int], tuple[str, int]]:
    """Codec and bytes of a field's values by round and client."""
    rows = run.ledger
    rows = rows[(rows.kind == "algorithm") & (rows.direction == "down") & (rows.field == field)]
    return {(r.round, r.client): (r.codec, r.bytes) for r in rows.itertuples()}


def test_a_broadcast_refers_to_the_last_one_and_gets_smaller(tmp_path: Path) -> None:
    alone = {name: spec.removesuffix("+last") for name, spec in LAST.items()}
    last, plain = run(few_bits(), tmp_path / "last"), run(few_bits(codecs=alone), tmp_path / "alone")
    codecs = {round: c for (round, _), (c, _) in sent_down(last, "mean").items()}
    assert codecs == {1: "sigma:0.01", 2: LAST["down.mean"], 3: LAST["down.mean"], 4: LAST["down.mean"]}
    assert last.summary["bytes_down"] < 0.8 * plain.summary["bytes_down"]
    assert abs(last.summary["test_accuracy"] - plain.summary["test_accuracy"]) < 0.04


def test_who_missed_the_last_broadcast_gets_the_same_values_dense(tmp_path: Path) -> None:
    r = run(few_bits(rounds=6, participation="0.5"), tmp_path / "run")
    took_part = {round: {k for t, k in sent_down(r, "mean") if t == round} for round in range(1, 7)}
    seen = set()
    for (round, k), (name, size) in sent_down(r, "mean").items():
        if round > 1:
            had = k in took_part[round - 1]
            assert name == (LAST["down.mean"] if had else "dense")
            assert (size == 4 * 7510) == (not had)
            seen.add(had)
    assert seen == {True, False}


def test_a_run_goes_on_and_is_verified_with_its_last_broadcast(tmp_path: Path) -> None:
    whole = run(few_bits(rounds=5), tmp_path / "whole")
    out = tmp_path / "stopped"
    run(few_bits(rounds=3), out)
    done = CliRunner().invoke(main, ["resume", str(out), "--rounds", "5", "--quiet"])
    assert done.exit_code == 0, done.output
    assert [RunFolder.open(out).summary[k] for k in DIGESTS] == [whole.summary[k] for k in DIGESTS]
    checked = CliRunner().invoke(main, ["verify", str(out)])
    assert checked.exit_code == 0, checked.output
