"""What every `abserve serve TARGET` does with its plan, its space and what is wrong."""

from __future__ import annotations

import io
from collections.abc import Callable

import msgspec
import pytest
import typer

from servers.commands.serving import serve
from servers.export.manifest import ExportError
from servers.models.weights import WeightsError
from servers.options.defaults import OptionError
from servers.options.launch import LaunchPlan

PLAN = LaunchPlan(
    argv=("/bin/true",), env={}, http_url="http://[::1]:1", grpc_address=None, model="m", title="t", max_batch_size=1
)


def served(
    plan: Callable[[], LaunchPlan] = lambda: PLAN, *, print_launch: bool = False, print_space: bool = False
) -> tuple[bytes, list[LaunchPlan]]:
    """What is printed, and what is started."""
    out, started = io.BytesIO(), list[LaunchPlan]()
    serve(
        plan, lambda: b"space", print_launch=print_launch, print_space=print_space, out=out, start=started.append
    )  # fmt: skip
    return out.getvalue(), started


def test_a_server_is_started_only_where_nothing_is_printed() -> None:
    assert served() == (b"", [PLAN])
    assert served(print_space=True) == (b"space", [])
    printed, started = served(print_launch=True)
    assert (msgspec.json.decode(printed)["model"], started) == ("m", [])


@pytest.mark.parametrize(("error", "status"), [(OptionError, 2), (WeightsError, 2), (ExportError, 1)])
def test_an_error_is_one_sentence_and_a_wrong_option_has_status_2(
    capsys: pytest.CaptureFixture[str], error: type[Exception], status: int
) -> None:
    def plan() -> LaunchPlan:
        raise error("it is wrong")

    with pytest.raises(typer.Exit) as ended:
        served(plan)
    assert ended.value.exit_code == status
    assert capsys.readouterr().err == "error: it is wrong\n"
    assert served(plan, print_space=True) == (b"space", [])
