"""What a person reads of a tuning, letter by letter; `pytest tests/golden --snapshot-update` renews it."""

from __future__ import annotations

import pytest
from syrupy.assertion import SnapshotAssertion

from loadgen.report.document import Document
from loadgen.report.renderers.markdown import render_markdown
from loadgen.tune.outcome import outcome_of
from loadgen.tune.sections import tuning_document
from tests.golden.test_golden_reports import shown
from tests.synthetic_tuning import PlantedTuning, final, tuning

STOPPED = PlantedTuning(stages=("screening",), state="interrupted")


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Document]:
    result = final(tmp_path_factory.mktemp("final"))
    commands = {name: f"abserve serve {name} --model openclip_vit_b32" for name in ("native", "triton")}
    files = {"deploy/native.sh": "starts native at its best"}
    return {
        "finished": tuning_document(outcome_of(tuning(), result), commands, files),
        "limited": tuning_document(outcome_of(tuning(PlantedTuning(limit_ms=150.0)), result)),
        "interrupted": tuning_document(outcome_of(tuning(STOPPED), None)),
    }


@pytest.mark.parametrize("name", ["finished", "limited", "interrupted"])
def test_terminal(documents: dict[str, Document], name: str, snapshot: SnapshotAssertion) -> None:
    assert "\n".join(shown(documents[name], 100)) == snapshot


@pytest.mark.parametrize("name", ["finished", "interrupted"])
def test_markdown(documents: dict[str, Document], name: str, snapshot: SnapshotAssertion) -> None:
    assert render_markdown(documents[name]) == snapshot
