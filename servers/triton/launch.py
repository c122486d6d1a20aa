"""From settings to a launch plan: checks this machine, lays out the repository, builds tritonserver's command line.

The plan starts the tritonserver binary itself, without a wrapper process, so that a cold start begins with the
creation of that process.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from servers.engines.processors import wait_policy
from servers.engines.settings import EngineError, EngineSettings
from servers.language.engine import GenerationSettings, generating_environment
from servers.language.module import DTYPES, TOKENIZER, served_folder
from servers.language.specification import LanguageModel, language_model
from servers.language.weights import pin_language_weights, weights_sha256
from servers.models.files import user_path
from servers.models.sources.triton_repository import CONFIG, read_config, step_folders
from servers.models.weights import WeightsSource
from servers.options.command_line import flag_of, is_chosen
from servers.options.defaults import ALL, OptionError, check_traces
from servers.options.launch import LaunchPlan, check_free, host_in_url, is_loopback
from servers.protocol.examples import generate_commands, in_path, infer_commands
from servers.triton.config import MODEL_PY, language_config, vllm_config
from servers.triton.installation import (
    CODE,
    Installation,
    current_interpreter,
    find_folder,
    libpython_remedy,
    missing_library,
    read_installation,
    takes_numpy_2,
)
from servers.triton.process import (
    CAUSES,
    MEBIBYTE,
    YOUNG_FOLDER_SECONDS,
    assert_space,
    new_prefix,
    region_bytes,
    remove_abandoned_regions,
    remove_folders,
)
from servers.triton.repository import (
    LIBRARIES,
    MODELS,
    PlacedModel,
    Serving,
    apply_tuning,
    assert_usable,
    backend_folder,
    lay_out,
    merge_config,
    plain_path,
    write_model,
)
from servers.triton.settings import TritonSettings
from servers.triton.wheel import find_wheel

STUB_TIMEOUT_SECONDS = 300
EXIT_TIMEOUT_SECONDS = 20
LANGUAGE_REGION_BYTES = 48 * MEBIBYTE
"""Shared memory for the prompts and responses of language models, and for the responses that are kept."""
VLLM_TAKES_TEXT = (
    "Triton's vLLM backend takes text and returns text, and abserve measures servers that take token ids; measure vLLM "
    "itself with the target vllm"
)
VLLM_MEMORY_SHARE = 0.4
"""Of the GPU's memory: what the vLLM backend takes, so that another server fits beside it."""
OF_ONNXRUNTIME = ("batch_multiple", "cudnn_conv_algo_search")
"""Options of Triton's own onnxruntime backend alone."""
OF_CONFIGS = ("instances", "batching", *OF_ONNXRUNTIME)
"""Options that the config of a generated model of tensors has."""
OF_TENSORS = (
    *("payloads", "mode", "max_batch_size", "max_queue_delay_us", "pad_to"),
    *("decode_threads", "max_image_pixels"),
)
"""Other options that only a model of tensors has."""
WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def find_installation(
    settings: TritonSettings, announce: Callable[[str], None] = lambda _message: None
) -> Installation:
    """The tritonserver to start: the one that is asked for or installed here, else the wheel's. Raises `TritonError`.
    May fetch the wheel's missing libpython, after a call of `announce`."""
    folder = find_folder(settings.tritonserver)
    return find_wheel(announce=announce) if folder is None else read_installation(folder, current_interpreter())


def choose_backend(settings: TritonSettings, installation: Installation, has_plan: Callable[[], bool]) -> str:
    """The backend to execute with; `has_plan` returns whether the model's TensorRT plan exists. Raises `OptionError`
    for one that the installation does not have."""
    offered = [name for name in ("tensorrt", "onnxruntime", "python") if name in installation.backends]
    asked: str = settings.backend
    if asked == "vllm":
        raise OptionError("--backend vllm generates tokens, and this model answers with tensors; use another --backend")
    if asked == "auto" and settings.engine not in ("auto", "onnxruntime"):
        asked = "python"
    if asked == "auto":
        usable = (name for name in offered if name != "tensorrt" or (settings.device != "cpu" and has_plan()))
        asked = next(usable, "python")
    _assert_offered(asked, offered, installation)
    if installation.runs_in_python(asked):
        assert_python(installation, f"the {asked} backend", "use another --backend")
    return asked


