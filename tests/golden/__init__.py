"""Golden digests: the bits of short runs of every algorithm, recorded, and the command that compares them.

tests/golden/golden.json holds, for every algorithm with dense and with bf16 messages, the sha256 of the final
model, of all client states, and of the ledger's rows. A change that must not change a bit is checked with it:

    python -m tests.golden                       every run: 0 and 2 workers, resumed, verified, remote
    python -m tests.golden --quick               only --workers 0: enough for a change of algorithms
    python -m tests.golden --only NAME           only runs whose name contains NAME
    python -m tests.golden --write               record anew, in the commit that changes the bits and says why
    python -m tests.golden --write --only NAME   record these algorithms and codecs anew and keep the others

The runs are made with --numerics portable, so that the digests are those of every x86-64 processor
(docs/decisions/023-how-a-worker-computes.md). They belong to the versions of torch and numpy that the file
names. With others the runs are compared all the same; if they differ then, the file is recorded anew in a
commit of its own. The command ends with 0 only if it has compared, or written, at least one run.

Two of the runs are also a test (test_golden.py), which lower versions of the libraries pass as well: it takes
its digests from a run of its own there.
"""

from __future__ import annotations

from pathlib import Path

GOLDEN = Path(__file__).with_name("golden.json")
