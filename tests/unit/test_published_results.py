"""Published results are what their manifests say, and what the README quotes is in them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = sorted((ROOT / "docs/results").glob("*/manifest.json"))


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.parent.name)
def test_every_file_is_listed_with_its_hash(manifest: Path) -> None:
    folder, document = manifest.parent, json.loads(manifest.read_text())
    present = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {"manifest.json"}
    assert present == set(document["files"])
    for name, facts in document["files"].items():
        content = (folder / name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (facts["bytes"], facts["sha256"]), name
    for fact in ("date", "hardware", "software", "weights", "commands"):
        assert document[fact], fact


def test_both_arms_of_a_ranked_run_are_verified_and_the_control_is_not() -> None:
    result = json.loads((ROOT / "docs/results/2026-11-22-h200/http-uint8/result.json").read_text())
    findings = {
        (e["label"], e["control"], e["workload"]): e["finding"]
        for e in result["studies"]["gpu_proof"]["evidence"]["records"]
    }
    assert result["valid"]
    assert {findings[label, False, None] for label in "ab"} == {"GPU_VERIFIED"}
    assert {finding for (_, control, _), finding in findings.items() if control} == {"CPU_FALLBACK"}


def test_there_is_something_to_check() -> None:
    assert MANIFESTS
