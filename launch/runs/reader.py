"""A run folder read back, for notebooks, reports and comparisons.

from launch.runs.reader import Run, run_experiment
run = Run.open("runs/20261121-fedlap_cov-0")          # or run_experiment(algo="fedlap", rounds=5)
run.metrics["test_accuracy"];  run.ledger.groupby("field")["bytes"].sum();  run.model()
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas

from fedsim.errors import DataError, UsageError
from fedsim.wire.ledger import COLUMNS

if TYPE_CHECKING:
    from torch import nn

FORMAT = 1
TEXT = ("kind", "direction", "message", "field", "layer", "codec")
SUMS = {
    "MB": ("bytes_down", "bytes_up"),
    "MB up": ("bytes_up",),
    "MB down": ("bytes_down",),
    "simulated": ("simulated_seconds",),
}
"""What is summed up over the rounds so far."""
ALWAYS = ("algo", "dataset", "clients", "rounds", "seed", "params")
"""Of what an experiment has, the keys that readers count on."""


@dataclass(frozen=True)
class Run:
    """One run folder; every part is read when it is asked for.

    Raises:
        UsageError: if an argument is wrong.
        DataError: if data is missing or damaged.
    """

    path: Path

    @staticmethod
    def open(path: str | Path) -> Run:
        """Open a run folder.

        Raises:
            UsageError: if there is no run of this format.
            DataError: if its manifest is damaged.
        """
        run = Run(Path(path))
        if run.manifest.get("format") != FORMAT:
            raise UsageError(f"{path}: its manifest has format {run.manifest.get('format')!r}, not {FORMAT}")
        described = run.manifest.get("experiment")
        if missing := [key for key in ALWAYS if not isinstance(described, dict) or key not in described]:
            raise DataError(f"{path}: its manifest is damaged: the experiment has no {missing[0]}")
        return run

    @cached_property
    def manifest(self) -> Mapping[str, Any]:
        return self._json("manifest.json")

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        """Written when a run ends, however it ends."""
        return self._json("summary.json")

    @property
    def experiment(self) -> Mapping[str, Any]:
        result: Mapping[str, Any] = self.manifest["experiment"]
        return result

    @property
    def params(self) -> int:
        """P."""
        return int(self.experiment["params"])

    @property
    def label(self) -> str:
        """The algorithm, with its codecs if it has any."""
        codecs = self.experiment.get("codecs") or {}
        selected = ", ".join(f"{field} {codec}" for field, codec in codecs.items())
        return str(self.experiment["algo"]) + (f" ({selected})" if selected else "")

    @property
    def status(self) -> str:
        """done, failed, interrupted, or "not ended": running, or killed."""
        if not (self.path / "summary.json").is_file():
            return "not ended"
        return str(self.summary.get("status", "not ended"))

    @cached_property
    def lines(self) -> tuple[dict[str, Any], ...]:
        """metrics.jsonl, with the traffic of rounds that were not evaluated in the line after them.

        A last line that is still being written is left out.

        Raises:
            UsageError: if an argument is wrong.
            DataError: if data is missing or damaged.
        """
        path = self._file("metrics.jsonl")
        written = path.read_text()
        try:
            lines = [json.loads(line) for line in written[: written.rfind("\n") + 1].splitlines()]
            rounds = [int(line["round"]) for line in lines if "bytes_down" in line and "bytes_up" in line]
        except (ValueError, KeyError, TypeError) as e:
            raise DataError(f"{path} is damaged: {e!r}") from None
        if len(rounds) < len(lines):
            raise DataError(f"{path} is damaged: a line does not say what its round cost")
        if every_round(rounds):
            return tuple(lines)
        own = self.ledger[self.ledger.kind == "algorithm"]
        for side in ("down", "up"):
            sent = own[own.direction == side]
            so_far = [int(sent.bytes[sent["round"] <= number].sum()) for number in rounds]
            for line, now, before in zip(lines, so_far, [0, *so_far], strict=False):
                line[f"bytes_{side}"] = now - before
        return tuple(lines)

    @cached_property
    def metrics(self) -> pandas.DataFrame:
        """One line per evaluated round, as `lines`; MB_down, MB_up and MB are sums so far."""
        frame = pandas.DataFrame(list(self.lines))
        for side in ("down", "up"):
            frame[f"MB_{side}"] = frame[f"bytes_{side}"].cumsum() / 1e6 if len(frame) else []
        frame["MB"] = frame["MB_down"] + frame["MB_up"]
        return frame

    @cached_property
    def ledger(self) -> pandas.DataFrame:
        """ledger.csv; '' where a text does not apply, -1 where a number does not.

        A last row that is still being written is left out.
        """
        path = self._file("ledger.csv")
        written = path.read_bytes()
        whole = BytesIO(written[: written.rfind(b"\n") + 1])
        try:
            frame = pandas.read_csv(whole, dtype=dict.fromkeys(TEXT, "str"), keep_default_na=False)
        except ValueError as e:
            raise DataError(f"{path} is damaged: {e}") from None
        if tuple(frame.columns) != COLUMNS:
            raise DataError(
                f"{path} has the columns {', '.join(frame.columns)}; {', '.join(COLUMNS)} are due"
            )
        return frame

    def model(self) -> nn.Module:
        """The final model, rebuilt from the manifest, with the weights of model.safetensors, in eval mode.

        Needs the data set's files only for its shape of inputs, as the run did.
        """
        from safetensors.torch import load_file

        from launch.runs.restored import StoredRun

        stored = StoredRun.open(self.path)
        weights = load_file(self._file("model.safetensors"))
        module = stored.problem.net.module
        for name, parameter in module.named_parameters():
            parameter.data.copy_(weights[name])
        return module.eval()

    def _file(self, name: str) -> Path:
        path = self.path / name
        if not path.is_file():
            raise UsageError(
                f"{self.path} is no run folder, or its run did not get so far: there is no {name}"
            )
        return path

    def _json(self, name: str) -> Mapping[str, Any]:
        path = self._file(name)
        try:
            result = json.loads(path.read_text())
        except ValueError as e:
            raise DataError(f"{path} is damaged: {e}") from None
        if not isinstance(result, dict):
            raise DataError(f"{path} is damaged: it holds no object")
        return result


def json_or_empty(path: Path) -> dict[str, Any]:
    """Read one of a run's files; {} where there is none, or where it is damaged."""
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return result if isinstance(result, dict) else {}


