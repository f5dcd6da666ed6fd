"""Facts about the source tree that no type checker knows."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedsim
import launch
import protocols
import workers
from fedsim.algorithm import Algorithm
from tests import conftest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (fedsim, protocols, workers, launch)
MODULES = sorted(f for p in PACKAGES for f in (ROOT / p.__name__).rglob("*.py"))
PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
PICKLES |= {"jsonpickle", "yaml", "ruamel", "pickletools", "copyreg"}
"""Yaml may be read safely; nothing here needs it."""
CODE = {"eval", "exec", "compile"}
USERS_CODE = {
    "fedsim/plugins.py": ["calls exec", "calls compile"],
    "launch/engines/kubernetes.py": ["imports yaml"],
}
"""What --algo path/to/file.py means; and a module that writes YAML, and reads none."""
PICKLING_CALLS = {
    ("torch", "load"),
    ("torch", "save"),
    ("torch", "package"),
    ("jit", "load"),
    ("jit", "save"),
    ("hub", "load"),
    ("serialization", "load"),
    ("pd", "read_pickle"),
    ("pandas", "read_pickle"),
}


def _imported(tree: ast.AST) -> Iterator[str]:
    """Every module that a file imports, also inside functions and by importlib.import_module("...")."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = ast.unparse(node.func)
            if name.endswith(("import_module", "__import__")):
                yield str(node.args[0].value)


def _offences(source: str) -> list[str]:
    tree = ast.parse(source)
    result = [f"imports {name}" for name in _imported(tree) if PICKLES & set(name.split("."))]
    result += [f"imports {n}" for n in _imported(tree) if tuple(n.split(".")[-2:]) in PICKLING_CALLS]
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(ast.Name("builtins"), name) if name in CODE:
                result.append(f"calls {name}")
            case ast.Attribute(value, name) | ast.Call(
                ast.Name("getattr"), [value, ast.Constant(str(name)), *_]
            ):
                owner = ast.unparse(value).split(".")[-1]
                if (owner, name) in PICKLING_CALLS or name.endswith("to_pickle"):
                    result.append(f"uses {owner}.{name}")
            case ast.keyword("allow_pickle", value) if ast.unparse(value) != "False":
                result.append("allow_pickle")
            case ast.Call(ast.Attribute(ast.Name("np" | "numpy"), "load"), [_, _, _, *_]):
                result.append("numpy.load with allow_pickle by position")
            case ast.Call(ast.Name(name), _) if name in CODE:
                result.append(f"calls {name}")
            case ast.keyword("weights_only", _):
                result.append("weights_only, which is no boundary (CVE-2025-32434, CVE-2026-24747)")
    return result


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import os, dill as d",
        "def f():\n    from marshal import loads",
        "from torch import load",
        "import importlib\nimportlib.import_module('shelve')",
        "__import__('cloudpickle')",
        "import torch\nx = torch.load('x')",
        "import torch\nx = torch.jit.load('x')",
        "import torch\nwrite = torch.save",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import numpy as np\nnp.load('x', allow_pickle=yes)",
        "import numpy as np\nnp.load('x', None, True)",
        "import numpy\nnumpy.load('x', allow_pickle=not False)",
        "import joblib\njoblib.load('x')",
        "from joblib import load",
        "import shelve\nshelve.open('x')",
        "import marshal\nmarshal.loads(b'')",
        "import yaml\nyaml.load(text, Loader=yaml.Loader)",
        "from yaml import unsafe_load",
        "import pandas as pd\npd.read_pickle('x')",
        "frame.to_pickle('x')",
        "import torch\ngetattr(torch, 'load')('x')",
        "import torch\ntorch.hub.load('a', 'b')",
        "from torch.serialization import load",
        "read('x', weights_only=True)",
        "eval(text)",
        "exec(text, {})",
        "exec(compile(text, 'x', 'exec'))",
        "import builtins\nbuiltins.eval(text)",
    ],
)
def test_the_search_for_pickles_finds_them(source: str) -> None:
    assert _offences(source)


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.frombuffer(b'1')",
        "np.load('x')",
        "np.load('x', 'r')",
        "np.load('x', allow_pickle=False)",
        "model.eval()",
        "re.compile('x')",
        "json.load(file)",
    ],
)
def test_the_search_for_pickles_finds_nothing_else(source: str) -> None:
    assert not _offences(source)


