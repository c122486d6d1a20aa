"""Settings survive the way through a command line, and the command offers each of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import ValidationError

from servers.native.command import serve_native
from servers.native.settings import NativeSettings, from_argv, to_argv
from servers.options import validation_sentence


def test_arguments_bring_back_the_same_settings(monkeypatch):
    settings = NativeSettings(http_port=1234, engine="null", artefact=Path("/x/model.onnx"), added_delay_ms=2.5)
    monkeypatch.setenv("ABSERVE_NATIVE_HTTP_PORT", "4321")
    assert from_argv(to_argv(settings)) == settings
    assert from_argv([]).http_port == 4321


def test_every_field_is_an_option_with_its_help_variable_and_default():
    app = typer.Typer()
    app.command()(serve_native)
    options: dict[str | None, Any] = {one.name: one for one in typer.main.get_command(app).params}
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
    text = (Path(__file__).resolve().parents[3] / "docker-compose.yml").read_text()
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


def test_http_and_grpc_need_different_ports():
    with pytest.raises(ValidationError) as caught:
        NativeSettings(http_port=1234, grpc_port=1234)
    sentence = "--grpc-port 1234: HTTP and gRPC need different ports, and this is --http-port"
    assert validation_sentence(caught.value) == sentence
