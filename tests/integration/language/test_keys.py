"""A language model's server with keys, asked by OpenAI's client."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from tests.grpc_streams import inputs, stream
from tests.integration.language.conftest import StartGated

KEY = "first-key-0123456789"


@pytest.mark.parametrize("fronts", ["0", "1"])
def test_openai_needs_the_key(gated: StartGated, tmp_path: Path, fronts: str) -> None:
    (tmp_path / "keys").write_text(KEY)
    server = gated("--fronts", fronts, "--api-key-file", str(tmp_path / "keys"))
    server.open("load")
    server.wait_ready()

    def client(key: str) -> openai.OpenAI:
        address = f"http://{server.address}/v1"
        return openai.OpenAI(base_url=address, api_key=key, max_retries=0)

    with client(KEY) as good, client(KEY + "x") as bad:
        (model,) = good.models.list()
        for ask in (bad.models.list, lambda: bad.completions.create(model=model.id, prompt=[1, 2], max_tokens=2)):
            with pytest.raises(openai.AuthenticationError):
                ask()
        assert good.completions.create(model=model.id, prompt=[1, 2], max_tokens=2).choices[0].finish_reason == "length"


def test_a_key_has_its_slots_and_no_more(gated: StartGated, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"{KEY}\nfew-{KEY} slots=1 requests=5\n")
    (tmp_path / "hold").write_text("0")
    server = gated("--api-key-file", str(tmp_path / "keys"), grpc=True)
    server.open("load")
    server.wait_ready()
    address = f"http://{server.address}/v1"
    with (
        openai.OpenAI(base_url=address, api_key=f"few-{KEY}", max_retries=0) as few,
        openai.OpenAI(base_url=address, api_key=KEY) as other,
        stream(server.grpc_address, {"authorization": f"Bearer few-{KEY}"}) as (calls, arrived),
        ThreadPoolExecutor(2) as threads,
    ):

        def ask(client: openai.OpenAI) -> str:
            return client.completions.create(model="scripted", prompt=[1, 2], max_tokens=2).choices[0].finish_reason

        first = threads.submit(ask, few)
        server.wait_until(lambda: bool((tmp_path / "steps").read_bytes()), "the first one is generated")
        with pytest.raises(openai.RateLimitError, match="slots=1"):
            ask(few)
        calls.async_stream_infer("scripted", inputs([1, 2], 2))
        assert "slots=1" in str(arrived.get(timeout=60))
        second = threads.submit(ask, other)
        (tmp_path / "hold").unlink()
        assert first.result(60) == second.result(60) == "length"
        assert ask(few) == "length"
        calls.async_stream_infer(
            "scripted", inputs([1, 2], 2)
        )  # the stream goes on, and so does what counts for the key
        while not arrived.get(timeout=60).get_response().parameters["triton_final_response"].bool_param:
            pass
        server.wait_until(lambda: ask(few) == "length", "its message counts no more")