def _assert_offered(backend: str, offered: Sequence[str], installation: Installation) -> None:
    if backend not in offered:
        raise OptionError(
            f"--backend {backend}: the tritonserver of {installation.origin} does not have it; its backends: "
            f"{', '.join(installation.backends) or 'none'}"
        )


def assert_here(engine: str, environment: Path | None) -> None:
    """Raise `OptionError` for an engine of the python backend whose libraries another environment has."""
    if environment is not None:
        raise OptionError(
            f"Triton's python backend executes in this environment, and the libraries of the {engine} engine are in "
            "another one; use abserve serve native"
        )


def assert_python(installation: Installation, what: str, instead: str) -> None:
    """Raise `OptionError` where the python backend's process cannot run here: Triton would wait minutes for it.
    `instead` is what to do without it."""
    interpreter, stub, other = current_interpreter(), installation.stub, installation.stub_python
    if stub is None and other is None:
        raise OptionError(f"{what} needs the python backend, which {installation.origin} does not have; {instead}")
    if stub is None:
        raise OptionError(
            f"{what} needs Python {other}, for which {installation.origin} has the process of its python backend; this "
            f"is Python {interpreter.minor}: install abserve with Python {other}, or {instead}"
        )
    if missing := missing_library(stub, search_path(installation)):
        remedy = f"install the whole tritonserver with its lib, or {instead}"
        if missing.startswith(interpreter.libpython_name):
            remedy = libpython_remedy(interpreter)
        raise OptionError(
            f"{what} needs the python backend, whose process in {installation.origin} does not start: {missing}; "
            f"{remedy}"
        )


def search_path(installation: Installation) -> str:
    """The loader's path for the processes of an installation."""
    return _path(*installation.library_path, os.environ.get("LD_LIBRARY_PATH"))


def assert_ready(settings: TritonSettings) -> None:
    """Raise `OptionError` for anything that would keep the server from starting, before anything slow."""
    assert_free(
        settings.host,
        {"--http-port": settings.http_port, "--grpc-port": settings.grpc_port, "--metrics-port": settings.metrics_port},
    )
    assert_usable(settings.folder)


def assert_free(host: str, ports: Mapping[str, int]) -> None:
    """Raise `OptionError` for a port in use; tritonserver's own message names neither option nor remedy. `ports` maps
    an option, as in `--http-port`, to its port."""
    options: dict[int, str] = {}
    for option, port in ports.items():
        if port in options:
            raise OptionError(f"{options[port]} and {option} are both {port}; use two different ports")
        options[port] = option
        check_free(host, port, option)


def prepare(
    settings: TritonSettings,
    models: Sequence[PlacedModel],
    weights: WeightsSource,
    installation: Installation | None = None,
    backend: str = "python",
) -> LaunchPlan:
    """Prepare everything except the process. `weights` are pinned; without `installation` it is the wheel's. Each model
    gets its own process; the plan names the first model. Raises `TritonError`."""
    engine = _engine(settings, backend)
    assert_ready(settings)
    installation = installation or find_wheel()
    _clean_up()
    shared_bytes = max(region_bytes(model.specification, engine.max_batch_size) for model in models)
    serving = Serving(settings, engine, weights, backend)
    # Each process of the python backend has a region; in front of another backend there is at most one, which decodes.
    regions = len(models) * serving.instances * len(engine.device.split(","))
    if backend != "python":
        regions = sum(model.specification.decodes_to is not None for model in models)
    assert_space(shared_bytes * regions)
    lay_out(settings.folder, installation, models, serving)
    first, repository = models[0], settings.folder / MODELS
    if settings.merge_config:
        for executed in dict.fromkeys(serving.name(model.specification.executed) for model in models):
            merge_config(repository, executed, settings.merge_config)
    names = [serving.name(model.specification) for model in models]
    for name in names:
        _assert_name(name)
    tuning = apply_tuning(repository, names, settings.tuning, repository)
    executes = f"{engine.kind} {engine.precision}" if backend == "python" else engine.precision
    decodes = backend != "python" and first.specification.decodes_to is not None
    how = f"ensemble of the python and {backend} backends" if decodes else f"{backend} backend"
    more = [
        # No client may load, unload or replace a model; a model that fails to load ends the server.
        "--model-control-mode=none",
        # The generated config is complete. Completing it would start Python once more before the model's process.
        "--disable-auto-complete-config",
        # Pinned memory is for copies to a GPU; without one its allocation only fails with a warning.
        *(["--pinned-memory-pool-byte-size=0"] if engine.device == "cpu" else []),
        f"--backend-config=python,shm-default-byte-size={shared_bytes}",
    ]
    shared = _shared_fields(settings, installation, repository, more)
    shared["env"] |= wait_policy(engine.spinning)
    return LaunchPlan(
        **shared,
        model=names[0],
        title=f"{installation.title}, {how}, {executes}",
        max_batch_size=engine.max_batch_size,
        cannot_pad=first.specification.cannot_pad or does_not_pad(backend),
        artefact=dict(first.manifest) if first.manifest is not None else None,
        tuning=tuning,
        examples=infer_commands(shared["http_url"], names[0], first.specification.inputs),
    )


