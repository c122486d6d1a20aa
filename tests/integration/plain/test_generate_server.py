"""The plain server of language models: the tokens of generate(), both protocols, clients that leave, and refusals."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from typer.testing import CliRunner

from servers.commands.serve import serve
from servers.language.module import build_module
from servers.language.specification import language_model
from tests.again import again
from tests.integration.native.conftest import free_port, wait_until
from tests.integration.plain.test_plain_servers import launch, running

MODEL = language_model("language:tiny")
PROMPTS = [[17, 5, 900, 33], [1023, 1, 2], [7] * 40, list(range(100, 164))]


@cache
def reference() -> Any:
    module = build_module(MODEL)
    module.generation_config.eos_token_id = None
    return module


def all_generated(prompts: list[list[int]], length: int) -> list[list[int]]:
    """What transformers' own generate() answers to prompts of one length, EOS being a token like any other."""
    ids = torch.tensor(prompts)
    answers = reference().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False)
    tokens: list[list[int]] = answers[:, ids.shape[1] :].tolist()
    return tokens


def generated(prompt: list[int], length: int) -> list[int]:
    return all_generated([prompt], length)[0]


def generated_with_eos(length: int) -> tuple[list[int], list[int], list[int]]:
    """A prompt whose answer of that length has EOS in it, the answer, and the answer up to EOS."""
    prompts = [[number, 3, 8] for number in range(1, 1023)]
    answers = zip(prompts, all_generated(prompts, length), strict=True)
    prompt, answer = next(pair for pair in answers if MODEL.eos[0] in pair[1])
    return prompt, answer, answer[: answer.index(MODEL.eos[0]) + 1]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, psutil.Process]]:
    folder = tmp_path_factory.mktemp("generate")
    options = ("--device", "cpu", "--threads", "1", "--max-length", "600", "--slots", "4")
    done = launch("fastapi", folder, "--model", "language:tiny", *options)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert (plan["model"], plan["max_batch_size"], plan["title"]) == ("tiny", None, "FastAPI generate() fp32")
    with (
        running(plan, folder) as (found, _),
        httpx.Client(base_url=found.url, timeout=30, trust_env=False) as client,
    ):
        yield client, psutil.Process(found.process.pid)


@pytest.fixture
def client(server: tuple[httpx.Client, psutil.Process]) -> httpx.Client:
    return server[0]


def events_of(lines: Iterator[str]) -> Iterator[Any]:
    """The documents of a stream of events, [DONE] as None."""
    for line in filter(None, lines):
        assert line.startswith("data: "), line
        text = line.removeprefix("data: ")
        yield None if text == "[DONE]" else json.loads(text)


def completion(prompt: list[int] | str, length: int, **more: Any) -> dict[str, Any]:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": "tiny", "prompt": prompt, "max_tokens": length, "temperature": 0, "ignore_eos": True}
    return {**body, "stream": True, "return_token_ids": True, "stream_options": options, "cache_salt": "x", **more}


def complete(client: httpx.Client, body: dict[str, Any]) -> list[Any]:
    with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        return list(events_of(answer.iter_lines()))


def generate(client: httpx.Client, prompt: list[int], length: int, **more: Any) -> list[Any]:
    body = {"input_ids": prompt, "max_tokens": length, "ignore_eos": True, **more}
    with client.stream("POST", "/v2/models/tiny/generate_stream", json=body) as answer:
        assert answer.status_code == 200
        return list(events_of(answer.iter_lines()))


def test_a_completion_is_that_of_generate_token_by_token(client: httpx.Client) -> None:
    prompt = PROMPTS[0]
    *chunks, usage, done = complete(client, completion(prompt, 24))
    assert done is None
    tokens = [chunk["choices"][0]["token_ids"] for chunk in chunks]
    assert tokens == [[token] for token in generated(prompt, 24)]
    assert chunks[0]["choices"][0]["prompt_token_ids"] == prompt
    assert not any("prompt_token_ids" in chunk["choices"][0] for chunk in chunks[1:])
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == " ".join(f"t{ids[0]}" for ids in tokens)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == list(range(1, 25))
    assert {chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]} == {None}
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": 4, "completion_tokens": 24, "total_tokens": 28}
    assert {(chunk["object"], chunk["model"], chunk["id"]) for chunk in chunks} == {
        ("text_completion", "tiny", usage["id"])
    }


