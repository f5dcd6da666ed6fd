"""--json: one document on standard output, with the numbers of the tables (docs/json.md)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any


def print_json(document: Any) -> None:
    """Print a document: dataclasses as objects, numbers of numpy as numbers, NaN and infinity as null."""
    text = json.dumps(plain(document), indent=1, ensure_ascii=False, allow_nan=False)
    print("".join(c if c == "\n" or c.isprintable() else json.dumps(c)[1:-1] for c in text))


def plain(value: Any) -> Any:
    """The value as JSON has it."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in value]
    if isinstance(value, Path):
        return str(value)
    if type(value).__module__ == "numpy":
        return plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value
