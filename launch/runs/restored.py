"""A run restored from its folder: experiment, last committed round, and the messages of the next round."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from fedsim import model_specs, plugins
from fedsim.errors import DataError, DiskError, WireError
from fedsim.problem import Problem
from fedsim.round_events import TaskId
from fedsim.wire.envelope import NONE
from fedsim.wire.message_context import MessageContext, codec_stream, of_broadcast, of_upload
from fedsim.wire.schema import check_values, optional_group
from fedsim.wire.state_file import encode_state
from launch.runs import manifest
from launch.runs.documents import CURE
from launch.runs.folder import MODEL, RunFolder, check_entries
from launch.runs.summary import check_model
from workers.assembly import assemble
from workers.numerics import DRIFT
from workers.probe import probe
from workers.storage.checkpoints import Checkpoint, read_checkpoint
from workers.storage.client_states import ClientStates
from workers.storage.journal import read_journal
from workers.storage.recovery import checkpoint_path
from workers.task_execution import execute


@dataclass(frozen=True)
class Message:
    """A message before encoding, with tensors in their wire dtypes. Both ends know `context`."""

    side: str
    exchange: int
    value: Any
    context: MessageContext


@dataclass(frozen=True)
class RestoredRun:
    """A run restored from its folder. Opening it gives this process the run's numerics."""

    run: RunFolder
    problem: Problem
    checkpoint: Checkpoint[Any]

    @staticmethod
    def open(folder: Path, data_dir: Path | None = None) -> RestoredRun:
        """Assemble a run's problem, and read its newest checkpoint. `data_dir` defaults to the manifest's."""
        run = RunFolder.open(folder)
        check_entries(folder)
        described, experiment = run.experiment, run.to_experiment()
        device = "cuda" if experiment.device == "cuda" and torch.cuda.is_available() else "cpu"
        kept = run.manifest.get("execution", {}).get("data_dir")
        problem = assemble(experiment, data_dir or (Path(kept) if kept else None), device)
        for name, now in (("params", problem.net.layout.size), ("client_sizes", list(problem.sizes))):
            if name in described and described[name] != now:
                raise DataError(f"{folder}: its {name} was {described[name]}; with this data it is {now}")
        checkpoint = _newest(folder, problem, str(run.manifest["run"]))
        if checkpoint.experiment != manifest.lasting_digest(described):
            raise DataError(
                f"{folder / manifest.MANIFEST} describes another experiment than the one that the checkpoint "
                f"of round {checkpoint.round} belongs to"
            )
        return RestoredRun(run, problem, checkpoint)

    @property
    def folder(self) -> Path:
        return self.run.path

    @property
    def round(self) -> int:
        return self.checkpoint.round

    @property
    def first_round(self) -> int:
        """The number of the first round: 0 if there is a set-up, else 1."""
        return 0 if self.problem.algorithm.setup else 1

    @property
    def name(self) -> str:
        """The run's name, which is in every envelope."""
        return str(self.run.manifest["run"])

    def committed(self, round: int) -> Checkpoint[Any] | None:
        """Return the checkpoint of a round; None if it was deleted."""
        path = checkpoint_path(self.folder, round)
        if not path.exists():
            return None
        try:
            read = _read(path, self.problem)
        except (DiskError, WireError) as e:
            raise DataError(str(e)) from None
        if (read.round, read.run) != (round, self.name):
            raise DataError(f"checkpoint {path} holds round {read.round} of run {read.run}")
        return read

    def unlike(self, created: Checkpoint[Any]) -> str | None:
        """Return how a recomputed round differs from the run's; '' if equal, None without a checkpoint."""
        kept = self.committed(created.round)
        if kept is None:
            return None
        if kept.versions.tolist() != created.versions.tolist():
            return "the versions of the clients' states differ"
        for f in fields(kept.server):
            if encode_state(getattr(kept.server, f.name)) != encode_state(getattr(created.server, f.name)):
                return f"field {f.name!r} of the server's state differs"
        return ""

    def journal(self) -> list[dict[str, Any]]:
        try:
            return read_journal(self.folder / "journal")
        except DiskError as e:
            raise DataError(str(e)) from None

    def drift(self) -> list[str]:
        """Return changes of the environment since the run began, such as `torch was 2.6, here it is 2.7`."""
        was, e = self.run.experiment, self.problem.experiment
        here = manifest.surroundings(probe(self.problem))
        facts: list[tuple[str, Any, Any]] = [*manifest.computing(self.run.manifest, here, e.device)]
        if e.device != "cpu":
            facts.append(("device", e.device, self.problem.net.device.type))
        facts.append(("data", was.get("data"), self.problem.data_digest))
        sources = was.get("sources", {})
        for path, digest in (plugins.sources(plugins.all_choices(e)) | model_specs.sources(e.model)).items():
            facts.append((f"the sha256 of {path}", sources.get(path), digest))
        return [
            f"{what} was {then}, here it is {now}" for what, then, now in facts if then not in (None, now)
        ] + [f"{DRIFT} ({text})" for text in self.run.drift]

    def largest_participant(self) -> int:
        """Return the next round's participant with the most examples, or the largest client if none."""
        participants = self.problem.rounds.schedule()(self.round + 1).participants
        everyone = tuple(range(len(self.problem.clients)))
        return max(participants or everyone, key=lambda k: self.problem.sizes[k])

    def states(self) -> ClientStates:
        return ClientStates(self.folder / "state", self.problem.algorithm.client_type, self.name)

    def state(self, client: int) -> Any:
        """Return a client's committed state."""
        problem, version = self.problem, int(self.checkpoint.versions[client])
        if not version:
            return problem.algorithm.client_init(problem.context(0, 0), client)
        try:
            return self.checkpoint.load_state(self.states(), client)
        except (DiskError, WireError) as e:
            raise DataError(str(e)) from None

    def next_messages(self, client: int) -> Iterator[Message]:
        """Yield the messages of the next round if only this client takes part."""
        problem, algorithm = self.problem, self.problem.algorithm
        server, state, round = self.checkpoint.server, self.state(client), self.round + 1
        folds = self.checkpoint.folds
        for number in range(1, len(algorithm.exchanges_in(round)) + 1):
            types, ctx = problem.messages.exchange(round, number), problem.context(round, number, folds, 1)
            sent = algorithm.broadcast(server, ctx)
            part = optional_group(types.down)
            if part is not None:
                sent = replace(sent, **{part.name: algorithm.broadcast_to(server, client, ctx)})
            seed, last, receiver = problem.experiment.seed, self.checkpoint.broadcast, NONE
            if problem.rounds.policy.has_own_broadcast():
                last, receiver = problem.rounds.policy.reference(state.got, problem.context(0, 0)), client
            context = of_broadcast(last, codec_stream(seed, round, number), receiver)
            yield Message("down", number, self._plain(sent), context)
            _, down = problem.messages.sent(sent, "down", context)
            check_values(down, f"broadcast of round {round}")
            result = execute(problem, TaskId(round, number, client, 0), state, down, folds, 1)
            context = of_upload(down, codec_stream(seed, round, number, client))
            yield Message("up", number, self._plain(result.up), context)
            check_values(result.decoded, f"upload of client {client}")
            if number < len(algorithm.exchanges_in(round)):
                state = result.committed
                server = algorithm.server_update(
                    server, down, [ctx.arrival(client, down, result.decoded)], ctx
                )

    def _plain(self, message: Any) -> Any:
        """Return the message as it would be received without codecs."""
        return self.problem.messages.sent(message)[1]


