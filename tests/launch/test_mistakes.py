"""A user's mistake is one clear line and exit code 2, never a traceback, and loses nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from launch.cli import main


def launch(out: Path, *arguments: str) -> Result:
    return CliRunner(catch_exceptions=False).invoke(main, ["launch", "--out", str(out), *arguments])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--algo", "fedlap_cow"], "did you mean 'fedlap_cov'"),
        (["--algo", "nowhere.py:Mine"], "there is no file"),
        (["--set", "delt=1"], "did you mean 'delta'"),
        (["--set", "delta=-1"], "delta = -1"),
        (["--participation", "11"], "--participation '11'"),
        (["--dataset", "fashion_mnits"], "did you mean 'fashion_mnist'"),
        (["--dataset", "mnist", "--data-dir", "."], "MNIST/raw/train-images-idx3-ubyte"),
        (["--dataset", "mnist", "--data-dir", "/nowhere"], "the data folder /nowhere"),
        (["--codec", "mean=bf17"], "did you mean 'bf16'"),
        (["--codec", "sideways.mean=bf16"], "the direction is"),
        (["--devices", "cuda:7"], "--devices cuda:7"),
        (["--workers", "-1"], "workers = -1"),
        (["--config", "/nowhere.toml"], "/nowhere.toml"),
        (["--partition", "natural"], "natural"),
        (["--model", "cnn_acar"], "cnn_acar"),
    ],
    ids=lambda value: "-".join(value)[:30] if isinstance(value, list) else "",
)
def test_a_mistake_is_one_clear_line(arguments: list[str], words: str, tmp_path: Path) -> None:
    done = launch(tmp_path / "run", "--workers", "0", *arguments)
    assert done.exit_code == 2
    assert words in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "run" / "manifest.json").exists()


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    done = launch(tmp_path, "--workers", "0")
    assert done.exit_code == 2
    assert "not empty" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["precious"]


@pytest.mark.parametrize(
    "what", ["algorithms", "datasets", "models", "partitions", "codecs", "schedules"], ids=str
)
def test_lists(what: str) -> None:
    done = CliRunner(catch_exceptions=False).invoke(main, ["list", what])
    assert done.exit_code == 0
    assert len(done.stdout.splitlines()) > 2


def test_describe_shows_box_messages_and_hyperparameters() -> None:
    done = CliRunner(catch_exceptions=False).invoke(main, ["describe", "fedlap_cov"])
    assert done.exit_code == 0
    for word in ("Eq. 21", "precision", "2P down, 2P up", "delta", "number > 0", "epochs"):
        assert word in done.stdout
