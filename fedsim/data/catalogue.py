"""The catalogue of data sets, which lists and describes them without opening a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Inputs = Literal["scaled", "raw"]


@dataclass(frozen=True)
class DatasetInfo:
    """One line of `fedsim list datasets`.

    shape           shape of one input, without the example axis
    files           paths relative to the data folder; empty if no files are needed. An idx file may be
                    compressed (FILE.gz)
    source          origin and licence of the public data
    scale           "scaled" inputs are x / scale (images: in [0, 1]); 1 for tables
    default_inputs  the kind of inputs in the published experiments on this data set
    """

    name: str
    description: str
    shape: tuple[int, ...]
    classes: int
    files: tuple[str, ...]
    source: str
    scale: float = 1.0
    default_inputs: Inputs = "scaled"


def _idx_files(folder: str) -> tuple[str, ...]:
    kinds = ("images-idx3-ubyte", "labels-idx1-ubyte")
    return tuple(f"{folder}/raw/{part}-{kind}" for part in ("train", "t10k") for kind in kinds)


_CIFAR10_FILES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")

_ALL = (
    DatasetInfo(
        name="digits",
        description="8x8 handwritten digits that ship with scikit-learn; 1442 train, 355 test",
        shape=(1, 8, 8),
        classes=10,
        scale=16.0,
        files=(),
        source="scikit-learn's digits.csv.gz (UCI optical recognition of digits, CC BY 4.0)",
    ),
    DatasetInfo(
        name="mnist",
        description="28x28 handwritten digits; 60000 train, 10000 test",
        shape=(1, 28, 28),
        classes=10,
        scale=255.0,
        files=_idx_files("MNIST"),
        source="MNIST idx files, CC BY-SA 3.0; torchvision.datasets.MNIST(DIR, download=True)",
    ),
    DatasetInfo(
        name="fashion_mnist",
        description="28x28 articles of clothing; 60000 train, 10000 test",
        shape=(1, 28, 28),
        classes=10,
        scale=255.0,
        files=_idx_files("FashionMNIST"),
        # The published experiments use pixels of 0..255 (docs/references/published-numbers.md#data-sets).
        default_inputs="raw",
        source="FashionMNIST idx files, MIT; torchvision.datasets.FashionMNIST(DIR, download=True)",
    ),
    DatasetInfo(
        name="cifar10",
        description="32x32 colour images, 10 classes; 50000 train, 10000 test",
        shape=(3, 32, 32),
        classes=10,
        scale=255.0,
        files=tuple(f"cifar-10-batches-bin/{name}" for name in _CIFAR10_FILES),
        source="unpack cifar-10-binary.tar.gz into DIR; no licence stated, cite Krizhevsky 2009",
    ),
    DatasetInfo(
        name="cifar100",
        description="32x32 colour images, 100 fine classes; 50000 train, 10000 test",
        shape=(3, 32, 32),
        classes=100,
        scale=255.0,
        files=("cifar-100-binary/train.bin", "cifar-100-binary/test.bin"),
        source="unpack cifar-100-binary.tar.gz into DIR; no licence stated, cite Krizhevsky 2009",
    ),
    DatasetInfo(
        name="cifar10_jpeg",
        description="CIFAR-10 as quality-75 JPEG: LOSSY (RMSE about 8/255); 50000 train, 10000 test",
        shape=(3, 32, 32),
        classes=10,
        scale=255.0,
        files=("CIFAR10/cifar10-jpeg-q75.npz.xz",),
        source="a lossy copy made for this project, not published: results on it are labelled "
        'CIFAR-10-JPEG. With the original files use the data set "cifar10"',
    ),
    DatasetInfo(
        name="uci_credit",
        description="credit approval, 42 raw features as in the FedLap release; 521 train, 131 test",
        shape=(42,),
        classes=2,
        files=("UCICredit/crx.data",),
        default_inputs="raw",
        source="UCI Credit Approval (crx.data of credit+approval.zip), CC BY 4.0",
    ),
    DatasetInfo(
        name="flamby_heart",
        description="heart disease at 4 hospitals, 13 raw features by FLamby's rule; 486 train, 254 test",
        shape=(13,),
        classes=2,
        files=tuple(
            f"HeartDisease/processed.{centre}.data"
            for centre in ("cleveland", "hungarian", "switzerland", "va")
        ),
        default_inputs="raw",
        source="UCI Heart Disease (the processed.*.data files of heart+disease.zip), CC BY 4.0",
    ),
)

DATASETS: Mapping[str, DatasetInfo] = MappingProxyType({info.name: info for info in _ALL})
