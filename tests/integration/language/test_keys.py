"""A language model's server with keys, asked by OpenAI's client."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

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
