"""A language model in a real Triton: the tokens of generate() as a stream of events, clients that leave, and errors."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpc_client

from servers.gpu.info import engine_in_log, triton_info
from servers.options.defaults import OptionError
from servers.triton.launch import find_installation, prepare_language
from servers.triton.process import TritonProcess
from tests.again import again
from tests.integration.plain.test_generate_server import PROMPTS, events_of, generated, generated_with_eos
from tests.integration.triton.conftest import READY_SECONDS, Running, settings

pytestmark = pytest.mark.triton
SLOTS, WAITING, LONG = 2, 3, 900


ASKS_OFTEN = """
import servers.triton.language_model

servers.triton.language_model.CANCEL_SECONDS = 0.0
"""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One that asks whether clients have left all the time, so that each answer is asked about as it ends."""
    folder = tmp_path_factory.mktemp("language")
    options = settings(
        folder, model="language:tiny", device="cpu", threads=1, slots=SLOTS, max_length=LONG + 64, queue_size=WAITING
    )
    plan = prepare_language(options, find_installation(options))
    (model,) = options.folder.rglob("1/model.py")
    with model.open("a") as file:
        file.write(ASKS_OFTEN)
    with TritonProcess(plan, folder / "log") as process:
        assert process.wait_ready(READY_SECONDS)
        yield Running(plan, process, folder / "log")


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.plan.http_url, timeout=60, trust_env=False) as client:
        yield client


def stream(client: httpx.Client, prompt: list[int], length: int, **more: Any) -> Any:
    body = {"input_ids": prompt, "max_tokens": length, "ignore_eos": True, **more}
    return client.stream("POST", "/v2/models/tiny/generate_stream", json=body)


def generate(client: httpx.Client, prompt: list[int], length: int, **more: Any) -> list[Any]:
    with stream(client, prompt, length, **more) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        return list(events_of(answer.iter_lines()))


def test_each_token_of_generate_is_an_event_of_its_own(client: httpx.Client) -> None:
    events = generate(client, PROMPTS[0], 24)
    assert [event["token_ids"] for event in events] == generated(PROMPTS[0], 24)
    assert [event.get("prompt_tokens") for event in events] == [4] + [None] * 23
    assert [event.get("finish_reason") for event in events] == [None] * 23 + ["length"]
    assert {(event["model_name"], event["model_version"]) for event in events} == {("tiny", "1")}


def test_requests_at_once_get_their_own_tokens(client: httpx.Client) -> None:
    """Five at once on two slots, and again: the responses of tokens that came before are used again."""
    prompts = (PROMPTS * 3)[: SLOTS + WAITING]
    with ThreadPoolExecutor(len(prompts)) as pool:
        for _ in range(2):
            answers = list(pool.map(lambda prompt: generate(client, prompt, 40), prompts))
            for prompt, events in zip(prompts, answers, strict=True):
                assert [event["token_ids"] for event in events] == generated(prompt, 40)
                assert events[0]["prompt_tokens"] == len(prompt)


def test_nobody_asks_about_a_client_whose_answer_has_ended(client: httpx.Client) -> None:
    """Triton ended (SIGSEGV) in each of eight trials, and at the usual pace once in some hundred answers."""
    with ThreadPoolExecutor(SLOTS + WAITING) as pool:
        for answers in pool.map(lambda prompt: generate(client, prompt, 1), PROMPTS[:1] * 2000):
            assert len(answers) == 1


@again
def test_tokens_arrive_as_they_are_generated(client: httpx.Client) -> None:
    begun = time.monotonic()
    with stream(client, PROMPTS[1], LONG) as answer:
        events = events_of(answer.iter_lines())
        next(events)
        first = time.monotonic() - begun
        assert len(list(events)) == LONG - 1
    assert first < 0.5 * (time.monotonic() - begun)


def test_an_answer_stops_at_eos_only_where_it_is_not_ignored(client: httpx.Client) -> None:
    prompt, expected, until_eos = generated_with_eos(24)
    stopped = generate(client, prompt, 24, ignore_eos=False)
    assert [event["token_ids"] for event in stopped] == until_eos
    assert stopped[-1]["finish_reason"] == "stop"
    assert [event["token_ids"] for event in generate(client, prompt, 24)] == expected


