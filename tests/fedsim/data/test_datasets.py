"""Images by name, on tiny files made here in the public formats and on the real ones."""

from __future__ import annotations

import gzip
import io
import lzma
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsim.data import DATASETS, Dataset, load_dataset
from fedsim.data.cache import cache_root
from fedsim.errors import DataError, UsageError

_ROOT = Path(__file__).resolve().parents[3]


def _check(dataset: Dataset, train: int, test: int) -> None:
    info = DATASETS[dataset.name]
    for inputs, targets, n in (
        (dataset.train_inputs, dataset.train_targets, train),
        (dataset.test_inputs, dataset.test_targets, test),
    ):
        assert inputs.shape == (n, *info.shape)
        assert inputs.dtype == (np.uint8 if len(info.shape) == 3 else np.float32)
        assert targets.shape == (n,) and targets.dtype == np.int64
        assert targets.min() >= 0 and targets.max() < info.classes
        assert not inputs.flags.writeable and not targets.flags.writeable
    assert (dataset.classes, dataset.scale) == (info.classes, info.scale)


def _mapped(array: np.ndarray) -> bool:
    base: object = array
    while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
        base = base.base
    return isinstance(base, np.memmap)


# ---- tiny files in the public formats


def _idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def _write_mnist(folder: Path, n: int = 12, packed: bool = True) -> np.ndarray:
    rng = np.random.RandomState(0)
    raw = folder / "raw"
    raw.mkdir(parents=True)
    images = rng.randint(0, 256, (n + 4, 28, 28)).astype(np.uint8)
    labels = (np.arange(n + 4) % 10).astype(np.uint8)
    for part, rows in (("train", slice(0, n)), ("t10k", slice(n, None))):
        for kind, array in (("images-idx3-ubyte", images), ("labels-idx1-ubyte", labels)):
            content = _idx(array[rows])
            name = f"{part}-{kind}"
            if packed:
                (raw / f"{name}.gz").write_bytes(gzip.compress(content))
            else:
                (raw / name).write_bytes(content)
    return images


def _rows(labels: list[tuple[int, ...]], seed: int) -> tuple[bytes, np.ndarray]:
    pixels = np.random.RandomState(seed).randint(0, 256, (len(labels), 3072)).astype(np.uint8)
    data = b"".join(bytes(label) + row.tobytes() for label, row in zip(labels, pixels, strict=True))
    return data, pixels.reshape(-1, 3, 32, 32)


# ---- digits


def test_digits_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    dataset = load_dataset("digits")
    _check(dataset, 1442, 355)
    bunch = load_digits()
    ours = np.concatenate([dataset.train_inputs, dataset.test_inputs]).reshape(-1, 64)
    labels = np.concatenate([dataset.train_targets, dataset.test_targets])
    # The same examples, whatever their order.
    expected = np.column_stack([bunch.data, bunch.target]).astype(np.uint8)
    result = np.column_stack([ours, labels]).astype(np.uint8)
    assert sorted(map(bytes, result)) == sorted(map(bytes, expected))
    # The split rule, on one class: every fifth example is a test example.
    threes = np.flatnonzero(bunch.target == 3)
    expected_test = bunch.data[threes[4::5]].reshape(-1, 1, 8, 8)
    np.testing.assert_array_equal(
        dataset.test_inputs[dataset.test_targets == 3], expected_test.astype(np.uint8)
    )
    np.testing.assert_array_equal(dataset.train_inputs[0, 0], bunch.images[0].astype(np.uint8))


def test_digits_without_the_csv_come_from_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedsim.data.readers import digits

    expected = load_dataset("digits")
    monkeypatch.setattr(digits, "digits_file", lambda: None)
    result = load_dataset("digits")
    np.testing.assert_array_equal(result.train_inputs, expected.train_inputs)
    np.testing.assert_array_equal(result.test_targets, expected.test_targets)


@pytest.mark.process
def test_digits_import_neither_scikit_learn_nor_torch() -> None:
    code = (
        "import sys; from fedsim.data import load_dataset; load_dataset('digits');"
        "print([m for m in ('sklearn', 'torch', 'pandas', 'PIL') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=_ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ---- idx files


@pytest.mark.parametrize("packed", [True, False])
def test_idx_files_packed_or_not(tmp_path: Path, packed: bool) -> None:
    images = _write_mnist(tmp_path / "MNIST", packed=packed)
    dataset = load_dataset("mnist", tmp_path)
    _check(dataset, 12, 4)
    np.testing.assert_array_equal(dataset.train_inputs[:, 0], images[:12])
    np.testing.assert_array_equal(dataset.test_inputs[:, 0], images[12:])
    assert dataset.centres is None


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda b: b[:-1], "should hold"),
        (lambda b: b + b"\0", "should hold"),
        (lambda b: b"\0\0\x09" + b[3:], "not an idx file"),
        (lambda b: _idx(np.zeros(12, np.uint8)), "not an idx file"),
        (lambda b: b"", "nothing"),
        (lambda b: _idx(np.zeros((12, 28, 27), np.uint8)), "shape"),
        (lambda b: _idx(np.zeros((11, 28, 28), np.uint8)), "do not belong together"),
    ],
)
def test_a_malformed_idx_file_is_refused(tmp_path: Path, spoil: Callable[[bytes], bytes], words: str) -> None:
    _write_mnist(tmp_path / "MNIST", packed=False)
    path = tmp_path / "MNIST/raw/train-images-idx3-ubyte"
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(DataError, match=words):
        load_dataset("mnist", tmp_path)
    assert not list(cache_root().glob("*")), "nothing of a refused file is cached"


