"""Models of timm and transformers, low-rank adapters of peft, and texts of the datasets package.

    pip install timm transformers peft datasets
    fedsim launch --model hub.py:vit --dataset cifar10 --algo fedavg
    MODEL=bert-tiny TEXTS=reviews fedsim launch --model hub.py:text_adapters --dataset hub.py:texts \
        --partition natural --clients 4 --algo fedlap_cov
    fedsim plan --model hub.py:mlp_adapters --algo ivon_admm

Nothing is downloaded in a run: fetch a model first (hf download NAME --local-dir MODEL), and save a data set
with input_ids and label by DatasetDict.save_to_disk(TEXTS). Only safetensors are read, no code of the folder.

Adapters: a layer W becomes W x + B A x (Hu et al. 2021, Sec. 4.1, arXiv:2106.09685). W is frozen and never
sent; A (r, I) and B (O, r) are trained. B is 0 at the start, so training starts from the original model.
Parameters without pretrained values, such as a new head, must be trained, too, or they stay random.

Source: timm.create_model; transformers' auto classes; peft.inject_adapter_in_model.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Collection
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fedsim import DataError, Dataset

Shape = tuple[int, ...]


def vit(shape: Shape, classes: int) -> nn.Module:
    """Build a vision transformer of timm for small images, with random weights."""
    import timm

    return timm.create_model(
        "vit_tiny_patch16_224",
        pretrained=False,
        in_chans=shape[0],
        img_size=shape[1:],
        patch_size=4,
        num_classes=classes,
    )


class Text(nn.Module):
    """A model of transformers that maps ids (n, T) to logits (n, C); its folder is $MODEL.

    It starts at the folder's weights, or, if there are none beside config.json, at random.
    """

    def __init__(self, shape: Shape, classes: int) -> None:
        super().__init__()
        from transformers import AutoConfig, AutoModelForSequenceClassification as Classifier

        folder = Path(os.environ["MODEL"])
        config = AutoConfig.from_pretrained(folder, num_labels=classes, local_files_only=True)
        if any(folder.glob("*.safetensors")):
            self.model = Classifier.from_pretrained(
                folder,
                config=config,
                dtype=torch.float32,
                use_safetensors=True,
                local_files_only=True,
                ignore_mismatched_sizes=True,
            )
        else:
            self.model = Classifier.from_config(config, dtype=torch.float32)
        self.padding = config.pad_token_id

    def forward(self, ids: Tensor) -> Tensor:
        """Mask padding, except at the first place, so that a row of only padding has finite outputs."""
        rows = ids.long()
        mask = torch.ones_like(rows) if self.padding is None else (rows != self.padding).long()
        mask[:, 0] = 1
        return self.model(input_ids=rows, attention_mask=mask).logits


def with_adapters(module: nn.Module, rank: int, target: Collection[str], also: Collection[str]) -> nn.Module:
    """Freeze a model in place, except for the modules named in `also`, and add adapters to the targets."""
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=list(target))
    adapted = inject_adapter_in_model(config, module)
    for name, parameter in adapted.named_parameters():
        parameter.requires_grad_("lora_" in name or not {*also}.isdisjoint(name.split(".")))
    return adapted


def text_adapters(shape: Shape, classes: int) -> nn.Module:
    """Adapt the attention of the text model, and train its head."""
    return with_adapters(Text(shape, classes), 8, ("query", "value"), ("classifier",))


def mlp_adapters(shape: Shape, classes: int) -> nn.Module:
    """Adapt the hidden layers of an MLP with 200 and 100 units, and train its last layer."""
    layers = OrderedDict[str, nn.Module](
        flatten=nn.Flatten(),
        fc1=nn.Linear(int(np.prod(shape)), 200),
        act1=nn.Sigmoid(),
        fc2=nn.Linear(200, 100),
        act2=nn.Sigmoid(),
        out=nn.Linear(100, classes),
    )
    return with_adapters(nn.Sequential(layers), 4, ("fc1", "fc2"), ("out",))


def texts() -> Dataset:
    """Read the folder $TEXTS, of rows of one length; a column `author`, if any, names natural clients."""
    import datasets

    parts = datasets.load_from_disk(os.environ["TEXTS"])
    train, test = parts["train"], parts["test"]
    classes = train.features["label"].names
    if test.features["label"].names != classes:
        raise DataError("train and test name their classes differently, so a number means two things")
    authors = train["author"] if "author" in train.column_names else None
    if authors is not None and None in authors:
        raise DataError("a row of train has no author")
    return Dataset(
        "texts",
        np.array(train["input_ids"], np.int32),
        np.array(train["label"], np.int64),
        np.array(test["input_ids"], np.int32),
        np.array(test["label"], np.int64),
        classes=len(classes),
        centres=None if authors is None else np.unique(authors, return_inverse=True)[1],
    )
