"""The frozen part of a model is one file's pages for all processes of a machine."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from fedsim.learning.frozen import freeze, frozen_digest
from tests.support.commands import fedsim, start
from workers.storage.shared_frozen import FILE, map_frozen, write_frozen

WIDTH = 600
NETS = f"""
from torch import nn

def wide(shape, classes):
    layers = nn.Linear(64, {WIDTH}), nn.BatchNorm1d({WIDTH}), nn.Linear({WIDTH}, {WIDTH}), nn.ReLU()
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear({WIDTH}, classes))
"""


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    module = nn.Sequential(
        nn.Linear(64, WIDTH), nn.BatchNorm1d(WIDTH * 2), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
    )
    module[1].running_mean.normal_()
    freeze(module, "3.*")
    return module


def test_the_frozen_part_of_another_process_takes_the_place_of_ones_own(tmp_path: Path) -> None:
    one, other = network(1), network(2)
    assert write_frozen(one, tmp_path) == tmp_path / FILE
    head = other[3].weight.clone()
    small = one[1].num_batches_tracked
    assert map_frozen(other, tmp_path)
    assert torch.equal(one[2].weight, other[2].weight)
    assert torch.equal(one[1].running_mean, other[1].running_mean)
    assert torch.equal(other[3].weight, head)  # trained
    assert not other[2].weight.requires_grad
    for layer in (0, 2):  # too small to be in the file
        other[layer].bias.data.copy_(one[layer].bias)
    assert small == other[1].num_batches_tracked
    assert frozen_digest(one) == frozen_digest(other)


def test_a_write_stays_in_the_process(tmp_path: Path) -> None:
    one = network(1)
    write_frozen(one, tmp_path)
    before = (tmp_path / FILE).read_bytes()
    map_frozen(one, tmp_path)
    one[2].weight.data.zero_()
    assert (tmp_path / FILE).read_bytes() == before


def test_nothing_is_mapped_that_does_not_fit(tmp_path: Path) -> None:
    one = network(1)
    before = frozen_digest(one)
    assert not map_frozen(one, tmp_path)
    (tmp_path / FILE).write_bytes(b"torn")
    assert not map_frozen(one, tmp_path)
    assert frozen_digest(one) == before
    little = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    freeze(little, "1.*")
    assert write_frozen(little, tmp_path) is None


@pytest.mark.process
@pytest.mark.slow
def test_workers_of_a_run_have_one_copy_and_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(NETS)
    options = (
        *("--algo", "fedavg", "--model", f"{tmp_path / 'nets.py'}:wide", "--train", "5.*", "--clients", "4"),
        *("--set", "local.epochs=1"),
    )
    fedsim("launch", *options, "--rounds", "30", "--workers", "0", "--out", str(tmp_path / "0"))
    running = start("launch", *options, "--rounds", "30", "--workers", "2", "--out", str(tmp_path / "2"))
    running.wait_for(" 2/30")
    processes = json.loads((tmp_path / "2" / "processes.json").read_text())
    workers = [p["pid"] for p in processes if p["role"] == "worker"]
    file = str(tmp_path / "2" / FILE)
    mapped = [Path(f"/proc/{pid}/maps").read_text().count(file) for pid in (running.process.pid, *workers)]
    running.rest()
    assert mapped == [1, 1, 1]
    assert not os.path.exists(file)
    shas = [json.loads((tmp_path / k / "summary.json").read_text())["model_sha256"] for k in "02"]
    assert shas[0] == shas[1]
