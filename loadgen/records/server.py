"""What a server reports of the model that it executes, and of the models that an ensemble calls."""

from __future__ import annotations

import msgspec

from loadgen.records.record import Record


class StageTotals(Record, frozen=True, kw_only=True):
    """A server's own statistics of a block: differences of its counters, summed over the block's requests.

    The names are Triton's. What a server does not report is None; a negative number means that its counters ran
    backwards. `receive` and `encode` are the native server's HTTP stages; `decode` is part of compute_input on Triton,
    except in an ensemble with a model that decodes.
    """

    requests: int | None
    items: int | None
    executions: int | None
    queue_ns: int | None
    compute_input_ns: int | None
    compute_infer_ns: int | None
    compute_output_ns: int | None
    receive_ns: int | None = None
    decode_ns: int | None = None
    encode_ns: int | None = None
    batches: dict[int, int] = msgspec.field(default_factory=dict)
    """Executed batch size → number of executions."""
    steps: tuple[StepTotals, ...] = ()
    """Of an ensemble: its models, whose times are summed here. `executions` and `batches` are those of the one that
    executes; with a model whose statistics cannot be read all these are unknown."""

    @property
    def executed_items(self) -> int | None:
        """Items in `executions`: of an ensemble those of the model that executes, which may get more or fewer."""
        executing = [step.totals for step in self.steps if step.executes and step.totals is not None]
        return executing[0].items if executing else self.items


class StepTotals(Record, frozen=True, kw_only=True):
    """The statistics of one model that an ensemble calls."""

    model: str
    calls: int
    """How often one request to the ensemble calls it."""
    decodes: bool
    """Whether its time is the stage `decode` of the ensemble."""
    executes: bool
    """Whether the ensemble's executions and batches are its own."""
    totals: StageTotals | None
    """None: its configuration or its statistics cannot be read. Includes requests that others sent to it."""


class StepRecord(Record, frozen=True, kw_only=True):
    """One model that an ensemble calls."""

    model: str
    version: str | None = None
    """None: the latest."""
    calls: int = 1
    """How often one request to the ensemble calls it."""
    config: dict[str, object] | None
    """None: it cannot be read."""