def prepare_repository(settings: TritonSettings, installation: Installation) -> LaunchPlan:
    """A launch of the user's own model repository, whose files stay as they are; only the model is loaded. Raises
    `TritonError`, and `UnknownModelError` for a config that cannot be read."""
    folder = settings.triton_repository
    assert folder is not None
    model = user_path(folder) / settings.model
    if not model.is_dir():
        raise OptionError(f"--triton-repository {folder} has no model {settings.model}; {_listed(folder)}")
    _assert_name(settings.model)
    for option in _changing(settings, "merge_config", *OF_CONFIGS):
        raise OptionError(f"{flag_of(option)} changes generated configs; edit the one in your own repository")
    assert_ready(settings)
    _clean_up()
    lay_out(settings.folder, installation)
    models = user_path(folder).absolute()
    served = models if settings.tuning == ALL else settings.folder / MODELS
    tuning = apply_tuning(models, [settings.model], settings.tuning, served)
    config = _config_in(model)
    backend = "" if config is None else config.backend or config.platform
    how = f"{backend} backend" if backend not in ("", "ensemble") else backend
    steps = list(step_folders(models, [settings.model]))
    for step in steps:
        _assert_step(installation, step, settings.model)
    # Only this model and those that it names; other folders of the repository may not even load here.
    more = ["--model-control-mode=explicit", f"--load-model={settings.model}"]
    return LaunchPlan(
        **_shared_fields(settings, installation, served, more),
        model=settings.model,
        title=", ".join(filter(None, (installation.title, how, f"your {settings.model}"))),
        max_batch_size=None if config is None else max(1, config.max_batch_size),
        tuning=tuning,
        cannot_pad="your model repository is served unchanged",
        cannot_measure=next(filter(None, map(_cannot_measure, steps)), None),
    )


def language_backend(settings: TritonSettings, installation: Installation) -> str:
    """The backend that generates tokens. Raises `OptionError` for one that cannot, and for options without effect."""
    backend = "python" if settings.backend == "auto" else settings.backend
    for option in _changing(settings, *OF_TENSORS, *OF_CONFIGS):
        raise OptionError(f"{flag_of(option)} has no effect on a language model, whose engine batches tokens itself")
    if backend not in ("python", "vllm"):
        raise OptionError(f"--backend {backend} generates no tokens; use python, or vllm where it is installed")
    _assert_offered(backend, installation.backends, installation)
    assert_python(installation, f"the {backend} backend", "use a server of NVIDIA's images for this Python")
    return backend