def test_no_module_pickles() -> None:
    offences = {str(p.relative_to(ROOT)): _offences(p.read_text(encoding="utf-8")) for p in MODULES}
    assert {name: lines for name, lines in offences.items() if lines} == USERS_CODE


def test_no_library_is_asked_to_run_the_code_of_a_folder() -> None:
    """Left out, transformers asks on the terminal whether to run it."""
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                values = [ast.unparse(k.value) for k in node.keywords if k.arg == "trust_remote_code"]
                loads = values or node.func.attr in ("from_pretrained", "from_config")
                assert values == ["False"] or not loads, f"{path}:{node.lineno}"


def test_the_four_packages_share_one_parent_folder() -> None:
    """Their names are generic: an installed package of the same name would shadow one of them."""
    folders = {Path(str(package.__file__)).resolve().parents[1] for package in PACKAGES}
    assert folders == {ROOT}


def test_no_module_is_called_utils() -> None:
    names = {part for f in MODULES for part in f.relative_to(ROOT).with_suffix("").parts}
    assert not names & {"utils", "util", "helpers", "helper", "misc", "common"}


def _algorithms_of_files() -> set[type]:
    result: set[type] = set()
    for file in (ROOT / "protocols").rglob("*.py"):
        name = _module(file)
        module = importlib.import_module(name)
        result |= {
            value
            for value in vars(module).values()
            if inspect.isclass(value) and issubclass(value, Algorithm) and value.__module__ == name
        }
    return {kind for kind in result if not inspect.isabstract(kind)}


def test_the_registry_is_complete() -> None:
    assert _algorithms_of_files() == set(protocols.REGISTRY)
    assert len(set(protocols.REGISTRY)) == len(protocols.REGISTRY)


def test_algorithm_names_are_unique_and_found() -> None:
    names = [algorithm.name for algorithm in protocols.REGISTRY]
    assert len(set(names)) == len(names)
    assert [protocols.find(name) for name in names] == list(protocols.REGISTRY)


WORDS = """
    letter letters seal door doors bailiff guest guests visit visits crew pulse pulses fence fences echo
    echoes misconduct strike strikes stranger strangers admission belongings witness intake blame scoreboard
    turnout turnouts roster people rehearsal examiner spoilt lending told said found made chosen given
    wanted whose about
"""
PRIVATE = frozenset(WORDS.split())
"""Words of this project alone, which the field has other words for: envelope, listener, remote worker, ..."""
EXEMPT = {
    ("launch/results/*.py", "given"): "a column of timeline.csv, a file that older versions have written",
    ("launch/results/*.py", "said"): "the same",
    ("launch/results/*.py", "made"): "the same",
    ("workers/coordinator/task_timeline.py", "given"): "the same",
    **dict.fromkeys(
        [
            *(("tests/workers/test_protocol_messages.py", "given"), ("tests/launch/test_api.py", "given")),
            ("fedsim/live_objects.py", "found"),
            *(("fedsim/wire/codecs/user_codec.py", "made"), ("tests/fedsim/wire/test_user_codec.py", "made")),
        ],
        "still to be replaced",
    ),
    ("workers/coordinator/*.py", "about"): "a key of the journal's records",
    ("launch/sweep/*.py", "about"): "a key of recipes, which users write",
}
"""By file and name: what files or libraries call so."""
REMAINING: set[str] = set()
"""Names that are still to be replaced. This list only shrinks."""


