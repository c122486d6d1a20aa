"""`abserve serve vllm`: its launch plan, the folder that vLLM loads, and refusals; with vLLM installed, vLLM itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from loadgen.records.model_config import read_vllm
from servers.cli.commands import serve
from servers.language.module import build_module
from servers.language.specification import language_model
from tests.integration.native.conftest import free_port, wait_until

INSTALLED = find_spec("vllm") is not None
NEEDS_VLLM = pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed")
LACKS_VLLM = pytest.mark.skipif(INSTALLED, reason="vLLM is installed")
OF_TINY = ("vllm", "--model", "language:tiny", "--print-launch")


@pytest.fixture
def interpreter(tmp_path: Path) -> Path:
    """A Python whose environment has a package of that name and version, as `importlib.metadata` sees it."""
    site = tmp_path / "site"
    (site / "vllm-0.26.0.dist-info").mkdir(parents=True)
    (site / "vllm-0.26.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.26.0\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


def plan_of(monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str) -> Any:
    monkeypatch.chdir(folder)
    done = CliRunner().invoke(serve, [*OF_TINY, "--http-port", str(free_port()), *options])
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def value_of(argv: list[str], option: str) -> str:
    return argv[argv.index(option) + 1]


def test_the_plan_is_a_fair_vllm(interpreter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--python", str(interpreter), "--slots", "16", "--max-length", "512", "--device", "cpu")
    plan = plan_of(monkeypatch, tmp_path, *options)
    argv = plan["argv"]
    assert argv[:5] == [str(interpreter), "-P", "-m", "vllm.entrypoints.cli.main", "serve"]
    assert "--no-enable-prefix-caching" in argv
    assert (value_of(argv, "--generation-config"), value_of(argv, "--dtype")) == ("vllm", "float32")
    assert (value_of(argv, "--max-num-seqs"), value_of(argv, "--max-model-len")) == ("16", "512")
    assert (value_of(argv, "--served-model-name"), value_of(argv, "--seed")) == ("tiny", "0")
    assert value_of(argv, "--gpu-memory-utilization") == "0.4", "vLLM's own 0.92 of a CPU's memory refuses to start"
    assert "--disable-uvicorn-access-log" in argv
    assert "--api-server-count" not in argv
    assert (plan["title"], plan["model"]) == ("vLLM 0.26.0 fp32", "tiny")
    assert plan["env"] == {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
    }
    assert plan["artefact"]["weights"] == "random weights (seed 0)"


def test_the_folder_holds_the_same_model_and_a_tokenizer_of_ids(
    interpreter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(monkeypatch, tmp_path, "--python", str(interpreter), "--device", "cpu")
    folder = Path(plan["argv"][5])
    assert folder.parent == tmp_path / ".artefacts" / "language"
    loaded, made = AutoModelForCausalLM.from_pretrained(folder), build_module(language_model("language:tiny"))
    for (name, theirs), (_, ours) in zip(loaded.named_parameters(), made.named_parameters(), strict=True):
        assert torch.equal(theirs, ours), name
    tokenizer = AutoTokenizer.from_pretrained(value_of(plan["argv"], "--tokenizer"))
    assert tokenizer("t5 t17 t1023", add_special_tokens=False)["input_ids"] == [5, 17, 1023]
    assert tokenizer.decode([5, 17]) == "t5 t17"
    written = (folder / "config.json").stat().st_mtime_ns
    assert Path(plan_of(monkeypatch, tmp_path, "--python", str(interpreter), "--device", "cpu")["argv"][5]) == folder
    assert (folder / "config.json").stat().st_mtime_ns == written, "the folder was written again"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param((), "vLLM is not installed; run pip install vllm==0.26.0", marks=LACKS_VLLM),
        (("--python", "/no/python"), "--python /no/python does not run"),
        (("--python", "/usr/bin/false"), "--python /usr/bin/false has no vLLM"),
        (("--precision", "int8"), "precision 'int8' is not offered for language models"),
        (("--max-length", "2000"), "--max-length 2000: Tiny"),
        (("--weights", "no.safetensors"), "no such file"),
        (("--model", "open_clip:ViT-B-32"), "unknown language model"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_in_one_sentence(options: tuple[str, ...], message: str) -> None:
    done = CliRunner().invoke(serve, [*OF_TINY, "--http-port", str(free_port()), *options])
    assert (done.exit_code, message in done.stderr) == (2, True), done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_the_settings_in_effect_are_read_from_the_server() -> None:
    """The shape is that of vLLM 0.26.0's /server_info."""
    config = {
        "model_config": {"dtype": "torch.bfloat16", "max_model_len": 512, "seed": 0, "generation_config": "vllm",
                         "enforce_eager": False, "quantization": None},
        "cache_config": {"enable_prefix_caching": False, "kv_cache_size_tokens": 100_000},
        "scheduler_config": {"max_num_seqs": 16, "max_num_batched_tokens": 2048, "async_scheduling": True,
                             "stream_interval": 1},
        "device_config": {"device_type": "cuda"},
        "parallel_config": {"tensor_parallel_size": 1},
        "speculative_config": None,
    }  # fmt: skip
    served = {"model": "language:tiny", "weights": "random weights (seed 0)", "precision": "bf16"}
    settings = read_vllm({"vllm_config": config}, "0.26.0", served)
    assert settings == {
        "engine": "vllm", "engine_version": "0.26.0", "precision": "bf16", "device": "cuda", "slots": "16",
        "max_length": "512", "prefill_chunk": "2048", "prefix_cache": "False", "eager": "False",
        "async_scheduling": "True", "stream_interval": "1", "generation_config": "vllm", "kv_cache_tokens": "100000",
        "tensor_parallel": "1", "model": "language:tiny", "weights": "random weights (seed 0)",
    }  # fmt: skip
    speculating = {**config, "speculative_config": {"method": "ngram"}}
    assert read_vllm({"vllm_config": speculating}, None)["speculative"] == "ngram"
    assert read_vllm(None, "0.26.0") == {"engine": "vllm", "engine_version": "0.26.0"}
    assert read_vllm({"vllm_config": "text"}, None) == {"engine": "vllm"}


