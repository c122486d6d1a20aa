"""Lengths of sequences as real text has them, drawn by seed.

The table was measured in the 2,295 paragraphs with at least three words of `pydoc_data.topics` of Python 3.11.7, the
reference manual that comes with Python (PSF licence, version 2). A paragraph ends at a blank line. Its tokens were
counted as a WordPiece tokenizer would roughly make them: a run of letters and a run of digits count one for every 7
characters begun, every other character that is not space counts one, and two special tokens frame the paragraph.
"""

from __future__ import annotations

import numpy as np

QUANTILES = {0.0: 5, 0.05: 10, 0.1: 13, 0.25: 22, 0.5: 38, 0.75: 69, 0.9: 108, 0.95: 148, 0.99: 265, 1.0: 2213}
"""Share of the paragraphs with at most so many tokens; between them lengths are interpolated."""


def text_lengths(count: int, seed: int, largest: int) -> list[int]:
    """`count` lengths in random order, one from each of `count` equal parts of the distribution, cut at `largest`.

    So even a few lengths have nearly the distribution's mean.
    """
    generator = np.random.default_rng(seed)
    shares = (generator.permutation(count) + generator.random(count)) / count
    lengths = np.interp(shares, list(QUANTILES), list(QUANTILES.values()))
    return [min(largest, round(length)) for length in lengths]
