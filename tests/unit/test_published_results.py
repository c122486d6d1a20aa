"""Published results are what their manifests say, and what the README quotes is in them."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from loadgen.report.contents import result_document
from loadgen.report.renderers.terminal import print_document
from loadgen.result.result_file import read_result

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
        (e["label"], e["control"], e["cell"]): e["finding"]
        for e in result["studies"]["gpu_proof"]["evidence"]["records"]
    }
    assert result["valid"]
    assert {findings[label, False, None] for label in "ab"} == {"GPU_VERIFIED"}
    assert {finding for (_, control, _), finding in findings.items() if control} == {"CPU_FALLBACK"}


def test_the_readme_quotes_the_published_result(capsys: pytest.CaptureFixture[str]) -> None:
    """Whole, as the terminal shows it, caveats included; the frame around the headline is left out."""
    quoted = re.findall(r"^```text\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    result = read_result(ROOT / "docs/results/2026-11-22-h200/http-uint8/result.json")
    print_document(result_document(result), Console(width=100))
    shown = re.sub(r"[╭╮╰╯│─]", " ", capsys.readouterr().out)
    assert [block.replace("─", " ").split() for block in quoted] == [shown.split()]
    assert sum("images/s" in line for line in quoted[0].splitlines()) > 5


def test_there_is_something_to_check() -> None:
    assert MANIFESTS
