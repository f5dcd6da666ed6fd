"""Check folders in Hugging Face's layout: they may contain data, but no code and no outside references.

A folder is checked before a library opens it, because its author may not be trusted.

Source: https://huggingface.co/docs/transformers/custom_models (auto_map),
https://huggingface.co/docs/hub/datasets-manual-configuration (data_files).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedsim.errors import DataError, UsageError
from fedsim.extras import needed

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack")
"""The extensions of weight files that are not safetensors; most are pickles."""
BUILDERS = ("csv", "json", "parquet", "arrow", "text", "imagefolder")
"""The readers of the datasets package whose files contain only data."""
_SOURCES = re.compile(
    r"(^|_)(pretrained|checkpoints?|ckpts?|files?|filenames?|dirs?|folders?|urls?|uris?|hub|hf|cfg|overlay|custom|"
    r"trust|remote|revision|repo|filter|state_dict)(_|$)|^(source|token|weights)$"
)
"""Parts of keywords that name something to read, fetch or execute."""


def check_model(folder: Path, owner: str) -> None:
    """Refuse a model that is pickled, runs code or reads outside its folder. Errors begin with `owner`."""
    check_configurations(folder, owner)
    if (folder / "adapter_config.json").is_file():
        raise UsageError(
            f"{owner}: {folder} has adapters of a model elsewhere (adapter_config.json); "
            "merge them into the model first"
        )
    weights = {path.name for path in folder.glob("*.safetensors")}
    other = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if other and not weights:
        raise UsageError(
            f"{owner}: the weights in {folder} are no safetensors but {other[0]}, which is not read: "
            "it may be a pickle, and run code. Fetch or save them as safetensors (save_pretrained)"
        )
    for path in sorted(folder.glob("*.safetensors.index.json")):
        named = _json(path, owner).get("weight_map")
        if not isinstance(named, dict) or not weights.issuperset(map(str, named.values())):
            raise UsageError(f"{owner}: {path} names files that are no safetensors of this folder")


def check_configurations(folder: Path, owner: str) -> None:
    """Refuse a tokenizer or model that runs code or reads outside its folder. Errors begin with `owner`."""
    program = next(iter(sorted(folder.glob("*.py"))), None)
    if program is not None:
        raise UsageError(
            f"{owner}: {folder} has code of its own ({program.name}), which a run does not execute; "
            "if the library has this model, remove the file and auto_map"
        )
    for path in sorted(folder.glob("*config.json")):
        for why in _beyond(_json(path, owner), folder):
            raise UsageError(
                f"{owner}: {path} {why}; a run takes everything from this folder, and no code from it"
            )


def _json(path: Path, owner: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as e:
        raise UsageError(f"{owner}: {path} cannot be read: {' '.join(str(e).split())[:200]}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{owner}: {path} is not a JSON object")
    return content


def names_source(key: str) -> bool:
    """Return whether a keyword of a model library names something to read, fetch or execute."""
    key = key.lower()
    return bool(_SOURCES.search(key)) or (key.endswith("path") and not key.endswith("drop_path"))


def _beyond(config: Any, folder: Path) -> Iterator[str]:
    """Yield the reasons to refuse a configuration: references to code, or to files outside the folder."""
    items = config.items() if isinstance(config, dict) else enumerate(config)
    for key, value in items:
        name = str(key)
        if name in ("auto_map", "custom_pipelines") and value:
            yield f"names code of its own ({name})"
        elif name in ("model_args", "backbone_kwargs") and isinstance(value, dict):
            yield from (
                f"names a file or a download ({k})" for k, v in value.items() if v and names_source(k)
            )
        elif name == "use_pretrained_backbone" and value:
            yield f"asks for a download ({name})"
        elif isinstance(value, str) and (
            name in ("backbone", "architecture") or name.endswith("_implementation")
        ):
            if "/" in value or ":" in value:
                yield f"takes {name} from elsewhere ({value[:60]})"
        elif "file" in name and any(_outside(text, folder) for text in _texts(value)):
            yield f"names a file outside ({name})"
        if isinstance(value, dict | list):
            yield from _beyond(value, folder)


def _outside(text: str, folder: Path) -> bool:
    """Return whether a path, relative to the working directory or `folder`, is a file outside `folder`."""
    try:
        there = [path for path in (Path(text), folder / text) if path.is_file()]
    except (OSError, ValueError):
        return False
    return any(not is_inside(path, folder) for path in there)


def is_inside(path: str | Path, folder: Path) -> bool:
    """Return whether a path is inside a folder, after all links are resolved."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def _texts(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON or YAML value, without the keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


