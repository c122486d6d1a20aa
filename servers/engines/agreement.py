"""Whether an engine's answers are the model's: compared with expected ones, by the kind of each output.

    embedding   cosine of each row, its relative error and its largest difference
    logits      relative error, largest difference, and the same highest class where its lead exceeds the tolerance
    tensor      relative error and largest difference; integers and booleans are equal
    labels      equal

The relative error of a row is ‖answer - expected‖ / ‖expected‖, the largest difference is in units of the row's
largest expected value; both divisors are at least the median of the batch, so a row that happens to be close to zero
is compared by the scale of its neighbours. A row whose answer is that of another row fails at any tolerance, since
answers to similar inputs may all lie within it. NaN and infinities fail.

INT8 and FP8 lose accuracy by design, so their limits only catch answers that are not the model's; how much is lost is
measured and shown. Highest classes and labels may then differ, and every row counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from servers.engines.batches import random_inputs
from servers.engines.settings import EngineError
from servers.models.items import valid_items
from servers.models.specification import ModelSpecification, OutputKind
from servers.protocol.tensors import Array, TensorSpec

TOLERANCE: Mapping[str, float] = {"fp32": 1e-3, "tf32": 0.01, "fp16": 0.03, "bf16": 0.05, "int8": 0.6, "fp8": 0.6}
"""By precision, the largest relative error of a row, and its largest difference in units of its largest value."""

LOSSY = ("int8", "fp8")
"""Precisions whose loss is shown, and not a fault while the answers are recognisably the model's."""

MIN_COSINE: Mapping[str, float] = {**dict.fromkeys(TOLERANCE, 0.9995), **dict.fromkeys(LOSSY, 0.8)}
"""By precision, the lowest cosine of an embedding with the expected one."""

SWAPPED = 0.5
"""A row is swapped if another row's expected answer is nearer than this share of its error."""
MIN_SWAPPED_ERROR = 1e-4
"""Below this relative error, rows that should be equal may look swapped by rounding."""

PROOF_ROWS, PROOF_SHARE = 3, 0.76
"""A batch and a share of the axes' default sizes that are padded, so that the padding is checked too."""

CACHED_VALUES = 2**17
"""Values of a few rows that are compared at a time: 1 MiB in FP64, which stays in a processor's cache."""

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class OutputDifference:
    """The worst row of one output. None: this kind of output has no such number."""

    kind: OutputKind
    max_abs: float
    relative_error: float | None = None
    cosine_min: float | None = None
    top1: float | None = None
    """Of logits, the share of rows with the expected highest class; only rows with a clear lead count, in a lossy
    precision all. Of labels, the share of equal values."""


@dataclass(frozen=True, slots=True)
class Disagreement:
    """The comparison of one batch; `fault` is a clause that names the output and its error, None if all agree."""

    outputs: Mapping[str, OutputDifference]
    fault: str | None = None

    @property
    def cosine_min(self) -> float | None:
        """The lowest cosine of all outputs; None without one."""
        cosines = [output.cosine_min for output in self.outputs.values() if output.cosine_min is not None]
        return min(cosines, default=None)

    @property
    def relative_error(self) -> float | None:
        """The largest relative error of all outputs; None without one."""
        errors = [output.relative_error for output in self.outputs.values() if output.relative_error is not None]
        return max(errors, default=None)

    def details(self, reference: str) -> dict[str, object]:
        """The two figures as the description of an engine shows them; `reference` names the expected answers."""
        cosine, error = self.cosine_min, self.relative_error
        return {
            f"cosine_to_{reference}": None if cosine is None else round(cosine, 7),
            f"relative_error_to_{reference}": None if error is None else float(f"{error:.3g}"),
        }

    @property
    def top1(self) -> float | None:
        """The lowest share of expected classes of all outputs; None without one."""
        return min((output.top1 for output in self.outputs.values() if output.top1 is not None), default=None)


def disagreement(
    specification: ModelSpecification, expected: Mapping[str, Array], actual: Mapping[str, Array], precision: str
) -> Disagreement:
    """Compare the answers to one batch with the expected ones, both by output name, computed in `precision`. An answer
    with a missing output, another datatype or another shape is a fault."""
    outputs: dict[str, OutputDifference] = {}
    faults = []
    for tensor in specification.outputs:
        fault = _malformed(tensor, expected[tensor.name], actual.get(tensor.name))
        if fault is None:
            kind = specification.kind_of(tensor.name)
            outputs[tensor.name], fault = _compared(kind, expected[tensor.name], actual[tensor.name], precision)
        if fault is not None:
            faults.append(f"{tensor.name} {fault}")
    return Disagreement(outputs, "; ".join(faults) or None)


