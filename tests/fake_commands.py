"""What the fake server's program does as `abserve samples` and `abserve engine`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

SIDE = 32
"""Pixels on each side of an image: what runs of fake servers claim does not depend on the size of their bodies."""


def write_samples(folder: Path, side: int = SIDE) -> None:
    """Six images of noise."""
    folder.mkdir(parents=True)
    np.save(folder / "pixel_values.fp32.npy", np.random.default_rng(1).standard_normal((6, 3, side, side), dtype="f4"))
    (folder / "samples.json").write_text('{"kind": "photographs"}')


def measure_engine(argv: list[str]) -> None:
    """Each image takes 1 ms, unless the engine is `failing`, `hanging`, `silent` or `another`."""
    given = dict(part.removeprefix("--").split("=", 1) for part in argv)
    if given["engine"] == "failing":
        sys.stderr.write("there is no such engine\n")
        sys.exit(1)
    if given["engine"] == "hanging":
        sys.stdout.write("loading\n")
        sys.stdout.flush()
        time.sleep(600)
    if given["engine"] == "silent":
        return
    kind = "none" if given["engine"] == "another" else given["engine"]
    batch = {
        "repeats": 9, "execution_ns": None, "call_p99_ns": None, "items_per_second": 1.0, "tflops": 1.0,
        "share_of_matrix_product": None, "cosine_to_fp32": 1.0,
    }  # fmt: skip
    sizes = [int(size) for size in given["batches"].split(",")]
    document = {
        "schema": "abserve.engine/2", "model": given["model"], "flops_per_item": 1.0, "matrix_product_tflops": None,
        "engine": {"kind": kind, "precision": given["precision"], "device": given["device"]}, "load_seconds": 0.1,
        "batches": [{**batch, "batch": size, "call_ns": size * 1_000_000} for size in sizes],
    }  # fmt: skip
    Path(given["json"]).write_text(json.dumps(document))
