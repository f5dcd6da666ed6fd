"""Golden digests: the bits of short runs of every algorithm, recorded, and the command that compares them.

tests/golden/golden.json holds, for every algorithm with dense and with bf16 messages, the sha256 of the final
model, of all client states, and of the ledger's rows. A change that must not change a bit is checked with it:

    python -m tests.golden                 all runs: 0 and 2 workers, resumed, verified, remote (minutes)
    python -m tests.golden --quick         only --workers 0: enough for a change of algorithms
    python -m tests.golden --only NAME     only runs whose name contains NAME
    python -m tests.golden --write         record anew, in the commit that changes the bits, which says why

The bits depend on the machine: torch chooses its kernels by the processor. The file therefore has the probe
digest (workers/probe.py) of the machine that made it. Where this machine's probe is another one, differences
mean nothing; with --where-comparable the command then compares nothing, says so, and ends with 0, as CI needs
it. A file for such a machine is made there with --write before a change, and is not committed.

One run is also a test (test_golden.py, marked process and slow).
"""

from __future__ import annotations

from pathlib import Path

GOLDEN = Path(__file__).with_name("golden.json")