def _malformed(tensor: TensorSpec, expected: Array, actual: Array | None) -> str | None:
    if actual is None:
        return "is missing"
    if actual.dtype != tensor.dtype:
        return f"is {actual.dtype}, not {tensor.datatype}"
    if actual.shape != expected.shape:
        return f"has shape {list(actual.shape)}, expected {list(expected.shape)}"
    if actual.dtype.kind == "f":
        for array, whose in ((actual, "contains"), (expected, "should contain")):
            if not np.isfinite(array).all():
                return f"{whose} NaN or infinity"
    return None


def _compared(kind: OutputKind, expected: Array, actual: Array, precision: str) -> tuple[OutputDifference, str | None]:
    if kind == "labels" or actual.dtype.kind != "f":
        different = int(np.count_nonzero(actual != expected))
        if actual.dtype.kind in "OSU":
            largest = float(different > 0)
        else:
            largest = float(np.abs(actual.astype(np.float64) - expected.astype(np.float64)).max(initial=0))
        equal = 1 - different / max(actual.size, 1)
        needed = 1 - TOLERANCE[precision] if precision in LOSSY else 1.0
        fault = f"differs in {different} of {actual.size} values that must be equal" if equal < needed else None
        return OutputDifference(kind, largest, top1=equal if kind == "labels" else None), fault
    want, got = (array.reshape(len(array), -1) for array in (expected, actual))
    if not want.size:
        return OutputDifference(kind, 0.0), None
    norms, answer_norms, products, errors, largest_values, differences = _row_by_row(want, got)
    relative = _ratio(errors, np.maximum(norms, np.median(norms)))
    scale = np.maximum(largest_values, np.median(largest_values))
    limit = TOLERANCE[precision]
    cosine, top1 = _lowest_cosine(products, norms * answer_norms), None
    worst, largest_difference = float(relative.max()), float(_ratio(differences, scale).max())
    fault = None
    if not worst <= limit:
        fault = f"has a relative error of {worst:.2g}, more than {limit:g}"
    elif not largest_difference <= limit:
        fault = f"has a value that is off by {largest_difference:.2g} of the row's largest, more than {limit:g}"
    elif kind == "embedding" and cosine is not None and not cosine >= MIN_COSINE[precision]:
        fault = f"has a cosine of {cosine:.6f}, below {MIN_COSINE[precision]}"
    elif (swapped := _swapped_row(want, got, norms, errors, relative)) is not None:
        fault = f"has in row {swapped[0]} the answer of row {swapped[1]}"
    if kind == "logits":
        lossy = precision in LOSSY
        top1 = _top1(expected, actual, np.full_like(scale, -1.0) if lossy else 2 * limit * scale)
        if fault is None and top1 is not None and top1 < 1 and not lossy:
            fault = f"has another highest class in {1 - top1:.1%} of the rows with a clear one"
    return OutputDifference(kind, float(differences.max()), worst, cosine, top1), fault