def every_round(rounds: Sequence[int]) -> bool:
    """Whether none was left out between those that were evaluated, so that sums over lines are whole."""
    return list(rounds) == list(range(len(rounds)))


@dataclass(frozen=True)
class Curve:
    """A run's metrics.jsonl: one mapping per evaluated round, ascending."""

    lines: tuple[dict[str, Any], ...]

    @staticmethod
    def read(folder: Path) -> Curve:
        """Of a run folder.

        Raises:
            UsageError: if an argument is wrong.
            DataError: if data is missing or damaged.
        """
        return Curve(Run(folder).lines)

    def rounds(self) -> list[int]:
        return [line["round"] for line in self.lines]

    def has(self, name: str) -> bool:
        """Whether there is a number of this name in any line; sums of seconds need every round's."""
        if name != "simulated":
            return name in SUMS or any(line.get(name) is not None for line in self.lines)
        timed = all("simulated_seconds" in line for line in self.lines if line["round"])
        return timed and every_round(self.rounds())

    def metric(self, name: str) -> list[float]:
        """One value per evaluated round; sums are so far. null is NaN.

        Raises:
            UsageError: if an argument is wrong.
        """
        if name in SUMS:
            scale, total, out = 1e-6 if name.startswith("MB") else 1.0, 0.0, []
            for line in self.lines:
                total += sum(line.get(key) or 0 for key in SUMS[name])
                out.append(total * scale)
            return out
        values = [line.get(name) for line in self.lines]
        if all(v is None for v in values) and not any(name in line for line in self.lines):
            known = sorted({key for line in self.lines for key in line})
            raise UsageError(f"no metric {name!r} in this run (it has {', '.join(known)})")
        return [math.nan if v is None else float(v) for v in values]


def run_experiment(
    *, workers: int = 0, out: str | Path | None = None, data_dir: str | Path | None = None, **experiment: Any
) -> Run:
    """Run an experiment with the keys of Experiment, as `fedsim launch` does: the same bits, quietly.

    workers 0 runs in this process, which a notebook wants.

    Raises:
        FedsimError: any FedsimError.
    """
    from launch.config import Overrides
    from launch.run import launch

    folders = {key: str(path) for key, path in (("out", out), ("data_dir", data_dir)) if path is not None}
    return Run.open(
        launch(*Overrides.typed({**experiment, **folders, "workers": workers}).resolve(), quiet=True)
    )
