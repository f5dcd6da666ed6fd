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

from fedsim.errors import DataError, UsageError
from fedsim.wire.ledger_rows import COLUMNS, TREE_COLUMNS
from launch.runs.file_checks import SUMMARY, KnownFiles, check_files, checked_bytes, known_files
from launch.runs.manifest import StoredManifest, json_of
from launch.runs.run_state import rows_until
from workers.storage.growing_file import LEDGER, METRICS

if TYPE_CHECKING:
    import pandas
    from torch import nn

TEXT = ("kind", "direction", "message", "field", "layer", "codec", "hop")
SUMS = {
    "MB": ("bytes_down", "bytes_up"),
    "MB up": ("bytes_up",),
    "MB down": ("bytes_down",),
    "simulated": ("simulated_seconds",),
    "J": ("joules",),
}
"""What is summed up over the rounds so far."""


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
        _ = run.experiment
        return run

    @cached_property
    def opened(self) -> StoredManifest:
        """The manifest, checked."""
        return StoredManifest.read(self.path)

    @property
    def manifest(self) -> Mapping[str, Any]:
        """What manifest.json holds."""
        return self.opened.content

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        """Written when a run ends, however it ends."""
        return json_of(self._file(SUMMARY))

    @cached_property
    def known(self) -> KnownFiles:
        """What is known of the run's files, with which they are compared when they are read."""
        return known_files(self.path)

    def checked(self) -> Run:
        """The run, after all its files were compared with what is known of them.

        Raises:
            DataError: if one was changed, naming it.
        """
        check_files(self.opened, self.known)
        return self

    @property
    def experiment(self) -> Mapping[str, Any]:
        """The manifest's experiment."""
        return self.opened.described

    @property
    def params(self) -> int:
        """P."""
        return int(self.experiment["params"])

    @property
    def clients(self) -> int:
        """How many clients have data: K, or one of a centralised run, which has the rows of K."""
        return len(self.experiment.get("client_sizes") or ()) or int(self.experiment["clients"])

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

    @property
    def drift(self) -> tuple[str, ...]:
        """Which workers and starts may have computed other bits than the run's (--allow-drift)."""
        return tuple(self.manifest.get("drift", ()))

    @cached_property
    def lines(self) -> tuple[dict[str, Any], ...]:
        """metrics.jsonl, with the traffic of rounds that were not evaluated in the line after them.

        A last line that is still being written is left out.

        Raises:
            UsageError: if an argument is wrong.
            DataError: if data is missing or damaged.
        """
        path, written = self.path / METRICS, checked_bytes(self.path, METRICS, self.known)
        lines: list[dict[str, Any]] = []
        rounds: list[int] = []
        for number, text in enumerate(written[: written.rfind(b"\n") + 1].splitlines(), 1):
            try:
                lines.append(json.loads(text))
                rounds += [int(lines[-1]["round"])] if {"bytes_down", "bytes_up"} <= lines[-1].keys() else []
            except (ValueError, KeyError, TypeError, AttributeError):
                raise DataError(f"{path} is damaged: line {number} is no line of a round") from None
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
        import pandas

        frame = pandas.DataFrame(list(self.lines))
        for side in ("down", "up"):
            frame[f"MB_{side}"] = frame[f"bytes_{side}"].cumsum() / 1e6 if len(frame) else []
        frame["MB"] = frame["MB_down"] + frame["MB_up"]
        return frame

    @cached_property
    def ledger(self) -> pandas.DataFrame:
        """ledger.csv; '' where a text does not apply, -1 where a number does not.

        A last row that is still being written is left out, and so are rows of a round that is not committed.

        Raises:
            UsageError: if there is none.
            DataError: if it is damaged, or its sums are not those of summary.json.
        """
        import pandas

        path, written = self.path / LEDGER, checked_bytes(self.path, LEDGER, self.known)
        whole = BytesIO(written[: written.rfind(b"\n") + 1])
        types = {name: "str" if name in TEXT else "int64" for name in TREE_COLUMNS}
        try:
            frame = pandas.read_csv(whole, dtype=types, keep_default_na=False)
        except ValueError as e:
            raise DataError(f"{path} is damaged: {' '.join(str(e).split())}") from None
        if tuple(frame.columns) not in (COLUMNS, TREE_COLUMNS):
            raise DataError(
                f"{path} has the columns {', '.join(frame.columns)}; {', '.join(COLUMNS)} are due"
            )
        last = rows_until(self.path)
        if last is not None:
            frame = frame[frame["round"] <= last]
        if self.status in ("done", "interrupted"):  # one that failed may not have written all its rows
            other = differing_sum(frame, self.summary.get("bytes"))
            if other:
                raise DataError(f"{path} and {SUMMARY} do not belong together: {other}")
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
            if parameter.requires_grad:
                parameter.data.copy_(weights[name])
        return module.eval()

    def _file(self, name: str) -> Path:
        path = self.path / name
        if not path.is_file():
            raise UsageError(
                f"{self.path} is no run folder, or its run did not get so far: there is no {name}"
            )
        return path


def differing_sum(ledger: pandas.DataFrame, summed: Any) -> str:
    """The first sum of a ledger that is not the one in summary.json's `bytes`; '' if there is none."""
    if not isinstance(summed, dict):
        return ""
    in_summary: dict[Any, Any] = {}
    try:
        for kind, sides in summed.items():
            for side, named in sides.items():
                in_summary |= {
                    (kind, side, name, layer): n for name, of in named.items() for layer, n in of.items()
                }
    except AttributeError:
        return "its `bytes` are no sums by kind, direction, field and layer"
    in_ledger = ledger.groupby(["kind", "direction", "field", "layer"])["bytes"].sum().to_dict()
    for key in sorted(in_summary.keys() | in_ledger.keys()):
        if in_summary.get(key, 0) != in_ledger.get(key, 0):
            what = ", ".join(part for part in key if part)
            return (
                f"{what} has {in_ledger.get(key, 0):,} bytes, and the summary says {in_summary.get(key, 0)}"
            )
    return ""


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
        """Whether there is a number of this name in any line; of simulated sums, in every round's."""
        if name not in ("simulated", "J"):
            return name in SUMS or any(line.get(name) is not None for line in self.lines)
        (key,) = SUMS[name]
        timed = all(key in line for line in self.lines if line["round"])
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
        if any(isinstance(v, list) for v in values):
            raise UsageError(f"{name!r} is no number: it is a list in every line of metrics.jsonl")
        return [math.nan if v is None else float(v) for v in values]


def run_experiment(
    *, workers: int = 0, out: str | Path | None = None, data_dir: str | Path | None = None, **experiment: Any
) -> Run:
    """Run an experiment with the keys of Experiment, as `fedsim launch` does: the same bits, quietly.

    workers 0 runs in this process, which a notebook wants.

    Raises:
        FedsimError: any FedsimError.
    """
    from launch.configuration.config import Overrides
    from launch.session.run import launch

    folders = {key: str(path) for key, path in (("out", out), ("data_dir", data_dir)) if path is not None}
    return Run.open(
        launch(*Overrides.typed({**experiment, **folders, "workers": workers}).resolve(), quiet=True)
    )
