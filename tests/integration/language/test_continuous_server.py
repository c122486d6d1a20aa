"""The baseline engine behind the native server: several clients at once, judged by the reference's command."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.integration.language.conftest import EventStream, post
from tests.integration.native.conftest import Server, _starter, _stop

OPTIONS = (
    "--model", "language:tiny", "--engine", "continuous", "--slots", "3", "--max-length", "64", "--device", "cpu",
    "--threads", "1",
)  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    servers: list[Server] = []
    start = _starter(tmp_path_factory.mktemp("continuous"), lambda _: ["-m", "servers.native"], servers, *OPTIONS)
    server = start()
    server.wait_ready()
    yield server
    _stop(servers)


@pytest.mark.slow  # by default tests/unit/language/test_continuous_engine.py
def test_five_clients_get_the_reference_s_tokens(server: Server, tmp_path: Path) -> None:
    prompts = [[number + 1] * 3 + [7, 8, 9][:number] for number in range(5)]

    def ask(prompt: list[int]) -> dict[str, Any]:
        asked = {"model": "tiny", "prompt": prompt, "max_tokens": 20, "temperature": 0, "ignore_eos": True,
                 "stream": True, "return_token_ids": True}  # fmt: skip
        with EventStream(server, "/v1/completions", asked) as stream:
            assert stream.read_head() == 200
            events = stream.events()
        choices = [event["choices"][0] for event in events[:-1] if event["choices"]]
        return {"prompt": prompt, "output": [token for choice in choices for token in choice["token_ids"]]}

    with ThreadPoolExecutor(5) as pool:
        answers = list(pool.map(ask, prompts))
    assert [len(answer["output"]) for answer in answers] == [20] * 5
    asked, judged = tmp_path / "asked.json", tmp_path / "judged.json"
    asked.write_text(json.dumps({"model": "language:tiny", "device": "cpu", "answers": answers}))
    command = [sys.executable, "-m", "loadgen.entry", "language-reference", "--in", str(asked), "--out", str(judged)]
    subprocess.run(command, check=True, timeout=60)
    document = json.loads(judged.read_text())
    assert max(max(answer["deficits"]) for answer in document["answers"]) < 1e-4


@pytest.mark.slow  # by default tests/unit/language/test_continuous_engine.py
def test_a_client_that_leaves_frees_its_slot(server: Server) -> None:
    for _ in range(6):  # twice as many as there are slots
        with EventStream(server, "/v2/models/tiny/generate_stream", {"input_ids": [5, 6], "max_tokens": 60}) as stream:
            assert stream.read_head() == 200
            stream.read_until(b"token_ids")
    status, answer = post(server, "/v1/completions", {"model": "tiny", "prompt": [1, 2], "max_tokens": 3})
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 3
