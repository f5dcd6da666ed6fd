"""TensorBoard: event files in RUN/tracking/tensorboard, which `tensorboard --logdir RUN` finds."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from fedsim.extras import needed
from launch.tracking import Ending, Row, TrackedRun, Value


class TensorboardTracker:
    """A tracker that uses TensorBoard's own writer, because torch's imports torch. Scalars are float32."""

    def __init__(self) -> None:
        def imported(module: str) -> Any:
            return needed(f"tensorboard.{module}", "--track tensorboard", "tensorboard")

        self._event = imported("compat.proto.event_pb2")
        self._summary = imported("compat.proto.summary_pb2")
        self._tensor = imported("compat.proto.tensor_pb2").TensorProto
        self._string = imported("compat.proto.types_pb2").DT_STRING
        self._hparams = imported("plugins.hparams.summary_v2")
        self._writers = imported("summary.writer.event_file_writer")

    def start(self, run: TrackedRun) -> str:
        """Open a file. TensorBoard then hides events that an earlier start wrote after round run.last."""
        self._writer = self._writers.EventFileWriter(str(run.folder))
        if run.id:
            again = self._event.SessionLog(status=self._event.SessionLog.START)
            self._add(run.last + 1, session_log=again)
        self._add(0, summary=self._hparams.hparams_pb(dict(run.config), trial_id=run.name))
        self._text("configuration", _table(run.config), 0)
        self._writer.flush()
        return run.name

    def log(self, rows: Sequence[Row]) -> None:
        """Write one event per round."""
        for row in rows:
            self._scalars(row)
        self._writer.flush()

    def finish(self, ending: Ending) -> None:
        """Write the final numbers and the paths of the files, because an event file cannot contain files."""
        self._scalars(ending.final)
        files = {path.name: str(path) for path in ending.files}
        self._text("end", _table({"status": ending.status, **files}), ending.final.round)
        self._writer.close()

    def _scalars(self, row: Row) -> None:
        value = self._summary.Summary.Value
        values = [value(tag=k, simple_value=x) for k, x in row.numbers.items()]
        self._add(row.round, summary=self._summary.Summary(value=values))

    def _text(self, tag: str, markdown: str, step: int) -> None:
        kind = self._summary.SummaryMetadata.PluginData(plugin_name="text")  # for the Text tab
        shape = {"dim": [{"size": 1}]}
        tensor = self._tensor(dtype=self._string, string_val=[markdown.encode()], tensor_shape=shape)
        metadata = self._summary.SummaryMetadata(plugin_data=kind)
        value = self._summary.Summary.Value(tag=f"{tag}/text_summary", metadata=metadata, tensor=tensor)
        self._add(step, summary=self._summary.Summary(value=[value]))

    def _add(self, step: int, **what: Any) -> None:
        self._writer.add_event(self._event.Event(wall_time=time.time(), step=step, **what))


def _table(values: Mapping[str, Value]) -> str:
    return "\n".join(["| key | value |", "|---|---|", *(f"| {k} | {v} |" for k, v in values.items())])
