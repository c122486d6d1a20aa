"""NVIDIA's perf_analyzer drives the native server as it drives Triton, and prints the same full breakdown."""

from __future__ import annotations

import json
import re

import pytest

MODEL = "openclip_vit_b32"
USERS = 2
OUTPUT_BYTES = 32 * 512 * 4
BREAKDOWN = re.compile(
    r"Avg request latency: (\d+) usec \(overhead (\d+) usec \+ queue (\d+) usec \+ compute input (\d+) usec \+ "
    r"compute infer (\d+) usec \+ compute output (\d+) usec\)"
)

pytestmark = pytest.mark.slow


def number(pattern: str, output: str) -> float:
    match = re.search(pattern, output)
    assert match is not None, output
    return float(match[1])


@pytest.mark.parametrize("memory", ["none", "system"])
@pytest.mark.parametrize("batch", [1, 32])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_it_measures_and_prints_a_full_server_breakdown(open_server, perf_analyzer, protocol, batch, memory):
    before = open_server.model_stats()
    output = perf_analyzer.run(
        *("-m", MODEL, "-i", protocol, "-b", str(batch), "--concurrency-range", str(USERS)),
        *("-u", open_server.address if protocol == "http" else open_server.grpc_address),
        *("--shared-memory", memory, "--output-shared-memory-size", str(OUTPUT_BYTES)),
        # Whether this machine is quiet is not the question: take the first three windows whatever they are.
        *("--measurement-mode", "count_windows", "--measurement-request-count", "50", "--stability-percentage", "999"),
    )
    requests = number(r"Request count: (\d+)", output)
    assert requests >= 50
    assert number(r"throughput: ([\d.]+) infer/sec", output) > 0
    assert number(r"Successful request count: (\d+)", output) >= requests
    # It reads the statistics while both users' requests are under way: executed, but not yet answered.
    executed, answered = number(r"Inference count: (\d+)", output), number(r"Successful request count: (\d+)", output)
    assert abs(executed - batch * answered) <= USERS * batch
    parts = BREAKDOWN.search(output)
    assert parts is not None, output
    total, *stages = map(int, parts.groups())
    assert abs(total - sum(stages)) <= 3
    assert stages[1] > 0  # queue
    assert stages[3] > 0  # compute infer
    assert number(r"Avg latency: (\d+) usec", output) > total
    after = open_server.model_stats()
    assert after["inference_count"] - before["inference_count"] >= batch * requests
    assert after["inference_stats"]["fail"] == before["inference_stats"]["fail"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory, native_starter):
    """A server with a small BERT, which pads requests of different lengths to a batch."""
    folder = tmp_path_factory.mktemp("bert") / "tiny"
    folder.mkdir()
    config = {"model_type": "bert", "vocab_size": 200, "hidden_size": 32, "num_hidden_layers": 2}
    sizes = {"num_attention_heads": 2, "intermediate_size": 64, "max_position_embeddings": 128, "type_vocab_size": 1}
    (folder / "config.json").write_text(json.dumps({**config, **sizes}))
    options = ("--engine", "torch", "--device", "cpu", "--threads", "1", "--pad-to", "32,64,128")
    return native_starter(folder.parent, "--model", str(folder), *options)


def drive(bert, perf_analyzer, protocol, *options):
    address = bert.address if protocol == "http" else bert.grpc_address
    return perf_analyzer.run(
        *("-m", "tiny", "-i", protocol, "-u", address, "--concurrency-range", str(USERS), *options),
        *("--measurement-mode", "count_windows", "--measurement-request-count", "50", "--stability-percentage", "999"),
    )


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_it_drives_a_text_model_with_its_own_data_and_with_a_file(bert, perf_analyzer, protocol, tmp_path):
    lengths = (5, 33, 64, 100)
    items = [
        {
            "input_ids": {"content": [length + place for place in range(length)], "shape": [length]},
            "attention_mask": {"content": [1] * length, "shape": [length]},
        }
        for length in lengths
    ]
    (tmp_path / "inputs.json").write_text(json.dumps({"data": items}))
    before = bert.model_stats()
    shapes = ("--shape", "input_ids:64", "--shape", "attention_mask:64")
    for options in ((*shapes, "--input-data", "zero"), ("--input-data", str(tmp_path / "inputs.json"))):
        output = drive(bert, perf_analyzer, protocol, *options)
        assert number(r"Request count: (\d+)", output) >= 50
        assert BREAKDOWN.search(output) is not None, output
    after = bert.model_stats()
    assert after["inference_stats"]["fail"] == before["inference_stats"]["fail"]


def test_its_random_bytes_as_token_ids_are_refused_and_harm_nobody(bert, perf_analyzer):
    shapes = ("--shape", "input_ids:64", "--shape", "attention_mask:64")
    with pytest.raises(AssertionError, match="its ids are 0 to 199"):
        drive(bert, perf_analyzer, "http", *shapes, "--input-data", "random")
    drive(bert, perf_analyzer, "http", *shapes, "--input-data", "zero")