def prepare_language(
    settings: TritonSettings, installation: Installation, announce: Callable[[str], None] = lambda _message: None
) -> LaunchPlan:
    """A launch of a language model: one of abserve's engines behind the python backend, or Triton's vLLM backend.
    Raises `OptionError`, `TritonError`, `EngineError`, and `UnknownModelError` and `WeightsError` for the model."""
    backend = language_backend(settings, installation)
    assert_ready(settings)
    model = language_model(settings.model, settings.weights)
    model = replace(model, weights=pin_language_weights(model.weights, model.fields))
    settings.check_length(model)
    generation = settings.resolved_generation()
    if backend == "python":
        assert_here(generation.engine, generating_environment(generation.engine))
    lay_out(settings.folder, installation)
    _clean_up()
    assert_space(LANGUAGE_REGION_BYTES)
    if backend == "python":
        config = language_config(model.name, generation.device, generation_parameters(model, generation))
        private = {
            "model": model.reference,
            "weights": model.weights.text,
            "settings": asdict(generation),
            "queue_size": settings.queue_size,
        }
        files = {
            "model.py": MODEL_PY.format("servers.triton.language_model", "GeneratingModel"),
            "engine.json": json.dumps(private),
        }
    else:
        folder = served_folder(model, generation.precision, generation.device, settings.artefacts, announce)
        config = vllm_config(model.name, generation.device)
        files = {"model.json": json.dumps(vllm_arguments(generation, folder))}
    repository = settings.folder / MODELS
    write_model(repository / model.name, config, files)
    if settings.merge_config:
        merge_config(repository, model.name, settings.merge_config)
    tuning = apply_tuning(repository, [model.name], settings.tuning, repository)
    how = f"{generation.engine} {generation.precision}" if backend == "python" else generation.precision
    more = [
        "--model-control-mode=none",
        # Triton's vLLM backend adds its optional inputs and outputs to the config itself.
        *(["--disable-auto-complete-config"] if backend == "python" else []),
        *(["--pinned-memory-pool-byte-size=0"] if generation.device == "cpu" else []),
        f"--backend-config=python,shm-default-byte-size={LANGUAGE_REGION_BYTES}",
    ]
    shared = _shared_fields(settings, installation, repository, more)
    if generation.device == "cpu":
        # A step is short: threads that spin between its operators take the cores of tritonserver and the clients.
        shared["env"] |= wait_policy(settings.spinning == "on")
    return LaunchPlan(
        **shared,
        model=model.name,
        title=f"{installation.title}, {backend} backend, {how}",
        max_batch_size=None,
        tuning=tuning,
        cannot_pad="a language model's engine batches tokens",
        cannot_measure=None if backend == "python" else VLLM_TAKES_TEXT,
        examples=generate_commands(shared["http_url"], model.name) if backend == "python" else (),
    )


def generation_parameters(model: LanguageModel, generation: GenerationSettings) -> dict[str, str]:
    """The settings of a language model's engine as parameters of its config; what is left to the engine is missing."""
    chosen = {name: getattr(generation, name) for name in ("slots", "max_length", "prefill_chunk")}
    return {
        "engine": generation.engine,
        "precision": generation.precision,
        "device": generation.device,
        **({"threads": str(generation.threads)} if generation.device == "cpu" else {}),
        "weights": model.weights.label,
        "weights_sha256": weights_sha256(model.weights, model.fields),
        "model": model.label,
        **{name: str(value) for name, value in chosen.items() if value},
    }


def vllm_arguments(generation: GenerationSettings, folder: Path) -> dict[str, object]:
    """The content of model.json: arguments of vLLM's engine, alike in what `abserve serve vllm` sets."""
    limits = {"max_model_len": generation.max_length, "max_num_seqs": generation.slots}
    return {
        "model": str(folder),
        **({"tokenizer": str(folder / TOKENIZER)} if (folder / TOKENIZER).is_dir() else {}),
        "dtype": DTYPES[generation.precision],
        "seed": 0,
        "generation_config": "vllm",
        "enable_prefix_caching": False,
        "gpu_memory_utilization": VLLM_MEMORY_SHARE,
        **{name: value for name, value in limits.items() if value},
    }


def _changing(settings: TritonSettings, *names: str) -> list[str]:
    """Those of the options that change something; one instance is what there is without the option."""
    return [name for name in names if is_chosen(settings, name) and (name != "instances" or settings.instances != 1)]


def assert_applies(settings: TritonSettings, backend: str, engine: EngineSettings) -> None:
    """Raise `OptionError` for an option of batching that has no effect on a model of tensors."""
    settings.check_for_tensors()
    changing = _changing(settings, "batching", *OF_ONNXRUNTIME)
    for option in OF_ONNXRUNTIME:
        if option in changing and backend != "onnxruntime":
            raise OptionError(f"{flag_of(option)} is of the onnxruntime backend, and not of {backend}; leave it out")
    if "cudnn_conv_algo_search" in changing and engine.device == "cpu":
        raise OptionError("--cudnn-conv-algo-search has no effect on a CPU; leave it out")
    if settings.batch_multiple > engine.max_batch_size:
        raise OptionError(
            f"--batch-multiple {settings.batch_multiple} is more than the largest batch, {engine.max_batch_size}; give "
            "a smaller one, or a larger --max-batch-size"
        )
    if "batching" in changing and settings.queue_size:
        raise OptionError("--queue-size has no effect with --batching none; leave one of them out")


