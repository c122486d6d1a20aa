"""Published results are what their manifests say."""

from __future__ import annotations

import hashlib
import json
import shutil
import statistics
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from loadgen.base.documents import read_stored
from loadgen.report.files import published
from loadgen.verdict.result import analyse, stored_result
from tests.golden.synthetic_run import Plan, write_run

ROOT = Path(__file__).resolve().parents[2]
PACK = ROOT / ".ci/pack_results.py"
EXAMPLE = "docs/results/2026-11-29-h200-models/vit_b_16/report.html"
MOST_BYTES = 20_000_000
MANIFESTS = sorted((ROOT / "docs/results").glob("*/manifest.json"))


def files_below(folder: Path) -> dict[str, dict[str, object]]:
    """The files that a manifest in this folder should list, as it lists them."""
    contents = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    del contents["manifest.json"]
    return {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in contents.items()
    }


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.parent.name)
def test_every_file_is_listed_with_its_hash(manifest: Path) -> None:
    document = json.loads(manifest.read_text())
    assert document["files"] == files_below(manifest.parent)
    for fact in ("date", "hardware", "software", "weights", "commands"):
        assert document[fact], fact


def test_both_arms_of_a_ranked_run_are_verified_and_the_control_is_not() -> None:
    result = json.loads(read_stored(ROOT / "docs/results/2026-11-22-h200/http-uint8/result.json"))
    findings = {
        (e["label"], e["control"], e["workload"]): e["finding"]
        for e in result["studies"]["gpu_proof"]["evidence"]["records"]
    }
    assert result["valid"]
    assert {findings[label, False, None] for label in "ab"} == {"GPU_VERIFIED"}
    assert {finding for (_, control, _), finding in findings.items() if control} == {"CPU_FALLBACK"}


def test_the_default_number_of_instances_loses_least_over_all_loads_as_the_page_says() -> None:
    means: dict[tuple[str, ...], list[str]] = {}
    for path in sorted((ROOT / "docs/results").glob("2026-11-29-h200*/choices-*.json")):
        for server in json.loads(path.read_bytes())["servers"]:
            backend = {"1": "onnxruntime", "2": "python"}.get(server["defaults"].get("instances"), "")
            for entry in server["configurations"]:
                own = [tried["gain"]["value"] for tried in server["tried"] if tried["configuration"] == entry["name"]]
                if backend and entry["settings"]:
                    model = path.stem.removeprefix("choices-").strip("-12") or "vit"
                    key = (model, backend, entry["settings"]["instances"])
                    means.setdefault(key, []).append(f"{statistics.geometric_mean(own):.2f}")
    page = " ".join((ROOT / "docs/triton.md").read_text().split())
    shown = {key: " and ".join(sorted(values)) for key, values in means.items()}
    assert f"with one instance {shown['vit', 'python', '1']} of that, with four {shown['vit', 'python', '4']}," in page
    of_onnx = [shown[model, "onnxruntime", count] for model in ("vit", "resnet50", "bert-base") for count in "24"]
    assert f"with two {of_onnx[0]}, with four {of_onnx[1]}, of what it serves with one" in page
    pair = f"{shown['resnet50', 'python', '1']} and {shown['resnet50', 'python', '4']}"
    assert f"it is {pair} with ResNet-50 behind the python backend" in page
    assert f"{of_onnx[2]} and {of_onnx[3]} with ResNet-50, but {of_onnx[4]} and {of_onnx[5]} with BERT-base," in page


def test_a_server_beside_itself_has_no_winner_and_chooses_as_the_page_says() -> None:
    runs = json.loads((ROOT / "docs/results/2026-11-28-same-server-cpu/comparisons.json").read_text())
    page = (ROOT / "docs/results/measured/statistics.md").read_text()
    assert len(runs) == 10
    for run in runs:
        assert run["valid"]
        assert run["winners"] == []
        assert len(set(run["choices"].values())) == 1
        low, high = run["ci95"]
        row = f"| {run['run']} | {run['ratio']:.3f} ({low:.3f}–{high:.3f}) | {run['pairs']} | {run['choices']['a']} |"
        assert row in page


def test_the_table_of_second_starts_is_that_of_the_stored_ones() -> None:
    found = json.loads((ROOT / "docs/results/2026-11-29-starts-cpu/starts.json").read_text())
    page = (ROOT / "docs/engines.md").read_text()
    for server in {start["server"] for start in found}:
        cpu, wall, memory = (
            [start[name] for start in found if start["server"] == server] for name in ("cpu_s", "wall_s", "memory_mib")
        )
        assert len(cpu) == 5
        seconds = (f"{statistics.median(of):.1f}, {min(of):.1f} to {max(of):.1f}" for of in (cpu, wall))
        command = f"`{server.replace('-', ' --engine ').replace('triton', 'triton --engine onnxruntime')}`"
        assert f"| {command} | {' | '.join(seconds)} | {statistics.median(memory):,.0f} |" in page


