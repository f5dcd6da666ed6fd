"""Data: named data sets as plain arrays, and the ways of dividing them among clients.

catalogue    what data sets there are, without opening any of them
datasets     Dataset and load_dataset: files to arrays, decoded once per machine (cache)
arrays       the arrays of a data set: what they must look like by likelihood, and their digest
readers      one module per file format
vocabulary   how words are numbered
partitions   the splits by name, and a user's own; splits has their arithmetic
holdout      training rows held out for evaluation
"""

from __future__ import annotations

from fedsim.data.catalogue import DATASETS, DatasetInfo
from fedsim.data.datasets import Dataset, load_dataset
from fedsim.data.partitions import PARTITIONS, PartitionInfo, partition

__all__ = ["DATASETS", "PARTITIONS", "Dataset", "DatasetInfo", "PartitionInfo", "load_dataset", "partition"]
