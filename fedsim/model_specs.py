"""The syntax of a model: `BASE[+weights:FILE][+lora:r=R,target=NAMES,...]`.

    BASE            a name from `fedsim list models`, or FILE.py:NAME
    hf:FOLDER       a model of transformers: a folder with config.json and, if it is pretrained, *.safetensors
    timm:NAME,...   a model of timm, with keywords of its architecture: timm:vit_tiny_patch16_224,img_size=32
    +weights:FILE   start from this safetensors file where names and shapes fit
    +lora:...       freeze the model, and train low-rank adapters of its layers

This module imports no large packages, because options are resolved before the fork server starts.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedsim import hub_folders, plugins
from fedsim.errors import UsageError, unknown
from fedsim.plugins import MODEL_MODIFIER, short
from fedsim.specs import Form, key_values, number, whole

WEIGHTS = Form("weights", ("FILE",), help="a safetensors file to start from")
LORA = Form(
    "lora",
    ("r=R", "target=NAMES", "alpha=A", "dropout=P", "also=NAMES"),
    3,
    "where NAMES are ends of module names with / between them",
)

FORMS: Mapping[str, Form] = {
    "hf:FOLDER": Form("hf", help="a model of transformers (docs/models.md); adapters and weights as below"),
    "timm:NAME[,KEY=VALUE,...]": Form("timm", help="a model of timm, with keywords of its architecture"),
    "...+weights:FILE": replace(WEIGHTS, help="start from a safetensors file where names and shapes fit"),
    "...+lora:r=R,target=NAMES": replace(LORA, help="train adapters of these layers; also=NAMES: and these"),
}
"""The syntax of library models, for `fedsim list models`."""


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters: a layer W of the target computes W x + (alpha / r) B A x, A (r, I) and B (O, r).

    Attributes:
        rank: r.
        target: Ends of the names of modules that get an adapter.
        alpha: The numerator of the scale; by default r, which makes the scale 1.
        dropout: Probability of dropout before A.
        also: Ends of the names of modules that are trained fully beside the adapters, such as a new head.
    """

    rank: int
    target: tuple[str, ...]
    alpha: float
    dropout: float = 0.0
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelSpec:
    """The parts of a model: its origin, a file of weights ('' for none) and adapters (None for none)."""

    base: str
    weights: str = ""
    lora: Lora | None = None

    @staticmethod
    def parse(text: str) -> ModelSpec:
        """Parse a spec."""
        base, *modifiers = MODEL_MODIFIER.split(text)
        spec = ModelSpec(base)
        spec.architecture()
        for modifier in modifiers:
            kind, _, rest = modifier.partition(":")
            if spec.weights if kind == "weights" else spec.lora:
                raise UsageError(f"model {text!r}: +{kind} stands twice")
            if not rest:
                raise (WEIGHTS if kind == "weights" else LORA).misuse("model", f"+{modifier}")
            spec = replace(spec, weights=rest) if kind == "weights" else replace(spec, lora=_lora(rest))
        return spec

    @property
    def library(self) -> str:
        """The library that the model comes from, 'hf' or 'timm'; else ''."""
        kind, colon, _ = self.base.partition(":")
        return kind if colon and kind in ("hf", "timm") else ""

    @property
    def name(self) -> str:
        """The text after hf: or timm:."""
        return self.base.partition(":")[2].partition(",")[0]

    @property
    def keywords(self) -> Mapping[str, str]:
        """The keywords after the name of a timm model."""
        return dict(key_values(self.base.partition(",")[2])) if self.library == "timm" else {}

    def architecture(self) -> dict[str, Any]:
        """Return the keywords with parsed values: numbers, Booleans, None, words, or a list of these.

        Keywords that name files or downloads are refused, because timm would read and unpickle these.
        """
        if self.library == "timm" and not _TIMM_NAME.fullmatch(self.name):
            raise UsageError(
                f"model {self.base!r}: {self.name!r} is no name of an architecture of timm; a run downloads "
                "nothing, and reads weights from safetensors alone: timm:NAME+weights:FILE"
            )
        values = {}
        for key, text in self.keywords.items():
            values[key] = _literal(text)
            if hub_folders.names_source(key) or not _is_plain(values[key]):
                raise UsageError(
                    f"model {self.base!r}: {key}={text} does not describe an architecture; keywords that "
                    "name files, downloads or code are refused, and weights are read from safetensors alone: "
                    "+weights:FILE"
                )
        return values

    def files(self) -> tuple[Path, ...]:
        """Return the model's files of weights and configuration, apart from FILE.py."""
        paths: list[Path] = []
        if self.library == "hf":
            folder = Path(self.name).expanduser()
            if not (folder / "config.json").is_file():
                raise UsageError(
                    f"model {self.base!r}: there is no {folder / 'config.json'}. A run downloads nothing: "
                    "fetch the model first (hf download NAME --local-dir FOLDER) and name its folder"
                )
            hub_folders.check_model(folder, f"model {self.base!r}")
            paths += [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
        if self.weights:
            if not Path(self.weights).expanduser().is_file():
                raise UsageError(f"model +weights:{self.weights}: there is no such file")
            paths.append(Path(self.weights).expanduser())
        return tuple(paths)


_TIMM_NAME = re.compile(r"[A-Za-z0-9_.]+")


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) and not isinstance(item, list | tuple) for item in value)
    if isinstance(value, str):
        return bool(re.fullmatch(r"\w*", value, re.ASCII))
    return value is None or isinstance(value, bool | int | float)