def does_not_pad(backend: str) -> str | None:
    """Why a backend cannot pad batches, as a clause; None for the python backend, whose engine does it."""
    return None if backend == "python" else f"Triton's {backend} backend does not pad"


def prepare_trial(settings: TritonSettings, installation: Installation, models: Path) -> LaunchPlan:
    """A launch of all models in a folder; it goes on when one does not load. Raises `TritonError`."""
    lay_out(settings.folder, installation)
    more = ["--model-control-mode=none", "--disable-auto-complete-config"]
    shared = _shared_fields(settings, installation, models, more, exit_on_error="false")
    return LaunchPlan(**shared, model="", title=installation.title, max_batch_size=None)


def _config_in(folder: Path) -> Any:
    """The ModelConfig of a model's folder; None without a config.pbtxt."""
    return read_config(folder) if (folder / CONFIG).is_file() else None


def _cannot_measure(folder: Path) -> str | None:
    """Why the load generator cannot send load to a model, as a sentence; None if it can."""
    config = _config_in(folder)
    if config is None:
        return None
    if config.model_transaction_policy.decoupled:
        return (
            f"{folder.name} is decoupled (model_transaction_policy in its {CONFIG}), and abserve measures models with "
            "one answer per request"
        )
    if config.HasField("sequence_batching"):
        return f"{folder.name} is stateful (sequence_batching in its {CONFIG}), and abserve sends no correlation ids"
    return None


def _assert_name(model: str) -> None:
    """Raise `OptionError` for a name that no URL can hold as it is: Triton does not decode percent-encoding."""
    if in_path(model) != model:
        raise OptionError(
            f"tritonserver does not decode names in URLs, so no HTTP client reaches a model called {model!r}; rename "
            "its folder, with letters and digits of ASCII and . _ - alone"
        )


def _assert_step(installation: Installation, folder: Path, model: str) -> None:
    """Raise `OptionError` for a model of the python backend that cannot load here."""
    config = _config_in(folder)
    file = (config and config.default_model_filename) or CODE
    has_code = any(folder.glob(f"*/{file}"))
    backend = (config and (config.backend or config.platform)) or ("python" if has_code else "")
    if not installation.runs_in_python(backend):
        return
    what = f"model {folder.name}" if folder.name == model else f"{folder.name}, a step of model {model},"
    assert_python(installation, what, "serve a model without Python code")
    if backend != "python":
        return
    if not has_code:
        raise OptionError(f"{what} has no {file} in its version folder {folder}/1, which the python backend runs")
    _assert_numpy(installation, folder)


def _assert_numpy(installation: Installation, model: Path) -> None:
    """Raise `OptionError` where a user's Python model would answer with empty tensors."""
    assert installation.stub is not None
    if int(version("numpy").partition(".")[0]) < 2 or takes_numpy_2(installation.stub):
        return
    for file in sorted(model.rglob("*.py")):
        if re.search(rb"\.as_numpy\(|\bTensor\(", file.read_bytes()):
            raise OptionError(
                f"{file} uses as_numpy or pb_utils.Tensor(…), with which the python backend of {installation.origin} "
                "returns empty tensors with NumPy 2; run pip install 'numpy<2', or use to_dlpack and "
                "Tensor.from_dlpack there"
            )


def _engine(settings: TritonSettings, backend: str) -> EngineSettings:
    try:
        engine = settings.resolved_engine(backend)
        engine.on_first().check_here()
    except EngineError as exc:
        raise OptionError(str(exc)) from exc
    return engine


def _clean_up() -> None:
    """Remove what killed servers have left behind."""
    remove_abandoned_regions()
    remove_folders(0, time.time() - YOUNG_FOLDER_SECONDS)


def _listed(folder: Path) -> str:
    names = sorted(path.name for path in user_path(folder).glob("*") if path.is_dir())
    return f"its models: {', '.join(names)}" if names else "it has no folders at all"


