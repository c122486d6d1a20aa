"""Every command in docs/protocol.md is run as it stands there, against a server started as it says."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "protocol.md"
pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
BLOCKS = re.findall(r"^```bash\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
MODEL = "openclip_vit_b32"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the blocks leave files for those that follow."""
    return tmp_path_factory.mktemp("examples")


def run(block: str, server, folder: Path) -> str:
    (folder / "bin").mkdir(exist_ok=True)
    python = folder / "bin" / "python"
    python.unlink(missing_ok=True)
    python.symlink_to(sys.executable)
    environment = {**os.environ, "URL": f"http://{server.address}", "MODEL": MODEL}
    environment["PATH"] = f"{python.parent}:{environment['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def embedding(text: str) -> np.ndarray:
    output = json.loads(text)["outputs"][0]
    return np.array(output["data"]).reshape(output["shape"])


@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_every_block_runs(open_server, folder, index):
    """In the document's order: later blocks use the files of earlier ones."""
    block = BLOCKS[index]
    printed = run(block, open_server, folder)
    if "request.json" in block:
        np.testing.assert_array_equal(embedding(printed), np.full((1, 512), 0.5))
    elif "body.bin" in block:
        assert json.loads(printed)["id"] == "7"
        np.testing.assert_array_equal(embedding(printed), np.full((2, 512), 0.5))
    elif "answer.bin" in block:
        answer = (folder / "answer.bin").read_bytes()
        np.testing.assert_array_equal(np.frombuffer(answer[-2048:], np.float32), np.full(512, 0.5, np.float32))
    elif "unload" in block:
        assert "unloaded" in json.loads(printed)["error"]
    elif "/ready" in block or "/live" in block:
        assert printed == ""
    else:
        assert printed


def test_the_document_has_a_curl_for_every_route(open_server):
    """Routes are read from the application's own description."""
    described = json.loads(open_server.request("GET", "/openapi.json").body)["paths"]
    routes = {(method.upper(), path) for path, methods in described.items() for method in methods}
    shown = {command for block in BLOCKS for command in requests_in(block)}
    versions = any("/versions/" in path for _, path in shown)  # one example stands for all: they are the plain routes
    missing = {
        route
        for route in routes
        if not (versions and "/versions/" in route[1]) and not any(matches(route, request) for request in shown)
    }
    assert missing == set()
    assert ("POST", f"/v2/models/{MODEL}/infer") in shown


def test_the_commands_that_a_server_answers_with_infer(open_server, folder):
    welcome = json.loads(open_server.request("GET", "/").body)
    page = open_server.request("GET", "/docs").body.decode()
    (model,) = [each for each in welcome["models"] if each["name"] == MODEL]
    as_bytes, as_json = model["examples"]
    assert f"<h2>{MODEL}</h2>" in page
    assert f"/v2/models/{MODEL}/infer" in page
    run(as_bytes, open_server, folder)
    answer = (folder / "answer.bin").read_bytes()
    np.testing.assert_array_equal(
        np.frombuffer(answer[-2048:], np.float32), embedding(run(as_json, open_server, folder))[0]
    )


def requests_in(block: str) -> set[tuple[str, str]]:
    """Verb and path of each curl in a block."""
    requests = set()
    for command in re.split(r"^curl ", block, flags=re.MULTILINE)[1:]:
        path = re.search(r"\$URL(\S+)", command)
        assert path is not None, command
        posts = re.search(r"(^|\s)(-X POST|--data-binary|-d)\s", command) is not None
        requests.add(("POST" if posts else "GET", path[1].replace("$MODEL", MODEL)))
    return requests


def matches(route: tuple[str, str], request: tuple[str, str]) -> bool:
    pattern = re.sub(r"\{\w+\}", "[^/]+", route[1])
    return route[0] == request[0] and re.fullmatch(pattern, request[1]) is not None
