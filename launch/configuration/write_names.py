"""Write launch/configuration/names.json from the registries: python -m launch.configuration.write_names."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from fedsim import model_specs
from fedsim.compression import LEVELS
from fedsim.data.catalogue import DATASETS
from fedsim.data.partitions import MODIFIERS, PARTITIONS
from fedsim.data.readers import table_files
from fedsim.experiment import hyperparameter_names, resolved_hyperparameters
from fedsim.learning.models.registry import MODELS
from fedsim.participation import BASES, SPECS
from fedsim.specs import Form
from fedsim.wire.codecs import CODECS
from fedsim.wire.schema import all_fields
from launch.configuration import names
from launch.results.describe import all_exchanges
from launch.runs.client_costs import sent_once
from protocols import REGISTRY, RELATED, AnyAlgorithm


def text() -> str:
    """Return the text of names.json."""
    bases = {base.form.usage: base for base in BASES.values()}
    kinds: dict[str, dict[str, Any]] = {
        "algorithms": {kind.name: _algorithm(kind()) for kind in REGISTRY},
        "datasets": {
            d.name: _entry(Form(d.name), f"{d.description}{_needs(d.files)}") for d in DATASETS.values()
        }
        | {
            "...file": _entry(Form(table_files.FORM.name), "a table of yours: csv, tsv or parquet"),
        },
        "models": {m.name: _entry(Form(m.name), m.description) for m in MODELS.values()}
        | {f"...{form.name}": _entry(Form(usage), form.help) for usage, form in model_specs.FORMS.items()},
        "partitions": {p.name: _entry(p.form, p.description) for p in PARTITIONS.values()}
        | {usage: _entry(Form(usage), description) for usage, description in MODIFIERS.items()},
        "codecs": {c.name: _entry(c.form, c.description) for c in CODECS.values()},
        "compress": {word: {"usage": word, "cells": level} for word, level in LEVELS.items()},
        "schedules": {
            (bases[usage].form.name if usage in bases else usage): _entry(
                bases[usage].form if usage in bases else Form(usage), description
            )
            for usage, description in SPECS.items()
        },
    }
    return json.dumps({kind: kinds[kind] for kind in names.KINDS}, indent=1, ensure_ascii=False) + "\n"


def _entry(form: Form, description: str, usage: str = "") -> dict[str, Any]:
    entry: dict[str, Any] = {"usage": usage or form.usage, "cells": [description]}
    if form.arguments:
        entry |= {"arguments": form.arguments, "optional": form.optional}
    return entry | ({"help": form.help} if form.help else {})


def _algorithm(algorithm: AnyAlgorithm) -> dict[str, Any]:
    """Return an algorithm's entry, with its cost per client and round, paper, hyperparameters and fields."""
    costs = [all_exchanges(algorithm, side) for side in ("down", "up")]
    return {
        "usage": algorithm.name,
        "cells": [*costs, algorithm.paper],
        "group": "related" if type(algorithm) in RELATED else "papers",
        "url": algorithm.url,
        **({"differs": differs} if (differs := _differs(algorithm)) else {}),
        "hyperparameters": sorted(hyperparameter_names(type(algorithm))),
        "fields": sorted(set(_fields(algorithm))),
        **({"once": once} if (once := sorted(sent_once(algorithm))) else {}),
        "defaults": {
            "hyperparameters": resolved_hyperparameters(algorithm),
            **{f.name: getattr(algorithm, f.name) for f in fields(names.Defaults)[1:]},
        },
    }


def _differs(algorithm: AnyAlgorithm) -> str:
    """Return the text after "Differs:" in the algorithm's module docstring, to the end of the paragraph."""
    text = re.search(r"^Differs: (.+?)(?:\n\n|\Z)", inspect.getmodule(algorithm).__doc__ or "", re.M | re.S)
    return " ".join(text[1].split()) if text else ""


def _fields(algorithm: AnyAlgorithm) -> Iterator[str]:
    for exchange in (*algorithm.setup, *algorithm.exchanges):
        for message in (exchange.down, exchange.up):
            yield from (field.name for field in all_fields(message))


def _needs(files: tuple[str, ...]) -> str:
    folders = dict.fromkeys(file.rpartition("/")[0] for file in files)
    return f" (in DIR/{', '.join(folders)})" if folders else ""


if __name__ == "__main__":
    names.FILE.write_text(text(), encoding="utf-8")
