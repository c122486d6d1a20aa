"""`abserve compare` over other transports than HTTP, with other payloads than tensors, as a user runs it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from loadgen.entry import build
from tests.integration.loadgen.conftest import abserve, await_true, regions_of_load

pytestmark = pytest.mark.usefixtures("no_process_left")

COMPARE = [sys.executable, "-P", "-m", "loadgen.entry", "compare", "--scenarios", "single"]
NATIVE = ["--a", "native", "--b", "native", "--a-option", "engine=null", "--b-option", "engine=null"]


def compare(out: Path, *options: str) -> tuple[int, str]:
    return abserve("compare", "--scenarios", "single", "--out", str(out), *options)


def test_arms_with_different_payloads_are_measured_and_no_winner_is_named(tmp_path: Path) -> None:
    """The null engine answers with the first pixels, which are the same in an image's bytes and in its JPEG file."""
    status, said = compare(
        tmp_path / "run", *NATIVE, "--rounds", "1", "--no-handicap-check", "--a-payload", "uint8", "--b-payload", "jpeg"
    )
    assert status == 1, said
    result = json.loads((tmp_path / "run" / "result.json").read_bytes())
    assert result["parity"]["ok"], result["parity"]
    assert not result["valid"]
    assert {c["verdict"] for c in result["comparisons"]} == {"invalid"}
    (check,) = [c for c in result["checks"] if c["name"] == "same_payload"]
    assert (check["state"], check["severity"], check["scope"]) == ("failed", "invalidates", "run")
    sizes = {s["label"]: s["payload_bytes"] for s in result["summaries"]}
    assert sizes["a"] == 150_528
    assert 3_000 < sizes["b"] < 120_000
    models = {arm["label"]: arm["model_config"]["name"] for arm in result["arms"]}
    assert models == {"a": "openclip_vit_b32_uint8", "b": "openclip_vit_b32_jpeg"}
    sentence = "No winner: the arms got different payloads (native with uint8 payloads and native with jpeg payloads)"
    assert sentence in result["verdict"]["sentence"]
    assert "different payloads" in said
    for name in ("summary.md", "report.html"):
        assert sentence in (tmp_path / "run" / name).read_text()


@pytest.mark.slow
@pytest.mark.triton
def test_a_matrix_on_both_real_servers(tmp_path: Path) -> None:
    options = ("--a-option", "engine=null", "--b-option", "engine=null", "--rounds", "1")
    _, said = compare(tmp_path / "m", *options, "--transport", "http,grpc,shm", "--payload", "uint8")
    index = (tmp_path / "m" / "summary.md").read_text()
    page = (tmp_path / "m" / "index.html").read_text()
    for transport in ("http", "grpc", "shm"):
        out = tmp_path / "m" / f"{transport}-uint8"
        result = json.loads((out / "result.json").read_bytes())
        assert result["experiment"]["transport"] == transport
        assert result["parity"]["ok"], said
        assert {arm["label"]: arm["target"] for arm in result["arms"]} == {"a": "native", "b": "triton"}
        for path in (out / "blocks").glob("*.json"):
            block = json.loads(path.read_bytes())
            assert (block["errors"], block["transport"], block["complete"]) == (0, transport, True)
            counted = block["requests"] + block["cool_down"]
            assert block["stages"]["requests"] == counted, "the server counted what the client counted"
            sent = np.load(out / block["samples"])["request_bytes"]
            assert (sent < 1000).all() if transport == "shm" else (sent > 150_528).all()
        assert f"uint8 over {transport}" in index
        assert f'href="{transport}-uint8/report.html"' in page
    assert index.count("| single | throughput, images/s |") == 3
    assert regions_of_load() == []


@pytest.mark.slow
@pytest.mark.parametrize("transport", [pytest.param("grpc", marks=pytest.mark.slow), "shm"])
def test_ctrl_c_in_a_block_leaves_neither_memory_nor_processes(tmp_path: Path, transport: str) -> None:
    out = tmp_path / "run"
    slow = ["--a-option", "added-delay-ms=50", "--b-option", "added-delay-ms=50", "--preset", "full"]
    command = [*COMPARE, "--out", str(out), *NATIVE, *slow, "--transport", transport, "--payload", "uint8"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    await_true(lambda: any(out.glob("samples/*.part")), "a block under way", 90)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors.decode()
    assert regions_of_load() == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--transport", "grpc", "--b", "http://127.0.0.1:1"), "--b-grpc HOST:PORT"),
        (("--transport", "shm", "--b", "http://192.0.2.1:8000"), "on another machine"),
        (("--payload", "png"), "choose from tensors, fp32, uint8, jpeg"),
        (("--a-grpc", "127.0.0.1:8001"), "--a-grpc has no effect on native"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    out = tmp_path / "run"
    done = CliRunner().invoke(build(), ["compare", "--out", str(out), *options], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert words in " ".join(done.output.split())
    assert not out.exists()
