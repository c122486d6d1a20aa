"""Distribution functions and their inverses, and a root finder: SciPy has them all, and weighs more (140 MB) than all
that a comparison of two URLs needs. A test compares both.

The incomplete beta function is its continued fraction (DiDonato and Morris, ACM TOMS 18, 1992), the incomplete gamma
function its series. Both agree with SciPy to a relative 1e-9 for parameters up to 500,000.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
_TINY, _PRECISION, _MOST_TERMS = 1e-300, 1e-16, 20_000
_ERFC = (
    -1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806, 0.27886807, -1.13520398, 1.48851587, -0.82215223,
    0.17087277,
)  # fmt: skip
"""A fit of erfc with a relative error of 1.2e-7 (Press et al., Numerical Recipes, section 6.2)."""


def normal_cdf(values: Array) -> Array:
    """The standard normal distribution of many values, to a relative 1.2e-7."""
    size = np.abs(values) / math.sqrt(2.0)
    part = 1.0 / (1.0 + 0.5 * size)
    tail = 0.5 * part * np.exp(np.polynomial.polynomial.polyval(part, _ERFC) - size * size)
    return np.where(values > 0.0, 1.0 - tail, tail)


def normal_quantile(share: float) -> float:
    """The value below which this share of a standard normal distribution lies."""
    return NormalDist().inv_cdf(share)


def beta_cdf(x: float, a: float, b: float, rest: float | None = None) -> float:
    """The regularised incomplete beta function; `rest` is 1 − x where the caller knows it more precisely."""
    rest = 1.0 - x if rest is None else rest
    if x <= 0.0 or rest <= 0.0:
        return 0.0 if x <= 0.0 else 1.0
    if x > (a + 1.0) / (a + b + 2.0):
        return 1.0 - beta_cdf(rest, b, a, x)
    return math.exp(_log_beta_density(x, a, b, rest) + math.log(x) + math.log(rest)) * _beta_fraction(x, a, b) / a


def _log_beta_density(x: float, a: float, b: float, rest: float) -> float:
    scale = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    return scale + (a - 1.0) * math.log(x) + (b - 1.0) * math.log(rest)


def _beta_fraction(x: float, a: float, b: float) -> float:
    """The continued fraction, by Lentz's method."""
    above, below = 1.0, 1.0 - (a + b) * x / (a + 1.0)
    below = 1.0 / (below or _TINY)
    value = below
    for term in range(1, _MOST_TERMS):
        twice = a + 2.0 * term
        for factor in (
            term * (b - term) * x / ((twice - 1.0) * twice),
            -(a + term) * (a + b + term) * x / (twice * (twice + 1.0)),
        ):
            below = 1.0 / ((1.0 + factor * below) or _TINY)
            above = (1.0 + factor / above) or _TINY
            step = above * below
            value *= step
        if abs(step - 1.0) < _PRECISION * 4.0:
            break
    return value


@lru_cache(maxsize=65_536)
def beta_quantile(share: float, a: float, b: float) -> float:
    """The value below which this share of a beta distribution lies, by Newton's method within a bracket."""
    low, high = 0.0, 1.0
    x = a / (a + b)
    for _ in range(200):
        if x in (0.0, 1.0):  # all else is nearer to an end than a float can tell
            return x
        miss = beta_cdf(x, a, b) - share
        low, high = (low, x) if miss > 0.0 else (x, high)
        step = miss / max(math.exp(_log_beta_density(x, a, b, 1.0 - x)), _TINY)
        following = x - step if low < x - step < high else (low + high) / 2.0
        if abs(following - x) <= 1e-14 * x:
            return following
        x = following
    return x


def student_tail(value: float, degrees: float) -> float:
    """The chance that Student's t is above the value."""
    if not value > 0.0:
        return 0.5 if value == 0.0 else 1.0 - student_tail(-value, degrees)
    squared = value * value
    if math.isinf(squared) or math.isinf(degrees):
        return 0.0 if math.isinf(squared) else math.erfc(value / math.sqrt(2.0)) / 2.0
    whole = degrees + squared
    return 0.5 * beta_cdf(degrees / whole, degrees / 2.0, 0.5, squared / whole)


