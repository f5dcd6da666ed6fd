"""Data sets as plain arrays, and the partitions that divide them among clients.

catalogue    descriptions of the data sets, available without opening a file
datasets     Dataset and load_dataset: read files into arrays, decoded once per machine (cache)
arrays       dtypes, shapes, checks and digest of the arrays of a data set
readers      one module per file format
partitions   partitions by name (computed by splits) or by a user (own_partitions)
holdout      training rows held out for evaluation
"""

from __future__ import annotations

from fedsim.data.catalogue import DATASETS, DatasetInfo
from fedsim.data.datasets import Dataset, load_dataset
from fedsim.data.partitions import PARTITIONS, PartitionInfo, partition

__all__ = ["DATASETS", "PARTITIONS", "Dataset", "DatasetInfo", "PartitionInfo", "load_dataset", "partition"]
