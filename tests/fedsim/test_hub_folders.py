"""Models and data sets of Hugging Face's libraries from folders that a stranger has written."""

from __future__ import annotations

import builtins
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fedsim.data.datasets import load_dataset
from fedsim.errors import DataError, FedsimError, UsageError
from fedsim.extras import needed
from fedsim.learning.models import library_models
from fedsim.learning.models.registry import build_model
from fedsim.model_specs import ModelSpec

datasets = pytest.importorskip("datasets")
ROWS = "size,label\n1,0\n2,1\n"


class Evil:
    """Unpickled, it touches a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is there once foreign code has run."""
    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("asks the user"))
    return tmp_path / "touched"


@pytest.fixture
def evil(tmp_path: Path, marker: Path) -> Path:
    """A pickle that touches the marker; timm before 1.0.26 reads such a file."""
    path = tmp_path / "evil"
    path.write_bytes(pickle.dumps(Evil(marker)))
    return path


@pytest.fixture
def old_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    """timm as it was in version 1.0.3, as far as files are concerned."""

    def create_model(name: str, **keywords: Any) -> torch.nn.Module:
        for value in [name.partition(":")[2], *keywords.values()]:
            if isinstance(value, dict):
                value = value.get("file")
            if isinstance(value, str) and Path(value).is_file():
                pickle.loads(Path(value).read_bytes())
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))

    monkeypatch.setattr("timm.create_model", create_model)


def test_the_evil_file_is_evil(evil: Path, marker: Path) -> None:
    pickle.loads(evil.read_bytes())
    assert marker.exists()


@pytest.mark.parametrize(
    "spec",
    [
        "timm:resnet18,checkpoint_path={evil}",
        "timm:resnet18,checkpoint_path='{evil}'",
        "timm:resnet18,Checkpoint_Path={evil}",
        "timm:resnet18,pretrained_cfg={{'file':'{evil}'}}",
        "timm:resnet18,pretrained_cfg_overlay={{'file':'{evil}'}}",
        "timm:resnet18,act_layer={evil}",
        "timm:resnet18,act_layer=['{evil}']",
        "timm:resnet18,block_args={{'file':'{evil}'}}",
        "timm:resnet18,cache_dir={evil}",
        "timm:resnet18,pretrained=True",
        "timm:resnet18,pretrained_strict=False",
        "timm:resnet18,trust_remote_code=True",
        "timm:resnet18,revision=main",
        "timm:resnet18,hf_hub_id=a",
        "timm:resnet18,state_dict=a",
        "timm:resnet18,weights_path=a",
        "timm:resnet18,source=a",
        "timm:local-dir:{evil}",
        "timm:hf-hub:a/b",
        "timm:hf_hub:a",
        "timm:{evil}",
    ],
)
@pytest.mark.usefixtures("old_timm")
def test_a_keyword_of_timm_that_names_a_file_is_refused_before_timm_is_asked(
    spec: str, evil: Path, marker: Path
) -> None:
    text = spec.format(evil=evil)
    with pytest.raises(
        UsageError, match=r"does not describe an architecture|no name of an architecture"
    ) as e:
        build_model(text, (1, 8, 8), 3)
    assert "\n" not in str(e.value)
    with pytest.raises(UsageError):
        library_models.library_model(ModelSpec(text), (1, 8, 8), 3, "categorical")
    assert not marker.exists()


def test_keywords_of_an_architecture_have_their_values() -> None:
    spec = ModelSpec.parse(
        "timm:vit,img_size=32,drop_path_rate=.1,global_pool=avg,class_token=False,pos_embed="
    )
    expected = {"img_size": 32, "drop_path_rate": 0.1, "global_pool": "avg", "class_token": False}
    assert spec.architecture() == {**expected, "pos_embed": ""}


# ---- models of transformers


