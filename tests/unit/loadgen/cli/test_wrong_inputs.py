"""What cannot run is refused before anything is written: inputs that do not fit servers at URLs, ports in use."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hostile_server import hostile_server


@pytest.mark.parametrize(
    ("datatype", "values", "words"),
    [
        ("FP16", [100000, 2], "item 1, input x has values that FP16 cannot hold"),
        ("UINT64", [2**64, 1], "item 1, input x has values that UINT64 cannot hold"),
        ("FP32", [1, 2, 3], "input x has 3 values, and the shape [2] needs 2"),
    ],
)
def test_a_wrong_file_is_a_usage_error_with_urls_too(
    tmp_path: Path, datatype: str, values: list[int], words: str
) -> None:
    tensor = {"datatype": datatype, "shape": [-1, 2]}
    metadata = {"name": "m", "inputs": [{"name": "x", **tensor}], "outputs": [{"name": "y", **tensor}]}
    (tmp_path / "x.json").write_text(json.dumps({"data": [{"x": values}]}))
    with hostile_server() as server:
        server.answers.update({path: (200, {}, b"") for path in ("/v2/health/live", "/v2/models/m/ready")})
        server.answers["/v2/models/m"] = (200, {}, json.dumps(metadata).encode())
        done = subprocess.run(
            [
                *(sys.executable, "-m", "loadgen.entry", "compare", "--a", server.url, "--b", server.url),
                *("--model", "m", "--inputs", "x.json", "--scenarios", "single", "--out", "run"),
            ],
            cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert done.returncode == 2
    assert words in done.stderr
    assert "Warning" not in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "command",
    [
        ("record", "--to", "http://127.0.0.1:1", "--listen"),
        ("record", "--grpc-to", "127.0.0.1:1", "--grpc-listen"),
        ("shadow", "--primary", "http://127.0.0.1:1", "--candidate", "http://127.0.0.1:2", "--listen"),
        ("shadow", "--primary", "http://127.0.0.1:1", "--candidate", "http://127.0.0.1:2", "--metrics-listen"),
    ],
)
def test_a_port_in_use_leaves_no_folder_in_the_way_of_another_try(tmp_path: Path, command: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-m", "loadgen.entry", *command, place, "--out", "run"],
            cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert done.returncode == 2
    assert f"cannot listen on {place}" in done.stderr
    assert f"choose another {command[-1]}" in done.stderr
    assert list(tmp_path.iterdir()) == []
