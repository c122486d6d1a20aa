"""Toy servers in the states and with the faults that a test names."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import cache
from pathlib import Path

import pytest

from loadgen.conformance.cases import select
from loadgen.conformance.records import CaseResult
from loadgen.conformance.runner import CaseRun
from loadgen.conformance.servers import LaunchedSession

TOY = (sys.executable, str(Path(__file__).with_name("toy_server.py")))

Sessions = Callable[..., LaunchedSession]
RunCases = Callable[..., dict[str, CaseResult]]


@pytest.fixture(scope="session")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sessions]:
    """`sessions("fault", …, row_ms="20")`: a session over toys with these faults and options. Tests that want the same
    one share it; it starts its server again after `close`."""
    with ExitStack() as stack:

        @cache
        def start(*faults: str, **options: str) -> LaunchedSession:
            named = {name.replace("_", "-"): value for name, value in options.items()}
            if faults:
                named["fault"] = ",".join(faults)
            folder = tmp_path_factory.mktemp("toy")
            return stack.enter_context(closing(LaunchedSession("native", "toy", named, folder, abserve=TOY)))

        yield start


@pytest.fixture
def run_cases(sessions: Sessions) -> RunCases:
    """`run_cases("2,15", "fault", …)`: number → result, over a toy with these faults."""

    def run(numbers: str, *faults: str, **options: str) -> dict[str, CaseResult]:
        session = sessions(*faults, **options)
        results = CaseRun(session, destructive=True).run(select(numbers), announce=lambda _: None)
        return {result.number: result for result in results}

    return run


@pytest.fixture(scope="module")
def native_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaunchedSession]:
    """The native server without a model: only its front end is tested."""
    folder = tmp_path_factory.mktemp("native")
    with closing(LaunchedSession("native", "openclip_vit_b32", {"engine": "null"}, folder)) as session:
        yield session
