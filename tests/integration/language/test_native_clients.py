"""Unmodified clients stream from the native server, which generates with a real model: `abserve serve native`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import tritonclient.http as triton

from loadgen.records.traffic import RecordedRequest, RecordedTraffic
from servers.language.module import build_module
from servers.language.specification import language_model
from tests.integration.language.conftest import EventStream
from tests.integration.native.conftest import Server, free_port
from tests.recording import recorder

PROMPT = [5, 17, 3, 900, 44]
COUNT = 12


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The tiny model, started by its launch plan as a comparison starts it."""
    folder, port = tmp_path_factory.mktemp("tiny"), free_port()
    options = ["--model", "language:tiny", "--slots", "4", "--max-length", "64", "--device", "cpu", "--threads", "1"]
    options += ["--record", str(folder / "traffic"), "--record-answers"]
    printed = subprocess.run(
        [
            sys.executable,
            "-m",
            "loadgen.entry",
            "serve",
            "native",
            *options,
            "--http-port",
            str(port),
            "--grpc-port",
            "0",
            "--print-launch",
        ],
        capture_output=True,
        check=True,
    )
    plan = json.loads(printed.stdout)
    assert (plan["model"], plan["grpc_address"], plan["max_batch_size"]) == ("tiny", None, None)
    assert plan["title"] == "native slots fp32"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(plan["argv"], stderr=log)
    server = Server(process, port, folder)
    try:
        server.wait_ready()
        server.wait_until((folder / "traffic" / "traffic.json").exists, "the recording has begun")
        yield server
    finally:
        process.terminate()
        assert process.wait(60) == 0


