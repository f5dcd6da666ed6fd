"""Microseconds of a step: as it comes, recorded, in lanes, and of plain torch; IVON, curvature and TF32.

1,280 random examples, 4 local epochs, Adam, one Gaussian penalty, which plain torch has not; kernels are
deterministic. Recordings are made in a task that is not counted; a figure is the median of three tasks. On a
CPU the tape of the tests stands for CUDA graphs, so that equal bits are compared there, too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fedsim.learning.gaussian import Gaussian
from fedsim.learning.models.registry import build_model
from fedsim.learning.params import Net
from fedsim.learning.recordings import Recordings, cuda_graphs
from fedsim.learning.shards import Shard
from fedsim.learning.solvers.first_order import LocalTraining, minimise
from fedsim.learning.solvers.ivon import IvonTraining, ivon
from fedsim.seeds import RandomStream, seeded_torch
from tests.benchmarks.gpu.machine import seconds_of
from tests.benchmarks.gpu.stage import Stage
from tests.support.streams import Device
from tests.support.tape import Tapes
from workers.assembly import fix_numerics
from workers.worker.lanes import CudaStream, Lanes

COLOUR = (3, 32, 32)
MODELS = {
    "mlp": ((1, 28, 28), 32),
    "cnn_acar": (COLOUR, 64),
    "cnn_zenke": (COLOUR, 64),
    "resnet20": (COLOUR, 64),
}
"""Shape of an example, and batch size."""
TINY = {"mlp_small": ((1, 8, 8), 32)}
LANES = (1, 4, 8, 10, 16)
RNG = RandomStream(0, "benchmark", 1, 0)


@dataclass
class Client:
    """One client of one model on the device, and what was measured of it."""

    stage: Stage
    model: str
    shape: tuple[int, ...]
    batch: int
    seconds: dict[str, float] = field(default_factory=dict)
    """A training step's, by the way of computing it."""

    def __post_init__(self) -> None:
        self.examples, self.epochs = (128, 1) if self.stage.tiny else (1280, 4)
        self.per_epoch = -(-self.examples // self.batch)

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if self.stage.gpu else "cpu")

    def shard(self, recorded: bool) -> Shard:
        """The same examples and start every time."""
        with seeded_torch(0):
            net = Net(build_model(self.model, self.shape, 10), self.device)
            inputs, targets = torch.rand(self.examples, *self.shape), torch.randint(10, (self.examples,))
        if recorded:
            net.recordings = (
                Recordings(cuda_graphs(), self.device) if self.stage.gpu else Tapes().recordings()
            )
        return Shard(net, inputs.to(self.device), targets.to(self.device), 1.0)

    def timed(self, work: Callable[[], Any]) -> tuple[float, Any]:
        """Seconds of a call, and its result."""
        work()
        spent = []
        for _ in range(1 if self.stage.tiny else 3):
            self._wait()
            began = time.perf_counter()
            result = work()
            self._wait()
            spent.append(time.perf_counter() - began)
        return statistics.median(spent), result

    def _wait(self) -> None:
        if self.stage.gpu:
            torch.cuda.synchronize()

    def training(self, recorded: bool) -> tuple[float, Tensor, list[str]]:
        """Seconds of a step of Adam, the solution, and why steps were not recorded."""
        shard = self.shard(recorded)
        start, how = shard.net.snapshot(), LocalTraining(epochs=self.epochs, batch_size=self.batch)
        prior = Gaussian(0.1 * start, 0.5)
        seconds, fit = self.timed(
            lambda: minimise(shard, start, how=how, rng=RNG, round=1, penalties=(prior,))
        )
        return seconds / how.steps(self.examples), fit.solution.cpu(), _refusals(shard)

    def ivon(self, recorded: bool) -> tuple[float, Tensor, list[str]]:
        """The same of IVON; the solution is its mean."""
        shard = self.shard(recorded)
        start, how = shard.net.snapshot(), IvonTraining(epochs=self.epochs, batch_size=self.batch, lr=5e-3)
        zero, one = torch.zeros_like(start), torch.ones_like(start)
        settings = {"prior_mean": zero, "prior_precision": one, "ess": float(self.examples), "h0": 0.1}
        seconds, fit = self.timed(lambda: ivon(shard, start, how=how, rng=RNG, round=1, **settings))
        return seconds / (how.epochs * self.per_epoch), fit.solution.mean.cpu(), _refusals(shard)

    def compared(self, what: str, train: Callable[[bool], tuple[float, Tensor, list[str]]]) -> None:
        """Report both ways of one solver, and whether they have the same bits."""
        plain, one, _ = train(False)
        recorded, other, refusals = train(True)
        same = torch.equal(one.view(torch.int32), other.view(torch.int32))
        self.seconds |= {what: plain, f"{what} recorded": recorded}
        micro = {"as_it_comes_us": 1e6 * plain, "recorded_us": 1e6 * recorded}
        self.stage.report(
            f"{self.model}, {what}, batch {self.batch}: {1e6 * plain:.0f} us a step as it comes, "
            f"{1e6 * recorded:.0f} us recorded{'' if self.stage.gpu else ' (a tape)'}; the same bits: {same}",
            {f"{self.model} {what}": micro | {"same_bits": same, "refusals": refusals}},
        )
        if refusals:
            self.stage.fail(f"{self.model}, {what}", f"not recorded: {'; '.join(refusals)}")
        if not same:
            self.stage.fail(f"{self.model}, {what}", "a recorded step has other bits than one as it comes")

    def plain_torch(self) -> None:
        """The same network in torch alone: torch.optim.Adam on one batch, without a penalty."""
        with seeded_torch(0):
            module = build_model(self.model, self.shape, 10).to(self.device)
            inputs = torch.rand(self.batch, *self.shape, device=self.device)
            targets = torch.randint(10, (self.batch,), device=self.device)
        module.train()
        self._wait()
        adam = torch.optim.Adam(module.parameters(), 1e-3, fused=True, capturable=self.stage.gpu)

        def step() -> None:
            adam.zero_grad(set_to_none=False)
            torch.nn.functional.cross_entropy(module(inputs), targets).backward()  # type: ignore[no-untyped-call]
            adam.step()

        repeats = 10 if self.stage.tiny else 200
        if not self.stage.gpu:
            eager = seconds_of(step, repeats)
            self.stage.report(f"{self.model}, plain torch: {1e6 * eager:.0f} us a step")
            return
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):  # gradients must not come from another stream than the graph's
            eager = seconds_of(step, repeats)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step()
        once = seconds_of(graph.replay, repeats)
        self.stage.report(
            f"{self.model}, plain torch: {1e6 * eager:.0f} us a step, {1e6 * once:.0f} us in one CUDA graph",
            {f"{self.model} plain torch": {"eager_us": 1e6 * eager, "graph_us": 1e6 * once}},
        )

    def curvature(self) -> None:
        """The exact diagonal of the GGN of all examples."""
        shard = self.shard(True)
        weights = shard.net.snapshot()
        seconds, _ = self.timed(lambda: shard.curvature(weights, "exact", RNG))
        epochs = seconds / (self.per_epoch * self.seconds["adam recorded"])
        self.stage.report(
            f"{self.model}, exact curvature of {self.examples} examples: {seconds:.4f} s, or {epochs:.1f} "
            "epochs of recorded steps",
            {f"{self.model} curvature": {"seconds": seconds, "epochs": epochs}},
        )

    def lanes(self) -> None:
        """Recorded steps of several clients at once: microseconds for each client's step."""
        most = max(LANES)
        shards = [self.shard(True) for _ in range(most)]
        start, how = shards[0].net.snapshot(), LocalTraining(epochs=self.epochs, batch_size=self.batch)
        prior, expected, figures = Gaussian(0.1 * start, 0.5), None, {}
        stream = CudaStream if self.stage.gpu else Device(0).stream
        places: list[Any] = [SimpleNamespace(net=shard.net, shard=shard) for shard in shards]
        for count in LANES[: 2 if self.stage.tiny else None]:
            lanes, solutions = Lanes(places[:count], lambda *_: None, stream), list[Tensor]()

            def train(place: Any, solutions: list[Tensor] = solutions) -> None:
                fit = minimise(place.shard, start, how=how, rng=RNG, round=1, penalties=(prior,))
                solutions.append(fit.solution.cpu())

            def work(lanes: Lanes = lanes, count: int = count) -> None:
                for _ in range(count):
                    lanes.start(train)
                while lanes.busy:
                    lanes.advance()

            seconds, _ = self.timed(work)
            expected = solutions[0] if expected is None else expected
            same = all(torch.equal(s.view(torch.int32), expected.view(torch.int32)) for s in solutions)
            each = 1e6 * seconds / (count * how.steps(self.examples))
            figures[str(count)] = {"us": each, "same_bits": same}
            if not same:
                self.stage.fail(f"{self.model}, {count} lanes", "other bits than a single lane's")
        text = ", ".join(f"{count}: {f['us']:.0f} us" for count, f in figures.items())
        same = all(f["same_bits"] for f in figures.values())
        self.stage.report(
            f"{self.model}, a client's step with lanes {text}; the same bits: {same}",
            {f"{self.model} lanes": figures},
        )

    def tf32(self) -> None:
        """Recorded steps with TF32 in matrix products and convolutions, beside float32."""
        fix_numerics(1, "cuda", "tf32")
        try:
            seconds, _, _ = self.training(True)
        finally:
            fix_numerics(1, "cuda")
        ratio = self.seconds["adam recorded"] / seconds
        self.stage.report(
            f"{self.model}, adam, tf32: {1e6 * seconds:.0f} us a step recorded; float32 / tf32: {ratio:.2f}",
            {f"{self.model} tf32": {"recorded_us": 1e6 * seconds, "float32_over_tf32": ratio}},
        )


def _refusals(shard: Shard) -> list[str]:
    return list(shard.net.recordings.refusals) if shard.net.recordings else []


def run(stage: Stage) -> None:
    fix_numerics(1, "cuda" if stage.gpu else "cpu")
    clients = [Client(stage, name, *of) for name, of in (TINY if stage.tiny else MODELS).items()]
    for client in clients:
        with stage.part(f"{client.model}, adam"):
            client.compared("adam", client.training)
        with stage.part(f"{client.model}, plain torch"):
            client.plain_torch()
    for client in clients:
        with stage.part(f"{client.model}, ivon"):
            client.compared("ivon", client.ivon)
        with stage.part(f"{client.model}, curvature"):
            client.curvature()
    for client in clients:
        with stage.part(f"{client.model}, lanes"):
            client.lanes()
    for client in clients if stage.gpu else ():
        with stage.part(f"{client.model}, tf32"):
            client.tf32()