def _lora(text: str) -> Lora:
    values = dict(key_values(text))
    known = ("r", "target", "alpha", "dropout", "also")
    for key in values:
        if key not in known:
            raise unknown("key of +lora:", key, known)
    rank, alpha = whole(values.get("r", "")), number(values.get("alpha", values.get("r", "")))
    dropout = number(values.get("dropout", "0"))
    target, also = (tuple(n for n in values.get(key, "").split("/") if n) for key in ("target", "also"))
    if rank < 1 or not target or not alpha > 0 or not 0 <= dropout < 1:
        raise LORA.misuse("model", f"+lora:{text}")
    return Lora(rank, target, alpha, dropout, also)


def is_model_spec(text: str) -> bool:
    """Return whether a model has a library or a modifier, and is not just a name or FILE.py:NAME."""
    return text.startswith(("hf:", "timm:")) or bool(MODEL_MODIFIER.search(text))


def absolute(text: str) -> str:
    """Return the same spec with absolute paths, valid in every working directory."""
    base, *modifiers = MODEL_MODIFIER.split(text)
    if base.startswith("hf:"):
        base = f"hf:{Path(base[3:]).expanduser().resolve()}"
    elif plugins.is_spec(base):
        base = plugins.absolute(base)
    parts = [base]
    for modifier in modifiers:
        kind, _, rest = modifier.partition(":")
        parts.append(f"weights:{Path(rest).expanduser().resolve()}" if kind == "weights" else modifier)
    return "+".join(parts)


def sources(text: str) -> dict[str, str]:
    """Return the digests {file name: sha256} of a model's files; copies in other folders have the same."""
    if not is_model_spec(text):
        return {}
    return {
        f"model file {path.parent.name}/{path.name}": _sha256(path) for path in ModelSpec.parse(text).files()
    }


def packages(text: str) -> tuple[str, ...]:
    """Return the optional packages that the model needs."""
    spec = ModelSpec.parse(text)
    own = {"hf": ("transformers.models.auto.modeling_auto",), "timm": ("timm",)}.get(spec.library, ())
    return (*own, *(("peft",) if spec.lora else ()))


def fingerprint(text: str) -> str:
    """Return a model's identity, which depends on the bytes of its files, but not on their folder."""
    base = MODEL_MODIFIER.split(text)[0]
    own = plugins.fingerprint(base) if plugins.is_spec(base) else short(base)
    files = ",".join(f"{name}@{digest}" for name, digest in sources(text).items())
    return "+".join([own, *MODEL_MODIFIER.split(short(text))[1:]]) + (f"@{files}" if files else "")


def _sha256(path: Path) -> str:
    s = path.stat()
    return _hashed(path.resolve(), (s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns))


@lru_cache(maxsize=64)
def _hashed(path: Path, state: tuple[int, ...]) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
