"""python -m tests.golden [--write] [--quick] [--jobs N] [--only NAME]

Carries out the recorded runs (all algorithms x dense and bf16 x 0 and 2 workers, resumed, verified, remote)
and compares their digests with tests/golden/golden.json; --write makes that file anew, or with --only the
records of these names. The docstring of tests/golden/__init__.py says more.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from tests.golden import GOLDEN, runs

NOTHING = 2
"""Exit code of a call that had nothing to compare or could not write."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="names that contain this")
    selected = parser.parse_args(arguments)
    golden, here = json.loads(GOLDEN.read_text()), runs.versions()
    work = [w for w in runs.everything(selected.quick) if selected.only in w[0 if selected.write else 1]]
    if not work:
        print(f"nothing was compared: no run's name contains {selected.only!r}")
        return NOTHING
    there = f"{GOLDEN.name} was recorded with {_listed(golden['versions'])}, and here is {_listed(here)}"
    if selected.write and selected.only and golden["versions"] != here:
        print(f"{there}: one file holds the runs of one version; record all of them (--write)")
        return NOTHING
    began = time.monotonic()
    with ThreadPoolExecutor(selected.jobs) as pool:
        created = list(pool.map(lambda w: w[2][0](*w[2][1:]), work))
    plan = golden["plan"] if selected.write and selected.only else runs.plan_numbers()
    records: dict[str, runs.Record] = {}
    differences = []
    for (key, how, _), record in zip(work, created, strict=True):
        expected = records.setdefault(key, record) if selected.write else golden["runs"].get(key, {})
        differences += [f"{how}: {k}" for k, v in record.items() if expected.get(k) != v]
    if not selected.write and golden["plan"] != plan:
        differences.append("fedsim plan: its numbers")
    for line in differences:
        print("differs:", line)
    if selected.write and not differences:
        known = (golden["runs"] if selected.only else {}) | records
        content = {"versions": here, "plan": plan, "runs": {k: known[k] for k in runs.names() if k in known}}
        GOLDEN.write_text(json.dumps(content, indent=1) + "\n")
    elif differences and not selected.write and golden["versions"] != here:
        print(f"{there}; if a checkout without your change differs as well, record the file anew (--write)")
        print("in a commit of its own")
    print(f"{len(work)} runs in {time.monotonic() - began:.0f} s: {len(differences)} differences")
    return 1 if differences else 0


def _listed(versions: Mapping[str, str]) -> str:
    return " and ".join(f"{name} {version}" for name, version in versions.items())


if __name__ == "__main__":
    sys.exit(main())
