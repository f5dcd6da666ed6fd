"""Codecs in envelopes, in problems and in whole runs: where each is accepted, what it saves and changes."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsim.errors import UsageError, WireError
from fedsim.experiment import Experiment, build_algorithm
from fedsim.learning.gaussian import Gaussian
from fedsim.learning.params import Layout
from fedsim.problem import Problem
from fedsim.wire.codecs import CODECS
from fedsim.wire.envelope import VERSION, Envelope, Header, decode, decode_own, encode, pack, unpack
from fedsim.wire.message_context import of_upload
from fedsim.wire.schema import TRIANGLE, Mean, Precision, Scalar, all_fields, check_values
from launch.commands.lists import print_list
from launch.configuration.execution import Execution
from launch.session.run import launch
from protocols import REGISTRY, AnyAlgorithm, find

P = 3000
DIMS = {"P": P}
LAYOUT = Layout.vector(P)


@dataclass(frozen=True)
class Down:
    mean: Mean
    scale: Scalar


@dataclass(frozen=True)
class Up:
    mean: Mean
    precision: Precision
    train_loss: Scalar


def upload(seed: int = 0) -> Up:
    draws = torch.Generator().manual_seed(seed)
    return Up(torch.randn(P, generator=draws), torch.rand(P, generator=draws) + 0.01, 0.5)


def envelope_of(message: object, codecs: dict[str, str], **label: Any) -> Envelope:
    payload = encode(message, codecs, DIMS, **label)
    sent = pack(Header(VERSION, "upload", "run", fields=payload.fields), payload.frames)
    return unpack([bytes(f) for f in (sent.head, *sent.frames)], "here")


# ---- envelopes


def test_a_letter_decodes_to_what_its_sender_decodes() -> None:
    up = upload()
    down = Down(up.mean * (1 + 1e-5), 1.0)
    refs = of_upload(down)
    assert list(refs.fields) == ["mean"]
    codecs = {"mean": "delta+zstd", "precision": "best:0.1"}
    payload = encode(up, codecs, DIMS, refs, LAYOUT)
    own = decode_own(Up, payload, codecs, DIMS, refs, LAYOUT)
    envelope = envelope_of(up, codecs, context=refs, layout=LAYOUT)
    there = decode(Up, envelope, codecs, DIMS, "here", refs, LAYOUT)
    assert torch.equal(own.mean, up.mean) and torch.equal(there.mean, up.mean)
    assert torch.equal(own.precision, there.precision) and not torch.equal(own.precision, up.precision)
    layers = {f.name: [p.layer for p in f.parts] for f in envelope.header.fields}
    assert layers == {"mean": ["values"], "precision": ["indices", "values"], "train_loss": ["values"]}
    assert envelope.total_bytes() < 0.5 * envelope_of(up, {}).total_bytes()


def test_dense_stands_in_for_what_does_not_shrink_and_the_header_says_so() -> None:
    codecs = {"precision": "csr:0.9", "mean": "zstd"}
    envelope = envelope_of(upload(), codecs)
    assert [f.codec for f in envelope.header.fields] == ["zstd", "dense", "dense"]
    back = decode(Up, envelope, codecs, DIMS, "here")
    assert torch.equal(back.precision, upload().precision)


@pytest.mark.parametrize(
    ("sent", "target"), [("bf16", "f16"), ("csr:0.1", "csr:0.2"), ("bitmap:0.1", "dense")]
)
def test_another_codec_than_the_runs_is_refused(sent: str, target: str) -> None:
    envelope = envelope_of(upload(), {"precision": sent})
    with pytest.raises(WireError, match=f"'precision' is encoded as '{sent}'; this run uses '{target}'"):
        decode(Up, envelope, {"precision": target}, DIMS, "here")


@pytest.mark.parametrize("name", ["csr:0.1", "bitmap:0.1", "best:0.1", "log8"])
@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan")])
def test_no_codec_hides_a_precision_that_is_not_one(name: str, bad: float) -> None:
    up = upload()
    up.precision[17] = bad
    seen = decode(Up, envelope_of(up, {"precision": name}), {"precision": name}, DIMS, "here")
    with pytest.raises(WireError, match="precision"):
        check_values(seen, "here")


# ---- where each is accepted


def problem(algo: str, codecs: dict[str, str], **changes: Any) -> Problem:
    experiment = Experiment(algo=algo, model="logistic", clients=3, codecs=codecs, **changes)
    return Problem.build(experiment, build_algorithm(find(algo), {}), None)


def test_the_choice_is_kept_by_direction_in_one_spelling() -> None:
    created = problem("fedlap_cov", {"precision": "csr:.10", "up.mean": "delta+zstd", "down.mean": "zstd"})
    assert created.messages.codecs == {
        "down": {"precision": "csr:0.1", "mean": "zstd"},
        "up": {"precision": "csr:0.1", "mean": "delta+zstd"},
    }


@pytest.mark.parametrize(
    ("algo", "field", "name", "says"),
    [
        ("fedlap_cov", "mean", "csr:0.1", "is for a precision or a curvature, and 'mean' is a mean"),
        ("fedlap_cov", "up.mean", "log8", "no levels below zero"),
        ("fedlap_cov", "precision", "topk:0.1", "a delta or a gradient, and 'precision' is a precision"),
        ("fedlap_cov", "down.mean", "delta+zstd", r"nothing to refer to.* \(up.mean\)"),
        ("fedlap_cov", "up.train_loss", "delta+zstd", "the broadcast has no field 'train_loss'"),
        ("fedlap_func", "down.owners", "bf16", "'owners' holds no floats"),
    ],
)
def test_a_codec_that_does_not_fit_is_refused_at_build(algo: str, field: str, name: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        problem(algo, {field: name})


def test_a_delta_of_a_full_precision_is_lossless_and_fine_but_csr_is_not() -> None:
    full = next(a.name for a in REGISTRY if ("precision", (TRIANGLE,)) in _sent_up(a()))
    for name in ("csr:0.1", "best:0.1", "log8", "bf16"):
        with pytest.raises(UsageError, match="not positive definite any more"):
            problem(full, {"precision": name})
    assert problem(full, {"up.precision": "delta+zstd"}).messages.codecs["up"] == {"precision": "delta+zstd"}


def test_no_entries_are_left_out_of_an_increment_of_a_full_precision() -> None:
    algorithm = build_algorithm(find("bayes_admm"), {"silent": "last"})
    for name, fits in (("topk:0.1", False), ("bf16", True)):
        experiment = Experiment(
            algo="bayes_admm", model="logistic", clients=3, codecs={"up.z_precision": name}
        )
        if fits:
            Problem.build(experiment, algorithm, None)
            continue
        with pytest.raises(UsageError, match="not positive definite any more"):
            Problem.build(experiment, algorithm, None)


@pytest.mark.parametrize(("algo", "field"), [("fedavgm", "up.delta"), ("mime", "gradient"), ("bcm", "shift")])
def test_topk_fits_increments(algo: str, field: str) -> None:
    assert set(problem(algo, {field: "topk:0.1"}).messages.codecs["up"].values()) == {"topk:0.1"}


def _sent_up(algorithm: AnyAlgorithm) -> set[tuple[str, tuple[str, ...]]]:
    return {(f.name, f.kind.dims) for e in algorithm.exchanges for f in all_fields(e.up)}


def test_list_shows_every_codec(capsys: pytest.CaptureFixture[str]) -> None:
    print_list("codecs")
    shown = capsys.readouterr().out
    assert all(f.form.usage in shown for f in CODECS.values())
    assert "csr:p" in shown and "delta+zstd" in shown


# ---- whole runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of runs of fedlap_cov through the launcher, in this process, by the codecs they use."""
    folder = tmp_path_factory.mktemp("runs")
    selected = {
        "dense": {},
        "small": {"up.precision": "best:0.1", "up.mean": "delta+zstd"},
        "delta": {"up.mean": "delta+zstd", "down.mean": "zstd", "precision": "zstd"},
        "csr": {"precision": "csr:0.1"},
        "half": {"precision": "csr:0.5"},
        "bitmap": {"precision": "bitmap:0.1"},
        "half down": {"down.mean": "bf16"},
        "half down, delta up": {"down.mean": "bf16", "up.mean": "delta+zstd"},
        "whole steps": {"precision": "csr:0.1"},
    }

    def run(name: str) -> Path:
        out = folder / name
        if not out.exists():
            experiment = Experiment(
                algo="fedlap_cov",
                clients=3,
                rounds=3,
                codecs=selected[name],
                hyperparameters={"local.epochs": 1, "rho": 1.0 if name == "whole steps" else 0.3},
            )
            launch(experiment, Execution(workers=0, devices="cpu", out=str(out)), quiet=True)
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDSIM_CACHE", str(folder / "cache"))
        yield run


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "ledger.csv").open() as file:
        return [r for r in csv.DictReader(file) if r["kind"] == "algorithm"]


