"""Cosines between embeddings, as tests compare them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def row_cosines(a: npt.NDArray[np.generic], b: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
    """Cosine of each row of `a` with the same row of `b`, computed in FP64; NaN where a row is zero or not finite."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        cosines: npt.NDArray[np.float64] = (x * y).sum(axis=1) / (np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1))
    return cosines
