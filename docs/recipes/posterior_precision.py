"""What codecs of an uploaded precision do to the posterior: the table in docs/compression.md.

    python docs/recipes/posterior_precision.py      5 minutes; rewrites the table between the markers

fedlap_cov on digits with five and ten clients, 60 rounds, two seeds. Only the uploaded precision has a codec.
A cell is the median over the parameters of the posterior's precision over that of the dense run.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from report import ROOT, table
from safetensors.torch import load_file
from torch import Tensor

import fedsim

PAGE = ROOT / "docs" / "compression.md"
BEGIN, END = "<!-- posterior: docs/recipes/posterior_precision.py -->", "<!-- end of posterior -->"
CODECS = (
    "bf16",
    "log8",
    "ratio:0.25",
    "ratio:2",
    "ratio:0.25+nearest",
    "ratio:2+nearest",
    "best:0.1",
    "csr:0.1",
)
CLIENTS = (5, 10)
SEEDS = (0, 1)


def precision(codec: str, clients: int, seed: int, rounds: int) -> Tensor:
    """Return the precision of the last model, (P,)."""
    codecs = {"up.precision": codec} if codec else {}
    with tempfile.TemporaryDirectory() as folder:
        run = fedsim.run(
            clients=clients, rounds=rounds, seed=seed, codecs=codecs, quiet=True, out=f"{folder}/run"
        )
        tensors = load_file(Path(run.path) / "model.safetensors")
    return torch.cat([t.flatten() for name, t in sorted(tensors.items()) if name.startswith("precision.")])


def rows(rounds: int = 60) -> list[tuple[str, ...]]:
    """Return a row for each codec, with the median for each number of clients and seed."""
    dense = {(k, s): precision("", k, s, rounds) for k in CLIENTS for s in SEEDS}
    result = []
    for codec in CODECS:
        cells = []
        for k in CLIENTS:
            shares = [precision(codec, k, s, rounds) / dense[k, s] for s in SEEDS]
            cells.append(", ".join(f"{float(share.median()):.2f}" for share in shares))
        print(codec, *cells, flush=True)
        result.append((codec, *cells))
    return result


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60, help="rounds of a run")
    rounds = parser.parse_args(argv).rounds
    text = table(("up.precision", *(f"K = {k}, two seeds" for k in CLIENTS)), rows(rounds))
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