@NEEDS_VLLM
@pytest.mark.gpu
@pytest.mark.slow
def test_a_real_vllm_answers_with_the_ids_of_generate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In FP32: the ids are equal, the first chunk has the prompt's, and the settings are read back."""
    model = "language:demo"
    options = ("--model", model, "--precision", "fp32", "--slots", "8", "--max-length", "512")
    plan = plan_of(monkeypatch, tmp_path, *options)
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(plan["argv"], env={**os.environ, **plan["env"]}, stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=plan["http_url"], timeout=60, trust_env=False) as client:

            def ready() -> bool:
                assert process.poll() is None, (tmp_path / "log").read_text()[-4000:]
                try:
                    return client.get("/health").status_code == 200
                except httpx.TransportError:
                    return False

            wait_until(ready, "ready", 300)
            prompt = [17, 5, 900, 33]
            body = {"model": "demo", "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
            body |= {"stream": True, "return_token_ids": True}
            with client.stream("POST", "/v1/completions", json=body) as answer:
                lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
            chunks = [json.loads(line) for line in lines if line != "[DONE]"]
            choices = [choice for chunk in chunks for choice in chunk["choices"]]
            assert choices[0]["prompt_token_ids"] == prompt
            tokens = [token for choice in choices for token in choice["token_ids"]]
            module = build_module(language_model(model), "cuda")
            module.generation_config.eos_token_id = None
            ids = torch.tensor([prompt], device="cuda")
            expected = module.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
            assert tokens == expected[0, 4:].tolist()
            info = client.get("/server_info?config_format=json").json()
            settings = read_vllm(info, client.get("/version").json()["version"], plan["artefact"])
            assert (settings["precision"], settings["slots"], settings["max_length"]) == ("fp32", "8", "512")
            assert settings["prefix_cache"] == "False"
    finally:
        process.terminate()
        process.wait(60)
