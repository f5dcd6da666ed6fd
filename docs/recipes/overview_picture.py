"""The picture at the top of README.md: who sends what to whom, and where the bytes are counted.

    python docs/recipes/overview_picture.py      2 seconds; writes docs/assets/overview.svg

Fields and sizes are read off the messages of the main job's algorithm. One file serves light and dark pages.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from fedsim.algorithm import Exchange
from fedsim.wire.schema import schema
from protocols.fedlap_cov import FedLapCov

DOCS = Path(__file__).resolve().parents[1]
PICTURE = "assets/overview.svg"
P = 7510
"""Parameters of mlp_small on digits, the main job's model."""
COLOURS = {"mean": "#3b6fd4", "precision": "#c2571a", "rest": "#8a8f98"}
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1f2328 }
  .title { font-weight: 600 } .small { font-size: 12px; fill: #59636e }
  .box { fill: #f6f8fa; stroke: #8a8f98 } .line { stroke: #59636e; fill: none }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc } .small { fill: #a8b1bb }
    .box { fill: #161b22; stroke: #6e7681 } .line { stroke: #a8b1bb }
  }
"""


def sizes(message: type) -> list[tuple[str, int]]:
    """Bytes of every field with P numbers, by name."""
    dims = {"P": P}
    return [(f.name, f.dense_bytes(dims)) for f in schema(message) if f.kind.dims == ("P",)]


def box(x: int, y: int, width: int, height: int, title: str, *lines: str) -> list[str]:
    """A rectangle with a title and lines of text."""
    out = [f'<rect class="box" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>']
    out.append(f'<text class="title" x="{x + 12}" y="{y + 22}">{title}</text>')
    for n, line in enumerate(lines):
        out.append(f'<text class="small" x="{x + 12}" y="{y + 42 + 18 * n}">{line}</text>')
    return out


def envelope(x: int, y: int, fields: Sequence[tuple[str, int]], label: str) -> list[str]:
    """A message as a bar of its fields; header and framing are the thin end."""
    out = [f'<text class="small" x="{x}" y="{y - 6}">{label}</text>']
    at = x
    for name, _ in fields:
        out.append(f'<rect x="{at}" y="{y}" width="96" height="18" fill="{COLOURS[name]}"/>')
        out.append(f'<text x="{at + 6}" y="{y + 14}" style="fill:#fff;font-size:12px">{name}</text>')
        at += 97
    out.append(f'<rect x="{at}" y="{y}" width="10" height="18" fill="{COLOURS["rest"]}"/>')
    return out


def picture() -> str:
    """The whole picture."""
    (exchange,) = FedLapCov().exchanges
    assert isinstance(exchange, Exchange)
    down, up = sizes(exchange.down), sizes(exchange.up)
    values = f"{down[0][1]:,}"
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="804" height="290" viewBox="0 0 804 290" role="img" '
        'aria-label="A coordinator sends tasks to worker processes and gets uploads; every byte is counted">',
        f"<style>{STYLE}</style>",
        '<defs><marker id="tip" markerWidth="9" markerHeight="8" refX="8" refY="4" orient="auto">'
        '<path class="line" d="M1,1 L8,4 L1,7"/></marker></defs>',
        *box(8, 16, 236, 130, "coordinator (one process)", "the server's state", "who takes part in a round"),
        '<text class="small" x="20" y="94">folds uploads in client order</text>',
        '<text class="small" x="20" y="112">checkpoint after every round</text>',
        *box(8, 172, 236, 102, "ledger.csv", "every byte by round, client,", "direction, field and layer:"),
        '<text class="small" x="20" y="250">values, indices, header, framing</text>',
        '<path class="line" d="M126,146 L126,170" marker-end="url(#tip)"/>',
        *box(604, 16, 192, 74, "worker process 0", "clients 0, 3, 6: own data,", "own state, local training"),
        *box(604, 102, 192, 56, "worker process 1", "clients 1, 4, 7"),
        *box(604, 170, 192, 56, "worker process 2", "clients 2, 5, 8"),
        '<path class="line" d="M246,58 L600,58" marker-end="url(#tip)"/>',
        '<path class="line" d="M600,124 L248,124" marker-end="url(#tip)"/>',
        *envelope(284, 30, down, "task, to every client of the round"),
        *envelope(284, 96, up, "upload, from every client of the round"),
        f'<text class="small" x="284" y="176">fedlap_cov on digits: each field is {values} bytes,</text>',
        f'<text class="small" x="284" y="194">4 bytes for each of the P = {P:,} parameters.</text>',
        '<text class="small" x="284" y="212">Grey: header and framing of the envelope.</text>',
        '<text class="small" x="284" y="248">ZeroMQ over ipc or tcp, on one machine or several.</text>',
        '<text class="small" x="284" y="266">The same bits for any number of workers.</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def files() -> dict[str, str]:
    """The text of the picture, by its path in docs/."""
    return {PICTURE: picture()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=DOCS, help="folder of the pages")
    out = parser.parse_args(argv).out
    for name, text in files().items():
        (out / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
