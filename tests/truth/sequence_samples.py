"""Stands in for `abserve samples` of the planted model with `--sequences`: eight items of each of two lengths."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

LENGTHS = (16, 48)


def main(argv: list[str]) -> None:
    folder = Path(argv[argv.index("--out") + 1])
    folder.mkdir(parents=True, exist_ok=True)
    lengths = [length for length in LENGTHS for _ in range(8)]
    items = np.random.default_rng(4).standard_normal((len(lengths), max(LENGTHS)), dtype="<f4")
    for item, length in zip(items, lengths, strict=True):
        item[length:] = 0.0
    np.save(folder / "x.fp32.npy", items)
    manifest = {
        "schema": "abserve.samples/2", "kind": "random values", "item": "sequence", "count": len(lengths),
        "kinds": {"y": "embedding"}, "lengths": lengths,
        "axis": {"name": "sequence", "places": {"x": 1}, "default": LENGTHS[0], "largest": LENGTHS[-1]},
    }  # fmt: skip
    (folder / "samples.json").write_text(json.dumps(manifest))


if __name__ == "__main__":
    main(sys.argv[1:])