def _private_names(path: Path, source: str) -> Iterator[str]:
    """`file:line: name` of every identifier that contains a private word.

    The name of a test is a sentence, in which any word may stand.
    """
    lines = iter(source.splitlines(keepends=True))
    tokens = list(tokenize.generate_tokens(lambda: next(lines, "")))
    exempt = {name for (file, name) in EXEMPT if path.match(file)} | REMAINING
    if "from hypothesis import" in source:
        exempt.add("given")
    for number, token in enumerate(tokens):
        name = token.string
        if (
            token.type != tokenize.NAME
            or name.startswith("test_")
            or hasattr(builtins, name)
            or name in exempt
        ):
            continue
        parts = {part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}
        if name == "echo" and [t.string for t in tokens[number - 2 : number]] == ["click", "."]:
            continue
        if parts & PRIVATE:
            yield f"{path}:{token.start[0]}: {name}"


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("letter = 1", ["letter"]),
        ("class OpenLetter: pass", ["OpenLetter"]),
        ("def f(x_made, *, whose): ...", ["x_made", "whose"]),
        ("DOORS = {}", ["DOORS"]),
        ("raise FileNotFoundError", []),
        ("click.echo('x')", []),
        ("echo('x')", ["echo"]),
        ("x = 'letter'  # letter", []),
        ("string.ascii_lowercase, already, aboutness", []),
        ("def test_a_letter_is_made(): ...", []),
        ("from hypothesis import given", []),
    ],
)
def test_the_search_for_private_words_finds_identifiers_only(source: str, names: list[str]) -> None:
    result = [line.rpartition(" ")[2] for line in _private_names(Path("x.py"), source)]
    assert result == names


def test_no_identifier_has_a_private_word() -> None:
    files = [*MODULES, *sorted((ROOT / "tests").rglob("*.py"))]
    bad = [
        line
        for file in files
        for line in _private_names(file.relative_to(ROOT), file.read_text(encoding="utf-8"))
    ]
    assert not bad, "\n".join(["", *bad])


def test_every_long_test_exists() -> None:
    for name in conftest.LONG:
        file, _, function = name.partition("::")
        assert f"\ndef {function.partition('[')[0]}(" in (ROOT / "tests" / file).read_text(
            encoding="utf-8"
        ), name


# ---- the import graph


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _imports_of(source: str, known: set[str]) -> set[str]:
    """The modules of this project that a file imports, inside functions and by their names in strings, too.

    What only a type checker imports is left out.
    """
    tree, typing = ast.parse(source), set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            typing |= {id(inner) for statement in node.body for inner in ast.walk(statement)}
    result: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in typing:
            continue
        if isinstance(node, ast.Import):
            result |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            result |= {name if name in known else str(node.module) for name in names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
            result.add(node.value)
    return result & known


def _circles(graph: dict[str, set[str]]) -> list[str]:
    """Modules that are left when those without imports are taken away again and again: none, or circles."""
    left = {module: set(imports) - {module} for module, imports in graph.items()}
    while leaves := {module for module, imports in left.items() if not imports}:
        left = {module: imports - leaves for module, imports in left.items() if module not in leaves}
    return sorted(left)


def test_no_circle_of_imports_not_even_inside_functions() -> None:
    """`fedsim` itself is the door: its stub names launch.api; only protocols/related imports from it."""
    known = {_module(path) for path in MODULES}
    graph = {_module(path): _imports_of(path.read_text(encoding="utf-8"), known) for path in MODULES}
    stub = ast.parse((ROOT / "fedsim" / "__init__.pyi").read_text(encoding="utf-8"))
    graph["fedsim"] |= {str(node.module) for node in stub.body if isinstance(node, ast.ImportFrom)}
    assert _circles(graph) == []
    assert "launch.api" in graph["fedsim"]


def test_a_circle_inside_functions_is_seen() -> None:
    known = {"a.b", "a.c", "a.d"}
    one = _imports_of("def f():\n    from a import c\n", known)
    other = _imports_of("import_module('a.b')\nfrom a.d import x\n", known)
    assert _circles({"a.b": one, "a.c": other, "a.d": set()}) == ["a.b", "a.c"]