# ---- data sets


def files_inside(folder: Path) -> tuple[Path, ...]:
    """Return all files of a folder, in an order that does not depend on the machine.

    A program, or a link that leads out of the folder, raises a DataError.
    """
    paths = sorted(folder.rglob("*"))  # rglob does not follow links to folders
    for path in paths:
        if path.is_symlink() and not is_inside(path, folder):
            raise DataError(
                f"{path} is a link that leads out of {folder}: its files must lie in it; copy this one"
            )
        if path.suffix == ".py":
            raise DataError(f"{path} is a program: a data set's folder holds data, and no code is executed")
    return tuple(path for path in paths if path.is_file())


def load(folder: Path, scratch: str) -> Any:
    """Load the splits of a data set, as datasets.load_from_disk and load_dataset return them.

    The library writes its cache to `scratch`. A folder that refers to anything outside, or whose reader is
    not in BUILDERS, raises a DataError.
    """
    files_inside(folder)
    datasets = needed("datasets", f"data set hf:{folder.name}")
    if (folder / "dataset_dict.json").is_file():
        _check_saved(folder)
        parts = datasets.load_from_disk(str(folder), keep_in_memory=True)
    else:
        _check_card(folder)
        local = datasets.DownloadConfig(local_files_only=True)
        builder = datasets.load_dataset_builder(str(folder), cache_dir=scratch, download_config=local)
        kind = type(builder).__module__.rpartition(".")[2]
        named = [str(name) for names in (builder.config.data_files or {}).values() for name in names]
        _check_files(folder, named)
        if kind not in BUILDERS:
            raise DataError(
                f"{folder} has files of a kind that is not read ({kind}); "
                "save it as parquet, csv, json or images"
            )
        builder.download_and_prepare(download_config=local)
        parts = builder.as_dataset(in_memory=True)
    for part in parts.values():
        for column in part.data.columns:
            for chunk in column.chunks:
                _check_files(folder, _referred(chunk))
    return parts


def _check_saved(folder: Path) -> None:
    """Check a folder from save_to_disk: the names of its splits, and of their files."""
    try:
        splits = json.loads((folder / "dataset_dict.json").read_bytes())["splits"]
        for split in splits:
            state = json.loads((folder / str(split) / "state.json").read_bytes())
            _check_files(folder, [str(folder / str(split) / name) for name in _texts(state["_data_files"])])
    except (ValueError, LookupError, TypeError, OSError) as e:
        raise DataError(f"{folder} is not what save_to_disk writes: {type(e).__name__}: {e}") from None


def _check_card(folder: Path) -> None:
    """Check README.md, whose header may name the files of the data set."""
    if (folder / ".huggingface.yaml").exists():
        raise DataError(f"{folder} has a .huggingface.yaml, which is not read; README.md may say the same")
    if not (folder / "README.md").is_file():
        return
    card = needed("huggingface_hub", f"data set hf:{folder.name}").DatasetCard.load(folder / "README.md")
    for config in card.data.to_dict().get("configs") or ():
        places = [config.get(key) for key in ("data_files", "data_dir")] if isinstance(config, dict) else []
        for text in _texts(places):
            if ":" in text or text.startswith(("/", "~", "\\")) or ".." in Path(text).parts:
                raise DataError(
                    f"{folder / 'README.md'} names data outside the folder ({text[:100]}): "
                    "a data set's files lie in its folder, and a run downloads nothing"
                )


def _check_files(folder: Path, names: list[str]) -> None:
    for name in names:
        if "://" in name or "::" in name or not is_inside(name, folder):
            raise DataError(
                f"{folder} names a file outside it ({name[:100]}): "
                "a data set's files lie in its folder, and a run downloads nothing"
            )


def _referred(array: Any) -> list[str]:
    """Return the external files to which a pyarrow array (of images, for example) refers."""
    kind = array.type
    if hasattr(array, "storage"):
        return _referred(array.storage)
    if str(kind).startswith("struct"):
        names = [kind.field(i).name for i in range(kind.num_fields)]
        if {"bytes", "path"} <= set(names):
            paths = array.field("path").filter(array.field("bytes").is_null())
            return [str(path) for path in paths.to_pylist() if path is not None]
        return [text for name in names for text in _referred(array.field(name))]
    if hasattr(array, "flatten") and hasattr(kind, "value_type"):
        return _referred(array.flatten())
    return []