@lru_cache(maxsize=4096)
def student_quantile(tail: float, degrees: float) -> float:
    """The value above which Student's t is with the chance `tail`, below one half. Newton's method on the logarithms of
    both: the tail is concave there, so every start converges."""
    value = normal_quantile(1.0 - tail) if tail > 1e-15 else 8.0
    if math.isinf(degrees):
        return value
    scale = math.lgamma((degrees + 1.0) / 2.0) - math.lgamma(degrees / 2.0) - math.log(degrees * math.pi) / 2.0
    for _ in range(200):
        beyond = student_tail(value, degrees)
        density = math.exp(scale - (degrees + 1.0) / 2.0 * math.log1p(value * value / degrees))
        step = math.log(beyond / tail) * beyond / (density * value)
        value *= math.exp(min(step, 30.0))
        if abs(step) < 1e-14:
            break
    return value


def binomial_cdf(count: int, trials: int, chance: float) -> float:
    """The chance of at most `count` successes."""
    if count < 0:
        return 0.0
    return 1.0 if count >= trials else beta_cdf(1.0 - chance, trials - count, count + 1.0, chance)


def f_tail(value: float, above: float, below: float) -> float:
    """The chance that Fisher's F is above the value, with these degrees of freedom."""
    whole = below + above * value
    return beta_cdf(below / whole, below / 2.0, above / 2.0, above * value / whole)


def chi_square_quantiles(shares: Array, degrees: float) -> Array:
    """The values below which these shares of a χ² distribution lie, by Newton's method on the logarithms of both."""
    half = degrees / 2.0
    normal = np.array([normal_quantile(float(share)) for share in shares])
    start = half * (1.0 - 1.0 / (9.0 * half) + normal / (3.0 * math.sqrt(half))) ** 3  # Wilson and Hilferty
    least = np.exp((np.log(shares) + math.lgamma(half + 1.0)) / half)  # of the series' first term: a lower bound
    values: Array = np.maximum(start, least)
    for _ in range(100):
        term = np.full_like(values, 1.0 / half)
        series = term.copy()
        for number in range(1, _MOST_TERMS):
            term *= values / (half + number)
            series += term
            if (term < _PRECISION * series).all():
                break
        log_cdf = half * np.log(values) - values - math.lgamma(half) + np.log(series)
        step = (log_cdf - np.log(shares)) * series  # the density times the value over the distribution is 1 / series
        values *= np.exp(-np.clip(step, -2.0, 2.0))
        if (np.abs(step) < 1e-13).all():
            break
    return 2.0 * values


def root(function: Callable[[float], Any], low: float, high: float, tolerance: float = 2e-12) -> float:
    """Where the function is 0 between two places with different signs, by Brent's method (1973)."""
    before, now = low, high
    at_before, at_now = float(function(before)), float(function(now))
    if at_before * at_now > 0.0:
        raise ValueError("the function has the same sign at both ends")
    other, at_other, step, last = before, at_before, 0.0, 0.0
    for _ in range(100):
        if at_now == 0.0:
            break
        if at_before != 0.0 and (at_before < 0.0) != (at_now < 0.0):
            other, at_other = before, at_before
            step = last = now - before
        if abs(at_other) < abs(at_now):
            before, now, other = now, other, now
            at_before, at_now, at_other = at_now, at_other, at_now
        least, half = (tolerance + 1e-15 * abs(now)) / 2.0, (other - now) / 2.0
        if abs(half) < least:
            break
        if abs(last) > least and abs(at_now) < abs(at_before):
            if before == other:
                tried = -at_now * (now - before) / (at_now - at_before)
            else:
                first, second = (at_before - at_now) / (before - now), (at_other - at_now) / (other - now)
                tried = -at_now * (at_other * second - at_before * first) / (second * first * (at_other - at_before))
            good = 2.0 * abs(tried) < min(abs(last), 3.0 * abs(half) - least)
            last, step = (step, tried) if good else (half, half)
        else:
            last = step = half
        before, at_before = now, at_now
        now += step if abs(step) > least else math.copysign(least, half)
        at_now = float(function(now))
    return now
