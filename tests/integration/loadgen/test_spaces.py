"""The spaces that the real servers declare: every value of each passes the server's own check of a launch.

A sample of contenders in which each value of each setting occurs is planned with `--print-launch`, in this process,
since a new one takes seconds to import the servers.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from loadgen.experiment.plan import PlanError
from loadgen.launch.embedded import to_arguments
from loadgen.records.tuning import Space
from loadgen.tune.declared import read_spaces
from loadgen.tune.space import every_contender, for_load, narrowed, size
from servers.commands.native import space as native_space
from servers.commands.serve import serve
from servers.models.registry import DEFAULT_MODEL
from tests.integration.native.conftest import free_port

DEFAULT, TEXT, LANGUAGE = DEFAULT_MODEL, "transformers:distilbert-base-uncased", "language:demo"
SMALLEST, LARGEST = 20, 700
"""Contenders of a space: fewer need no search, and more cannot be told apart in half an hour."""


def sample(space: Space) -> Iterator[Mapping[str, str]]:
    """Contenders in which every value occurs, few of them."""
    missing = {(setting.name, value) for setting in space.settings for value in setting.values}
    defaults = {setting.name: setting.default for setting in space.settings}
    contenders = list(every_contender(space))
    while missing:
        best = max(contenders, key=lambda contender: len({*contender.items()} & missing))
        new = {*(defaults | best).items()} & missing
        if not new:
            return
        missing -= new
        yield best


def port_options(target: str) -> Iterable[str]:
    for name in ("http", "grpc", "metrics")[: {"native": 2, "triton": 3}.get(target, 1)]:
        yield f"--{name}-port={free_port()}"


def plan(target: str, options: Mapping[str, str], folder: Path) -> tuple[int, str]:
    """The exit status of `abserve serve TARGET … --print-launch`, and what it printed."""
    work = [f"--work-dir={folder}"] if target == "triton" else []
    arguments = [target, *to_arguments(options), *port_options(target), *work, "--print-launch"]
    result = CliRunner().invoke(serve, arguments, catch_exceptions=False)
    return result.exit_code, result.output


def check_sample(space: Space, folder: Path, more: Mapping[str, str]) -> None:
    chosen = list(sample(space))
    assert {value for contender in chosen for value in contender.values()}
    refused = {
        str(contender): output
        for contender in chosen
        for status, output in [plan(space.target, {**more, **space.fixed, **contender}, folder)]
        if status != 0
    }
    assert refused == {}
    for setting in space.settings:
        assert setting.default in setting.values
        assert not setting.ordered or [*setting.values] == sorted(setting.values, key=int)


def test_language_models_with_native_and_triton(tmp_path: Path) -> None:
    targets = ("native", "triton")
    options = {target: {"model": LANGUAGE, "device": "cpu"} for target in targets}
    for space in read_spaces(targets, options, outstanding=16):
        names = {setting.name for setting in space.settings}
        assert {"slots", "prefill-chunk", "engine"} <= names
        assert "max-batch-size" not in names
        assert SMALLEST <= size(space) <= LARGEST
        check_sample(space, tmp_path, {"model": LANGUAGE, "device": "cpu"})


def test_the_default_model_with_torch(tmp_path: Path) -> None:
    targets = ("native", "triton")
    options = {target: {"device": "cpu"} for target in targets}
    fix = {"native.engine": "torch", "triton.engine": "torch"}
    spaces = read_spaces(targets, options, tune={"precision": ["fp32"]}, fix=fix, outstanding=16)
    assert [space.fixed["engine"] for space in spaces] == ["torch", "torch"]
    for space in spaces:
        names = {setting.name for setting in space.settings}
        assert {"max-batch-size", "max-queue-delay-us", "mode"} <= names
        check_sample(space, tmp_path, {"device": "cpu"})


@pytest.mark.slow
def test_the_default_model_with_every_engine(tmp_path: Path, artefact_dir: Path) -> None:
    targets = ("native", "triton", "fastapi", "litserve")
    options = {target: {"device": "cpu"} for target in targets}
    for space in read_spaces(targets, options, outstanding=16):
        assert SMALLEST <= size(space) <= LARGEST
        artefacts = {"artefacts": str(artefact_dir)} if space.target in ("native", "triton") else {}
        check_sample(space, tmp_path, {"device": "cpu", **artefacts})


@pytest.mark.parametrize(
    ("target", "options", "words"),
    [
        ("native", {"model": "openclip_vit_b23"}, ("unknown model", "openclip_vit_b32")),
        ("native", {"engine": "tensorrrt"}, ("--engine tensorrrt", "tensorrt")),
        ("triton", {"backend": "vllm"}, ("--backend vllm",)),
        ("litserve", {"model": LANGUAGE}, ("serves no language models",)),
        ("vllm", {"model": DEFAULT}, ("unknown language model",)),
        ("native", {"colour": "red"}, ("--colour",)),
        ("native", {"threads": "-1"}, ("--threads -1",)),
    ],
)
def test_what_the_server_refuses_is_its_sentence(target: str, options: dict[str, str], words: tuple[str, ...]) -> None:
    with pytest.raises(PlanError) as error:
        read_spaces((target,), {target: options})
    message = str(error.value)
    assert message.startswith(f"abserve serve {target} cannot start: ")
    assert all(word in message for word in words), message


def test_printing_a_space_needs_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        options = [f"--http-port={listener.getsockname()[1]}", "--grpc-port=0", "--device=cpu"]
        assert CliRunner().invoke(serve, ["native", *options, "--print-launch"]).exit_code == 2
        monkeypatch.setenv("ABSERVE_NATIVE_THREADS", "1")
        printed = CliRunner().invoke(serve, ["native", *options, "--print-space"])
    space = msgspec.json.decode(printed.stdout, type=Space)
    # The engine is what `auto` stands for; the threads are set by a variable, as by an option.
    assert space.fixed == {"engine": "torch", "threads": "1"}


@pytest.mark.parametrize("model", [DEFAULT, TEXT, LANGUAGE])
@pytest.mark.parametrize(("gpu", "cores"), [(False, 2), (False, 8), (False, 64), (True, 4), (True, 64)])
def test_the_size_of_the_space_on_other_machines(
    model: str, gpu: bool, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = {"torch", "onnxruntime", "openvino", "tensorrt", "transformers"}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(cores)))
    monkeypatch.setattr("servers.engines.settings.nvidia_device_present", lambda: gpu)
    monkeypatch.setattr("servers.engines.factory.find_spec", lambda name: name in installed or None)
    space = msgspec.json.decode(native_space({"model": model}, ()), type=Space)
    (searched,) = narrowed([for_load(space, 16)], {}, {})
    assert SMALLEST <= size(searched) <= LARGEST
    names = {setting.name for setting in searched.settings}
    assert ("threads" in names) is not gpu
    assert ("pad-to" in names) is (model == TEXT)
    engines = next(setting.values for setting in searched.settings if setting.name == "engine")
    assert ("tensorrt" in engines) is (gpu and model != LANGUAGE)
