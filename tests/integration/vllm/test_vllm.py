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
from typer.testing import CliRunner

from loadgen.records.model_config import read_vllm
from servers.commands.serve import serve
from servers.commands.vllm import CAUSES
from servers.language.module import build_module
from servers.language.specification import language_model
from servers.options.launch import cause_in
from tests.integration.native.conftest import free_port, wait_until

INSTALLED = find_spec("vllm") is not None or "ABSERVE_VLLM_PYTHON" in os.environ
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


def test_vllm_runs_without_cuda_graphs(interpreter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--python", str(interpreter), "--device", "cpu", "--no-graphs")
    assert "--enforce-eager" in plan_of(monkeypatch, tmp_path, *options)["argv"]


def test_every_value_of_the_space_reaches_vllm(
    interpreter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--python", str(interpreter), "--device", "cpu")
    printed = CliRunner().invoke(serve, ["vllm", "--model", "language:tiny", *options, "--print-space"])
    settings = {setting["name"]: setting for setting in json.loads(printed.stdout)["settings"]}
    assert {"slots", "prefill-chunk", "threads"} <= settings.keys()
    plain = set(plan_of(monkeypatch, tmp_path, *options)["argv"])
    for name in ("slots", "prefill-chunk"):
        for value in set(settings[name]["values"]) - {settings[name]["default"]}:
            assert value in set(plan_of(monkeypatch, tmp_path, *options, f"--{name}", value)["argv"]) - plain


def test_the_plan_is_a_fair_vllm(interpreter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--python", str(interpreter), "--slots", "16", "--max-length", "512", "--device", "cpu")
    plan = plan_of(monkeypatch, tmp_path, *options)
    argv = plan["argv"]
    assert argv[:5] == [str(interpreter), "-P", "-m", "vllm.entrypoints.cli.main", "serve"]
    assert "--no-enable-prefix-caching" in argv
    assert "--enforce-eager" not in argv
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
    from transformers import AutoModelForCausalLM, AutoTokenizer

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


def test_the_cause_of_an_end_is_the_first_error_and_no_warning() -> None:
    log = """(APIServer pid=1) WARNING 11-26 22:45:13 [system.py] May cause `OSError: [Errno 24] Too many open files`.
(EngineCore pid=2) ERROR 11-26 22:45:59 [core.py:1330]     from flashinfer import (
(EngineCore pid=2) ERROR 11-26 22:45:59 [core.py:1330] ModuleNotFoundError: No module named 'flashinfer'
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.
"""
    assert cause_in(log, CAUSES) == "No module named 'flashinfer'"


def test_threads_on_a_cpu_are_those_asked_for(
    interpreter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless told not to, vLLM binds its threads to cores of its own choice, whatever OMP_NUM_THREADS says."""
    options = ("--python", str(interpreter), "--device", "cpu", "--threads", "3", "--fronts", "2")
    plan = plan_of(monkeypatch, tmp_path, *options)
    assert (plan["env"]["OMP_NUM_THREADS"], plan["env"]["VLLM_CPU_OMP_THREADS_BIND"]) == ("3", "nobind")
    assert plan["env"]["OMP_WAIT_POLICY"] == "PASSIVE"
    assert value_of(plan["argv"], "--api-server-count") == "2"


def test_the_settings_of_a_vllm_that_ran() -> None:
    """What vLLM 0.32.0 on a CPU answered to /server_info, without the parts that nobody reads."""
    info: dict[str, Any] = {
        "vllm_config": {
            "model_config": {"dtype": "torch.float32", "seed": 0, "max_model_len": 512, "quantization": None,
                             "enforce_eager": False, "generation_config": "vllm", "served_model_name": "demo"},
            "cache_config": {"block_size": 128, "gpu_memory_utilization": 0.4, "enable_prefix_caching": False,
                             "num_gpu_blocks": 11844, "kv_cache_size_tokens": 1516032},
            "parallel_config": {"pipeline_parallel_size": 1, "tensor_parallel_size": 1, "_api_process_count": 1,
                                "_api_process_rank": 0, "distributed_executor_backend": "mp"},
            "scheduler_config": {"runner_type": "generate", "max_num_batched_tokens": 2048, "max_num_seqs": 16,
                                 "enable_chunked_prefill": True, "async_scheduling": False, "stream_interval": 1},
            "device_config": {"device": "cpu"},
            "speculative_config": None,
            "compilation_config": {"mode": 2, "backend": "inductor", "cudagraph_mode": 0},
        },
        "vllm_env": {"VLLM_CPU_OMP_THREADS_BIND": "auto", "VLLM_USE_RUST_FRONTEND": False},
        "system_env": {"env_vars": "OMP_NUM_THREADS=1\nVLLM_SERVER_DEV_MODE=1\nVLLM_NO_USAGE_STATS=1\n"},
    }  # fmt: skip
    settings = read_vllm(info, "0.32.0")
    assert settings == {
        "engine": "vllm", "engine_version": "0.32.0", "precision": "fp32", "device": "cpu", "slots": "16",
        "max_length": "512", "prefill_chunk": "2048", "prefix_cache": "False", "eager": "False", "cuda_graphs": "none",
        "fronts": "1", "async_scheduling": "False", "stream_interval": "1", "generation_config": "vllm",
        "kv_cache_tokens": "1516032", "tensor_parallel": "1",
    }  # fmt: skip
    unbound = {**info, "vllm_env": {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}}
    assert read_vllm(unbound, None)["threads"] == "1"
    graphs = {**info["vllm_config"], "compilation_config": {"cudagraph_mode": [2, 1]}}
    assert read_vllm({"vllm_config": graphs}, None)["cuda_graphs"] == "full and piecewise"
    on_a_gpu = {
        **info["vllm_config"],
        "model_config": {"dtype": "torch.bfloat16"},
        "device_config": {"device_type": "cuda"},
        "speculative_config": {"method": "ngram"},
    }
    served = {"model": "language:tiny", "weights": "random weights (seed 0)"}
    told = {"precision": "bf16", "device": "cuda", "speculative": "ngram", **served}
    assert told.items() <= read_vllm({"vllm_config": on_a_gpu}, None, {**served, "precision": "bf16"}).items()
    assert read_vllm(None, "0.26.0") == {"engine": "vllm", "engine_version": "0.26.0"}
    assert read_vllm({"vllm_config": "text"}, None) == {"engine": "vllm"}


@NEEDS_VLLM
@pytest.mark.gpu
@pytest.mark.slow
def test_a_real_vllm_answers_with_the_best_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each token the logit is the largest, up to the precision's noise; a wrong one is several units below it. The
    first chunk has the prompt's ids, and the settings are read back. A CPU's vLLM is tested without a GPU."""
    device, precision, noise = ("cuda", "bf16", 0.25) if torch.cuda.is_available() else ("cpu", "fp32", 0.001)
    model = "language:demo"
    options = ("--model", model, "--slots", "8", "--max-length", "512", "--gpu-memory-utilization", "0.1")
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

            wait_until(ready, "ready", 400)
            prompt = [17, 5, 900, 33]
            body = {"model": "demo", "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
            body |= {"stream": True, "return_token_ids": True, "cache_salt": "salt"}
            body |= {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
            with client.stream("POST", "/v1/completions", json=body) as answer:
                lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
            chunks = [json.loads(line) for line in lines if line != "[DONE]"]
            choices = [choice for chunk in chunks for choice in chunk["choices"]]
            assert choices[0]["prompt_token_ids"] == prompt
            tokens = [token for choice in choices for token in choice["token_ids"]]
            assert (len(tokens), chunks[-1]["usage"]["completion_tokens"]) == (24, 24)
            module = build_module(language_model(model), device, precision).float()
            logits = module(torch.tensor([prompt + tokens], device=device)).logits[0, len(prompt) - 1 : -1].cpu()
            deficits = logits.max(dim=-1).values - logits[torch.arange(24), torch.tensor(tokens)]
            assert float(deficits.max()) < noise, deficits
            info = client.get("/server_info?config_format=json").json()
            settings = read_vllm(info, client.get("/version").json()["version"], plan["artefact"])
            assert (settings["precision"], settings["slots"], settings["max_length"]) == (precision, "8", "512")
            assert (settings["device"], settings["prefix_cache"], settings["fronts"]) == (device, "False", "1")
            assert settings["cuda_graphs"] == ("none" if device == "cpu" else "full and piecewise")
    finally:
        process.terminate()
        process.wait(60)
