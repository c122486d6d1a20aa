"""How much two outputs for one input differ, and how much of it can be rounding.

Two engines that compute the same function in the same precision differ by rounding alone. With unit roundoff u, the
error of a chain of n rounded operations is about √n · u (Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019); a network
of some dozens of layers has n of a few hundred, so √n is about 16. In FP16, TF32 and BF16 the operands are rounded and
sums are kept in FP32, so u is theirs: 2⁻¹¹, 2⁻¹¹ and 2⁻⁸. In FP32 each sum over some thousand products rounds as well:
√(300 · 3000) · 2⁻²⁴ is 6 · 10⁻⁵, rounded up. An element may differ by more than its row: the largest of a million
normal deviations is 4.9 times their root mean square.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]
Floats = npt.NDArray[np.float64]

ELEMENT_FACTOR = 8.0
_COARSEST_FIRST = ("bf16", "fp16", "tf32", "fp32")
_RELATIVE = {"bf16": 16 * 2.0**-8, "fp16": 16 * 2.0**-11, "tf32": 16 * 2.0**-11, "fp32": 1e-4}
UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The largest difference that counts as rounding."""

    precision: str
    """The coarsest of the precisions in effect; an unknown one counts as FP16."""
    relative: float
    """Largest difference of a row: ‖b − a‖ over ‖a‖."""

    @property
    def element(self) -> float:
        """Largest difference of an element: |b − a| over |a|."""
        return ELEMENT_FACTOR * self.relative

    def holds(self, difference: Difference) -> npt.NDArray[np.bool_]:
        """Whether each row is within the tolerance."""
        return (difference.relative <= self.relative) & (difference.element <= self.element)


def tolerance_of(precisions: Iterable[object]) -> Tolerance:
    """The tolerance between arms with these precisions in effect."""
    named = {str(precision).lower() for precision in precisions}
    if not named <= set(_COARSEST_FIRST):
        precision = "bf16" if "bf16" in named else UNKNOWN
        return Tolerance(precision, _RELATIVE["bf16" if precision == "bf16" else "fp16"])
    precision = next((name for name in _COARSEST_FIRST if name in named), "fp32")
    return Tolerance(precision, _RELATIVE[precision])


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of one output per row. Infinite if one of the two is not finite."""

    relative: Floats
    """‖b − a‖ over ‖a‖, or over the typical ‖a‖ if that is larger, since values that cancel keep their rounding."""
    element: Floats
    """The largest |b − a| over |a|, or over the root mean square of all elements if that is larger."""
    absolute: Floats
    """The largest |b − a|."""
    cosine: Floats
    """Shown only: it is 1 for a single value, or for a vector times a hundred."""


def difference(expected: Array, actual: Array, typical: float | None = None) -> Difference:
    """The difference of two arrays of one shape whose first dimension is the row. `typical` is the root mean square of
    the output's elements, by default of `expected`. Byte strings are equal or infinitely different."""
    rows = len(expected)
    if expected.dtype.hasobject or actual.dtype.hasobject:
        same = np.asarray([list(a.ravel()) == list(b.ravel()) for a, b in zip(expected, actual, strict=True)])
        apart = np.where(same, 0.0, np.inf)
        return Difference(apart, apart, apart, np.where(same, 1.0, 0.0))
    a = expected.reshape(rows, -1).astype(np.float64)
    b = actual.reshape(rows, -1).astype(np.float64)
    finite = np.isfinite(a).all(axis=1) & np.isfinite(b).all(axis=1)
    a, b = np.where(finite[:, None], a, 0.0), np.where(finite[:, None], b, 0.0)
    scale = root_mean_square(a) if typical is None else typical
    apart = np.abs(b - a)
    norms, lengths = np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1)
    cosine = np.where((norms == 0) & (lengths == 0), 1.0, _over((a * b).sum(axis=1), norms * lengths, when_nothing=0.0))
    relative = _over(np.linalg.norm(b - a, axis=1), np.maximum(norms, scale * np.sqrt(a.shape[1])))
    element = _over(apart, np.maximum(np.abs(a), scale)).max(axis=1)
    return Difference(
        relative=np.where(finite, relative, np.inf),
        element=np.where(finite, element, np.inf),
        absolute=np.where(finite, apart.max(axis=1), np.inf),
        cosine=np.where(finite, cosine, 0.0),
    )


def root_mean_square(array: Array) -> float:
    """Root mean square of all elements; 0 for byte strings."""
    if array.dtype.hasobject or not array.size:
        return 0.0
    return float(np.sqrt(np.mean(np.square(array.astype(np.float64)))))


def _over(distance: Floats, size: Floats, when_nothing: float = np.inf) -> Floats:
    """The quotient; zero distance gives 0, a distance from zero is infinite."""
    quotient = np.where(distance == 0, 0.0, when_nothing)
    np.divide(distance, size, out=quotient, where=size > 0)
    return quotient