@again
def test_clients_that_leave_free_their_slots(client: httpx.Client) -> None:
    def seconds(stay: bool) -> float:
        """Until a short answer that waits behind long ones for a slot."""
        with ExitStack() as answers:
            opened = [answers.enter_context(stream(client, PROMPTS[0], LONG)) for _ in range(SLOTS)]
            events = [events_of(answer.iter_lines()) for answer in opened]
            for stream_of_events in events:
                next(stream_of_events)
            begun = time.monotonic()
            if not stay:
                answers.close()
            assert len(generate(client, PROMPTS[1], 2)) == 2
            return time.monotonic() - begun

    assert seconds(stay=False) < 0.6 * seconds(stay=True)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"input_ids": [5000], "max_tokens": 6}, "token id 5000 is not in the vocabulary; ids are from 0 to 1023"),
        ({"input_ids": [], "max_tokens": 6}, "the prompt is empty"),
        ({"input_ids": [1], "max_tokens": 0}, "max_tokens is 0"),
        ({"input_ids": [1], "max_tokens": LONG + 64}, "together they must not exceed the maximum length of 964"),
    ],
)
def test_what_the_model_does_not_take_is_the_clients_error(
    client: httpx.Client, body: dict[str, Any], problem: str
) -> None:
    """The status is that of the first response, which Triton sends as an event."""
    answer = client.post("/v2/models/tiny/generate_stream", json=body)
    assert answer.status_code == 400
    (event,) = events_of(iter(answer.text.splitlines()))
    assert set(event) == {"error"}
    assert problem in event["error"]
    assert len(generate(client, [5], 1)) == 1


def test_one_response_is_also_an_answer_without_a_stream(client: httpx.Client) -> None:
    answer = client.post("/v2/models/tiny/generate", json={"input_ids": PROMPTS[0], "max_tokens": 1})
    assert answer.json()["token_ids"] == generated(PROMPTS[0], 1)[0]
    assert answer.json()["finish_reason"] == "length"


def test_a_full_queue_refuses(client: httpx.Client) -> None:
    """Over generate_stream Triton gives every error status 400."""

    def ask(_index: int) -> tuple[int, str]:
        body = {"input_ids": [1], "max_tokens": 300, "ignore_eos": True}
        answer = client.post("/v2/models/tiny/generate_stream", json=body)
        return answer.status_code, answer.text

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, range(12)))
    assert {status for status, _ in answers} == {200, 400}
    assert all(f"{WAITING} requests are waiting; retry later" in text for status, text in answers if status == 400)
    assert sum(status == 200 for status, _ in answers) >= SLOTS + WAITING


def test_grpc_streams_the_same_tokens(running: Running) -> None:
    responses: queue.SimpleQueue[Any] = queue.SimpleQueue()
    ids = grpc_client.InferInput("input_ids", [len(PROMPTS[0])], "INT32")
    ids.set_data_from_numpy(np.array(PROMPTS[0], np.int32))
    most = grpc_client.InferInput("max_tokens", [1], "INT32").set_data_from_numpy(np.array([8], np.int32))
    with grpc_client.InferenceServerClient(running.plan.grpc_address) as client:
        client.start_stream(lambda result, error: responses.put(error or result))
        client.async_stream_infer("tiny", [ids, most])
        tokens = [responses.get(timeout=30).as_numpy("token_ids").tolist() for _ in range(8)]
        client.stop_stream()
    assert tokens == [[token] for token in generated(PROMPTS[0], 8)]


def test_the_config_says_what_the_engine_does(running: Running, client: httpx.Client) -> None:
    config = client.get("/v2/models/tiny/config").json()
    values = {name: value["string_value"] for name, value in config["parameters"].items()}
    assert (values["engine"], values["precision"], values["device"], values["threads"]) == ("slots", "fp32", "cpu", "1")
    assert (values["slots"], values["max_length"]) == (str(SLOTS), str(LONG + 64))
    assert config["model_transaction_policy"]["decoupled"] is True
    assert "dynamic_batching" not in config
    in_effect = engine_in_log(running.log_file.read_text())
    assert in_effect is not None
    details = in_effect["details"]
    shared = values.keys() & details
    assert {"weights_sha256", "slots", "threads"} <= shared
    assert {name: str(details[name]) for name in shared} == {name: values[name] for name in shared}
    document: Any = triton_info({"version": "2.51.0"}, config, running.log_file.read_text(), {"devices": []})
    assert (document["runtime"]["engine"], document["runtime"]["device"]) == ("slots", "cpu")
    assert running.plan.title == "Triton 2.51, python backend, slots fp32"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch_size": 4}, "--max-batch-size has no effect on a language model"),
        ({"pad_to": "32,64"}, "--pad-to has no effect on a language model"),
        ({"mode": "eager"}, "--mode has no effect on a language model"),
        ({"backend": "onnxruntime"}, "--backend onnxruntime generates no tokens; use python, or vllm"),
        ({"backend": "vllm"}, "--backend vllm: the tritonserver of nvidia-pytriton 0.7.0 does not have it"),
        ({"max_length": 2000}, "--max-length 2000: Tiny"),
    ],
)
def test_options_without_a_meaning_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    asked = settings(tmp_path, **{"model": "language:tiny", "device": "cpu", **options})
    with pytest.raises(OptionError, match=message):
        prepare_language(asked, find_installation(asked))
