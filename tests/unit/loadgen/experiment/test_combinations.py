"""Which runs a command line asks for, and what is refused before anything starts."""

from __future__ import annotations

from itertools import product

import pytest

from loadgen.experiment.plan import PlanError, plan_combinations
from loadgen.experiment.settings import ExperimentSettings
from loadgen.measure.planning import check_reachable
from loadgen.records.payloads import base_name, implied_payload, variant_name
from loadgen.records.run import ArmRequest

MODEL = "openclip_vit_b32"


def arm(label: str = "a", target: str = "native", **fields: str | None) -> ArmRequest:
    return ArmRequest(label=label, target=target, **fields)  # type: ignore[arg-type]


def plan(transports=None, payloads=None, *, a=None, b=None, others=(), model=MODEL, matrix=False) -> list[str]:
    arms = [a or arm(), b or arm("b", "triton"), *others]
    asked = {"model": model, "transport": transports, "payload": payloads, "matrix": matrix}
    combinations = plan_combinations(arms, ExperimentSettings.model_validate(asked))
    for request, combination in product(arms, combinations):
        check_reachable(request, combination.transport)
    return [combination.folder for combination in combinations]


def test_one_run_unless_asked_for_more() -> None:
    assert plan() == ["http-fp32"]
    assert plan(("grpc",), ("jpeg",)) == ["grpc-jpeg"]
    assert plan(model=f"{MODEL}_uint8") == ["http-uint8"]


def test_every_transport_with_every_payload() -> None:
    assert plan(("shm", "http"), ("uint8", "fp32")) == ["shm-uint8", "shm-fp32", "http-uint8", "http-fp32"]
    assert len(set(plan(matrix=True))) == 9
    assert plan(("grpc",), matrix=True) == ["grpc-fp32", "grpc-uint8", "grpc-jpeg"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"a": arm(payload="jpeg"), "matrix": True}, "contradict"),
        ({"transports": ("grpc",), "b": arm("b", "http://box:8000")}, "--b-grpc HOST:PORT"),
        ({"transports": ("http",), "b": arm("b", "http://box:8000", grpc="box")}, "no gRPC address"),
        ({"transports": ("shm",), "b": arm("b", "http://box:8000")}, "on another machine"),
        ({"transports": ("shm",), "others": [arm("c", "http://box:8000")]}, "--c http://box:8000 is on another"),
        ({"transports": ("shm",), "others": [arm("old", "http://box:8000")]}, "arms.old http://box:8000 is on another"),
    ],
)
def test_what_cannot_be_is_refused_with_a_remedy(arguments: dict, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        plan(**arguments)


def test_a_local_url_may_share_memory() -> None:
    assert plan(("shm",), b=arm("b", "http://127.0.0.1:8000")) == ["shm-fp32"]


def test_names_of_variants() -> None:
    for payload, name in (("fp32", MODEL), ("uint8", f"{MODEL}_uint8"), ("jpeg", f"{MODEL}_jpeg")):
        assert variant_name(MODEL, payload) == name
        assert variant_name(f"{MODEL}_jpeg", payload) == name
        assert (base_name(name), implied_payload(name)) == (MODEL, payload)
