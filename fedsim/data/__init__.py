"""Data: named data sets as plain arrays, and the ways of dividing them among clients.

catalogue   what data sets there are, without opening any of them
datasets    Dataset and load_dataset: files to arrays, decoded once per machine (cache)
checks      what the arrays of a data set must look like, by likelihood
digits, idx, cifar, credit, heart, tff, stackoverflow      one file format each
tokens      how words are numbered
partition   the splits by name; splits holds their arithmetic
"""

from __future__ import annotations

from fedsim.data.catalogue import DATASETS, DatasetInfo
from fedsim.data.datasets import Dataset, load_dataset
from fedsim.data.partitions import PARTITIONS, PartitionInfo, partition

__all__ = [
    "DATASETS",
    "PARTITIONS",
    "Dataset",
    "DatasetInfo",
    "PartitionInfo",
    "load_dataset",
    "partition",
]