def bert(folder: Path, **more: Any) -> Path:
    from transformers import BertConfig, BertForSequenceClassification

    sizes: dict[str, Any] = {"vocab_size": 30, "hidden_size": 8, "num_hidden_layers": 1, "num_labels": 3}
    torch.manual_seed(3)
    config = BertConfig(num_attention_heads=2, intermediate_size=8, max_position_embeddings=16, **sizes)
    BertForSequenceClassification(config).save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    return folder


AUTO_MAP = {
    "AutoConfig": "evil.Config",
    "AutoModelForSequenceClassification": "evil.Model",
    "AutoTokenizer": [None, "evil.Words"],
}


@pytest.mark.parametrize("model_type", ["bert", "a_new_one"])
@pytest.mark.parametrize("code", [True, False])
def test_a_model_with_code_of_its_own_is_refused(
    model_type: str, code: bool, tmp_path: Path, marker: Path
) -> None:
    folder = bert(tmp_path / "bert", model_type=model_type, auto_map=AUTO_MAP)
    if code:
        (folder / "evil.py").write_text(f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n")
    with pytest.raises(UsageError, match="code of its own") as e:
        build_model(f"hf:{folder}", (6,), 3)
    assert "\n" not in str(e.value)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"text_config": {"auto_map": AUTO_MAP}}, "auto_map"),
        ({"attn_implementation": "someone/kernels"}, "takes attn_implementation from elsewhere"),
        ({"use_pretrained_backbone": True, "backbone": "resnet18"}, "asks for a download"),
        ({"backbone": "local-dir:/tmp"}, "takes backbone from elsewhere"),
        (
            {
                "model_type": "timm_wrapper",
                "architecture": "resnet18",
                "model_args": {"checkpoint_path": "x"},
            },
            "names a file or a download",
        ),
        ({"model_type": "timm_wrapper", "architecture": "hf-hub:a/b"}, "takes architecture from elsewhere"),
    ],
)
@pytest.mark.usefixtures("marker")
def test_a_configuration_takes_nothing_from_elsewhere(
    more: dict[str, Any], what: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=what):
        build_model(f"hf:{bert(tmp_path / 'bert', **more)}", (6,), 3)


def test_weights_that_are_a_pickle_are_refused_and_no_random_model_is_trained(
    evil: Path, marker: Path, tmp_path: Path
) -> None:
    folder = bert(tmp_path / "bert")
    (folder / "model.safetensors").unlink()
    evil.rename(folder / "pytorch_model.bin")
    with pytest.raises(UsageError, match=r"no safetensors but pytorch_model\.bin"):
        build_model(f"hf:{folder}", (6,), 3)
    assert not marker.exists()


