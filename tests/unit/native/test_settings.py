"""Settings survive the way through a command line, and the command offers each of them."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from pydantic import ValidationError

from servers.native.arguments import from_argv, to_argv, validation_sentence
from servers.native.command import serve_native
from servers.native.settings import NativeSettings


def test_arguments_bring_back_the_same_settings(monkeypatch):
    settings = NativeSettings(http_port=1234, engine="null", artefact=Path("/x/model.onnx"), added_delay_ms=2.5)
    monkeypatch.setenv("ABSERVE_NATIVE_HTTP_PORT", "4321")
    assert from_argv(to_argv(settings)) == settings
    assert from_argv([]).http_port == 4321


def test_every_field_is_documented_and_its_default_is_the_commands():
    options = inspect.signature(serve_native).parameters
    for name, field in NativeSettings.model_fields.items():
        assert field.description, name
        if name in options:
            assert options[name].default == field.default, name


def test_a_contradiction_is_one_sentence_with_the_option():
    with pytest.raises(ValidationError) as caught:
        NativeSettings(queue_size=0)
    assert validation_sentence(caught.value) == "--queue-size: Input should be greater than or equal to 1, got 0"


@pytest.mark.parametrize(("name", "value"), [("queue_timeout_us", 3_600_000_001), ("shutdown_timeout_s", "inf")])
def test_times_that_no_request_and_no_timer_takes_are_refused_at_the_start(name, value):
    with pytest.raises(ValidationError, match="less than or equal to 3600"):
        NativeSettings(**{name: value})


def test_two_doors_need_two_ports():
    with pytest.raises(ValidationError) as caught:
        NativeSettings(http_port=1234, grpc_port=1234)
    sentence = "--grpc-port: Value error, each door needs a port of its own, and this is --http-port, got 1234"
    assert validation_sentence(caught.value) == sentence
