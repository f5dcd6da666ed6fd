"""python -m tests.golden [--write] [--quick] [--jobs N] [--only NAME] [--where-comparable]

Carries out the recorded runs (all algorithms x dense and bf16 x 0 and 2 workers, resumed, verified, remote)
and compares their digests with tests/golden/golden.json; --write makes that file anew. The docstring of
tests/golden/__init__.py says more.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from tests.golden import GOLDEN, runs


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="names that contain this")
    parser.add_argument("--where-comparable", action="store_true", help="compare nothing under another probe")
    selected = parser.parse_args()
    began, probe = time.monotonic(), runs.probe()
    golden = {} if selected.write else json.loads(GOLDEN.read_text())
    if selected.where_comparable and golden and golden["probe"] != probe:
        print(f"NOT COMPARED: this machine's probe is {probe}, and {GOLDEN.name} was made where it is")
        print(f"{golden['probe']}: the bits of the two machines differ by themselves.")
        return 0
    work = [w for w in runs.everything(selected.quick) if selected.only in w[1]]
    with ThreadPoolExecutor(selected.jobs) as pool:
        created = list(pool.map(lambda w: w[2][0](*w[2][1:]), work))
    records: dict[str, runs.Record] = {}
    differences = []
    for (key, how, _), record in zip(work, created, strict=True):
        expected = records.setdefault(key, record) if selected.write else golden["runs"].get(key, {})
        differences += [f"{how}: {k}" for k, v in record.items() if expected.get(k) != v]
    plan = runs.plan_numbers()
    if not selected.write and golden["plan"] != plan:
        differences.append("fedsim plan: its numbers")
    for line in differences:
        print("differs:", line)
    note = f"{len(work)} runs in {time.monotonic() - began:.0f} s"
    if selected.write and not differences:
        GOLDEN.write_text(json.dumps({"probe": probe, "plan": plan, "runs": records}, indent=1) + "\n")
    elif differences and golden and golden["probe"] != probe:
        print(f"this machine computes other bits than the one that made {GOLDEN.name}: its probe is {probe},")
        print(f"and the file's is {golden['probe']}. Make the file anew here before a change (--write).")
    print(f"{note}: {len(differences)} differences")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
