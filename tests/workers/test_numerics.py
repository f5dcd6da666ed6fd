"""A worker that would compute other bits is not let in, and numerics = portable takes the choice away."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

import msgspec
import numpy as np
import pytest
import torch

from fedsim.errors import UsageError, WireError
from fedsim.wire.envelope import Envelope
from launch.runs.manifest import computing, with_workers
from tests.support.commands import DEADLINE, ran
from workers.coordinator.membership import Registration
from workers.numerics import PROBE, differences, facts_of_machine, facts_of_process
from workers.portable import LEAST, PORTABLE, check_numerics, environment_for
from workers.protocol_messages import WorkerConfig, WorkerManifest, ready

MINE = {"torch": "2.7", "device": "cpu", PROBE.format("cpu"): "aaaa"}


def registration(facts: Mapping[str, str], allow_drift: bool = False) -> Registration:
    manifest = WorkerManifest("", {}, dict(facts), "Intel Xeon")
    return Registration(WorkerConfig({}), manifest, 3, allow_drift)


def of_worker(facts: Mapping[str, str], processor: str = "AMD EPYC") -> Envelope:
    return ready("run", WorkerManifest("", {}, dict(facts), processor))


def test_only_what_both_sides_know_is_compared() -> None:
    assert [*differences({"a": "1", "b": "2", "d": "4"}, {"a": "1", "b": "3", "c": "5"})] == [("b", "2", "3")]


def test_a_worker_with_the_same_bits_is_let_in_whatever_its_processor_is_called() -> None:
    own = registration(MINE)
    assert own.check_worker(0, of_worker(MINE)) == ("", "")
    assert own.missing == [1, 2]


def test_a_worker_with_another_digest_is_refused_with_both() -> None:
    own = registration(MINE)
    why, _ = own.check_worker(1, of_worker({**MINE, PROBE.format("cpu"): "bbbb"}))
    for text in ("aaaa", "bbbb", "AMD EPYC", "Intel Xeon", "--numerics portable", "--allow-drift"):
        assert text in why
    assert own.missing == [0, 1, 2]


@pytest.mark.parametrize("name", ["torch", "device"])
def test_labels_count_too(name: str) -> None:
    why, _ = registration(MINE).check_worker(0, of_worker({**MINE, name: "other"}))
    assert f"{name} other instead of {MINE[name]}" in why


def test_a_run_cannot_start_once_every_missing_worker_was_refused() -> None:
    """A worker that tries again and is refused again is one worker; one that is let in counts no longer."""
    own = registration(MINE)
    for _ in range(3):
        own.refuse(0, "another file")
    assert not own.cannot_start()
    own.refuse(1, "another file")
    assert own.check_worker(1, of_worker(MINE)) == ("", "")
    assert own.refused == {0: "another file"} and not own.cannot_start()
    own.refuse(2, "another file")
    assert own.cannot_start()
    own.config_of(2)
    assert not own.cannot_start()


def test_with_allow_drift_it_is_let_in_and_named() -> None:
    own = registration(MINE, allow_drift=True)
    why, drift = own.check_worker(1, of_worker({**MINE, "torch": "2.6"}))
    assert (why, drift) == ("", "torch 2.6 instead of 2.7")
    assert own.missing == [0, 2]


def test_of_a_gpu_the_first_workers_digest_is_the_runs() -> None:
    """The coordinator computes on its CPU; workers on another model of GPU are refused."""
    gpu = {"torch": "2.7", "device": "cuda", "gpu": "H200", PROBE.format("cuda"): "cccc"}
    own = registration({"torch": "2.7", "device": "cuda"})
    assert own.check_worker(0, of_worker(gpu)) == ("", "")
    assert own.check_worker(1, of_worker(gpu)) == ("", "")
    why, _ = own.check_worker(2, of_worker({**gpu, "gpu": "A100", PROBE.format("cuda"): "dddd"}))
    assert "gpu A100 instead of H200" in why and "dddd instead of cccc" in why


def test_the_manifest_keeps_what_the_first_worker_has_brought() -> None:
    """A run that is resumed refuses the workers that it would have refused before."""
    content = {"versions": {"torch": "2.7"}, "platform": {"probe": {"cpu": "aaaa"}}}
    after = with_workers(content, {"gpu": "H200", PROBE.format("cuda"): "cccc"}, [])
    assert after["platform"] == {"probe": {"cuda": "cccc", "cpu": "aaaa"}, "gpu": "H200"}
    assert "drift" not in after
    later = with_workers(after, {"gpu": "A100", PROBE.format("cuda"): "dddd"}, ["worker 1: x", "worker 1: x"])
    assert later["platform"] == after["platform"] and later["drift"] == ["worker 1: x"]
    [(name, there, here)] = computing(after, {"platform": {"probe": {"cuda": "dddd"}}}, "cuda")
    assert (name, there, here) == (PROBE.format("cuda"), "cccc", "dddd")


def test_what_a_worker_says_of_itself_cannot_move_the_terminals_cursor() -> None:
    with pytest.raises(WireError):
        WorkerManifest.of(of_worker({**MINE, "torch": "\x1b[2J"}))
    with pytest.raises(WireError):
        WorkerManifest.of(of_worker(MINE, processor="x" * 501))


def test_facts_of_this_process_are_printable_texts() -> None:
    facts = facts_of_process("cpu", {"cpu": "aaaa"})
    assert (
        facts_of_machine().items() <= facts.items()
        and facts["settings"] == f"{torch.get_num_threads()} threads"
    )
    assert WorkerManifest.of(of_worker(facts)).facts == facts


@pytest.mark.parametrize("least", LEAST)
def test_portable_must_be_known_before_torch_is_imported(least: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_numerics("native")
    assert not environment_for("native")
    for name in PORTABLE:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="ATEN_CPU_CAPABILITY=default"):
        check_numerics("portable")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: least)
    monkeypatch.setattr(np, "show_config", lambda mode: {"SIMD Extensions": {"baseline": ["X86_V2"]}})
    for name, value in environment_for("portable").items():
        monkeypatch.setitem(os.environ, name, value)
    check_numerics("portable")


def test_portable_must_be_known_before_numpy_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: LEAST[0])
    monkeypatch.setattr(np, "show_config", lambda mode: {"SIMD Extensions": {"found": ["X86_V3"]}})
    for name, value in environment_for("portable").items():
        monkeypatch.setitem(os.environ, name, value)
    with pytest.raises(UsageError, match="NPY_ENABLE_CPU_FEATURES=X86_V2"):
        check_numerics("portable")


CHILD = """
import os
from hashlib import sha256
from workers.portable import environment_for
os.environ.update(environment_for("portable"))
import numpy as np
import torch
from workers.assembly import fix_numerics
fix_numerics(1, "cpu", "portable")
draws = torch.Generator().manual_seed(0)
x, images = torch.randn(64, 301, generator=draws), torch.randn(2, 3, 17, 17, generator=draws)
y, k = x.double().numpy(), torch.randn(5, 3, 4, 4, generator=draws)
results = {
    "product": x @ x.T, "exp": x.exp(), "log_softmax": x.log_softmax(1), "sum": x.sum(1),
    "conv2d": torch.nn.functional.conv2d(images, k), "cholesky": torch.linalg.cholesky(x @ x.T),
    "numpy.exp": np.exp(y), "numpy.log": np.log(abs(y)), "numpy.log1p": np.log1p(abs(y)),
    "numpy.tanh": np.tanh(y), "numpy.power": abs(y) ** 0.3, "numpy.std": y.std(0),
    "numpy.argsort": np.argsort(np.rint(3 * y).ravel()), "numpy.eigvalsh": np.linalg.eigvalsh(y @ y.T),
    "numpy.matmul": y @ y.T, "numpy.dot": y.ravel() @ y.ravel(),
    "sqrt": abs(x).sqrt(), "acos": (x / 9).acos(), "asin": (x / 9).asin(), "atan": x.atan(),
}
assert np.array_equal(results["sqrt"], np.sqrt(abs(x).numpy()))
for name, value in results.items():
    print(name, sha256(np.asarray(value).tobytes()).hexdigest())
