"""The paths of a user's own files on a remote worker's machine.

The coordinator sends the paths on its own machine. A remote worker may use copies at other paths, because the
coordinator compares the digests of the files' contents, not their paths.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedsim import partition_specs, plugins, user_files
from fedsim.errors import UsageError

FIELDS = ("algo", "model", "dataset", "partition")
"""Fields of an experiment (besides codecs) that may name a user's file that workers need."""


@dataclass(frozen=True)
class LocalFiles:
    """The paths of files on this machine.

    choices: the paths of files by field of the experiment. codecs: the paths of codec files, each used for
    the codecs of a file with the same name.
    """

    choices: Mapping[str, Path] = field(default_factory=dict)
    codecs: tuple[Path, ...] = ()

    def localised(self, experiment: Mapping[str, Any]) -> dict[str, Any]:
        """Return the experiment with the paths on this machine.

        Raises:
            UsageError: If a file is missing, or the run does not use a file that the user named.
        """
        result = dict(experiment)
        for name in FIELDS:
            result[name] = self._choice(f"--{name}", result.get(name, ""), self.choices.get(name))
        by_name = {path.name: path for path in self.codecs}
        codecs = dict(result.get("codecs", {}))
        for key, codec in codecs.items():
            known = plugins.is_spec(codec) and plugins.path_and_name(codec)[0].name
            codecs[key] = self._choice("--codec", codec, by_name.get(known) if known else None)
        used = {plugins.path_and_name(codec)[0] for codec in codecs.values() if plugins.is_spec(codec)}
        for path in self.codecs:
            if path.resolve() not in used:
                raise UsageError(f"--codec {path}: this run has no codec from a file named {path.name}")
        return result | {"codecs": codecs, "tree": ""}  # the coordinator alone computes with a tree

    def _choice(self, option: str, choice: str, here: Path | None) -> str:
        if user_files.is_table(choice) and not partition_specs.is_file(choice):
            return choice if here is None else user_files.moved_table(choice, here)
        if partition_specs.is_file(choice):
            moved = choice if here is None else partition_specs.moved(choice, here)
            if not partition_specs.file_of(moved).is_file():
                raise UsageError(
                    f"there is no file {partition_specs.file_of(moved)} on this machine: say where a copy of "
                    f"the run's {option} lies here, {option} FILE"
                )
            return moved
        if not plugins.is_spec(choice):
            if here is not None:
                raise UsageError(
                    f"{option} {here}: this run's {option} is {choice}, which is no file of yours"
                )
            return choice
        there, name = plugins.path_and_name(choice)
        path = (here or there).expanduser().resolve()
        if not path.is_file():
            known = f"this run's {option} is {plugins.short(choice)}, and "
            raise UsageError(
                f"{known if here is None else ''}there is no file {path} on this machine: say where it lies "
                f"here, fedsim worker {option} FILE"
            )
        return f"{path}:{name}"


def names_elsewhere(there: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, str]:
    """Return the coordinator's path of each user file, by its path on this machine.

    there: the coordinator's experiment. here: the same experiment, localised.
    """
    return {
        str(plugins.path_and_name(mine)[0]): str(plugins.path_and_name(its)[0])
        for its, mine in zip(_choices(there), _choices(here), strict=True)
        if plugins.is_spec(its)
    }


def _choices(experiment: Mapping[str, Any]) -> Iterator[str]:
    yield from (experiment.get(name, "") for name in FIELDS)
    yield from experiment.get("codecs", {}).values()
