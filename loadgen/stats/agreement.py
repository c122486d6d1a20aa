"""How far two answers to one input agree, by the kind of the output, and how much of a difference can be rounding.

**Rounding.** Two engines that compute the same function in the same precision differ by rounding alone. With unit
roundoff u, the error of a chain of n rounded operations is about √n · u (Higham and Mary, SIAM J. Sci. Comput. 41(5),
2019); a network of some dozens of layers has n of a few hundred, so √n is about 16. In FP16, TF32 and BF16 the operands
are rounded and sums are kept in FP32, so u is theirs: 2⁻¹¹, 2⁻¹¹ and 2⁻⁸. In FP32 each sum over some thousand products
rounds as well: √(300 · 3000) · 2⁻²⁴ is 6 · 10⁻⁵, rounded up. An output of FP16 or BF16 is rounded once more on each
side, which adds two of its own u. An element may differ by more than its vector: the largest of a million normal
deviations is 4.9 times their root mean square.

**Kinds.** NaN and infinity never agree, on either side. What cancels keeps the rounding of what cancelled, so a small
vector or element is measured against the root mean square of the whole output.

- *tensor*: the relative error of each item and of each element.
- *embedding*: the same for each vector (the last dimension), and its cosine. Its angle has a sine of the relative error
  over its own length, for which the element's tolerance holds: a vector 8 times as short as the others, whose rounding
  weighs 8 times as much, must keep its direction too.
- *logits*: the same for each vector, relative and absolute, and the order of the highest: a class that takes another's
  place among the top 1 or top 5 is wrong if the reference puts it lower by more than both may move. Each of these two
  may move by the vector's tolerance, not by that of the worst of many elements.
- *labels*: equal. So are integers, booleans and byte strings without a kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]
Floats = npt.NDArray[np.float64]
OutputKind = Literal["embedding", "logits", "labels", "tensor"]

ELEMENT_FACTOR = 8.0
NOT_FINITE = "holds NaN or infinite values"
UNKNOWN = "unknown"
_KINDS: tuple[OutputKind, ...] = get_args(OutputKind)
_COARSEST_FIRST = ("bf16", "fp16", "tf32", "fp32")
_RELATIVE = {"bf16": 16 * 2.0**-8, "fp16": 16 * 2.0**-11, "tf32": 16 * 2.0**-11, "fp32": 1e-4}
_OWN_ROUNDOFF = {"BF16": 2.0**-8, "FP16": 2.0**-11, "FP32": 0.0, "FP64": 0.0}
"""Of the outputs of each datatype with a fraction; 0 where it is far below the tolerance of any precision."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The largest difference that counts as rounding, in an output of one kind."""

    precision: str
    """The coarsest of the precisions in effect; an unknown one counts as FP16."""
    relative: float
    """Largest difference of a vector: ‖b − a‖ over ‖a‖."""
    kind: OutputKind = "tensor"
    """How the output is compared."""

    @property
    def element(self) -> float:
        """Largest difference of an element: |b − a| over |a|."""
        return ELEMENT_FACTOR * self.relative

    @property
    def cosine(self) -> float:
        """Least cosine of an embedding."""
        return float(np.sqrt(1.0 - min(self.element, 1.0) ** 2))


def tolerance_of(precisions: Iterable[object]) -> Tolerance:
    """The tolerance between arms with these precisions in effect."""
    named = {str(precision).lower() for precision in precisions}
    if not named <= set(_COARSEST_FIRST):
        precision = "bf16" if "bf16" in named else UNKNOWN
        return Tolerance(precision, _RELATIVE["bf16" if precision == "bf16" else "fp16"])
    precision = next((name for name in _COARSEST_FIRST if name in named), "fp32")
    return Tolerance(precision, _RELATIVE[precision])


