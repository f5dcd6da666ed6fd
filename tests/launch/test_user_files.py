"""A user's schedule, codec and split in files, through whole runs: processes, resume, manifest, sweeps."""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

import fedsim
from fedsim.errors import MismatchError
from launch.sweep.recipe import Recipe
from tests.support.kept_runs import command

DOCS = Path(__file__).resolve().parents[2] / "docs"
GUIDES = ("adding-a-schedule.md", "adding-a-codec.md", "adding-a-partition.md")
FILES = {
    name: source
    for guide in GUIDES
    for name, source in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", (DOCS / guide).read_text(), re.DOTALL)
}
CHOICES: dict[str, Any] = {
    "algo": "fedavg",
    "clients": 4,
    "participation": "nightly.py:nightly+lost:0.1",
    "codecs": {"up.mean": "int8.py:int8"},
    "partition": "split.py:half_own",
    "quiet": True,
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, source in FILES.items():
        (tmp_path / name).write_text(source)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_users_files_run_in_processes_and_resume_with_the_same_bits(folder: Path) -> None:
    whole = fedsim.run(**CHOICES, rounds=5)
    run = fedsim.run(**CHOICES, rounds=3, workers=2)
    assert run.experiment["sources"] == {
        str(folder / name): sha256(source.encode()).hexdigest() for name, source in FILES.items()
    }
    assert run.label == "fedavg (up.mean int8:int8)"
    assert command("ledger", run.path).out.startswith(f"{run.label} on digits: P = ")
    assert run.experiment["participation"] == f"{folder}/nightly.py:nightly+lost:0.1"
    rows = run.ledger[(run.ledger.kind == "algorithm") & (run.ledger.direction == "up")]
    digest = sha256(FILES["int8.py"].encode()).hexdigest()[:8]
    values = rows[(rows.field == "mean") & (rows.layer == "values")]
    assert set(values.codec) == {f"int8:int8@{digest}"}
    assert set(values.bytes) == {8 + run.summary["params"]}
    odd = run.ledger[(run.ledger.kind == "algorithm") & (run.ledger["round"] == 1)]
    assert set(odd.client) <= {1, 3}
    further = fedsim.resume(run, rounds=5, workers=1, quiet=True)
    assert further.summary["model_sha256"] == whole.summary["model_sha256"]
    assert further.metrics["bytes_up"].tolist() == whole.metrics["bytes_up"].tolist()


@pytest.mark.parametrize("name", sorted(FILES))
def test_resume_refuses_a_changed_file(name: str, folder: Path) -> None:
    run = fedsim.run(**CHOICES, rounds=1)
    (folder / name).write_text(FILES[name] + "\n# changed\n")
    with pytest.raises(MismatchError, match="sources"):
        fedsim.resume(run, rounds=2, quiet=True)


def test_failed_resume_can_be_tried_again_in_the_same_process(folder: Path) -> None:
    run = fedsim.run(**CHOICES, rounds=1)
    (folder / "split.py").write_text(FILES["split.py"] + "# changed")
    with pytest.raises(MismatchError) as caught:
        fedsim.resume(run, rounds=2, quiet=True)
    (folder / "split.py").write_text(FILES["split.py"])
    assert fedsim.resume(run, rounds=2, quiet=True).status == "done"
    assert caught.value.__traceback__ is not None  # a notebook keeps it, too, and with it all its frames


def test_sweep_takes_the_same_files_and_knows_a_copy_elsewhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = (
        'title = "own"\nseeds = [0]\n[experiment]\nalgo = "fedavg"\nclients = 4\nrounds = 1\n'
        'participation = "nightly.py:nightly+gone:0.1"\n[codecs]\n"up.mean" = "int8.py:int8"\n'
        '[[variant]]\nlabel = "own"\n'
    )
    ids = []
    for place in ("one", "other"):
        (folder / place).mkdir()
        monkeypatch.chdir(folder / place)
        for name, source in (FILES | {"recipe.toml": recipe}).items():
            Path(name).write_text(source)
        (job,) = Recipe.read(Path("recipe.toml")).trials()
        assert job.experiment.codecs == {"up.mean": f"{folder / place}/int8.py:int8"}
        assert job.experiment.participation == f"{folder / place}/nightly.py:nightly+gone:0.1"
        ids.append(job.id)
    assert ids[0] == ids[1]