def test_a_cut_gz_file_is_refused_by_name(tmp_path: Path) -> None:
    _write_mnist(tmp_path / "FashionMNIST")
    path = tmp_path / "FashionMNIST/raw/t10k-labels-idx1-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataError, match=str(path)):
        load_dataset("fashion_mnist", tmp_path)


def test_labels_out_of_range_are_refused(tmp_path: Path) -> None:
    _write_mnist(tmp_path / "MNIST", packed=False)
    (tmp_path / "MNIST/raw/t10k-labels-idx1-ubyte").write_bytes(_idx(np.array([0, 1, 2, 10], np.uint8)))
    with pytest.raises(DataError, match="0 to 9"):
        load_dataset("mnist", tmp_path)


# ---- CIFAR


def test_cifar10_binary(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    parts = []
    for i in range(5):
        data, images = _rows([(i,), (9 - i,)], seed=i)
        (folder / f"data_batch_{i + 1}.bin").write_bytes(data)
        parts.append(images)
    data, test_images = _rows([(7,)], seed=9)
    (folder / "test_batch.bin").write_bytes(data)
    dataset = load_dataset("cifar10", tmp_path)
    _check(dataset, 10, 1)
    np.testing.assert_array_equal(dataset.train_inputs, np.concatenate(parts))
    np.testing.assert_array_equal(dataset.test_inputs, test_images)
    assert dataset.train_targets.tolist() == [0, 9, 1, 8, 2, 7, 3, 6, 4, 5]
    (folder / "test_batch.bin").write_bytes(data[:-1])
    with pytest.raises(DataError, match="whole number of rows"):
        load_dataset("cifar10", tmp_path)
    (folder / "data_batch_3.bin").unlink()
    with pytest.raises(DataError, match=r"data_batch_3\.bin is missing"):
        load_dataset("cifar10", tmp_path)


def test_cifar100_binary_takes_the_fine_label(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    data, images = _rows([(3, 99), (4, 0), (19, 57)], seed=1)
    (folder / "train.bin").write_bytes(data)
    (folder / "test.bin").write_bytes(_rows([(1, 42)], seed=2)[0])
    dataset = load_dataset("cifar100", tmp_path)
    _check(dataset, 3, 1)
    np.testing.assert_array_equal(dataset.train_inputs, images)
    assert dataset.train_targets.tolist() == [99, 0, 57]
    assert dataset.test_targets.tolist() == [42]


@pytest.mark.parametrize(
    ("name", "folder"), [("cifar10", "cifar-10-batches-py"), ("cifar100", "cifar-100-python")]
)
def test_pickles_of_cifar_are_never_opened_and_the_binary_archive_is_named(
    name: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that have the publisher's md5, which torchvision would read."""
    (tmp_path / folder).mkdir()
    flag = tmp_path / "opened"
    # A pickle that would create `flag` when loaded.
    evil = b"cos\nsystem\n(S'touch " + os.fsencode(flag) + b"'\ntR."
    for file in (
        *(f"data_batch_{i}" for i in range(1, 6)),
        "test_batch",
        "batches.meta",
        "train",
        "test",
        "meta",
    ):
        (tmp_path / folder / file).write_bytes(evil)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    with pytest.raises(DataError, match=r"holds pickles, which are not read.*binary\.tar\.gz"):
        load_dataset(name, tmp_path)
    assert not flag.exists()


def _jpeg_copy(path: Path, sizes: tuple[int, int] = (3, 2), side: int = 32) -> list[np.ndarray]:
    from PIL import Image

    rng = np.random.RandomState(3)
    packed: dict[str, Any] = {}
    decoded = []
    for part, n in zip(("train", "test"), sizes, strict=True):
        files = []
        for _ in range(n):
            buffer = io.BytesIO()
            picture = rng.randint(0, 256, (side, side, 3)).astype(np.uint8)
            Image.fromarray(picture).save(buffer, "JPEG", quality=75)
            files.append(buffer.getvalue())
            decoded.append(np.asarray(Image.open(buffer).convert("RGB")))
        packed[f"{part}_jpeg"] = np.frombuffer(b"".join(files), np.uint8)
        packed[f"{part}_len"] = np.array([len(f) for f in files], np.uint16)
        packed[f"{part}_labels"] = np.arange(n, dtype=np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, **packed)
    path.parent.mkdir(parents=True)
    path.write_bytes(lzma.compress(buffer.getvalue()))
    return decoded


def test_cifar10_jpeg(tmp_path: Path) -> None:
    path = tmp_path / "CIFAR10/cifar10-jpeg-q75.npz.xz"
    decoded = _jpeg_copy(path)
    dataset = load_dataset("cifar10_jpeg", tmp_path)
    _check(dataset, 3, 2)
    both = np.concatenate([dataset.train_inputs, dataset.test_inputs])
    np.testing.assert_array_equal(both.transpose(0, 2, 3, 1), np.stack(decoded))
    assert dataset.test_targets.tolist() == [0, 1]


def test_a_spoilt_cifar10_jpeg_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "CIFAR10/cifar10-jpeg-q75.npz.xz"
    _jpeg_copy(path, side=31)
    with pytest.raises(DataError, match="image 0"):
        load_dataset("cifar10_jpeg", tmp_path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="not the JPEG copy"):
        load_dataset("cifar10_jpeg", tmp_path)
    buffer = io.BytesIO()
    np.savez(buffer, train_jpeg=np.array([object()]))
    path.write_bytes(lzma.compress(buffer.getvalue()))
    with pytest.raises(DataError, match="not the JPEG copy"):  # a pickled array is not loaded
        load_dataset("cifar10_jpeg", tmp_path)


# ---- real images


@pytest.mark.parametrize(
    ("name", "mean", "std"), [("mnist", 0.1307, 0.3081), ("fashion_mnist", 0.2860, 0.3530)]
)
def test_real_mnist_and_fashion_mnist(
    real_data: Callable[[str], Path], name: str, mean: float, std: float
) -> None:
    dataset = load_dataset(name, real_data(name))
    _check(dataset, 60000, 10000)
    assert _mapped(dataset.train_inputs)
    counts = np.bincount(dataset.train_inputs.reshape(-1), minlength=256)
    values = np.arange(256) / dataset.scale
    assert np.average(values, weights=counts) == pytest.approx(mean, abs=5e-5)
    spread = np.average(values**2, weights=counts) - np.average(values, weights=counts) ** 2
    assert spread**0.5 == pytest.approx(std, abs=5e-5)


# ---- names and places


def test_unknown_names_and_missing_files_say_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="did you mean 'fashion_mnist'"):
        load_dataset("fashionmnist")
    with pytest.raises(DataError, match="--data-dir DIR or the environment variable FEDSIM_DATA"):
        load_dataset("mnist")
    with pytest.raises(DataError, match=r"nowhere.*does not exist"):
        load_dataset("mnist", tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(
        DataError, match=r"data folder .*/file \(--data-dir or FEDSIM_DATA\) is a file, not a f"
    ):
        load_dataset("mnist", tmp_path / "file")
    monkeypatch.setenv("FEDSIM_DATA", str(tmp_path))
    path = tmp_path / "MNIST/raw/train-images-idx3-ubyte"
    with pytest.raises(DataError, match=f"{path} or {path}.gz is missing.*download=True"):
        load_dataset("mnist")
    with pytest.raises(DataError, match=f"{tmp_path / 'UCICredit/crx.data'} is missing"):
        load_dataset("uci_credit")
    path = tmp_path / "UCICredit/crx.data"
    path.mkdir(parents=True)
    with pytest.raises(DataError, match=f"{path} is a folder, not a file"):
        load_dataset("uci_credit")
    path.rmdir()
    path.symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match=f"{path} is a link to {tmp_path / 'gone'}, which does not exist"):
        load_dataset("uci_credit")
    with pytest.raises(DataError, match=r"data_batch_1\.bin is missing.*cifar-10-binary.tar.gz"):
        load_dataset("cifar10")


def test_the_catalogue_is_complete() -> None:
    for name, info in DATASETS.items():
        assert info.name == name and info.description and info.source
        assert info.default_inputs in ("scaled", "raw")
        assert info.classes >= 2 and info.scale >= 1


# ---- cache (the rest is in test_cache.py)


def test_without_a_writable_cache_arrays_stay_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write_mnist(tmp_path / "MNIST")
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path / "file" / "below"))
    dataset = load_dataset("mnist", tmp_path)
    _check(dataset, 12, 4)
    assert not _mapped(dataset.train_inputs)
