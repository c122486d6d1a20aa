"""`abserve serve vllm`: writes the model's folder if vLLM needs one, then becomes `vllm serve` or prints its plan.

Three settings differ from vLLM's defaults for a fair comparison: no prefix cache, which would answer a repeated prompt
without computing it, no sampling defaults of the model's generation_config.json, and no line in the log per request,
which abserve's servers do not write either. VLLM_SERVER_DEV_MODE adds the route /server_info, from which a comparison
reads the settings in effect. Other routes of that mode can stop the server, so only trusted clients may reach it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

import typer

from servers.commands.serving import PrintLaunch, PrintSpace, serve
from servers.commands.spaces import language_context
from servers.engines.processors import cuda_index
from servers.engines.settings import resolved_device
from servers.language.engine import GenerationSettings, generation_precision
from servers.language.module import DTYPES, TOKENIZER, served_folder
from servers.language.specification import LanguageModel, language_model
from servers.language.weights import pin_language_weights, weights_sha256
from servers.models.files import user_path
from servers.native.shared.tls import Certificate
from servers.options.command_line import checked, given_options, takes_settings
from servers.options.defaults import OptionError, usable_cores
from servers.options.launch import LaunchPlan, bind, check_exposure, host_in_url
from servers.options.libraries import installed_version
from servers.options.search import space_json
from servers.protocol.examples import completion_commands
from servers.vllm.settings import VllmSettings

INSTALL = "pip install vllm==0.26.0"
PYTHON_SECONDS = 60.0
LOOPBACK = "127.0.0.1"
CAUSES = (
    r"(?P<cause>Free memory on device .+)$",
    r"^(?!.*\bWARNING\b).*\b[A-Z]\w*Error: (?P<cause>.+)$",
    r"^.*error: (?P<cause>(?:argument|unrecognized) .+)$",
)
"""How vLLM's log says why it ended."""


@takes_settings(VllmSettings)
def serve_vllm(
    context: typer.Context, print_launch: PrintLaunch = False, print_space: PrintSpace = False, **options: object
) -> None:
    """Serve a language model with vLLM, which must be installed; it speaks OpenAI's protocol."""
    settings = checked(VllmSettings, options)
    serve(
        lambda: launch_plan(settings, lambda step: typer.echo(step, err=True)),
        lambda: _space(settings, given_options(context, options)),
        print_launch=print_launch,
        print_space=print_space,
    )


def _resolved(settings: VllmSettings) -> tuple[LanguageModel, str, str]:
    """The model, the device and the precision. Raises for options that are wrong."""
    model = language_model(settings.model, settings.weights)
    GenerationSettings(precision=settings.precision).check()
    device = resolved_device(settings.device)
    settings.check_length(model)
    return model, device, generation_precision(settings.precision, device)


def _space(settings: VllmSettings, given: Collection[str]) -> bytes:
    """What can be tuned, as `--print-space` prints it. Raises as `launch_plan` does; ports do not matter."""
    _, device, precision = _resolved(settings)
    find_vllm(settings.python)
    here = language_context(GenerationSettings("vllm", device, precision), usable_cores())
    in_effect = {"precision": precision, "fronts": settings.fronts or 1}
    not_searched = ["gpu-memory-utilization: other servers need the rest of the memory"]
    return space_json("vllm", settings, here, in_effect, given, not_searched)


def launch_plan(settings: VllmSettings, announce: Callable[[str], None]) -> LaunchPlan:
    """How to start vLLM, after everything that can be checked before: the options, the port, the installation."""
    model, device, precision = _resolved(settings)
    model = replace(model, weights=pin_language_weights(model.weights, model.fields))
    check_exposure(settings.host, anyone=settings.anyone)
    Certificate.check(settings.tls_certificate)
    scheme = "http" if settings.tls_certificate is None else "https"
    bind(settings.host, settings.http_port).close()
    python, release = find_vllm(settings.python)
    folder = served_folder(model, precision, device, settings.artefacts, announce)
    environment = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_HOST_IP": LOOPBACK,  # else its processes look for the machine's address and speak to each other over it
    }
    if device == "cpu" and settings.threads:
        # vLLM otherwise binds its threads to cores that it chooses, and then ignores their number. Threads that are not
        # bound must not spin beside other programs, whose processors they would take.
        environment |= {
            "OMP_NUM_THREADS": str(settings.threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
    return LaunchPlan(
        argv=(
            python,
            "-P",
            "-m",
            "vllm.entrypoints.cli.main",
            "serve",
            *arguments(settings, model, folder, precision, device),
        ),
        env=environment,
        http_url=(url := f"{scheme}://{host_in_url(settings.host)}:{settings.http_port}"),
        grpc_address=None,
        metrics_url=f"{url}/metrics",
        model=model.name,
        title=f"vLLM {release} {precision}",
        max_batch_size=None,
        cannot_pad="vLLM batches tokens",
        examples=completion_commands(url, model.name),
        artefact={
            "model": model.label,
            "weights": model.weights.label,
            "weights_sha256": weights_sha256(model.weights, model.fields),
            "precision": precision,
        },
        causes=CAUSES,
    )


def arguments(
    settings: VllmSettings, model: LanguageModel, folder: Path, precision: str, device: str
) -> tuple[str, ...]:
    """The arguments of `vllm serve`, as vLLM 0.26 names them."""
    index = cuda_index(device)
    return (
        str(folder),
        *(("--tokenizer", str(folder / TOKENIZER)) if (folder / TOKENIZER).is_dir() else ()),
        *("--host", settings.host),
        *("--port", str(settings.http_port)),
        *("--served-model-name", model.name),
        *("--dtype", DTYPES[precision]),
        *("--seed", "0"),
        "--disable-uvicorn-access-log",
        *(("--api-server-count", str(settings.fronts)) if settings.fronts else ()),
        *("--generation-config", "vllm"),
        "--no-enable-prefix-caching",
        *(() if settings.graphs else ("--enforce-eager",)),
        *(("--max-model-len", str(settings.max_length)) if settings.max_length else ()),
        *(("--max-num-seqs", str(settings.slots)) if settings.slots else ()),
        *(("--max-num-batched-tokens", str(settings.prefill_chunk)) if settings.prefill_chunk else ()),
        *(("--ssl-certfile", pem, "--ssl-keyfile", pem) if (pem := str(settings.tls_certificate or "")) else ()),
        *("--gpu-memory-utilization", str(settings.gpu_memory_utilization)),  # on a CPU of the machine's memory
        *(("--device-ids", str(index)) if index is not None else ()),
    )


def find_vllm(python: Path | None) -> tuple[str, str]:
    """The interpreter that has vLLM, and vLLM's version. Raises `OptionError` if it is not installed there."""
    if python is None:
        running = sys.executable
        if installed := installed_version("vllm"):
            return running, installed
        raise OptionError(
            f"vLLM is not installed; run {INSTALL}, or name the Python of an environment that has it with --python"
        )
    # Not resolved: the interpreter of a virtual environment is a link, and its place names the environment.
    program = "from importlib.metadata import version; print(version('vllm'))"
    command = [str(user_path(python).absolute()), "-P", "-c", program]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PYTHON_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise OptionError(
            f"--python {python} does not run ({exc}); give the python of an environment with vLLM"
        ) from exc
    if done.returncode != 0:
        raise OptionError(f"--python {python} has no vLLM; run {python} -m {INSTALL}")
    return command[0], done.stdout.strip()
