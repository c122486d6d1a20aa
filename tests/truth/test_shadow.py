"""What `abserve shadow` promises: equal servers have no winner in 19 of 20 runs, looked at after every block."""

from __future__ import annotations

import http.client
from contextlib import closing
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest

from loadgen.metrics.comparisons import Outcome
from loadgen.recorder.shadow_run import judged
from tests.again import again
from tests.shadowing import (
    INFER,
    Answers,
    answer_500,
    die,
    doubling,
    flood_bytes,
    flood_chunks,
    hang,
    serving,
    shadowing,
    tensor_request,
)

RUNS, BLOCKS = 100, 48


def outcomes(correlation: float, ratio: float, seed: int = 0) -> list[set[Outcome]]:
    """The verdicts of runs whose blocks scatter by 10 % and resemble each other, at every second look."""
    noise = np.random.default_rng(seed).normal(0.0, 1.0, (BLOCKS + 50, RUNS))
    state, logs = np.zeros(RUNS), []
    for fresh in noise:
        state = correlation * state + np.sqrt(1.0 - correlation**2) * fresh
        logs.append(state)
    ratios = ratio * np.exp(0.1 * np.array(logs[50:]).T)
    return [{judged(run[:looks], 0.05)[1] for looks in range(2, BLOCKS + 1, 2)} for run in ratios.tolist()]


@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.6])
def test_equal_servers_have_no_winner_in_19_of_20_runs(correlation: float) -> None:
    wins = sum(bool(verdicts & {"arm_better", "baseline_better"}) for verdicts in outcomes(correlation, 1.0))
    assert wins <= 0.05 * RUNS


@pytest.mark.parametrize("correlation", [0.0, 0.5])
def test_a_candidate_that_takes_30_percent_longer_is_found(correlation: float) -> None:
    found = outcomes(correlation, 1.3)
    assert all("baseline_better" in verdicts and "arm_better" not in verdicts for verdicts in found)


@pytest.mark.parametrize(
    "candidate",
    [
        hang, flood_chunks, *(pytest.param(each, marks=pytest.mark.slow) for each in (die, answer_500, flood_bytes)),
        pytest.param(None, marks=pytest.mark.slow),
    ],
    ids=["hangs", "floods in chunks", "dies", "500", "floods", "refuses"],
)  # fmt: skip
@again
def test_the_primary_is_as_fast_as_without_a_candidate(candidate: Answers | None, tmp_path: Path) -> None:
    """Beside a shadow that copies no request, round by round."""
    with serving(doubling(0.005)) as primary, serving(candidate or hang) as second:
        if candidate is None:
            second.socket.close()
        with (
            shadowing(primary.url, second.url, tmp_path / "with") as copying,
            shadowing(primary.url, second.url, tmp_path / "without", "--share", "0.000001") as alone,
            closing(http.client.HTTPConnection("127.0.0.1", copying.port, timeout=100)) as first,
            closing(http.client.HTTPConnection("127.0.0.1", alone.port, timeout=100)) as other,
        ):
            times_s: list[list[float]] = [[], []]
            for turn in range(300):
                for place, connection in enumerate((first, other)):
                    began_s = perf_counter()
                    connection.request("POST", INFER, tensor_request([float(turn)]))
                    with connection.getresponse() as response:
                        assert response.status == 200
                        response.read()
                    times_s[place].append(perf_counter() - began_s)
    for quantile, most in ((0.5, 1.3), (0.9, 2.0)):
        ratio = np.quantile(times_s[0], quantile) / np.quantile(times_s[1], quantile)
        assert ratio < most
