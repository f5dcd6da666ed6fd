"""Objects of a user's program: their digest."""

from __future__ import annotations

import textwrap
from typing import Any

from fedsim import live_objects


def test_digest_of_an_object_changes_with_its_code_only() -> None:
    def source(body: str) -> str:
        space: dict[str, Any] = {"__name__": "cell"}
        exec(textwrap.dedent(body), space)
        return live_objects.digest(live_objects.register(space["f"], "model"))

    assert source("def f(a):\n    return a + 1") == source("# why\n\ndef f(a):\n    return a + 1  # more")
    assert source("def f(a):\n    return a + 1") != source("def f(a):\n    return a + 2")
    assert source("def f(a, b=1):\n    return a") != source("def f(a, b=2):\n    return a")
    assert source("class f:\n    def g(self): return {1, 'a'}") != source(
        "class f:\n    def g(self): return {2}"
    )
