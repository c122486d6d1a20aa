"""The cases of language models, against the native server with a real model, and against answers that are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgen.conformance.cases import CASES, select
from loadgen.conformance.cases.language import ERROR_EVENT, LANGUAGE, judged
from loadgen.conformance.records import CaseVerdict, Response
from loadgen.conformance.runner import CaseRun
from loadgen.conformance.servers import LaunchedSession


@pytest.mark.slow
def test_the_native_server_conforms_on_both_routes(tmp_path: Path) -> None:
    options = {"threads": "1", "device": "cpu"}
    session = LaunchedSession("native", "language:tiny", options, tmp_path)
    try:
        results = CaseRun(session, destructive=True).run(LANGUAGE.cases, announce=lambda _case: None)
    finally:
        session.close()
    assert [(result.number, result.reason) for result in results if result.verdict is not CaseVerdict.CONFORMS] == []
    assert [result.number for result in results if result.not_observed] == []


def test_language_models_have_their_own_cases() -> None:
    assert select(None, language_model=True) == tuple(sorted(LANGUAGE.cases, key=lambda case: case.order))
    assert [case.number for case in select("36,43c", language_model=True)] == ["36", "36c", "36g", "43c"]
    assert not {case.number for case in CASES} & {case.number for case in LANGUAGE.cases}
    with pytest.raises(ValueError, match="those of language models from 36 to 46"):
        select("36")


def test_an_error_counts_wherever_it_is() -> None:
    def stream(*events: str) -> Response:
        return judged(Response("200", {}, "".join(f"data: {event}\n\n" for event in events).encode()))

    assert stream('{"token_ids":5}').status == "200"
    late = stream('{"token_ids":5}', '{"error":"too long"}')
    assert (late.status, late.message) == (ERROR_EVENT, "too long")
    assert stream('{"error":{"message":"too long"}}', "[DONE]").message == "too long"
    assert stream("{").status == ERROR_EVENT
    assert stream().status == ERROR_EVENT
    openai = judged(Response("400", {}, b'{"error":{"message":"n must be 1","code":400}}'))
    assert (openai.status, openai.message) == ("400", "n must be 1")
    assert judged(Response("400", {}, b'{"error":"x"}')).message is None