def tolerance_for(kind: str | None, datatype: str, tolerance: Tolerance) -> Tolerance:
    """The tolerance of an output of this kind, if it has one, and of this datatype of the protocol."""
    numbers = datatype in _OWN_ROUNDOFF or (datatype not in ("BOOL", "BYTES") and kind in ("embedding", "logits"))
    if kind == "labels" or not numbers:
        return replace(tolerance, kind="labels")
    relative = tolerance.relative + 2 * _OWN_ROUNDOFF.get(datatype, 0.0)
    return replace(tolerance, relative=relative, kind=kind if kind in _KINDS else "tensor")


def tolerances_for(
    datatypes: Mapping[str, str], kinds: Mapping[str, str], tolerance: Tolerance
) -> dict[str, Tolerance]:
    """The tolerance of every output, from its datatype and the kinds that are known."""
    return {name: tolerance_for(kinds.get(name), datatype, tolerance) for name, datatype in datatypes.items()}


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far answers agree, by the worst of their vectors."""

    fault: str | None = None
    """How they differ by more than rounding, to follow the name of the output; None if they agree."""
    relative: float = 0.0
    """‖b − a‖ over ‖a‖, or over the typical ‖a‖ if that is larger; infinite if one of the two is not finite."""
    element: float = 0.0
    """The largest |b − a| over |a|, or over the root mean square of the output if that is larger."""
    absolute: float = 0.0
    """The largest |b − a|."""
    cosine: float = 1.0
    """It decides for embeddings only: it is 1 for any two positive numbers, and for a vector times a hundred."""
    top1: float | None = None
    """Share of vectors with the same highest logit; None for other kinds, and for a single class."""
    top5: float | None = None
    """Share of vectors with the same five highest logits; None with five classes or fewer."""


def agree(expected: Array, actual: Array, tolerance: Tolerance, typical: float | None = None) -> Agreement:
    """Compare two arrays of one shape, whose first dimension is the item; empty ones are equal. `typical` is the root
    mean square of the output's elements, by default of `expected`."""
    if not expected.size:
        return Agreement()
    if not (_finite(expected) and _finite(actual)):
        return Agreement(NOT_FINITE, np.inf, np.inf, np.inf, 0.0)
    if tolerance.kind == "labels":
        return _equal(expected, actual)
    vectors = len(expected) if tolerance.kind == "tensor" or expected.ndim < 2 else -1
    length = expected.size // len(expected) if vectors > 0 else expected.shape[-1]
    a, b = (array.reshape(vectors, length).astype(np.float64) for array in (expected, actual))
    scale = root_mean_square([a]) if typical is None else typical
    agreement = _difference(a, b, scale)
    fault = _rounding_fault(agreement, tolerance)
    if tolerance.kind != "logits":
        return replace(agreement, fault=fault)
    (top1, first), (top5, others) = (_order(a, b, tolerance, scale, highest) for highest in (1, 5))
    return replace(agreement, fault=fault or first or others, top1=top1, top5=top5)


def worst_of(agreements: Sequence[Agreement]) -> Agreement:
    """Several agreements as one: the first fault, the largest errors, the mean shares of equal order."""
    if not agreements:
        return Agreement()
    first = [agreement.top1 for agreement in agreements if agreement.top1 is not None]
    fifth = [agreement.top5 for agreement in agreements if agreement.top5 is not None]
    return Agreement(
        fault=next((agreement.fault for agreement in agreements if agreement.fault), None),
        relative=max(agreement.relative for agreement in agreements),
        element=max(agreement.element for agreement in agreements),
        absolute=max(agreement.absolute for agreement in agreements),
        cosine=min(agreement.cosine for agreement in agreements),
        top1=sum(first) / len(first) if first else None,
        top5=sum(fifth) / len(fifth) if fifth else None,
    )


def trimmed(actual: Array, expected: Array) -> Array:
    """An item's output from a batch with longer items, cut to the size that it has alone; unchanged if its shape cannot
    be made that of `expected` by a cut, or if nothing would be left of it."""
    pairs = zip(actual.shape, expected.shape, strict=False)
    if actual.ndim != expected.ndim or not expected.size or any(size < target for size, target in pairs):
        return actual
    return actual[tuple(slice(size) for size in expected.shape)]