def test_both_protocols_give_the_same_tokens_to_many_users_at_once(client: httpx.Client) -> None:
    def ask(index: int) -> list[int]:
        prompt = PROMPTS[index % len(PROMPTS)]
        if index < len(PROMPTS):
            chunks = complete(client, completion(prompt, 16))[:-2]
            return [chunk["choices"][0]["token_ids"][0] for chunk in chunks]
        events = generate(client, prompt, 16)
        assert events[0]["prompt_tokens"] == len(prompt)
        assert [event.get("finish_reason") for event in events] == [None] * 15 + ["length"]
        return [event["token_ids"] for event in events]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(2 * len(PROMPTS))))
    expected = [generated(prompt, 16) for prompt in PROMPTS]
    assert answers == expected * 2


def test_text_is_taken_and_an_answer_comes_in_one_piece_without_stream(client: httpx.Client) -> None:
    body = completion("t17 t5 t900 t33", 6, stream=False)
    answer = client.post("/v1/completions", json=body).json()
    expected = generated(PROMPTS[0], 6)
    (choice,) = answer["choices"]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == (expected, PROMPTS[0])
    assert choice["text"] == " ".join(f"t{token}" for token in expected)
    assert answer["usage"]["completion_tokens"] == 6


def test_an_answer_stops_at_eos_unless_it_is_ignored(client: httpx.Client) -> None:
    """EOS is not masked where it is ignored: it comes, as the model says, and the answer goes on."""
    prompt, expected, until_eos = generated_with_eos(24)
    assert [event["token_ids"] for event in generate(client, prompt, 24)] == expected
    stopped = generate(client, prompt, 24, ignore_eos=False)
    assert [event["token_ids"] for event in stopped] == until_eos
    assert stopped[-1]["finish_reason"] == "stop"


@again
def test_a_client_that_leaves_ends_its_generation(server: tuple[httpx.Client, psutil.Process]) -> None:
    client, process = server
    complete(client, completion(PROMPTS[1], 2))  # every thread that stays is there now
    counts: list[int] = []

    def at_rest() -> bool:
        counts.append(process.num_threads())
        return len(counts) > 20 and len(set(counts[-20:])) == 1

    wait_until(at_rest, "no thread of an earlier request")
    idle = counts[-1]
    begun = time.monotonic()
    with client.stream("POST", "/v1/completions", json=completion(PROMPTS[1], 590)) as answer:
        next(events_of(answer.iter_lines()))
        assert process.num_threads() > idle
    wait_until(lambda: process.num_threads() <= idle, "the generation's thread to end")
    left = time.monotonic() - begun
    begun = time.monotonic()
    assert len(generate(client, PROMPTS[1], 590)) == 590
    assert left < 0.5 * (time.monotonic() - begun)


