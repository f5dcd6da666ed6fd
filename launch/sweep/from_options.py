"""A sweep without a recipe file, from options of launch for all runs, and lists of values to combine.

fedsim sweep --preset fashion_mnist --over algo=fedavg,ivon_admm --over participation=full,0.3 --seeds 0,1,2
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from fedsim import plugins
from fedsim.errors import UsageError, unknown
from fedsim.experiment import DEFAULTS, Experiment, convert, parse_setting
from launch.configuration import names
from launch.configuration.config import Overrides, plain_numbers
from launch.configuration.target_accuracy import parsed
from launch.sweep.recipe import Differences, Recipe, Table, Variant

FIXED = ("seed", "hyperparameters", "codecs", "device")
"""Fields of Experiment that --over refuses, because other options or names set them."""


def select_recipe(
    file: Path | None,
    options: Mapping[str, Any],
    over: Sequence[str],
    seeds: str | None,
    only: Sequence[str] = (),
) -> Recipe:
    """Return the recipe in a file, with these seeds and `only` these variants if they are given, or the
    recipe that the options define."""
    supplied = [name for name, value in options.items() if value not in (None, ())]
    if file is None:
        if only:
            raise UsageError("--only LABEL selects variants of a recipe file; name the file")
        if not over and seeds is None:
            raise UsageError(
                "name a recipe (docs/recipes/*.toml), or say what differs: --over KEY=V,V, --seeds S,S"
            )
        axes = dict(map(_axis, over))
        if len(axes) < len(over):
            raise UsageError("--over: a key is given twice; give all its values at once, KEY=VALUE,VALUE")
        return recipe_of(options, axes, seed_list(seeds or "0"))
    if extra := [*supplied, *(["over"] if over else [])]:
        name = extra[0].replace("_", "-")
        raise UsageError(
            f"recipe {file}: a recipe defines all of its runs; --{name} is for a sweep without one"
        )
    recipe = Recipe.read(file)
    known = {variant.label: variant for variant in recipe.variant}
    if wrong := [label for label in only if label not in known]:
        raise unknown(f"variant in recipe {file}:", wrong[0], known)
    variants = tuple(known[label] for label in only or known)
    return replace(recipe, variant=variants, seeds=seed_list(seeds) if seeds else recipe.seeds)


def recipe_of(
    options: Mapping[str, Any], over: Mapping[str, Sequence[str]], seeds: tuple[int, ...]
) -> Recipe:
    """Return the recipe that options define, with one variant per algorithm and a grid over other lists.

    `options` has options of launch by field of Experiment, config and preset. `over` has the values of each
    swept option of launch, hyperparameter or codec.FIELD.
    """
    remaining = dict(options)
    preset = remaining.pop("preset", None) or ""
    supplied = Overrides.of(remaining)
    convert(Experiment, supplied.experiment, supplied.where("experiment"), supplied.named("experiment"))
    grid = dict(_typed(key, values) for key, values in over.items())
    for axis in grid:
        table, _, key = axis.partition(".")
        if key in supplied.origins.typed.get(table, ()):
            once = supplied.named(table)(key, getattr(supplied, table)[key])
            raise UsageError(f"--over {key}=: {once} says it, too; give it once")
    algorithms = grid.pop("experiment.algo", (supplied.experiment.get("algo", DEFAULTS.algo),))
    swept = [axis.partition(".")[2] for axis in grid if axis.startswith("hyperparameters.")]
    for algo in algorithms:
        names.check_once(str(algo), [*supplied.origins.typed["hyperparameters"], *swept], "--set and --over")
    variants = tuple(Variant(plugins.short(str(a)), experiment={"algo": a}) for a in algorithms)
    return Recipe(
        title=", ".join(v.label for v in variants),
        variant=variants,
        seeds=seeds,
        preset=preset,
        experiment=supplied.experiment,
        hyperparameters=supplied.hyperparameters,
        codecs=supplied.codecs,
        grid=grid,
        table=(_table(supplied.experiment.get("until")),),
        differences=() if supplied.experiment.get("until") else (Differences(("test_accuracy@end",)),),
    )


def seed_list(text: str) -> tuple[int, ...]:
    """Parse seeds such as "0,1,2", "0-2" or "0-2,7"."""
    result: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise UsageError(f"--seeds {text!r}: write 0,1,2 or 0-2")
        result += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(result)


def _axis(text: str) -> tuple[str, list[str]]:
    """Return the key and the values of KEY=VALUE,VALUE."""
    key, equals, listed = text.partition("=")
    values = [value.strip() for value in listed.split(",")]
    if not equals or not all(values) or not key.strip():
        raise UsageError(f"--over {text!r}: write KEY=VALUE,VALUE, such as --over participation=full,0.3")
    return key.strip(), values


def _typed(key: str, values: Sequence[str]) -> tuple[str, tuple[Any, ...]]:
    """Return a grid key, and the values converted to the type of the key."""
    text = f"{key}={','.join(values)}"
    if len(set(values)) < len(values):
        raise UsageError(f"--over {text!r}: a value is given twice")
    key = key.replace("-", "_")
    if key in FIXED:
        instead = {"seed": "--seeds 0,1,2", "device": "--devices"}.get(
            key, "--over NAME=... or codec.FIELD=..."
        )
        raise UsageError(f"--over {text!r}: write {instead}")
    field, dot, rest = key.partition(".")
    if dot and field in ("codec", "codecs"):
        return f"codecs.{rest}", tuple(values)
    if key in {f.name for f in fields(Experiment)}:
        typed = tuple(v if _is_text(key) else parse_setting(f"{key}={v}")[1] for v in values)
        for value in typed:
            convert(Experiment, plain_numbers({key: value}), "--over", lambda k, v: f"--over {k}={v}")
        return f"experiment.{key}", typed
    name = rest if dot and field == "hyperparameters" else key
    return f"hyperparameters.{name}", tuple(parse_setting(f"{name}={v}")[1] for v in values)


def _is_text(key: str) -> bool:
    """Return True for a field of Experiment with text, in which 0.3 stays text."""
    hint = get_type_hints(Experiment, include_extras=True)[key]
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    return kind not in (int, float, bool)


def _table(until: object) -> Table:
    """Return a table of the costs of reaching the target accuracy, if there is one, and of final values."""
    columns = ["test_accuracy@end", "test_nll@end", "MB@end"]
    if until:
        level = parsed(str(until), "--until")
        columns = [f"MB to {level:g}", f"rounds to {level:g}", *columns]
    return Table(tuple(columns))
