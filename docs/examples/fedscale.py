"""FedScale's traces as files for --link and for --participation trace:FILE.

    python fedscale.py capacity client_device_capacity.json phones.csv --clients 1000
    python fedscale.py availability client_behave_trace.json there.csv --clients 1000 --rounds 200 --every 600
    fedsim launch --clients 1000 --link phones.csv --participation trace:there.csv

FedScale publishes both as pickled dicts, and a pickle can run any code, so this file reads a JSON export. If
you trust FedScale's files, make it yourself:

    json.dump(pickle.load(open(name, "rb")), open(f"{name}.json", "w"), default=float)

The keys of a dict are devices; client k is number k, and after the last device the file begins again.

    client_device_capacity   {"computation": milliseconds per inference, "communication": kbit per second}
    client_behave_trace      {"active": [s, ...], "inactive": [s, ...], "finish_time": s}

The rate is that of both directions. Training on an example costs three inferences, as in FedScale, and five
times as many (--passes 15) in five epochs. A client is there from active[i] to inactive[i] seconds, which
repeat after finish_time; round r is at (r - 1) times --every, whatever the virtual clock says.

Source: Lai et al. 2022, FedScale, https://arxiv.org/abs/2105.11367, and the documentation of both formats in
https://github.com/SymbioticLab/FedScale.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedsim import DataError

Devices = Mapping[str, Mapping[str, Any]]


def read(file: Path) -> Devices:
    """Return an export's devices by name."""
    try:
        devices = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        raise DataError(f"{file} is not JSON; export FedScale's pickle first") from None
    if not isinstance(devices, dict) or not devices:
        raise DataError(f"{file} is no object with an entry for each device")
    return devices


def positive(name: str, device: Mapping[str, Any], key: str) -> float:
    value = device.get(key)
    if not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise DataError(f"device {name}: {key} is {value!r}; it must be a number above 0")
    return float(value)


def links(devices: Devices, clients: int, passes: float = 3.0) -> list[str]:
    """Return the lines of a file for --link. passes: the cost of training on an example, in inferences."""
    cells = []
    for name, device in devices.items():
        rate = f"{positive(name, device, 'communication'):g}kbit"
        cells.append(f"{passes * positive(name, device, 'computation'):g}ms,{rate},{rate}")
    return ["client,compute,up,down", *(f"{k},{cells[k % len(cells)]}" for k in range(clients))]


def present(name: str, device: Mapping[str, Any], seconds: np.ndarray) -> np.ndarray:
    """Return whether a device is there at each of these times."""
    begin, end = (np.array(device.get(key, ()), dtype=float) for key in ("active", "inactive"))
    if begin.ndim != 1 or begin.shape != end.shape:
        raise DataError(f"device {name}: each active[i] needs its inactive[i]")
    now = (seconds % positive(name, device, "finish_time"))[:, None]
    there: np.ndarray = ((begin <= now) & (now <= end)).any(axis=1)
    return there


def trace(
    devices: Devices, clients: int, rounds: int, every: float, per_round: int | None = None, seed: int = 0
) -> list[str]:
    """Return the lines of a trace of participation. per_round: clients drawn from those there; None: all."""
    seconds = np.arange(rounds) * every
    there = np.array([present(name, device, seconds) for name, device in devices.items()])
    draws, lines = np.random.default_rng(seed), ["round,client"]
    for round in range(rounds):
        ids = np.flatnonzero(there[np.arange(clients) % len(devices), round])
        if per_round is not None and len(ids) > per_round:
            ids = np.sort(draws.choice(ids, per_round, replace=False))
        lines += [f"{round + 1},{client}" for client in ids]
    if len(lines) == 1:
        raise DataError(f"no client is there in any of the rounds 1 to {rounds}, every {every:g} s")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write FedScale's traces as files that fedsim reads.")
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind in ("capacity", "availability"):
        of_kind = kinds.add_parser(kind)
        of_kind.add_argument("export", type=Path, help="the JSON export")
        of_kind.add_argument("out", type=Path, help="the file to write")
        of_kind.add_argument("--clients", type=int, required=True)
    kinds.choices["capacity"].add_argument("--passes", type=float, default=3.0, help="inferences an example")
    kinds.choices["availability"].add_argument("--rounds", type=int, required=True)
    kinds.choices["availability"].add_argument("--every", type=float, required=True, metavar="SECONDS")
    kinds.choices["availability"].add_argument("--per-round", type=int)
    kinds.choices["availability"].add_argument("--seed", type=int, default=0)
    settings = vars(parser.parse_args(arguments))
    kind, export, out = (settings.pop(name) for name in ("kind", "export", "out"))
    lines = (links if kind == "capacity" else trace)(read(export), **settings)
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
