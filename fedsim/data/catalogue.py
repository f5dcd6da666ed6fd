"""The catalogue of data sets, which lists and describes them without opening a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from fedsim.specs import Form

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
    likelihood      meaning of the targets: a name in fedsim.learning.likelihoods
    clients         default number of clients read from a data set that is too large to be read whole
                    (NAME:CLIENTS sets another number); 0 if all clients are always read
    """

    name: str
    description: str
    shape: tuple[int, ...]
    classes: int
    files: tuple[str, ...]
    source: str
    scale: float = 1.0
    default_inputs: Inputs = "scaled"
    likelihood: str = "categorical"
    clients: int = 0

    @property
    def form(self) -> Form:
        """The syntax of the data set's name."""
        if not self.clients:
            return Form(self.name, help="which is always read whole")
        return Form(self.name, ("CLIENTS",), 1, "the number of clients to read")


def _idx_files(folder: str) -> tuple[str, ...]:
    kinds = ("images-idx3-ubyte", "labels-idx1-ubyte")
    return tuple(f"{folder}/raw/{part}-{kind}" for part in ("train", "t10k") for kind in kinds)


def _stackoverflow_files(*counts: str) -> tuple[str, ...]:
    files = ("stackoverflow_train.h5", "stackoverflow_test.h5", *(f"stackoverflow.{c}" for c in counts))
    return tuple(f"stackoverflow/{file}" for file in files)


_TFF = "https://storage.googleapis.com/tff-datasets-public/"

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
    DatasetInfo(
        name="emnist62",
        description="28x28 digits and letters by 3400 writers, 1 is background; 671585 train, 77483 test",
        shape=(1, 28, 28),
        classes=62,
        scale=255.0,
        files=("fed_emnist/fed_emnist_train.h5", "fed_emnist/fed_emnist_test.h5"),
        source=f"unpack {_TFF}fed_emnist.tar.bz2 into DIR/fed_emnist; cite Cohen 2017 (EMNIST), "
        "Caldas 2018 (LEAF)",
    ),
    DatasetInfo(
        name="cifar100_lda",
        description="CIFAR-100 as divided among 500 clients (two-step LDA) by TFF; 50000 train, 10000 test",
        shape=(3, 32, 32),
        classes=100,
        scale=255.0,
        files=("fed_cifar100/fed_cifar100_train.h5", "fed_cifar100/fed_cifar100_test.h5"),
        source=f"unpack {_TFF}fed_cifar100.tar.bz2 into DIR/fed_cifar100; no licence stated, "
        "cite Krizhevsky 2009",
    ),
    DatasetInfo(
        name="stackoverflow_lr",
        description="tags of Stack Overflow sentences (500, bag of 10000 words); the first 200 users, "
        "or N with stackoverflow_lr:N (5 MB each), at most 10000 test",
        shape=(10_000,),
        classes=500,
        files=_stackoverflow_files("word_count", "tag_count"),
        default_inputs="raw",
        source=f"unpack {_TFF}stackoverflow.tar.bz2, stackoverflow.word_count.tar.bz2 and "
        "stackoverflow.tag_count.tar.bz2 into DIR/stackoverflow; CC BY-SA 3.0",
        likelihood="bernoulli",
        clients=200,
    ),
    DatasetInfo(
        name="stackoverflow_nwp",
        description="next word of Stack Overflow sentences (20 places, 10004 ids); the first 500 users, "
        "or N with stackoverflow_nwp:N (30 kB each), at most 10000 test",
        shape=(20,),
        classes=10_004,
        files=_stackoverflow_files("word_count"),
        default_inputs="raw",
        source=f"unpack {_TFF}stackoverflow.tar.bz2 and stackoverflow.word_count.tar.bz2 into "
        "DIR/stackoverflow; CC BY-SA 3.0",
        likelihood="tokens",
        clients=500,
    ),
)

DATASETS: Mapping[str, DatasetInfo] = MappingProxyType({info.name: info for info in _ALL})
