"""Spaces are read through the command, which also checks the values that a user adds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from loadgen.experiment.plan import PlanError
from loadgen.tune.declared import read_spaces
from loadgen.tune.space import as_text, canonical, size, values_of

COMMAND = """
import json, pathlib, sys
target, *arguments = sys.argv[2:]
pathlib.Path(__file__).with_name("calls").open("a").write(" ".join([target, *arguments]) + chr(10))
assert arguments.pop(0) == "--print-space"
given = {arguments[i][2:]: arguments[i + 1] for i in range(0, len(arguments), 2)}
if given.get("model") == "missing":
    sys.exit("error: unknown model 'missing'; list all names with: abserve models")
if target == "litserve":
    print("not JSON")
    sys.exit()
if int(given.get("threads", 1)) > 8:
    sys.exit(f"error: --threads {given['threads']}: must be at most 8")
if {*given} - {"model", "threads", "engine", "queue-size", "max-batch-size", "pad-to"}:
    sys.exit("error: No such option")
threads = [] if "threads" in given else [dict(name="threads", default="4", values=["1", "4"], ordered=True)]
spins = int(given.get("threads", 4)) > 1 and target == "native"
spinning = [dict(name="spinning", default="on", values=["on", "off"],
                 when={} if "threads" in given else {"threads": ["4"]})] if spins else []
batch = [] if "max-batch-size" in given else [
    dict(name="max-batch-size", default="32", values=["8", "16", "32"], ordered=True)]
padding = [dict(name="pad-to", default="none", values=["none", "32,64,128"])] if target == "fastapi" else []
in_effect = {"auto": "torch", "0": "4"}
fixed = {name: in_effect.get(value, value) for name, value in given.items() if name in ("threads", "engine")}
print("a warning on standard output")
print(json.dumps(dict(target=target, settings=threads + spinning + batch + padding, fixed=fixed)))
"""


@pytest.fixture
def abserve(tmp_path: Path) -> tuple[str, ...]:
    script = tmp_path / "abserve.py"
    script.write_text(COMMAND)
    return sys.executable, str(script)


def calls(abserve: tuple[str, ...]) -> list[str]:
    return sorted(Path(abserve[1]).with_name("calls").read_text().splitlines())


def test_one_command_per_target_where_nothing_is_added(abserve: tuple[str, ...]) -> None:
    options = {"native": {"model": "m"}, "triton": {"model": "m", "max-batch-size": "8"}}
    native, triton = read_spaces(("native", "triton"), options, tune={"threads": ["1"]}, abserve=abserve)
    assert [setting.name for setting in native.settings] == ["threads", "spinning", "max-batch-size"]
    assert [setting.name for setting in triton.settings] == ["threads"]
    assert calls(abserve) == ["native --print-space --model m", "triton --print-space --model m --max-batch-size 8"]


def test_the_server_checks_an_added_value_and_says_what_applies_with_it(abserve: tuple[str, ...]) -> None:
    tune = {"threads": ["1", "8"], "native.max-batch-size": ["8"]}
    native, triton = read_spaces(("native", "triton"), {}, tune=tune, abserve=abserve)
    assert [setting.values for setting in native.settings] == [("1", "4", "8"), ("on", "off"), ("8", "32")]
    assert canonical(native, {"threads": "8", "spinning": "off"}) == {"threads": "8", "spinning": "off"}
    assert canonical(native, {"threads": "1", "spinning": "off"}) == {"threads": "1"}
    assert size(triton) == 3 * 3
    with pytest.raises(PlanError, match=r"^abserve serve native cannot start: --threads 9: must be at most 8$"):
        read_spaces(("native",), {}, tune={"threads": ["9"]}, abserve=abserve)


def test_a_value_that_stands_for_another_is_that_one(abserve: tuple[str, ...]) -> None:
    (native,) = read_spaces(("native",), {}, tune={"threads": ["1", "0", "6"]}, abserve=abserve)
    assert native.settings[0].values == ("1", "4", "6")


def test_a_fixed_value_is_the_one_in_effect(abserve: tuple[str, ...]) -> None:
    fix = {"native.threads": "1", "engine": "auto", "queue_size": "9"}
    native, triton = read_spaces(("native", "triton"), {}, fix=fix, abserve=abserve)
    assert native.fixed == {"threads": "1", "engine": "torch", "queue-size": "9"}
    assert [setting.name for setting in native.settings] == ["max-batch-size"]
    assert triton.fixed == {"engine": "torch", "queue-size": "9"}
    with pytest.raises(PlanError, match="native cannot start: No such option"):
        read_spaces(("native",), {}, fix={"colour": "red"}, abserve=abserve)


@pytest.mark.parametrize("name", ["model", "payloads", "http-port", "native.work_dir", "print-launch"])
def test_what_all_servers_have_alike_cannot_be_fixed(abserve: tuple[str, ...], name: str) -> None:
    with pytest.raises(PlanError, match=f"^--fix {name.rpartition('.')[2].replace('_', '-')} "):
        read_spaces(("native",), {}, fix={name: "1"}, abserve=abserve)


def test_a_value_that_is_a_list_is_joined_by_plus(abserve: tuple[str, ...]) -> None:
    values = values_of("32+64, none")
    assert values == ["32,64", "none"]
    assert values_of(as_text(values)) == values
    (fastapi,) = read_spaces(("fastapi",), {}, tune={"pad-to": values}, abserve=abserve)
    assert {setting.name: setting.values for setting in fastapi.settings}["pad-to"] == ("none", "32,64")
    with pytest.raises(PlanError, match=r"pad-to=32,64,none separates values; .* \+: pad-to=32\+64,none$"):
        read_spaces(("fastapi",), {}, tune={"pad-to": values_of("32,64,none")}, abserve=abserve)
    read_spaces(("fastapi",), {}, tune={"pad-to": values_of("32,64,32+64")}, abserve=abserve)
    read_spaces(("fastapi",), {}, tune={"threads": values_of("1,2")}, abserve=abserve)


def test_the_load_bounds_the_declared_values_but_not_the_users(abserve: tuple[str, ...]) -> None:
    (native,) = read_spaces(("native",), {}, outstanding=10, abserve=abserve)
    assert {setting.name: setting.values for setting in native.settings}["max-batch-size"] == ("8", "32")
    (native,) = read_spaces(("native",), {}, tune={"max-batch-size": ["16", "64"]}, outstanding=10, abserve=abserve)
    assert {setting.name: setting.values for setting in native.settings}["max-batch-size"] == ("16", "32", "64")


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        (
            "native",
            {"model": "missing"},
            r"^abserve serve native cannot start: unknown model 'missing'; list all names with: abserve models$",
        ),
        ("litserve", {}, "abserve serve litserve --print-space printed no valid line of JSON"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(
    abserve: tuple[str, ...], target: str, options: dict[str, str], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        read_spaces((target,), {target: options}, abserve=abserve)