def all_alike(answers: Sequence[Array]) -> bool:
    """Whether the answers to several inputs hold the same values, as far as the shortest of them goes. An empty
    answer is like other empty ones only."""
    first, *others = (answer.ravel() for answer in answers)
    least = min(map(len, (first, *others)))
    if not least:
        return bool(others) and not any(map(len, (first, *others)))
    return bool(others) and all(list(other[:least]) == list(first[:least]) for other in others)


def root_mean_square(arrays: Sequence[Array]) -> float:
    """Root mean square of all elements; 0 for byte strings."""
    numbers = [array for array in arrays if not array.dtype.hasobject]
    count = sum(array.size for array in numbers)
    return float(np.sqrt(sum(np.square(array.astype(np.float64)).sum() for array in numbers) / count)) if count else 0.0


def _finite(array: Array) -> bool:
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())


def _equal(expected: Array, actual: Array) -> Agreement:
    pairs = zip(expected.ravel().tolist(), actual.ravel().tolist(), strict=True)
    apart = next(((a, b) for a, b in pairs if a != b), None)
    if apart is None:
        return Agreement()
    absolute = 1.0
    if not (expected.dtype.hasobject or actual.dtype.hasobject):
        absolute = float(np.abs(actual.astype(np.float64) - expected.astype(np.float64)).max())
    return Agreement(f"is {apart[1]!r:.40} instead of {apart[0]!r:.40}", absolute=absolute, cosine=0.0)


def _difference(a: Floats, b: Floats, scale: float) -> Agreement:
    apart = np.abs(b - a)
    distances, norms, lengths = (np.linalg.norm(vectors, axis=1) for vectors in (b - a, a, b))
    cosines = np.where(norms == 0, 1.0, _over((a * b).sum(axis=1), norms * lengths, when_nothing=0.0))
    return Agreement(
        relative=float(_over(distances, np.maximum(norms, scale * np.sqrt(a.shape[1]))).max()),
        element=float(_over(apart, np.maximum(np.abs(a), scale)).max()),
        absolute=float(apart.max()),
        cosine=float(cosines.min()),
    )


def _rounding_fault(agreement: Agreement, tolerance: Tolerance) -> str | None:
    if agreement.relative > tolerance.relative or agreement.element > tolerance.element:
        return (
            f"has a relative error of {agreement.relative:.2g} (tolerance {tolerance.relative:.2g}), "
            f"of one element {agreement.element:.2g} (tolerance {tolerance.element:.2g})"
        )
    if tolerance.kind == "embedding" and agreement.cosine < tolerance.cosine:
        return f"has a cosine of {agreement.cosine:.6f} (at least {tolerance.cosine:.6f})"
    return None


def _order(a: Floats, b: Floats, tolerance: Tolerance, scale: float, highest: int) -> tuple[float | None, str | None]:
    """The share of vectors whose highest logits are the same, and a difference that rounding does not explain."""
    if a.shape[1] <= highest:
        return None, None
    ours, theirs = (np.sort(np.argpartition(-logits, highest - 1, axis=1)[:, :highest], axis=1) for logits in (a, b))
    lowest = np.take_along_axis(a, ours, axis=1).min(axis=1)
    margin = lowest - np.take_along_axis(a, theirs, axis=1).min(axis=1)
    explained = 2 * tolerance.relative * np.maximum(np.abs(lowest), scale)
    fault = None
    if (margin > explained).any():
        row = int(np.argmax(margin - explained))
        outsider = int(theirs[row, np.argmin(a[row, theirs[row]])])
        fault = (
            f"has class {outsider} in the top {highest}, which the reference puts {margin[row]:.2g} below it; "
            f"rounding explains {explained[row]:.2g}"
        )
    return float((ours == theirs).all(axis=1).mean()), fault


def _over(distance: Floats, size: Floats, when_nothing: float = np.inf) -> Floats:
    """The quotient; zero distance gives 0, a distance from zero is infinite."""
    quotient = np.where(distance == 0, 0.0, when_nothing)
    np.divide(distance, size, out=quotient, where=size > 0)
    return quotient
