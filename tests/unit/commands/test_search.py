"""How a settings class becomes the space that a search tries: values, conditions and defaults on one machine."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any

import pytest
from pydantic_settings import BaseSettings

from servers.engines.options import PAD_TO, padded_sizes
from servers.options.search import (
    DECODE_THREADS,
    ENGINE,
    MAX_BATCH_SIZE,
    MODE,
    PRECISION,
    SPINNING,
    THREADS,
    SearchContext,
    Searched,
    empty_space_json,
    space_json,
)

PadTo = Annotated[str, PAD_TO]
IN_PYTHON = {"backend": lambda _here, _value, backend: backend == "python"}


class ToySettings(BaseSettings):
    """Of a server; the order of the fields is not that of their conditions."""

    instances: Annotated[
        int,
        Searched(
            lambda _here: (1, 2, 4),
            ordered=True,
            applies={"threads": lambda here, count, threads: int(count) * int(threads) <= here.cores},
        ),
    ] = 1
    engine: Annotated[
        str, replace(ENGINE, applies={"backend": lambda _here, _engine, backend: backend == "python"})
    ] = "auto"
    mode: Annotated[str, MODE] = "auto"
    threads: Annotated[int, THREADS] = 0
    spinning: Annotated[str, SPINNING] = "auto"
    precision: Annotated[str, PRECISION] = "auto"
    max_batch_size: Annotated[int, MAX_BATCH_SIZE] = 32
    pad_to: Annotated[PadTo, replace(PAD_TO, applies=IN_PYTHON)] = "none"
    decode_threads: Annotated[int, DECODE_THREADS] = 2
    backend: Annotated[str, Searched(lambda here: here.backends)] = "auto"
    host: str = "127.0.0.1"


HERE = SearchContext(
    device="cpu",
    cores=4,
    engines=("torch", "onnxruntime", "openvino"),
    modes={"torch": ("eager",), "openvino": ()},
    precisions={"torch": ("fp32",), "onnxruntime": ("fp32", "int8"), "openvino": ("fp32", "bf16", "int8")},
    backends=("python", "onnxruntime"),
)
DEFAULTS = {"engine": "torch", "backend": "python", "threads": 4, "spinning": "on", "precision": "fp32"}


def space(here: SearchContext = HERE, given: tuple[str, ...] = (), **in_effect: object) -> dict[str, Any]:
    left_out = ["engine jax: not installed here", "queue: it is one"]
    printed: dict[str, Any] = json.loads(space_json("toy", ToySettings(), here, DEFAULTS | in_effect, given, left_out))
    printed["by_name"] = {entry["name"]: entry for entry in (*printed["settings"], *printed["on_request"])}
    return printed


def test_values_defaults_and_order() -> None:
    printed = space(max_batch_size=24)
    by_name = printed["by_name"]
    assert by_name["threads"]["values"] == ["1", "2", "3", "4"]
    assert by_name["max-batch-size"]["values"] == ["4", "8", "16", "24", "32"]  # the default is among them
    assert by_name["max-batch-size"]["default"] == "24"
    assert by_name["engine"]["ordered"] is False
    assert "host" not in by_name  # it is not declared
    assert "pad-to" not in by_name  # the model has no such axis
    assert "decode-threads" not in by_name  # its payload is not JPEG
    assert [entry["name"] for entry in printed["on_request"]] == ["precision"]


def test_a_setting_comes_after_those_that_it_depends_on() -> None:
    names = [entry["name"] for entry in space()["settings"]]
    for entry in space()["settings"]:
        others = {*entry["when"], *(name for when in entry["values_when"].values() for name in when)}
        assert all(names.index(other) < names.index(entry["name"]) for other in others), entry


def test_conditions() -> None:
    by_name = space()["by_name"]
    assert by_name["engine"]["when"] == {"backend": ["python"]}
    assert by_name["mode"]["when"] == {"engine": ["torch"]}
    assert by_name["spinning"]["when"] == {"engine": ["torch", "onnxruntime"], "threads": ["2", "3", "4"]}
    assert by_name["instances"]["when"] == {"threads": ["1", "2"]}
    assert by_name["instances"]["values_when"] == {"4": {"threads": ["1"]}}
    assert by_name["precision"]["when"] == {"engine": ["onnxruntime", "openvino"]}
    assert by_name["precision"]["values_when"] == {"bf16": {"engine": ["openvino"]}}


def test_a_declaration_replaces_that_of_the_type() -> None:
    assert space(replace(HERE, largest_axis=64))["by_name"]["pad-to"]["when"] == {"backend": ["python"]}


def test_an_option_that_is_given_is_fixed_and_decides_what_depends_on_it() -> None:
    printed = space(given=("engine", "threads", "host"), engine="openvino")
    assert printed["fixed"] == {"engine": "openvino", "threads": "4"}
    assert not printed["by_name"].keys() & {"engine", "threads", "mode", "spinning", "instances"}
    assert printed["by_name"]["precision"]["values"] == ["fp32", "int8", "bf16"]
    assert printed["not_searched"] == ["queue: it is one"]
    assert len(space()["not_searched"]) == 2
    assert space(given=("threads",), threads=2)["by_name"]["instances"]["values"] == ["1", "2"]


def test_a_stated_default_is_searched_all_the_same() -> None:
    printed = json.loads(space_json("toy", ToySettings(), HERE, DEFAULTS, (), stated=["backend"]))
    assert printed["fixed"] == {"backend": "python"}
    assert printed["settings"] == space()["settings"]


def test_what_depends_on_a_setting_that_never_applies_is_left_out() -> None:
    printed = space(given=("backend",), backend="onnxruntime")
    assert not printed["by_name"].keys() & {"engine", "mode", "spinning"}
    only = space(replace(HERE, engines=("torch",)), given=("backend",), backend="onnxruntime")
    assert not only["by_name"].keys() & {"engine", "mode", "spinning"}


def test_a_single_value_is_not_searched_but_counts_in_conditions() -> None:
    by_name = space(replace(HERE, engines=("torch",), backends=("python",)))["by_name"]
    assert "engine" not in by_name
    assert by_name["mode"]["when"] == {}
    by_name = space(replace(HERE, engines=("openvino",), backends=("python",)), engine="openvino")["by_name"]
    assert not by_name.keys() & {"mode", "spinning"}


@pytest.mark.parametrize("cores", [1, 2, 3, 64])
def test_threads_never_exceed_the_cores(cores: int) -> None:
    by_name = space(replace(HERE, cores=cores), threads=cores)["by_name"]
    if cores == 1:
        assert not by_name.keys() & {"threads", "spinning", "instances"}
        return
    assert set(map(int, by_name["threads"]["values"])) <= set(range(1, cores + 1))
    assert by_name["threads"]["values"][-1] == str(cores)


def test_a_gpu_has_neither_threads_nor_spinning() -> None:
    by_name = space(replace(HERE, device="cuda"))["by_name"]
    assert not by_name.keys() & {"threads", "spinning"}
    assert by_name["max-batch-size"]["values"][-1] == "128"


@pytest.mark.parametrize(
    ("largest", "sizes"),
    [
        (None, ()),
        (512, ("none", "32,64,128,256,512")),
        (77, ("none", "32,64,77")),
        (2048, ("none", "32,64,128,256,512")),
        (16, ("none", "16")),
    ],
)
def test_sizes_to_pad_to(largest: int | None, sizes: tuple[str, ...]) -> None:
    assert tuple(padded_sizes(largest)) == sizes


def test_nothing_to_tune_has_a_reason() -> None:
    assert json.loads(empty_space_json("triton", "it is yours")) == {
        "target": "triton",
        "settings": [],
        "not_searched": ["it is yours"],
    }