def test_the_starts_and_towers_on_a_gpu_are_those_of_the_stored_ones() -> None:
    folder, page = ROOT / "docs/results/2026-11-29-h200-starts", (ROOT / "docs/results/README.md").read_text()
    starts, parts = (json.loads((folder / name).read_text()) for name in ("starts.json", "parts.json"))
    titles = dict.fromkeys(start["model"] for start in starts)
    for model, title in zip(titles, ("ViT-B-32", "ResNet-50", "MobileNetV3-large", "BERT-base"), strict=True):
        arms = [
            [start["wall_s"] for start in starts if (start["model"], start["server"]) == (model, server)]
            for server in ("native", "fastapi")
        ]
        later = [f"{statistics.median(of[1:]):.1f}, {min(of[1:]):.1f} to {max(of[1:]):.1f}" for of in arms]
        later.append(f"{statistics.median(part['all_s'] for part in parts if part['model'] == model):.1f}")
        assert f"| {title} | {' | '.join([*later, *(f'{of[0]:.1f}' for of in arms)])} |" in page
    loads = json.loads((folder / "attention.json").read_text())[2:]  # later ones; in turn with cuDNN's and without
    times = [load["median_us"] for load in loads]
    ratios = [
        without[shape] / cudnn[shape] for cudnn, without in zip(times[::2], times[1::2], strict=True) for shape in cudnn
    ]
    seconds = [sorted(load["load_s"] for load in loads[first::2]) for first in (1, 0)]
    (low, high), (cudnn_low, cudnn_high) = seconds
    words = " ".join(page.split())
    assert f"loads in {low:.1f} to {high:.1f} s in place of {cudnn_low:.1f} to {cudnn_high:.1f}" in words
    assert f"its batches take {min(ratios):.1f} to {max(ratios):.1f} times as long" in words
    towers = json.loads((folder / "towers.json").read_text())
    for model in ("ViT-B-32", "ViT-B-16"):
        one, eight, many = (f"{towers[f'open_clip:{model} {rows}']['ratio']:.2f}" for rows in (1, 8, 32))
        assert f"{one}, {eight} and {many} times as long" in page


def test_no_server_wins_beside_a_busy_core_and_the_page_has_the_runs() -> None:
    runs = json.loads((ROOT / "docs/results/2026-11-29-busy-core-cpu/comparisons.json").read_text())
    page = (ROOT / "docs/results/measured/statistics.md").read_text()
    identical, planted = ([run for run in runs if run["servers"] == kind] for kind in ("identical", "planted"))
    assert all(run["rough"] and not run["valid"] and run["winners"] == [] for run in runs)
    for two in zip(identical, planted, strict=True):
        cells = (f"{run['ratio']:.2f} ({run['ci95'][0]:.2f}–{run['ci95'][1]:.1f}) | {run['pairs']}" for run in two)
        assert f"| {two[0]['run']} | {' | '.join(cells)} |" in page
    lost = [share for run in runs for share in run["lost"]]
    named = [sum(not holds(run["ci95_without_disturbance"], 1.0) for run in group) for group in (planted, identical)]
    held = sum(holds(run["first_range"], run["ratio"]) for run in runs)
    words = (
        f"others took {100 * min(lost):.0f} to {100 * max(lost):.0f} % of the cores' time",
        f"exclude 1 in {named[0]} of the {len(planted)} planted runs",
        f"held the run's own ratio in {held} of {len(runs)} of these runs",
    )
    assert named[1] == 0, "in none of the identical ones"
    assert [text for text in words if text not in " ".join(page.split())] == []


def holds(interval: list[float], value: float) -> bool:
    return interval[0] <= value <= interval[1]


def test_the_repository_stays_small_with_one_report_as_an_example() -> None:
    """A larger tree cannot be carried to a rented machine, and is slow to clone."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs git and a checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = listed.rstrip("\0").split("\0")
    assert [name for name in names if name.endswith("report.html")] == [EXAMPLE]
    assert f"RUN := {Path(EXAMPLE).parent}\n" in (ROOT / "Makefile").read_text()
    sizes = {name: path.stat().st_size for name in names if (path := ROOT / name).is_file()}
    largest = sorted(sizes, key=lambda name: -sizes[name])[:5]
    assert sum(sizes.values()) <= MOST_BYTES, f"see CONTRIBUTING.md, Publish a result; the largest files are {largest}"


@pytest.mark.parametrize("example", [False, True])
def test_a_packed_run_is_reported_as_before_and_loses_no_record(tmp_path: Path, example: bool) -> None:
    run = write_run(tmp_path / "run", Plan(pairs=2))
    result = analyse(run)
    published(result).write(run)
    records = {path.name: path.read_bytes() for path in [*run.glob("*.json"), *run.glob("blocks/*")]}
    manifest = tmp_path / "manifest.json"
    manifest.write_text('{\n "date": "2026-11-25"\n}\n')
    command = [sys.executable, str(PACK), *(["--example"] if example else []), str(tmp_path)]
    for _ in range(2):  # the second time changes nothing
        subprocess.run(command, check=True)
        left = {"summary.md", "result.json.gz", "records.tar.xz"}
        assert {path.name for path in run.iterdir()} == left | ({"report.html"} if example else set())
        assert json.loads(manifest.read_text()) == {"date": "2026-11-25", "files": files_below(tmp_path)}
    assert read_stored(run / "result.json") == records.pop("result.json")
    with tarfile.open(run / "records.tar.xz") as tar:
        packed = {Path(entry.name).name: file.read() for entry in tar if (file := tar.extractfile(entry)) is not None}
    assert packed == records
    assert stored_result(run) == result


def test_there_is_something_to_check() -> None:
    assert MANIFESTS