@pytest.fixture(scope="module")
def answer() -> list[int]:
    """What transformers' own module says, one token after the other."""
    import torch

    module = build_module(language_model("language:tiny"))
    ids = list(PROMPT)
    with torch.inference_mode():
        for _ in range(COUNT):
            ids.append(int(module(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


def test_an_unmodified_openai_client_streams(tiny: Server, answer: list[int]) -> None:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{tiny.port}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        chunks = list(
            client.completions.create(
                model="tiny",
                prompt=PROMPT,
                max_tokens=COUNT,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
        )
        *tokens, last = chunks
        extras = [chunk.choices[0].model_extra or {} for chunk in tokens]
        assert [token for extra in extras for token in extra["token_ids"]] == answer
        assert "".join(chunk.choices[0].text for chunk in tokens) == " ".join(f"t{token}" for token in answer)
        assert tokens[-1].choices[0].finish_reason == "length"
        assert last.choices == []
        assert last.usage is not None
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(PROMPT), COUNT)
        whole = client.completions.create(
            model="tiny", prompt=" ".join(f"t{token}" for token in PROMPT), max_tokens=COUNT, temperature=0,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        assert whole.choices[0].text == " ".join(f"t{token}" for token in answer)


def test_an_unmodified_openai_client_streams_through_the_recorder(
    tiny: Server, answer: list[int], tmp_path: Path
) -> None:
    with recorder(tmp_path / "traffic", to=f"http://127.0.0.1:{tiny.port}") as recording:
        with openai.OpenAI(base_url=f"{recording.url}/v1", api_key="hidden", max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ["tiny"]
            chunks = client.completions.create(
                model="tiny", prompt=PROMPT, max_tokens=COUNT, temperature=0, stream=True,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )  # fmt: skip
            ids = [token for chunk in chunks for token in (chunk.choices[0].model_extra or {})["token_ids"]]
        read = recording.end()
    assert ids == answer
    (request,) = read.requests
    assert (request.route, request.model, request.status) == ("/v1/completions", "tiny", 200)
    assert json.loads(read.content(request) or b"")["prompt"] == PROMPT
    assert (request.first_byte_ns or 0) < (request.end_ns or 0)
    folder = tiny.folder / "traffic"

    def same() -> list[RecordedRequest]:
        """Those with this content that the server itself has recorded."""
        return [each for each in RecordedTraffic(folder).requests if each.content == request.content]

    tiny.wait_until(lambda: bool(same()), "the server has recorded it, too")
    (own,) = same()
    assert (own.route, own.model, own.status) == (request.route, request.model, request.status)
    assert (RecordedTraffic(folder).answer(own) or b"").count(b'"token_ids"') == COUNT


def test_an_openai_client_understands_the_refusals(tiny: Server) -> None:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{tiny.port}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match="n must be 1: each prompt gets one answer"):
            client.completions.create(model="tiny", prompt=PROMPT, n=2, max_tokens=3)
        with pytest.raises(openai.BadRequestError, match="maximum length of 64"):
            client.completions.create(model="tiny", prompt=PROMPT, max_tokens=60)
        with pytest.raises(openai.NotFoundError, match="the model 'gpt-4' does not exist"):
            client.completions.create(model="gpt-4", prompt=PROMPT)


def test_an_openai_client_that_stops_in_the_middle_frees_the_slot(tiny: Server) -> None:
    before = tiny.metric("abserve_native_client_disconnects_total{")
    with openai.OpenAI(base_url=f"http://127.0.0.1:{tiny.port}/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=59, stream=True, temperature=0)
        next(iter(stream))
        stream.close()
    tiny.wait_until(lambda: tiny.metric("abserve_native_slots_in_use{") == 0, "the slot is free")
    assert tiny.metric("abserve_native_client_disconnects_total{") in (before, before + 1)  # it may have been quicker


def test_httpx_reads_tritons_events(tiny: Server, answer: list[int]) -> None:
    url = f"http://127.0.0.1:{tiny.port}/v2/models/tiny/generate_stream"
    with httpx.stream("POST", url, json={"input_ids": PROMPT, "max_tokens": COUNT}, timeout=60) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        events = [json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line]
    assert [event["token_ids"] for event in events] == answer


def test_tritonclient_finds_what_it_asks_for(tiny: Server) -> None:
    client = triton.InferenceServerClient(tiny.address)
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("tiny")
    names = [tensor["name"] for tensor in client.get_model_metadata("tiny")["inputs"]]
    assert names == ["input_ids", "max_tokens", "ignore_eos"]
    config = client.get_model_config("tiny")
    assert config["model_transaction_policy"] == {"decoupled": True}
    parameters = {name: value["string_value"] for name, value in config["parameters"].items()}
    assert (parameters["engine"], parameters["slots"], parameters["max_length"]) == ("slots", "4", "64")
    assert parameters["spinning"] == "off"
    assert len(parameters["weights_sha256"]) == 64
    assert client.get_inference_statistics("tiny")["model_stats"][0]["name"] == "tiny"
    client.close()


def test_more_users_than_slots_all_get_the_right_answer(tiny: Server, answer: list[int]) -> None:
    document = {"input_ids": PROMPT, "max_tokens": COUNT}
    streams = [EventStream(tiny, "/v2/models/tiny/generate_stream", document) for _ in range(9)]
    for stream in streams:
        stream.__enter__()
    for stream in streams:
        assert stream.read_head() == 200
        assert [event["token_ids"] for event in stream.events()] == answer
        stream.socket.close()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--max-queue-delay-us", "5"], "--max-queue-delay-us is for models of tensors"),
        (["--max-queue-delay-us", "0"], "--max-queue-delay-us is for models of tensors"),
        (["--max-batch-size", "32"], "--max-batch-size is for models of tensors; a language model has --slots"),
        (["--device", "cpu,cpu"], "a language model runs on one device"),
        (["--max-length", "5000"], "takes at most 1024 tokens"),
        (["--engine", "torch"], "no engine of this name generates tokens"),
        (["--max-batch-size", "8"], "--max-batch-size is for models of tensors; a language model has --slots"),
        (["--precision", "int8"], "precision 'int8' is not offered for language models"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused_in_one_sentence(options: list[str], sentence: str) -> None:
    refused(["--model", "language:tiny", *options], sentence)


def test_a_model_of_tensors_has_no_slots() -> None:
    for slots in ("4", "0"):
        refused(["--slots", slots], "--slots is for language models, such as --model language:demo")


def refused(options: list[str], sentence: str) -> None:
    """In this process: the command's imports take seconds."""
    import typer
    from typer.testing import CliRunner

    from servers.commands.native import serve_native

    app = typer.Typer()
    app.command()(serve_native)
    result = CliRunner().invoke(app, [*options, "--print-launch"])
    assert result.exit_code == 2, result.output
    assert sentence in result.output.replace("\n", " ")
