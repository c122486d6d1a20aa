"""The distribution functions beside SciPy's."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import optimize, special

from loadgen.stats import distributions as d

CLOSE = 3e-9
SIZES = (1.0, 2.5, 13.3, 400.0, 70_000.5)


@pytest.mark.parametrize("degrees", [0.7, *SIZES])
def test_students_t(degrees: float) -> None:
    for value in (-3.0, 0.0, 1e-3, 0.8, 2.2, 9.0):
        assert d.student_tail(value, degrees) == pytest.approx(special.stdtr(degrees, -value), rel=CLOSE)
    for tail in (0.4, 0.025, 1e-6, 1e-12):
        assert d.student_quantile(tail, degrees) == pytest.approx(-special.stdtrit(degrees, tail), rel=CLOSE)


def test_students_t_with_endless_degrees_is_normal() -> None:
    assert d.student_tail(1.959963984540054, math.inf) == pytest.approx(0.025, rel=CLOSE)
    assert d.student_quantile(0.025, math.inf) == pytest.approx(1.959963984540054, rel=CLOSE)
    assert d.student_tail(1e300, 3.0) == 0.0


@pytest.mark.parametrize("size", [*SIZES, 500_000.0])
@pytest.mark.parametrize("quantile", [0.5, 0.99, 0.999])
def test_order_statistics(size: float, quantile: float) -> None:
    a, b = quantile * size, size - quantile * size + 1.0
    for share in (1e-6, 0.025, 0.5, 0.975):
        assert d.beta_quantile(share, a, b) == pytest.approx(special.betaincinv(a, b, share), rel=CLOSE)


@pytest.mark.parametrize(("trials", "chance"), [(1, 0.5), (40, 1 / 3), (6_000, 0.01), (100_000, 0.001)])
def test_binomial_and_f(trials: int, chance: float) -> None:
    for count in {-1, 0, round(trials * chance * 0.8), round(trials * chance * 1.3), trials}:
        expected = special.bdtr(count, trials, chance) if count >= 0 else 0.0
        assert d.binomial_cdf(count, trials, chance) == pytest.approx(expected, rel=CLOSE, abs=1e-200)
    for value in (0.1, 1.0, 12.0):
        assert d.f_tail(value, 4, trials + 2) == pytest.approx(special.fdtrc(4, trials + 2, value), rel=CLOSE)


@pytest.mark.parametrize("degrees", SIZES[:4])
def test_quantiles_of_chi_square(degrees: float) -> None:
    shares = (np.arange(120) + 0.5) / 120
    assert d.chi_square_quantiles(shares, degrees) == pytest.approx(special.chdtri(degrees, 1.0 - shares), rel=CLOSE)


def test_the_normal_distribution() -> None:
    values = np.linspace(-12.0, 12.0, 2001)
    assert d.normal_cdf(values) == pytest.approx(special.ndtr(values), rel=1.3e-7)
    assert d.normal_quantile(0.975) == pytest.approx(special.ndtri(0.975), rel=CLOSE)


def test_a_root_is_brents() -> None:
    for function, low, high in ((math.cos, 0.0, 3.0), (lambda x: x**3 - 2.0, 0.0, 3.0), (lambda x: x, -1.0, 0.0)):
        assert d.root(function, low, high) == pytest.approx(optimize.brentq(function, low, high), abs=1e-11)
    with pytest.raises(ValueError, match="same sign"):
        d.root(math.cos, 0.0, 1.0)


@pytest.mark.parametrize(("a", "b", "end"), [(1.0, 2.7e-20, 1.0), (2.7e-20, 1.0, 0.0)])
def test_a_beta_distribution_with_all_its_mass_at_an_end(a: float, b: float, end: float) -> None:
    assert d.beta_quantile(0.9, a, b) == pytest.approx(end, abs=1e-12)
