"""Names that an earlier version had, with what replaces each of them.

This is the one place where fedsim remembers what it no longer has. `fedsim.errors.unknown` and the command
line ask it before they guess at a misspelling.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath

VERSION = "0.2"
"""The version in which all of these names left."""

_TREE = "--tree computes the same bits, and books the same bytes, in the coordinator"
_VERIFY = "fedsim verify RUN computes tasks again and compares the bits"
_FEDSCALE = "docs/examples/fedscale.py writes files for --link and trace:FILE"
_HUB = "write FILE.py:NAME, as in docs/examples/hub.py"
_TFF = "write FILE.py:NAME, as in docs/examples/tff.py"
_FEDPM = "docs/examples/fedpm.py has the algorithm, and an entropy code for its masks"
_MASKS = f"{_FEDPM}; commit cac19ee has this code"
_ROUND = "--round REGEX begins a round with a line of the command's output"

OPTIONS: Mapping[str, str] = {
    "--edge-processes": _TREE,
    "--keep-uploads": _VERIFY,
    "--personalise": "docs/examples/personal.py trains a model per client from a run's last model",
    "--silence": _ROUND,
    "--smallest": _ROUND,
    "--on ray": "the same fedsim sweep on several machines, with one folder --runs, shares its runs",
    "--durability none": "--durability process survives kill -9",
    "--codec edge.FIELD": "a --tree adds exact sums; leave it out",
}
"""Options of the command line, and so keys of configuration files and arguments in Python."""

NAMES: Mapping[str, Mapping[str, str]] = {
    "command": {"replay": _VERIFY, "edge": _TREE, "devices": _FEDSCALE},
    "hyperparameter": {"prior_power": "only personal models had it, and never the rounds"},
    "algorithm": {"fedpm": _FEDPM},
    "class variable": {"default_codecs": "--codec names the codec of every field"},
    "codec": {"bernoulli": _FEDPM, "mrc": _MASKS, "levels": _MASKS},
    "model": {**dict.fromkeys(("cnn_emnist", "resnet18_gn", "lstm"), _TFF), "hf": _HUB, "+lora": _HUB},
    "data set": {
        **dict.fromkeys(("emnist62", "cifar100_lda", "stackoverflow_lr", "stackoverflow_nwp"), _TFF),
        "hf": _HUB,
        "leaf": "write FILE.py:NAME, as in docs/examples/leaf.py",
        ".npz": "write FILE.py:NAME that reads it (docs/datasets.md)",
        "category=": "a column of text with few values is one feature a value; write such numbers as text",
    },
    "likelihood": {"tokens": "token_classes scores every place that has a target (-1: none)"},
    "partition": {
        "pachinko": "it was the split of cifar100_lda; docs/examples/tff.py has its clients",
        "+noise": "wrong labels are a data set of your own, as in docs/examples/label_noise.py",
    },
}
"""Other names by kind, where the kind is the first argument of fedsim.errors.unknown."""


def removed(kind: str, name: str) -> str | None:
    """Return the error message for a removed name of a kind; None for any other name.

    kind: "option", where the name has its dashes, or a key of NAMES. The name of a file, which may have a
    comma and more behind it, is removed if its extension is.
    """
    names = OPTIONS if kind == "option" else NAMES.get(kind, {})
    if (extension := PurePath(name.partition(",")[0]).suffix.lower()) in names:
        name = extension
    instead = names.get(name)
    return None if instead is None else f"{name} left in {VERSION}: {instead}"
