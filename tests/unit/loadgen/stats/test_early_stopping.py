"""The early-stopping bound: MLPerf's numbers, and that it keeps what it promises."""

from __future__ import annotations

import numpy as np
import pytest

from loadgen.stats.percentiles import late_allowed, queries_needed


@pytest.mark.parametrize(("late", "queries"), [(0, 459), (10, 2_010), (100, 12_571)])
def test_published_numbers(late: int, queries: int) -> None:
    assert queries_needed(late) == queries


@pytest.mark.parametrize("late", [0, 1, 10, 37])
def test_both_directions_agree(late: int) -> None:
    needed = queries_needed(late)
    assert late_allowed(needed) == late
    assert late_allowed(needed - 1) == (late - 1 if late else None)


def test_other_quantiles_and_confidences() -> None:
    assert queries_needed(0, 0.9, 0.95) == 29  # 0.9^29 = 0.047
    assert queries_needed(0, 0.999) == 4603


def test_a_server_at_the_bound_rarely_passes() -> None:
    random = np.random.default_rng(3)
    for queries in (459, 2_010, 5_000):
        allowed = late_allowed(queries)
        assert allowed is not None
        passes = np.mean(random.binomial(queries, 0.01, 50_000) <= allowed)
        assert passes <= 0.0125


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="no bound"):
        queries_needed(-1)
    with pytest.raises(ValueError, match="no bound"):
        queries_needed(1, 1.0)