def _ratio(parts: Float64Array, wholes: Float64Array) -> Float64Array:
    """Row by row; 0 where both are 0, infinity where only the whole is."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio: Float64Array = np.where(parts == 0, 0.0, parts / wholes)
    return ratio


def _row_by_row(want: Array, got: Array) -> Float64Array:
    """Six numbers per row, shape [6, rows]: ‖want‖, ‖got‖, want · got, ‖got − want‖, the largest magnitudes of want and
    of got − want. Batches of sequences have 100 MB of answers, so the temporary arrays are a few rows long."""
    step, parts = max(1, CACHED_VALUES // want.shape[1]), []
    for start in range(0, len(want), step):
        w, g = (array[start : start + step].astype(np.float64) for array in (want, got))
        difference = g - w
        norm_w, norm_g, error = (np.linalg.norm(rows, axis=1) for rows in (w, g, difference))
        largest = (np.abs(rows).max(axis=1) for rows in (w, difference))
        parts.append(np.stack([norm_w, norm_g, np.einsum("ij,ij->i", w, g), error, *largest]))
    return np.concatenate(parts, axis=1)


def _lowest_cosine(products: Float64Array, lengths: Float64Array) -> float | None:
    """Over the rows in which neither is zero; None without one."""
    rows = lengths > 0
    return float((products[rows] / lengths[rows]).min()) if rows.any() else None


def _swapped_row(
    want: Array, got: Array, norms: Float64Array, errors: Float64Array, relative: Float64Array
) -> tuple[int, int] | None:
    """The first row whose answer is much nearer to another row's expected answer, and that row. Of ‖want − got‖² =
    ‖want‖² − 2 want · got + ‖got‖² the last part does not change which row is the nearest, so one matrix product finds
    it: the differences of all pairs would take seconds."""
    rows = np.flatnonzero(relative > MIN_SWAPPED_ERROR)
    if not len(rows):
        return None
    expected, answers = want.astype(np.float64), got[rows].astype(np.float64)
    nearest = (norms**2 - 2 * answers @ expected.T).argmin(axis=1)
    for row, answer, other in zip(rows, answers, nearest, strict=True):
        if np.linalg.norm(expected[other] - answer) < SWAPPED * errors[row]:
            return int(row), int(other)
    return None


def _top1(expected: Array, actual: Array, clear_lead: Float64Array) -> float | None:
    """Share of the clear rows with the same highest class along the last axis; `clear_lead` is per row of the batch."""
    classes = expected.shape[-1]
    if expected.ndim < 2 or classes < 2:
        return None
    want, got = (array.astype(np.float64).reshape(-1, classes) for array in (expected, actual))
    second, first = np.partition(want, -2, axis=1)[:, -2:].T
    clear = first - second > np.repeat(clear_lead, len(want) // len(clear_lead))
    return float((want.argmax(axis=1) == got.argmax(axis=1))[clear].mean()) if clear.any() else None


Answer = Callable[[Mapping[str, Array]], Mapping[str, Array]]
"""Answers a batch: arrays by input in, arrays by output out."""


@dataclass(frozen=True, slots=True)
class Proof:
    """One batch; `lengths` holds each item's size along the padded axis, and is empty where no item is padded."""

    specification: ModelSpecification
    inputs: Mapping[str, Array]
    lengths: tuple[int, ...] = ()

    def expected(self, answer: Answer) -> dict[str, Array]:
        """The answers to each item alone, zero in the places of padding."""
        axis = self.specification.padded_axis
        if axis is None or not self.lengths:
            return dict(answer(self.inputs))
        separate = [
            answer({name: axis.cut(name, array[row : row + 1], length) for name, array in self.inputs.items()})
            for row, length in enumerate(self.lengths)
        ]
        stacked: dict[str, Array] = {}
        for name in separate[0]:
            shape = np.max([answers[name].shape for answers in separate], axis=0)
            stacked[name] = np.zeros((len(separate), *shape[1:]), separate[0][name].dtype)
            for row, answers in enumerate(separate):
                part = answers[name]
                place: tuple[Any, ...] = (row, *map(slice, part.shape[1:]))
                stacked[name][place] = part[0]
        return stacked

    def without_padding(self, outputs: Mapping[str, Array]) -> dict[str, Array]:
        """Answers to the batch with zeros in the places of padding, as in `expected`."""
        axis = self.specification.padded_axis
        if axis is None or not self.lengths:
            return dict(outputs)
        cleared = {name: array.copy() for name, array in outputs.items()}
        for name, array in cleared.items():
            axis.pad(name, array, self.lengths)
        return cleared


def proof_batch(specification: ModelSpecification, rows: int, seed: int, share: float = 1.0) -> Proof:
    """Random items; the largest has this share of the axes' default sizes, the others of a padded axis less."""
    sizes = {axis.name: min(max(1, round(share * axis.default)), axis.largest) for axis in specification.axes}
    if (axis := specification.padded_axis) is None:
        return Proof(specification, random_inputs(specification, rows, seed, sizes))
    lengths = tuple(max(1, sizes[axis.name] * (rows - row) // rows) for row in range(rows))
    return Proof(specification, valid_items(specification, seed, lengths), lengths)


def check_finite(proof: Proof, answer: Answer) -> None:
    """Raise `EngineError` if an output of floating-point numbers has none that is finite, as with damaged weights."""
    for name, array in answer(proof.inputs).items():
        if array.dtype.kind == "f" and array.size and not np.isfinite(array).any():
            raise EngineError(f"no value of output {name} is a finite number: are the weights damaged?")


def proof_at_load(specification: ModelSpecification, max_batch_size: int) -> Proof:
    """The batch with which an engine proves at load that it computes the model."""
    return proof_batch(specification, min(PROOF_ROWS, max_batch_size), 1, PROOF_SHARE)