"""
KERNELS = {
    "the processor's own": {},
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_CBWR": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "NPY_ENABLE_CPU_FEATURES": "X86_V3",
        "OPENBLAS_CORETYPE": "Haswell",
    },
    "none of numpy's": {"NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4", "OPENBLAS_CORETYPE": "Nehalem"},
    "few of MKL's": {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "DNNL_MAX_CPU_ISA": "AVX"},
}
"""What a caller's environment says of the kernels."""


def portable_results(environment: Mapping[str, str]) -> dict[str, str]:
    others = {name: value for name, value in os.environ.items() if name not in PORTABLE}
    done = ran([sys.executable, "-W", "error", "-c", CHILD], env=others | environment)
    assert done.returncode == 0, done.stderr
    return dict(line.split() for line in done.stdout.splitlines())


@pytest.mark.process
@pytest.mark.slow
def test_portable_results_do_not_depend_on_the_kernels_that_the_environment_asks_for() -> None:
    """The probe of a run does not see numpy's exp and log, by which a Dirichlet split is drawn."""
    own, *others = (portable_results(environment) for environment in KERNELS.values())
    assert len(own) == 20
    assert all(other == own for other in others)


def test_a_join_file_says_which_numerics_a_run_has() -> None:
    from workers.transport.join_credentials import FORMAT, JoinCredentials, KeyPair

    pair = KeyPair.new()
    credentials = JoinCredentials(FORMAT, "r", "tcp://127.0.0.1:1", pair.public, 1, (pair,), "portable")
    assert msgspec.json.decode(msgspec.json.encode(credentials), type=JoinCredentials).numerics == "portable"


@pytest.mark.process
def test_a_worker_on_a_gpu_says_how_cublas_divides_its_memory() -> None:
    """torch 2.6 refuses matrix products without it where algorithms have to be deterministic."""
    program = (
        "import os, torch; torch.cuda.is_available = lambda: True;"
        "from workers.assembly import fix_numerics; fix_numerics(1, 'cuda');"
        "print(os.environ['CUBLAS_WORKSPACE_CONFIG'], torch.are_deterministic_algorithms_enabled())"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CUBLAS")}
    done = ran([sys.executable, "-c", program], env=environment)
    assert done.stdout.split() == [":4096:8", "True"], done.stderr


@pytest.mark.process
def test_a_gpu_worker_computes_deterministically_without_importing_a_compiler() -> None:
    """torch.use_deterministic_algorithms imports torch._inductor, which takes seconds in every worker."""
    program = (
        "import sys, torch\n"
        "from fedsim.process_settings import set_deterministic\n"
        "set_deterministic((True, False, False))\n"
        "assert torch.are_deterministic_algorithms_enabled()\n"
        "assert 'torch._inductor' not in sys.modules\n"
        "import torch._inductor.config as config\n"
        "set_deterministic((True, False, False))\n"
        "assert torch.are_deterministic_algorithms_enabled()\n"
        "assert getattr(config, 'deterministic', True)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=DEADLINE)