def _trace_options(settings: TritonSettings) -> list[str]:
    """Triton's own spans, which its native backends and the python one have alike. Raises `OptionError`."""
    check_traces(settings.traces)
    if not settings.traces:
        return []
    rate = round(1 / settings.trace_share) if settings.trace_share else 0  # 0: only what a client traces
    config = ("mode=opentelemetry", f"rate={rate}", "level=TIMESTAMPS", f"opentelemetry,url={settings.traces}")
    return [f"--trace-config={option}" for option in config]


def _tls_options(settings: TritonSettings) -> list[str]:
    """TLS of gRPC; tritonserver's HTTP has none."""
    if settings.tls_certificate is None:
        return []
    file = plain_path(settings.tls_certificate)
    return ["--grpc-use-ssl=true", f"--grpc-server-cert={file}", f"--grpc-server-key={file}"]


def _shared_fields(
    settings: TritonSettings,
    installation: Installation,
    models: Path,
    more: Sequence[str],
    exit_on_error: str = "true",
) -> dict[str, Any]:
    """What every plan has: tritonserver's command with `more` arguments, its environment and its addresses.
    tritonserver keeps its default for everything that is not named."""
    address = _address(settings.host)
    host, prefix = host_in_url(WILDCARDS.get(address, address)), "ipv6:" if ":" in address else ""
    argv = (
        str(installation.binary),
        f"--model-repository={plain_path(models)}",
        f"--backend-directory={plain_path(backend_folder(settings.folder, installation))}",
        # Of an IPv6 address HTTP wants the family, and reads it as IPv4 without; gRPC wants brackets.
        f"--http-address={prefix}{address}",
        f"--grpc-address={host_in_url(address)}",
        f"--metrics-address={prefix}{address}",
        f"--http-port={settings.http_port}",
        f"--grpc-port={settings.grpc_port}",
        f"--metrics-port={settings.metrics_port}",
        f"--exit-on-error={exit_on_error}",
        # The sampler of `abserve compare` reads the GPU for both arms; a second reader would cost one arm.
        "--allow-gpu-metrics=false",
        "--allow-cpu-metrics=false",
        f"--exit-timeout-secs={EXIT_TIMEOUT_SECONDS}",
        "--log-format=ISO8601",
        f"--backend-config=python,shm-region-prefix-name={new_prefix()}",
        # Includes loading and warming up every batch size; Triton's 30 s are too short for a large model on few cores.
        f"--backend-config=python,stub-timeout-seconds={STUB_TIMEOUT_SECONDS}",
        *_client_shm(installation.version, address),
        *_trace_options(settings),
        *_tls_options(settings),
        *more,
    )
    # The stub embeds Python: it finds its environment by the `python3` on PATH, and libpython by the loader.
    environment = {
        "LD_LIBRARY_PATH": _path(
            installation.libraries, settings.folder / LIBRARIES, os.environ.get("LD_LIBRARY_PATH")
        ),
        "PATH": _path(Path(sys.executable).parent, os.environ.get("PATH")),
        "PYTHONUNBUFFERED": "1",  # the last output of a dying model explains its death
    }
    return {
        "argv": argv,
        "env": environment,
        "http_url": f"http://{host}:{settings.http_port}",
        "grpc_address": f"{'' if settings.tls_certificate is None else 'grpcs://'}{host}:{settings.grpc_port}",
        "metrics_url": f"http://{host}:{settings.metrics_port}/metrics",
        "causes": CAUSES,
    }


def _client_shm(release: str, address: str) -> tuple[str, ...]:
    """Lets clients of this machine register shared memory, as older releases always do: 2.68 has switched it off."""
    if not release or tuple(map(int, release.split("."))) < (2, 68) or not is_loopback(address):
        return ()
    return ("--allow-client-shm=true",)


def _path(*parts: Path | str | None) -> str:
    """A search path; folders named first, such as this project's, come before the user's."""
    return os.pathsep.join(str(part) for part in parts if part)


def _address(host: str) -> str:
    """A numeric address, IPv4 if there is one: Triton does not resolve names."""
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return str(min(addresses, key=lambda entry: entry[0] != socket.AF_INET)[4][0])
    except OSError as exc:
        raise OptionError(f"--host {host} cannot be resolved; use an address such as 127.0.0.1") from exc
