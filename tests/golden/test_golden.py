"""Recorded runs have the recorded bits when they are carried out again, whatever the processor; the command
that compares them never ends well without a comparison."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from tests.golden import GOLDEN, __main__, runs

NAME = "fedlap_cov dense"
OTHER_KERNELS = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_CBWR": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "DNNL_MAX_CPU_ISA": "AVX",
    "NPY_DISABLE_CPU_FEATURES": "X86_V3",
    "OPENBLAS_CORETYPE": "Haswell",
}
"""What a caller's environment may say; a portable run computes as if it said nothing."""


@cache
def expected(name: str) -> runs.Record:
    """The recorded digests of a run. Other versions of torch or numpy than recorded may give other bits: then
    those of the run in process here, which worker processes and other environments also give."""
    golden = json.loads(GOLDEN.read_text())
    recorded: runs.Record = golden["runs"][name]
    return recorded if golden["versions"] == runs.versions() else runs.created(name, 0)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(("name", "workers"), [(NAME, 0), (NAME, 2), ("ivon_admm bf16", 0)])
@pytest.mark.parametrize("environment", [{}, OTHER_KERNELS], ids=["as it is", "other kernels"])
def test_recorded_run_has_the_recorded_bits(
    name: str, workers: int, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    due = expected(name)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert runs.created(name, workers) == due


def test_every_algorithm_and_codec_is_recorded() -> None:
    assert set(json.loads(GOLDEN.read_text())["runs"]) == set(runs.names())


ONE = {"model_sha256": "a", "clients_sha256": "b", "rows_sha256": "c"}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of golden digests of two runs, in the place of the real one; a run is made in no time."""
    path = tmp_path / "golden.json"
    path.write_text(json.dumps({"versions": runs.versions(), "plan": "1", "runs": {"x a": ONE, "y a": ONE}}))
    monkeypatch.setattr(__main__, "GOLDEN", path)
    monkeypatch.setattr(runs, "names", lambda: ["x a", "y a"])
    monkeypatch.setattr(runs, "created", lambda name, workers: dict(ONE))
    monkeypatch.setattr(runs, "plan_numbers", lambda: "1")
    return path


def computes(monkeypatch: pytest.MonkeyPatch, record: runs.Record) -> None:
    monkeypatch.setattr(runs, "created", lambda name, workers: record)


def test_equal_digests_end_with_0_and_others_with_1(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert __main__.main(["--quick"]) == 0
    computes(monkeypatch, ONE | {"model_sha256": "other"})
    assert __main__.main(["--quick"]) == 1


def test_a_comparison_of_nothing_does_not_end_with_0(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["--quick", "--only", "nothing is called so"]) == __main__.NOTHING
    assert "nothing was compared" in capsys.readouterr().out


def test_a_run_that_is_not_recorded_is_a_difference(file: Path) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | {"runs": {"x a": ONE}}))
    assert __main__.main(["--quick"]) == 1
    assert __main__.main(["--quick", "--only", "x a"]) == 0


def test_other_versions_are_compared_and_named_where_bits_differ(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | {"versions": {"torch": "2.0", "numpy": "2"}}))
    assert __main__.main(["--quick"]) == 0
    assert "torch 2.0" not in capsys.readouterr().out
    computes(monkeypatch, ONE | {"model_sha256": "other"})
    assert __main__.main(["--quick"]) == 1
    assert "torch 2.0" in capsys.readouterr().out


def test_write_with_a_name_records_only_runs_of_this_name(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ONE | {"model_sha256": "other"}
    computes(monkeypatch, other)
    assert __main__.main(["--write", "--quick", "--only", "y"]) == 0
    assert json.loads(file.read_text())["runs"] == {"x a": ONE, "y a": other}
    assert __main__.main(["--write", "--quick"]) == 0
    assert json.loads(file.read_text())["runs"] == {"x a": other, "y a": other}


def test_one_file_does_not_mix_versions(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = json.dumps(json.loads(file.read_text()) | {"versions": {"torch": "2.0"}})
    file.write_text(before)
    assert __main__.main(["--write", "--quick", "--only", "y"]) == __main__.NOTHING
    assert "torch 2.0" in capsys.readouterr().out and file.read_text() == before