@pytest.mark.usefixtures("marker")
def test_the_parts_of_a_model_lie_in_its_folder(tmp_path: Path) -> None:
    folder = bert(tmp_path / "bert")
    save_file({"a": torch.zeros(1)}, tmp_path / "outside.safetensors")
    index = {"metadata": {}, "weight_map": {"a": "../outside.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UsageError, match="names files that are no safetensors of this folder"):
        build_model(f"hf:{folder}", (6,), 3)


@pytest.mark.usefixtures("marker")
def test_adapters_of_a_model_elsewhere_are_refused(tmp_path: Path) -> None:
    base, folder = bert(tmp_path / "base"), bert(tmp_path / "adapters")
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    with pytest.raises(UsageError, match="adapters of a model elsewhere"):
        build_model(f"hf:{folder}", (6,), 3)


def test_nothing_is_downloaded_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "0")
    needed("json", "a test")
    assert (os.environ["HF_HUB_OFFLINE"], os.environ["HF_DATASETS_OFFLINE"]) == ("1", "1")


# ---- data sets


def table(folder: Path, card: str = "", train: str = "train.csv") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in (train, "test.csv"):
        (folder / name).write_text(ROWS)
    if card:
        (folder / "README.md").write_text(f"---\n{card}\n---\n# Data\n")
    return folder


def card(train: str, test: str = "test.csv") -> str:
    files = f"  - split: train\n    path: {train}\n  - split: test\n    path: {test}"
    return f"configs:\n- config_name: default\n  data_files:\n{files}"


@pytest.mark.usefixtures("marker")
def test_a_card_names_files_of_the_folder(tmp_path: Path) -> None:
    folder = table(tmp_path / "data", card("part/*.csv"))
    (folder / "part").mkdir()
    (folder / "part" / "x.csv").write_text(ROWS.replace("2,1", "7,1"))
    assert load_dataset(f"hf:{folder}").train_inputs.tolist() == [[1.0], [7.0]]


@pytest.mark.parametrize(
    "train",
    [
        "../outside.csv",
        "part/../../outside.csv",
        "../*.csv",
        "'**/../../outside.csv'",
        "{outside}",
        "'~/outside.csv'",
        "['train.csv', '../outside.csv']",
        "file://{outside}",
        "http://127.0.0.1:9/x.csv",
        "hf://datasets/a/b/x.csv",
        "zip://x.csv::{outside}",
    ],
)
@pytest.mark.usefixtures("marker")
def test_a_card_that_names_data_outside_the_folder_is_refused(train: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside.csv"
    outside.write_text(ROWS)
    folder = table(tmp_path / "data", card(train.format(outside=outside)))
    with pytest.raises(DataError, match="names data outside the folder") as e:
        load_dataset(f"hf:{folder}")
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("data_dir", ["..", "/tmp"])
@pytest.mark.usefixtures("marker")
def test_the_folder_that_a_card_names_lies_in_the_folder(data_dir: str, tmp_path: Path) -> None:
    table(tmp_path)
    folder = table(tmp_path / "data", f"configs:\n- config_name: default\n  data_dir: {data_dir}")
    with pytest.raises(DataError, match="names data outside the folder"):
        load_dataset(f"hf:{folder}")


@pytest.mark.usefixtures("marker")
def test_a_card_beside_the_card_is_refused(tmp_path: Path) -> None:
    (tmp_path / "outside.csv").write_text(ROWS)
    folder = table(tmp_path / "data")
    (folder / ".huggingface.yaml").write_text(card("../outside.csv"))
    with pytest.raises(DataError, match=r"huggingface\.yaml"):
        load_dataset(f"hf:{folder}")


@pytest.mark.parametrize("kind", ["file", "folder"])
@pytest.mark.usefixtures("marker")
def test_a_link_that_leads_out_of_the_folder_is_refused(kind: str, tmp_path: Path) -> None:
    outside = table(tmp_path / "outside")
    folder = table(tmp_path / "data")
    (folder / "train.csv").unlink()
    target = outside if kind == "folder" else outside / "train.csv"
    (folder / ("train" if kind == "folder" else "train.csv")).symlink_to(target)
    with pytest.raises(DataError, match="is a link that leads out"):
        load_dataset(f"hf:{folder}")


@pytest.mark.usefixtures("marker")
def test_a_link_inside_the_folder_is_read(tmp_path: Path) -> None:
    folder = table(tmp_path / "data", train="blob.txt")
    (folder / "train.csv").symlink_to("blob.txt")
    assert load_dataset(f"hf:{folder}").train_inputs.tolist() == [[1.0], [2.0]]


def test_a_program_among_the_data_is_refused(tmp_path: Path, marker: Path) -> None:
    folder = table(tmp_path / "data")
    (folder / "data.py").write_text(f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n")
    with pytest.raises(DataError, match="is a program"):
        load_dataset(f"hf:{folder}")
    assert not marker.exists()


@pytest.mark.usefixtures("marker")
def test_files_that_hold_more_than_data_are_refused(tmp_path: Path) -> None:
    import h5py

    folder = tmp_path / "data"
    folder.mkdir()
    with h5py.File(tmp_path / "outside.h5", "w") as file:
        file["label"] = [0, 1]
    for part in ("train", "test"):
        with h5py.File(folder / f"{part}.h5", "w") as file:
            file["label"] = h5py.ExternalLink("../outside.h5", "/label")
    with pytest.raises(DataError, match=r"of a kind that is not read \(hdf5\)"):
        load_dataset(f"hf:{folder}")


@pytest.mark.parametrize("what", ["split", "file"])
@pytest.mark.usefixtures("marker")
def test_what_save_to_disk_has_written_names_files_of_the_folder(what: str, tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"input_ids": [[1, 2], [3, 4]], "label": [0, 1]})
    for name in ("data", "outside"):
        datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / name)
    folder = tmp_path / "data"
    if what == "split":
        (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["../outside/train", "test"]}))
    else:
        path = folder / "train" / "state.json"
        state = json.loads(path.read_text())
        state["_data_files"] = [
            {"filename": f"../../outside/train/{f['filename']}"} for f in state["_data_files"]
        ]
        path.write_text(json.dumps(state))
    with pytest.raises(DataError, match="names a file outside"):
        load_dataset(f"hf:{folder}")


