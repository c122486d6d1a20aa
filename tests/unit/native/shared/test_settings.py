"""Settings survive the way to a child process, and the command offers each of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import ValidationError

from servers.commands.native import serve_native
from servers.models.registry import DEFAULT_MODEL, get_specification
from servers.native.shared.recording import check_recording
from servers.native.shared.settings import NativeSettings
from servers.options.command_line import from_argument, to_argument, validation_sentence
from servers.options.defaults import OptionError


def test_the_argument_brings_back_the_same_settings(monkeypatch):
    settings = NativeSettings(http_port=1234, engine="null", artefact=Path("/x/model.onnx"), added_delay_ms=2.5)
    monkeypatch.setenv("ABSERVE_NATIVE_HTTP_PORT", "4321")
    assert from_argument(NativeSettings, [to_argument(settings)]) == settings
    assert from_argument(NativeSettings, []).http_port == 4321


def test_an_argument_that_is_not_a_json_object_is_one_sentence() -> None:
    for argument in ("--http-port", "[]"):
        with pytest.raises(ValidationError) as caught:
            from_argument(NativeSettings, [argument])
        assert validation_sentence(caught.value).startswith(f"settings {argument}: ")


def test_every_field_is_an_option_with_its_help_variable_and_default():
    app = typer.Typer()
    app.command()(serve_native)
    options: dict[str | None, Any] = {option.name: option for option in typer.main.get_command(app).params}
    for name, field in NativeSettings.model_fields.items():
        assert field.description, name
        if name in ("artefact", "artefact_uint8"):  # the command finds them itself
            assert name not in options
            continue
        option = options[name]
        assert (option.envvar, option.help) == (f"ABSERVE_NATIVE_{name.upper()}", field.description)
        assert option.opts == [f"--{name.replace('_', '-')}"]
        assert option.default == (None if name == "max_batch_size" else field.default)  # None: the model's


def test_the_stack_leaves_a_setting_at_the_servers_own_default():
    """docker-compose.yml cannot import it."""
    text = (Path(__file__).resolve().parents[4] / "docker-compose.yml").read_text()
    defaults = re.findall(r"ABSERVE_NATIVE_(\w+): \$\{\w+:-(.*)\}", text)
    assert dict(defaults)["MAX_QUEUE_DELAY_US"]
    for name, default in defaults:
        assert str(NativeSettings.model_fields[name.lower()].default) == default, name


def test_a_contradiction_is_one_sentence_with_the_option():
    with pytest.raises(ValidationError) as caught:
        NativeSettings(queue_size=0)
    assert validation_sentence(caught.value) == "--queue-size 0: must be greater than or equal to 1"


@pytest.mark.parametrize(("name", "value"), [("queue_timeout_us", 3_600_000_001), ("shutdown_timeout_s", "inf")])
def test_times_that_no_request_and_no_timer_takes_are_refused_at_the_start(name, value):
    with pytest.raises(ValidationError, match="less than or equal to 3600"):
        NativeSettings(**{name: value})


@pytest.mark.parametrize(("spinning", "spins"), [("auto", None), ("off", False), ("on", True)])
def test_spinning_reaches_the_engine(spinning, spins):
    assert NativeSettings(engine="onnxruntime", device="cpu", spinning=spinning).engine_settings().spinning is spins


def test_http_and_grpc_need_different_ports():
    with pytest.raises(ValidationError) as caught:
        NativeSettings(http_port=1234, grpc_port=1234)
    sentence = "--grpc-port 1234: HTTP and gRPC need different ports, and this is --http-port"
    assert validation_sentence(caught.value) == sentence


@pytest.mark.parametrize(
    "device", ["cuda:0,cuda:0", "cuda,cuda:0", "cuda:0,cpu", "auto,cpu", "cuda:0,", "cuda:0, cuda:1", "gpu,cuda:1"]
)
def test_a_list_of_devices_has_different_gpus_or_the_cpu_several_times(device):
    with pytest.raises(ValidationError) as caught:
        NativeSettings(device=device)
    sentence = f"--device {device}: list different GPUs, such as cuda:0,cuda:1, or cpu several times"
    assert validation_sentence(caught.value) == sentence


def test_each_engine_process_has_its_device_and_its_share():
    settings = NativeSettings(device="cuda:1,cuda:0,cuda:2", queue_size=512, threads=5)
    assert [(engine.device, engine.queue_size, engine.threads) for engine in settings.of_engines()] == [
        ("cuda:1", 171, 5),
        ("cuda:0", 171, 5),
        ("cuda:2", 171, 5),
    ]
    assert from_argument(NativeSettings, [to_argument(settings)]) == settings
    settings = NativeSettings(device="cuda:1")
    assert settings.of_engines() == [settings]


@pytest.mark.parametrize(("cores", "each"), [(5, 2), (1, 1)])
def test_engine_processes_on_the_cpu_divide_its_cores(monkeypatch, cores, each):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(cores))
    assert [engine.threads for engine in NativeSettings(device="cpu,cpu").of_engines()] == [each, each]


def test_several_engine_processes_need_a_front_end(monkeypatch):
    with pytest.raises(ValidationError) as caught:
        NativeSettings(device="cpu,cpu", fronts=0)
    assert validation_sentence(caught.value) == (
        "--fronts 0: one process has one engine; with several devices use --fronts 1 or more"
    )
    specification = get_specification(DEFAULT_MODEL)
    for device, cores, fronts in (
        ("cpu", 16, 0),
        ("cpu,cpu", 16, 1),
        ("cuda:0", 16, 8),
        ("cuda:0", 2, 0),
        ("cuda:0,cuda:1", 8, 5),
        ("cuda:0,cuda:1", 2, 1),
        ("cuda:0,cuda:1", 64, 16),
    ):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: range(cores))
        assert NativeSettings(device=device).resolved(specification).fronts == fronts, (device, cores)


def test_busy_polling_needs_front_ends_in_their_own_processes():
    specification = get_specification(DEFAULT_MODEL)
    with pytest.raises(OptionError, match="add --fronts 1"):
        NativeSettings(device="cpu", busy_poll_us=1000).resolved(specification)
    assert NativeSettings(device="cpu", busy_poll_us=1000, fronts=1).resolved(specification).busy_poll_us == 1000


def test_a_recording_needs_a_folder_of_its_own_that_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "used" / "requests").mkdir(parents=True)
    (tmp_path / "file").touch()
    for given, problem in (
        ({"record": tmp_path / "used"}, "another folder"),
        ({"record": tmp_path / "file" / "traffic"}, "another folder"),
        ({"record_share": 0.5}, "add --record FOLDER"),
    ):
        with pytest.raises(OptionError, match=problem):
            check_recording(NativeSettings(**given))
    check_recording(NativeSettings(record=tmp_path / "new" / "traffic", record_answers=True))
    check_recording(NativeSettings())