def trained_model(run: RunFolder) -> nn.Module:
    """Return the final model: a module with all tensors of model.safetensors, in eval mode."""
    problem, file = RestoredRun.open(run.path).problem, run.file(MODEL)
    check_model(file, problem, run.summary)
    module = problem.net.module
    tensors = module.state_dict(keep_vars=True)
    for name, tensor in load_file(file).items():
        if name in tensors:  # others are of the posterior, such as its precision
            if tensor.shape != tensors[name].shape:
                raise DataError(f"{file} is damaged: {name} has the shape {tuple(tensor.shape)}; {CURE}")
            tensors[name].data.copy_(tensor)
    return module.eval()


def _read(path: Path, problem: Problem) -> Checkpoint[Any]:
    return read_checkpoint(path, problem.algorithm.server_type, problem.messages.broadcast_type)


def _newest(folder: Path, problem: Problem, run: str) -> Checkpoint[Any]:
    """Return the newest readable checkpoint; damaged checkpoints are skipped."""
    damage, clients = "", len(problem.clients)
    for path in sorted((folder / "checkpoints").glob("*.checkpoint"), reverse=True):
        try:
            read = _read(path, problem)
        except (WireError, DiskError) as e:
            damage = damage or f" that can be read: {e}"
            continue
        if read.run != run:
            damage = damage or f" of its own: {path} is of run {read.run}, and manifest.json of run {run}"
            continue
        if len(read.versions) == clients:
            return read
        damage = damage or f" of {clients} clients: {path} has {len(read.versions)}"
    raise DataError(f"{folder} has no checkpoint{damage or '; no round of it was committed'}")