@pytest.mark.parametrize("image", ["{outside}", "http://127.0.0.1:9/x.png", "x.png"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.usefixtures("marker")
def test_a_row_that_refers_to_an_image_elsewhere_is_refused(image: str, nested: bool, tmp_path: Path) -> None:
    import pyarrow
    from PIL import Image
    from pyarrow import parquet

    outside = tmp_path / "outside.png"
    Image.new("L", (4, 4)).save(outside)
    row = {"bytes": None, "path": image.format(outside=outside)}
    feature: Any = {"_type": "Image"}
    values: list[Any] = [row, row]
    if nested:
        feature, values = {"_type": "List", "feature": feature}, [[row], [row]]
    features = {"image": feature, "label": {"_type": "Value", "dtype": "int64"}}
    rows = pyarrow.table({"image": values, "label": [0, 1]})
    described = {"huggingface": json.dumps({"info": {"features": features}})}
    (tmp_path / "data").mkdir()
    for part in ("train", "test"):
        parquet.write_table(rows.replace_schema_metadata(described), tmp_path / "data" / f"{part}.parquet")
    with pytest.raises(DataError, match="names a file outside"):
        load_dataset(f"hf:{tmp_path / 'data'}")


@pytest.mark.usefixtures("marker")
def test_images_of_the_folder_are_read(tmp_path: Path) -> None:
    from PIL import Image

    for part in ("train", "test"):
        for name, value in (("a", 3), ("b", 5)):
            (tmp_path / "data" / part / name).mkdir(parents=True)
            Image.new("L", (2, 2), value).save(tmp_path / "data" / part / name / "0.png")
    assert load_dataset(f"hf:{tmp_path / 'data'}").train_inputs[:, 0, 0, 0].tolist() == [3, 5]


@pytest.mark.usefixtures("marker")
def test_what_is_read_is_read_again_when_it_changes(tmp_path: Path) -> None:
    folder = table(tmp_path / "data", card("part/x.csv"))
    (folder / "part").mkdir()
    for first in (3.0, 4.0):
        (folder / "part" / "x.csv").write_text(f"size,label\n{first},0\n2,1\n")
        assert load_dataset(f"hf:{folder}").train_inputs.tolist() == [[first], [2.0]]


def test_a_tokenizer_with_code_of_its_own_is_refused(tmp_path: Path, marker: Path) -> None:
    words = tmp_path / "words"
    words.mkdir()
    (words / "tokenizer_config.json").write_text(json.dumps({"auto_map": AUTO_MAP}))
    folder = tmp_path / "data"
    rows = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]})
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(folder)
    with pytest.raises(FedsimError, match="code of its own"):
        load_dataset(f"hf:{folder},input=text,tokenizer={words}")
    assert not marker.exists()
