"""The syntax of a model: `BASE[+weights:FILE]`.

    BASE            a name from `fedsim list models`, or FILE.py:NAME
    timm:NAME       a model of timm with random weights
    +weights:FILE   start from this safetensors file where names and shapes fit

This module imports no large packages, because options are resolved before the fork server starts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from fedsim import plugins
from fedsim.errors import UsageError
from fedsim.foreign_files import sha256
from fedsim.plugins import WEIGHTS
from fedsim.removed import removed
from fedsim.specs import Form

TIMM = "timm:"

FORMS: Mapping[str, Form] = {
    "timm:NAME": Form("timm", help="a model of timm with random weights"),
    "...+weights:FILE": Form("weights", help="start from a safetensors file where names and shapes fit"),
}
"""The syntax of models that are no names, for `fedsim list models`."""

_TIMM_NAME = re.compile(r"[A-Za-z0-9_.]+")


@dataclass(frozen=True)
class ModelSpec:
    """The parts of a model: its origin, and a file of weights ('' for none)."""

    base: str
    weights: str = ""

    @staticmethod
    def parse(text: str) -> ModelSpec:
        """Parse a spec."""
        base, plus, weights = text.partition(WEIGHTS)
        for name, begins in (("hf", base.startswith("hf:")), ("+lora", "+lora:" in text)):
            if begins and (gone := removed("model", name)):
                raise UsageError(f"model {text!r}: {gone}")
        if plus and not weights:
            raise UsageError(f"model {text!r}: write {WEIGHTS}FILE, a safetensors file to start from")
        spec = ModelSpec(base, weights)
        if spec.timm is not None and not _TIMM_NAME.fullmatch(spec.timm):
            raise UsageError(
                f"model {base!r}: write {TIMM}NAME, an architecture of timm; with arguments it is a model of "
                "your own, FILE.py:NAME, as in docs/examples/hub.py"
            )
        return spec

    @property
    def timm(self) -> str | None:
        """The name of a model of timm; None for other models."""
        return self.base.removeprefix(TIMM) if self.base.startswith(TIMM) else None

    def files(self) -> tuple[Path, ...]:
        """Return the file of weights, if there is one."""
        if self.weights and not Path(self.weights).expanduser().is_file():
            raise UsageError(f"model +weights:{self.weights}: there is no such file")
        return (Path(self.weights).expanduser(),) if self.weights else ()


def absolute(text: str) -> str:
    """Return the same spec with absolute paths, valid in every working directory."""
    spec = ModelSpec.parse(text)
    base = plugins.absolute(spec.base) if plugins.is_spec(spec.base) else spec.base
    return f"{base}{WEIGHTS}{Path(spec.weights).expanduser().resolve()}" if spec.weights else base


def sources(text: str) -> dict[str, str]:
    """Return the digest {file name: sha256} of a model's weights; copies in other folders have the same."""
    return {
        f"model file {path.parent.name}/{path.name}": _sha256(path) for path in ModelSpec.parse(text).files()
    }


def packages(text: str) -> tuple[str, ...]:
    """Return the optional packages that the model needs."""
    return () if ModelSpec.parse(text).timm is None else ("timm",)


def fingerprint(text: str) -> str:
    """Return a model's identity, which depends on the bytes of its files, but not on their folder."""
    spec = ModelSpec.parse(text)
    own = plugins.fingerprint(spec.base) if plugins.is_spec(spec.base) else spec.base
    if not spec.weights:
        return own
    [(file, digest)] = sources(text).items()
    return f"{own}{WEIGHTS}{Path(spec.weights).name}@{file}@{digest}"


def _sha256(path: Path) -> str:
    s = path.stat()
    return _hashed(path.resolve(), (s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns))


@lru_cache(maxsize=64)
def _hashed(path: Path, state: tuple[int, ...]) -> str:
    return sha256(path, most=None)
