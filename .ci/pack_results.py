"""Packs published runs: `python .ci/pack_results.py [--example] docs/results/DATE-MACHINE…`.

In every folder of a run, result.json, matrix.json, rank.json and the CSV tables become NAME.gz, which `abserve report`,
`rank` and `diff` read; the other records go into records.tar.xz. Raw samples and logs are dropped, and so is what
abserve makes again; with --example, report.html is kept. Then manifest.json lists the files that are left. A packed run
stays as it is.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import shutil
import tarfile
from pathlib import Path

RESULTS = {"result.json", "matrix.json", "rank.json"}
KEPT = {"summary.md", "experiment.yaml", "manifest.json", "records.tar.xz"}
DROPPED = {"samples", "logs", ".running", "cells.parquet"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--example", action="store_true", help="keep report.html")
    parser.add_argument("folders", nargs="+", type=Path, help="folders with a manifest.json")
    given = parser.parse_args()
    for folder in given.folders:
        for run in sorted({path.parent for name in RESULTS for path in folder.rglob(name)}):
            pack(run, example=given.example)
        list_files(folder / "manifest.json")


def pack(run: Path, *, example: bool = False) -> None:
    """Pack the folder of one run."""
    result = run / "result.json"
    if result.exists() and json.loads(result.read_bytes()).get("rough"):
        raise SystemExit(f"{result} is ROUGH, and its figures are not to be cited; measure it again with --strict")
    records, removed = {}, []
    for path in sorted(path for path in run.rglob("*") if path.is_file()):
        name = str(path.relative_to(run))
        if name in KEPT or path.suffix == ".gz" or (example and name == "report.html"):
            continue
        removed.append(path)
        if name in RESULTS or path.suffix == ".csv":
            path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes(), 9, mtime=0))
        elif name != "report.html" and DROPPED.isdisjoint(Path(name).parts):
            records[name] = path.read_bytes()
    packed = run / "records.tar.xz"
    if records and packed.exists():
        raise SystemExit(f"{packed} exists already; unpack it there and remove it, so that no record is lost")
    if records:
        packed.write_bytes(archive(records))
    for path in removed:
        path.unlink()
    for folder in [path for path in run.iterdir() if path.is_dir()]:
        shutil.rmtree(folder)


def archive(files: dict[str, bytes]) -> bytes:
    """A tar file, the same bytes for the same files."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:xz", preset=9) as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return out.getvalue()


def list_files(manifest: Path) -> None:
    """Write the size and SHA-256 of every file beside a manifest, and below, into it."""
    text = manifest.read_text()
    document, indent = json.loads(text), text.index('"') - text.index("\n") - 1
    paths = [path for path in sorted(manifest.parent.rglob("*")) if path.is_file() and path != manifest]
    document["files"] = {
        str(path.relative_to(manifest.parent)): {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in paths
    }
    manifest.write_text(json.dumps(document, indent=indent, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
