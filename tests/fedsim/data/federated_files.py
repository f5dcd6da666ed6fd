"""Small files in the formats of TensorFlow Federated's data sets, for the tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np

WORDS, TAGS = 10_000, 500


def write_h5(path: Path, clients: dict[str, dict[str, Any]]) -> None:
    """examples/<client>/<column>; lists of bytes become strings of variable length, as published."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        group = file.create_group("examples")
        for client, columns in clients.items():
            created = group.create_group(client)
            for name, values in columns.items():
                if isinstance(values, list):
                    created.create_dataset(name, data=np.array(values, object), dtype=h5py.string_dtype())
                else:
                    created.create_dataset(name, data=values)


def write_emnist(folder: Path, clients: int = 4, rows: int = 20, classes: int = 62) -> dict[str, Any]:
    """Writers whose envelopes are easy to tell: a dark row where the label says. Returns the columns."""
    draws = np.random.RandomState(0)
    written = {}
    for part, n in (("train", rows), ("test", 5)):
        columns = {}
        for k in range(clients):
            labels = draws.randint(0, classes, n).astype(np.int32)
            pixels = draws.randint(200, 256, (n, 28, 28))
            for image, label in zip(pixels, labels, strict=True):
                image[label % 28] = label
            columns[f"f{k:04d}_{k % 3}"] = {"pixels": (pixels / 255).astype("f4"), "label": labels}
        write_h5(folder / f"fed_emnist/fed_emnist_{part}.h5", columns)
        written[part] = columns
    return written


def write_cifar100(folder: Path, clients: int = 3, rows: int = 10) -> dict[str, Any]:
    draws = np.random.RandomState(0)
    written = {}
    for part, n in (("train", clients), ("test", 2)):
        columns = {
            str(k): {
                "image": draws.randint(0, 256, (rows, 32, 32, 3)).astype(np.uint8),
                "label": draws.randint(0, 100, rows),
                "coarse_label": draws.randint(0, 20, rows),
            }
            for k in range(n)
        }
        write_h5(folder / f"fed_cifar100/fed_cifar100_{part}.h5", columns)
        written[part] = columns
    return written


def post(tokens: str, title: str = "a title", tags: str = "tag3") -> tuple[bytes, bytes, bytes]:
    return tokens.encode(), title.encode(), tags.encode()


Posts = dict[str, list[tuple[bytes, bytes, bytes]]]


def write_stackoverflow(folder: Path, train: Posts, test: Posts) -> Path:
    """Words are w0 w1 ..., w0 the most frequent; tags are tag0 tag1 ..., in no order in their file."""
    base = folder / "stackoverflow"
    for part, posts in (("train", train), ("test", test)):
        columns = {
            client: {
                **{name: [p[i] for p in rows] for i, name in enumerate(("tokens", "title", "tags"))},
                "creation_date": [b"2010-01-08 09:34:05 UTC"] * len(rows),
                "score": np.zeros(len(rows), np.int64),
                "type": [b"answer"] * len(rows),
            }
            for client, rows in posts.items()
        }
        write_h5(base / f"stackoverflow_{part}.h5", columns)
    lines = [f"w{i} {10**6 - i}" for i in range(WORDS + 7)]
    (base / "stackoverflow.word_count").write_text("\n".join(lines) + "\n")
    counts = {f"tag{i}": 10**5 - i for i in reversed(range(TAGS + 3))}
    (base / "stackoverflow.tag_count").write_text(json.dumps(counts))
    return base


def many_posts(clients: int = 3, rows: int = 12) -> Posts:
    """Sentences that repeat one word each, about the tag of that number."""
    return {
        f"{k:08d}": [
            post(" ".join([f"w{i % 5}"] * 6), f"w{i % 5}", f"tag{i % 5}|tag9") for i in range(k, k + rows)
        ]
        for k in range(clients)
    }
