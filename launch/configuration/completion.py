"""Shell completion of values: names, codecs, hyperparameters, run folders. This module does not import torch.

Completion is enabled by this line in ~/.bashrc (other shells: zsh_source, fish_source):
    eval "$(_FEDSIM_COMPLETE=bash_source fedsim)"
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import BashComplete, CompletionItem, add_completion_class

from fedsim.experiment import DEFAULTS
from launch.configuration import names, presets
from launch.tracking import TRACKERS

if TYPE_CHECKING:
    Item = CompletionItem[str]
else:
    Item = CompletionItem  # not generic before click 8.5
Completer = Callable[[click.Context, click.Parameter, str], list[Item]]
BREAKS = "=:"
"""Characters at which bash divides words."""


def _items(candidates: Iterable[tuple[str, str]], incomplete: str) -> list[Item]:
    return [CompletionItem(text, help=help) for text, help in candidates if text.startswith(incomplete)]


def _file(incomplete: str) -> list[Item]:
    return [CompletionItem(incomplete, type="file")]


def named(kind: str) -> Completer:
    """Complete names of a kind (launch.configuration.names.KINDS), or files if no name matches."""

    def complete(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[Item]:
        return _items(_names(kind), incomplete) or _file(incomplete)

    return complete


def _names(kind: str) -> list[tuple[str, str]]:
    """Return the names and their descriptions. A name that needs an argument ends with a colon."""
    return [
        (name + ":" * (len(known.form.arguments) > known.form.optional), known.cells[-1])
        for name, known in names.names(kind).items()
        if not name.startswith("...")
    ]


def codecs(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[Item]:
    """Complete FIELD= with a message field of the selected algorithm, then with the codec."""
    field, equals, _ = incomplete.partition("=")
    if equals:
        return _items(((f"{field}={name}", text) for name, text in _names("codecs")), incomplete)
    selected = _algorithm(ctx)
    both = (f"{side}.{name}" for side in ("up", "down") for name in selected.fields)
    return _items(((f"{text}=", "") for text in (*selected.fields, *both)), incomplete)


def hyperparameters(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[Item]:
    """Complete KEY= with a hyperparameter of the selected algorithm."""
    return _items(((f"{key}=", "") for key in _algorithm(ctx).hyperparameters), incomplete)


def _algorithm(ctx: click.Context) -> names.Name:
    """Return the selected algorithm, or the default one if none is selected or it is a user's file."""
    known, selected = names.names("algorithms"), ctx.params.get("algo") or DEFAULTS.algo
    return known.get(selected, known[DEFAULTS.algo])


def preset_names(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[Item]:
    """Complete the names of presets."""
    return _items(((name, presets.Preset.read(name).title) for name in presets.names()), incomplete)


def trackers(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[Item]:
    """Complete a comma-separated list of trackers."""
    before, comma, _ = incomplete.rpartition(",")
    left = [(name, title) for name, title in TRACKERS.items() if name not in before.split(",")]
    return _items(((f"{before}{comma}{name}", title) for name, title in left), incomplete)


def run_folders(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[Item]:
    """Complete run folders in runs/ and in the folder typed so far, or any folder if none matches."""
    typed = Path(incomplete) if incomplete.endswith("/") else Path(incomplete).parent
    bases = dict.fromkeys((Path("runs"), typed))
    matches = (base.glob(f"{depth}/manifest.json") for base in bases for depth in ("*", "*/*"))
    known = sorted({str(path.parent) for paths in matches for path in paths})
    folders = [CompletionItem(incomplete, type="dir")]
    return _items(((text, "") for text in known), incomplete) or folders


OF_FIELDS: dict[str, Completer] = {
    "algo": named("algorithms"),
    "dataset": named("datasets"),
    "model": named("models"),
    "partition": named("partitions"),
    "participation": named("schedules"),
    "codecs": codecs,
    "hyperparameters": hyperparameters,
    "track": trackers,
}
"""Completers of options, by field of the experiment or the execution."""


class BashWords(BashComplete):
    """Completion in bash, which divides words at = and : and replaces only the last part."""

    source_template = BashComplete.source_template.replace(
        "    return 0\n",
        '    [[ "${COMPREPLY[0]}" == *[=:] ]] && compopt -o nospace 2>/dev/null\n    return 0\n',
    )
    _typed = ""

    def get_completion_args(self) -> tuple[list[str], str]:
        """Join the parts into words; return the words before the cursor, and the word at the cursor."""
        arguments, incomplete = super().get_completion_args()
        words: list[str] = []
        for word in (*arguments, incomplete):
            if words and ((word[:1] in BREAKS and word) or words[-1][-1:] in BREAKS):
                words[-1] += word
            else:
                words.append(word)
        last = max((at for at, c in enumerate(words[-1], 1) if c in BREAKS), default=0)
        self._typed = words[-1][:last]
        return words[:-1], words[-1]

    def format_completion(self, item: Item) -> str:
        """Format a completion for the shell script, without the part of the word that bash keeps."""
        value = item.value.removeprefix(self._typed)
        return f"{item.type},{value}"


add_completion_class(BashWords)
