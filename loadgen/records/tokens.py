"""Streamed tokens: beside the sample file of a language model's block stand its chunks and its answers.

    samples/NNNN.npy            one row per request, as for every model; of a good answer `first_byte_ns` is the time of
                                its first chunk with tokens and `end_ns` that of its last one
    samples/NNNN.events.npy     `EVENT_DTYPE`, one row per chunk with tokens, which is what one read brought; the chunks
                                of a sample stand together, in the order in which they came, and the samples ascend
    samples/NNNN.answers.npy    `ANSWER_DTYPE`, one row per sample, in the order of the samples

Failed requests have their chunks too: all that came before the failure. Times are those of the samples. What a server
does not report is -1. A block's three files are written at its end; a killed run has none of its last block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from loadgen.records.samples import Samples, part_path, read_samples, store_samples

MOST_TOKENS = 2**20
"""Most tokens of a prompt or of an answer."""

EVENT_DTYPE = np.dtype(
    [
        ("sample", "<u4"),  # index of the sample whose answer the chunk belongs to
        ("tokens", "<u4"),  # tokens in the chunk, at least 1
        ("at_ns", "<i8"),  # when the read that brought the chunk returned
        ("events", "<u4"),  # events with a part of the answer in it, at least 1
    ]
)

ANSWER_DTYPE = np.dtype(
    [
        ("asked", "<i4"),  # tokens that the answer should have (max_tokens)
        ("prompt_asked", "<i4"),  # tokens of the prompt that was sent
        ("prompt_tokens", "<i4"),  # tokens of the prompt according to the server
        ("output_tokens", "<i4"),  # tokens of all chunks, counted as `counted` says
        ("usage_tokens", "<i4"),  # completion tokens according to the server
        ("cached_tokens", "<i4"),  # prompt tokens that the server took from a cache, by its own count
        ("distinct", "<i4"),  # distinct ids in the answer; -1 unless every token has an id
        ("chunks", "<i4"),  # chunks with tokens
        ("text_bytes", "<i4"),  # of the answer's text in UTF-8
        ("hidden_tokens", "<i4"),  # tokens that the server counted and did not stream
        ("number", "<i8"),  # the number that the prompt was made from, see `loadgen.experiment.prompts`
        ("finish", "<i2"),  # UNKNOWN, LENGTH, STOP or OTHER
        ("counted", "<u2"),  # UNCOUNTED to BY_EVENTS
        ("flags", "<u2"),  # IDS, ECHO, ECHO_DIFFERS, CUT
    ]
)
UNKNOWN, LENGTH, STOP, OTHER = 0, 1, 2, 3
"""Why an answer ended, by the server's word for it: none, length, stop, another such as error."""
UNCOUNTED, BY_IDS, BY_RUNNING_USAGE, BY_TOTAL_USAGE, BY_WORDS, BY_LENGTH, BY_EVENTS = range(7)
"""How the tokens of an answer were counted."""
COUNTED_BY = (
    "not at all", "ids", "the server's running usage", "the server's usage at the end, spread over the text",
    "the words of the text", "the length that was asked for, spread over the text", "events",
)  # fmt: skip
"""Each in words."""
IDS: Final = 1
"""Every token of the answer came with its id."""
ECHO: Final = 2
"""The server sent the ids of the prompt back."""
ECHO_DIFFERS: Final = 4
"""They were not those that were sent."""
CUT: Final = 8
"""The stream ended without its end: no finish reason, no [DONE], or in the middle of an event."""


@dataclass(frozen=True, slots=True)
class TokenRows:
    """The chunks and the answers of some samples."""

    events: Samples
    answers: Samples


def events_name(samples: str) -> str:
    """The name of the file with the chunks, by that of the samples."""
    return f"{samples.removesuffix('.npy')}.events.npy"


def answers_name(samples: str) -> str:
    """The name of the file with the answers, by that of the samples."""
    return f"{samples.removesuffix('.npy')}.answers.npy"


def is_beside_samples(name: str) -> bool:
    """Whether a file holds chunks or answers."""
    return name.removesuffix(".part").endswith((".events.npy", ".answers.npy"))


def store_tokens(samples: Path, rows: TokenRows) -> None:
    """Write both files that belong to a sample file. Raises `OSError`."""
    store_samples(samples.with_name(events_name(samples.name)), [rows.events], EVENT_DTYPE)
    store_samples(samples.with_name(answers_name(samples.name)), [rows.answers], ANSWER_DTYPE)


def read_tokens(samples: Path) -> TokenRows:
    """Read both files that belong to a sample file. Raises `OSError`, `ValueError`."""
    return TokenRows(
        read_samples(samples.with_name(events_name(samples.name)), EVENT_DTYPE),
        read_samples(samples.with_name(answers_name(samples.name)), ANSWER_DTYPE),
    )


def remove_tokens(samples: Path) -> None:
    """Remove both files that belong to a sample file, finished or not. Idempotent."""
    for name in (events_name(samples.name), answers_name(samples.name)):
        samples.with_name(name).unlink(missing_ok=True)
        part_path(samples.with_name(name)).unlink(missing_ok=True)


def join_tokens(parts: Sequence[TokenRows], order: npt.NDArray[np.intp]) -> TokenRows:
    """The rows of several processes. `order[i]` is the place among all their answers, one part after the other, of the
    sample that has the number i in the merged file."""
    if not parts:
        return TokenRows(np.empty(0, EVENT_DTYPE), np.empty(0, ANSWER_DTYPE))
    numbers = np.empty(len(order), dtype=np.uint32)
    numbers[order] = np.arange(len(order), dtype=np.uint32)
    events, first = [], 0
    for part in parts:
        renumbered = part.events.copy()
        renumbered["sample"] = numbers[first + renumbered["sample"].astype(np.int64)]
        events.append(renumbered)
        first += len(part.answers)
    joined = np.concatenate(events)
    return TokenRows(
        joined[np.argsort(joined["sample"], kind="stable")], np.concatenate([part.answers for part in parts])[order]
    )
