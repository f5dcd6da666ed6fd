"""The files in docs/examples do what they say, with data of a few rows."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

import fedsim

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def test_leaf_has_a_client_for_each_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    users = {"u10": [3, 61], "u2": [0], "gone": []}
    for part, of_part in (("train", users), ("test", users | {"gone": [1]})):
        rows = {user: {"x": [[y / 62] * 784 for y in ys], "y": ys} for user, ys in of_part.items()}
        counts = [len(ys) for ys in of_part.values()]
        (tmp_path / part).mkdir()
        (tmp_path / part / "all.json").write_text(
            json.dumps({"users": list(rows), "num_samples": counts, "user_data": rows})
        )
    monkeypatch.setenv("LEAF", str(tmp_path))
    run = fedsim.run(
        algo="fedavg",
        dataset=f"{EXAMPLES}/leaf.py:femnist",
        model="logistic",
        partition="natural",
        clients=2,
        rounds=1,
        quiet=True,
        out=tmp_path / "run",
    )
    experiment = run.manifest["experiment"]
    assert (experiment["client_sizes"], experiment["client_scores"]) == ([2, 1], "own test rows")
    assert run.summary["params"] == 784 * 62


def test_label_noise_is_a_share_of_the_training_labels() -> None:
    right, some = (fedsim.load_dataset(name) for name in ("digits", f"{EXAMPLES}/label_noise.py:digits_20"))
    wrong = right.train_targets != some.train_targets
    assert wrong.sum() == round(0.2 * len(wrong))
    assert set(some.train_targets[wrong].tolist()) == set(range(10))
    np.testing.assert_array_equal(right.test_targets, some.test_targets)


@pytest.mark.process
def test_fedpm_sends_masks_with_less_than_a_bit_a_parameter(tmp_path: Path) -> None:
    """An algorithm, a kind of field and a codec of its own, with worker processes and without any. In round 1
    theta is 1/2, so a mask has a bit a parameter, and whole words of 32 bits; in round 2 it has fewer."""
    runs = [
        fedsim.run(
            algo=f"{EXAMPLES}/fedpm.py:FedPM",
            codecs={"up.keep": f"{EXAMPLES}/fedpm.py:coded"},
            clients=3,
            rounds=2,
            workers=workers,
            quiet=True,
            out=tmp_path / f"{workers}",
        )
        for workers in (2, 0)
    ]
    one, other = (run.summary for run in runs)
    for name in ("model_sha256", "clients_sha256", "bytes_up", "bytes_down"):
        assert one[name] == other[name]
    ledger = runs[0].ledger
    masks = ledger[(ledger.field == "keep") & (ledger.direction == "up")]
    assert {name.partition("@")[0] for name in masks.codec} == {"fedpm:coded"}
    bits = 8 * masks.bytes / one["params"]
    assert bits[masks["round"] == 1].between(1, 1 + 32 / one["params"]).all()
    assert (bits[masks["round"] == 2] < 0.9).all()


def test_personal_models_gain_over_a_run_whose_scores_by_client_are_found_again(tmp_path: Path) -> None:
    run = fedsim.run(algo="fedavg", model="logistic", clients=4, rounds=1, quiet=True, out=tmp_path / "run")
    personal_models = runpy.run_path(str(EXAMPLES / "personal.py"))["personal_models"]
    scores = [score for _, score in personal_models(run, epochs=3, lr=0.1)]
    assert [s.client for s in scores] == [0, 1, 2, 3]
    for common, listed in (("accuracy", "client_accuracies"), ("nll", "client_nlls")):
        assert [getattr(s.common, common) for s in scores] == pytest.approx(run.lines[-1][listed], rel=1e-5)
    assert sum(s.personal.accuracy - s.common.accuracy for s in scores) > 0


def test_tff_has_the_clients_and_the_model_of_emnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import h5py

    folder = tmp_path / "fed_emnist"
    folder.mkdir()
    for part, rows in (("train", {"f10": 2, "f2": 3, "none": 0}), ("test", {"f2": 2})):
        with h5py.File(folder / f"fed_emnist_{part}.h5", "w") as file:
            for client, n in rows.items():
                grey = np.arange(n * 784, dtype=np.float32).reshape(n, 28, 28) % 256 / 255
                file[f"examples/{client}/pixels"] = grey
                file[f"examples/{client}/label"] = np.arange(61, 61 - n, -1, dtype=np.int32)
    monkeypatch.setenv("TFF", str(tmp_path))
    data = fedsim.load_dataset(f"{EXAMPLES}/tff.py:emnist62")
    assert data.train_inputs.shape == (5, 1, 28, 28)
    np.testing.assert_array_equal(data.train_inputs.ravel()[:784], np.arange(784) % 256)
    run = fedsim.run(
        algo="fedpa",
        hyperparameters={"burn_in_rounds": 1},
        dataset=f"{EXAMPLES}/tff.py:emnist62",
        model=f"{EXAMPLES}/tff.py:cnn_emnist",
        partition="natural",
        clients=2,
        rounds=1,
        quiet=True,
        out=tmp_path / "run",
    )
    assert run.manifest["experiment"]["client_sizes"] == [2, 3]
    assert run.summary["params"] == 1_206_590


def test_fedscale_writes_links_and_a_trace_that_a_plan_reads(tmp_path: Path) -> None:
    exports = {
        "capacity": {
            "1": {"computation": 162.0, "communication": 5648.5},
            "7": {"computation": 40, "communication": 2000},
        },
        "availability": {
            "0": {"inactive": [100, 900], "active": [0, 600], "finish_time": 1000},
            "1": {"inactive": [500], "active": [100], "finish_time": 1000},
        },
    }
    main = runpy.run_path(str(EXAMPLES / "fedscale.py"))["main"]
    for name, export in exports.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(export))
    main(["capacity", "capacity.json", "phones.csv", "--clients", "3"])
    first, second = "486ms,5648.5kbit,5648.5kbit", "120ms,2000kbit,2000kbit"
    lines = ["client,compute,up,down", f"0,{first}", f"1,{second}", f"2,{first}"]
    assert (tmp_path / "phones.csv").read_text().split() == lines
    when = ["--rounds", "8", "--every", "200"]
    main(["availability", "availability.json", "there.csv", "--clients", "3", *when])
    # at 0, 200, ..., 1400 s, which is 400 s again; client 0: [0, 100] and [600, 900], client 1: [100, 500]
    there = {1: (0, 2), 2: (1,), 3: (1,), 4: (0, 2), 5: (0, 2), 6: (0, 2), 7: (1,), 8: (1,)}
    rows = [f"{round},{client}" for round, clients in there.items() for client in clients]
    assert (tmp_path / "there.csv").read_text().split() == ["round,client", *rows]
    plan = fedsim.plan(algo="fedavg", clients=3, rounds=8, link="phones.csv", participation="trace:there.csv")
    assert plan["devices"]["simulated_seconds"] > 0
    main(["availability", "availability.json", "few.csv", "--clients", "30", *when, "--per-round", "4"])
    assert len((tmp_path / "few.csv").read_text().split()) == 1 + 8 * 4


def test_hub_trains_adapters_of_a_text_model_and_of_an_mlp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets
    from transformers import BertConfig

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
    BertConfig(vocab_size=30, max_position_embeddings=4, **sizes).save_pretrained(tmp_path / "bert")
    rows = datasets.Dataset.from_dict(
        {
            "input_ids": [[2, i, 3, 0] for i in range(8)],
            "label": [0, 1] * 4,
            "author": ["bob"] * 5 + ["al"] * 3,
        }
    ).cast_column("label", datasets.ClassLabel(2))
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "texts")
    monkeypatch.setenv("MODEL", str(tmp_path / "bert"))
    monkeypatch.setenv("TEXTS", str(tmp_path / "texts"))
    common = {
        "algo": "fedlap_cov",
        "clients": 2,
        "rounds": 1,
        "quiet": True,
        "hyperparameters": {"epochs": 1},
    }
    text, mlp = (
        fedsim.run(**common, model=f"{EXAMPLES}/hub.py:{model}", out=tmp_path / model, **data)
        for model, data in (
            ("text_adapters", {"dataset": f"{EXAMPLES}/hub.py:texts", "partition": "natural"}),
            ("mlp_adapters", {}),
        )
    )
    assert text.manifest["experiment"]["client_sizes"] == [3, 5]
    assert text.summary["params"] == 2 * 8 * (8 + 8) + 2 * (8 + 1)  # of query and value; the head
    assert mlp.summary["params"] == 4 * (64 + 200) + 4 * (200 + 100) + 10 * (100 + 1)


def test_hub_has_a_model_of_timm_for_small_images() -> None:
    vit = runpy.run_path(str(EXAMPLES / "hub.py"))["vit"]
    assert vit((1, 8, 8), 3)(torch.zeros(2, 1, 8, 8)).shape == (2, 3)
