"""Values of many blocks in bounded memory."""

from __future__ import annotations

import numpy as np
import pytest

from loadgen.stats.percentiles import Pool


def filled(rng: np.random.Generator, blocks: int, each: int, most: int) -> tuple[Pool, np.ndarray]:
    """A pool of blocks that differ in speed, and all of their values."""
    pool = Pool(most)
    every = [rng.lognormal(0.0, 0.3, each) * np.exp(rng.normal(0.0, 0.05)) for _ in range(blocks)]
    for index, values in enumerate(every):
        pool.add(index, values)
    return pool, np.concatenate(every)


def test_all_values_are_kept_while_there_are_few() -> None:
    pool, every = filled(np.random.default_rng(1), 5, 100, 500)
    assert np.sort(pool.values).tolist() == np.sort(every).tolist()
    assert pool.count == 500
    assert pool.mean == pytest.approx(every.mean())
    assert all((np.diff(values) >= 0).all() for values in pool.blocks.values())


def test_many_values_are_thinned_alike_in_every_block() -> None:
    pool, every = filled(np.random.default_rng(1), 100, 1000, 2**13)
    assert 2**12 <= len(pool.values) <= 2**13
    assert {len(values) for values in pool.blocks.values()} <= {62, 63}
    assert pool.count == 100_000
    assert pool.mean == pytest.approx(every.mean())


def test_shares_below_a_threshold_are_those_of_all_values() -> None:
    """Without bias, and closer than a random sample of the same size comes to them: its standard error at the p99 of
    8,192 values is 0.0011."""
    rng = np.random.default_rng(2)
    errors: list[float] = []
    for _ in range(60):
        pool, every = filled(rng, 40, 2000, 2**13)
        errors.append(float((pool.values <= np.quantile(every, 0.99)).mean()) - 0.99)
    assert abs(float(np.mean(errors))) < 3.0 * float(np.std(errors)) / np.sqrt(len(errors))
    assert float(np.std(errors)) < 0.0011


def test_no_block_is_missing() -> None:
    """Of a block with few requests one is kept however long the others are."""
    pool = Pool(64)
    pool.add(0, [1.0, 2.0, 3.0])
    for index in range(1, 20):
        pool.add(index, np.arange(1000.0))
    pool.add(20, [5.0])
    assert min(len(values) for values in pool.blocks.values()) == 1
    assert len(pool.values) <= 64