@pytest.mark.parametrize(
    ("change", "status", "problem"),
    [
        ({"prompt": []}, 400, "the prompt is empty"),
        ({"prompt": [1024]}, 400, "token id 1024 is not in the vocabulary; ids are from 0 to 1023"),
        ({"prompt": [-1]}, 400, "token id -1 is not in the vocabulary"),
        ({"prompt": [2**70]}, 400, "is not in the vocabulary"),
        ({"prompt": [1] * 580, "max_tokens": 21}, 400, "together they must not exceed the maximum length of 600"),
        ({"prompt": [1.5]}, 400, "prompt"),
        ({"prompt": [[1, 2]]}, 400, "prompt"),
        ({"prompt": "t1 no"}, 400, "no"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"n": 2}, 400, "n: input should be 1 or None"),
        ({"best_of": 2}, 400, "best_of: input should be 1 or None"),
        ({"temperature": 0.7}, 400, "temperature: input should be 0 or None"),
        ({"echo": True}, 400, "echo"),
        ({"suffix": "x"}, 400, "suffix"),
        ({"logprobs": 3}, 400, "logprobs"),
        ({"min_tokens": 3}, 400, "min_tokens"),
        ({"repetition_penalty": 1.1}, 400, "repetition_penalty"),
        ({"model": "other"}, 404, "the model other does not exist; this server has tiny"),
    ],
)
def test_what_it_does_not_do_is_refused_in_one_sentence(
    client: httpx.Client, change: dict[str, Any], status: int, problem: str
) -> None:
    answer = client.post("/v1/completions", json=completion([1, 2], 2) | change)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert problem in error["message"]
    assert (error["code"], set(error)) == (status, {"message", "type", "param", "code"})


def test_what_asks_for_nothing_special_is_no_problem(client: httpx.Client) -> None:
    neutral = {"temperature": 0.0, "n": 1, "best_of": None, "echo": False, "suffix": None, "stop": None}
    body = {
        "prompt": PROMPTS[0],
        "max_tokens": 2,
        **neutral,
        "stream_options": None,
        "user": "x",
        "return_token_ids": True,
    }
    answer = client.post("/v1/completions", json=body)
    assert answer.json()["choices"][0]["token_ids"] == generated(PROMPTS[0], 2)


def test_a_bad_request_of_tritons_protocol_gets_400(client: httpx.Client) -> None:
    for body in (b"", b"{", b"[]", b'{"input_ids": [5000], "max_tokens": 1}', b'{"input_ids": [5]}'):
        answer = client.post("/v2/models/tiny/generate_stream", content=body)
        assert answer.status_code == 400, answer.text
        assert set(answer.json()) == {"error"}
    assert len(generate(client, [5], 1)) == 1


def test_it_describes_itself_truly(client: httpx.Client) -> None:
    config = client.get("/v2/models/tiny/config").json()
    values = {name: value["string_value"] for name, value in config["parameters"].items()}
    assert (values["engine"], values["precision"], values["device"], values["threads"]) == (
        "generate",
        "fp32",
        "cpu",
        "1",
    )
    assert (values["weights"], values["model"]) == ("random weights (seed 0)", "language:tiny")
    assert (values["max_length"], values["attention"]) == ("600", "sdpa")
    assert config["model_transaction_policy"] == {"decoupled": True}
    (card,) = client.get("/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"]) == ("tiny", 600)
    assert client.get("/v2").json()["name"] == "fastapi"
    assert client.get("/v2/health/ready").status_code == 200
    assert client.get("/gpu-info").json()["runtime"]["placement"]["params_by_device"].keys() == {"cpu"}


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("litserve", (), "serves no language models"),
        ("fastapi", ("--max-batch-size", "4"), "--max-batch-size has no effect on a language model"),
        ("fastapi", ("--max-length", "2000"), "--max-length 2000: Tiny"),
        ("fastapi", ("--precision", "fp8"), "precision 'fp8' is not offered for language models"),
        ("fastapi", ("--weights", "no.safetensors"), "no such file"),
    ],
)
def test_options_without_a_meaning_are_refused(kind: str, options: tuple[str, ...], message: str) -> None:
    if kind == "litserve":
        pytest.importorskip("litserve")
    command = [kind, "--model", "language:tiny", "--http-port", str(free_port()), *options, "--print-launch"]
    done = CliRunner().invoke(serve, command)
    assert (done.exit_code, message in done.stderr) == (2, True), done.stderr


def test_the_server_is_one_file_that_a_person_reads_at_once() -> None:
    import servers.plain

    assert len((Path(servers.plain.__path__[0]) / "generate_server.py").read_text().splitlines()) <= 200