def floored(folder: Path) -> list[int]:
    """Of rounds 1, 2, 3."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["floored"] for line in lines[1:]]


def sent(folder: Path, direction: str, field: str) -> dict[tuple[str, str], int]:
    """Bytes by layer and codec."""
    out: dict[tuple[str, str], int] = {}
    for r in rows(folder):
        if (r["direction"], r["field"]) == (direction, field):
            key = r["layer"], r["codec"]
            out[key] = out.get(key, 0) + int(r["bytes"])
    return out


def test_a_run_with_codecs_is_done_and_smaller(runs: Callable[[str], Path]) -> None:
    dense, small = runs("dense"), runs("small")
    assert summary(small)["status"] == "done"
    precision, mean = sent(small, "up", "precision"), sent(small, "up", "mean")
    assert set(precision) == {("values", "best:0.1"), ("indices", "best:0.1")}
    assert set(mean) == {("values", "delta+zstd")}
    assert sum(precision.values()) < 0.1 * sum(sent(dense, "up", "precision").values())
    assert sum(mean.values()) < 0.95 * sum(sent(dense, "up", "mean").values())
    assert sent(small, "down", "mean") == sent(dense, "down", "mean")
    manifest = json.loads((small / "manifest.json").read_text())
    assert manifest["experiment"]["codecs"] == {"up.precision": "best:0.1", "up.mean": "delta+zstd"}
    assert "zstandard" in manifest["versions"]


def test_a_delta_refers_to_the_broadcast_as_decoded(runs: Callable[[str], Path]) -> None:
    plain, delta = summary(runs("half down")), summary(runs("half down, delta up"))
    for digest in ("model_sha256", "clients_sha256"):
        assert plain[digest] == delta[digest] != summary(runs("dense"))[digest]


def test_floored_entries_are_counted(runs: Callable[[str], Path]) -> None:
    """Without a lossy codec there are none; with one, V_k may become negative."""
    assert floored(runs("dense")) == floored(runs("delta")) == [0, 0, 0]
    first, *later = floored(runs("whole steps"))
    assert first == 0 and sum(later) > 0
    algorithm = find("fedlap_cov")()
    ctx = problem("fedlap_cov", {}).context(1, 1)
    server = replace(algorithm.server_init(ctx), started=True)
    V = torch.zeros_like(ctx.start, dtype=torch.float64)
    V[[1, 5]] = torch.tensor([-1e-9, -2.0], dtype=torch.float64)
    server = replace(server, sites=Gaussian(server.sites.shift, V))
    assert algorithm.report(server, ctx) == {"floored": 2}
    assert torch.equal(server.sites.precision, V)  # the sum stays as it is
    broadcast = algorithm.broadcast(server, ctx).precision
    assert torch.equal(broadcast, (algorithm.delta + V).clamp(min=algorithm.delta))
