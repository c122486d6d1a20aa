"""Writes the stored records of a comparison of language models that never happened.

Every user sends one prompt after another and gets its tokens at a planted pace, which falls with the number of users as
that of a batching server does. Faults are planted per arm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from loadgen.measure.token_answers import JudgedTokens
from loadgen.records.probes import TokensCompared
from loadgen.records.run import (
    ArmRecord,
    ArmRequest,
    BlockRecord,
    Environment,
    Experiment,
    RunState,
    StageTotals,
    TokenLimits,
    Workload,
)
from loadgen.records.samples import SAMPLE_DTYPE, Samples, store_samples
from loadgen.records.targets import TokenTransport
from loadgen.records.tokens import ANSWER_DTYPE, BY_IDS, EVENT_DTYPE, IDS, LENGTH, STOP, TokenRows, store_tokens
from tests.golden.synthetic_run import machine, order_of, simulated_once

ORIGIN_NS = 1_000_000_000_000
PROMPT, TOKENS = 32, 64


@dataclass(frozen=True)
class TokenArm:
    """A server of a language model, in milliseconds, and what is wrong with it."""

    ttft_ms: float = 30.0
    tpot_ms: float = 8.0
    per_user_ms: float = 0.4
    """More per token for every further user at once."""
    chunk: int = 1
    """Tokens per chunk."""
    first_chunk: int = 1
    noise: float = 0.02
    stall_share: float = 0.0
    """Share of the gaps that last `stall_ms` more."""
    stall_ms: float = 300.0
    short_share: float = 0.0
    """Share of the answers that end after 60 tokens, which the client counts as failed."""
    usage: float = 1.0
    """What the server counts of each token that it sends."""
    cached: int = 0
    """Prompt tokens that come from a cache."""
    distinct: float = 0.9
    coalesced: float = 0.0
    """Share of the chunks that are read with the one before."""
    text: float = 4.0
    """Bytes of text per token."""
    hidden: int = 0
    """Tokens of an answer that are counted and not streamed."""
    deficit: float = 1e-6
    """Of the worst token of each checked answer …"""
    wrong_share: float = 0.0
    """… and this share of them is 9 below the best."""
    masks_ends: bool = False
    transport: TokenTransport | None = None
    settings: dict[str, object] = field(default_factory=dict)
    title: str = "native slots fp32"


@dataclass(frozen=True)
class LanguagePlan:
    """What is to be found in the records."""

    arms: tuple[TokenArm, ...] = (
        TokenArm(),
        TokenArm(45.0, 12.0, 1.1, title="Triton 2.51, python backend, slots fp32"),
    )
    users: Sequence[int] = (1, 4, 16)
    rates: Sequence[float] = ()
    limits: TokenLimits | None = None
    pairs: int = 6
    answers: int = 12
    """Of each user in a block; of an open loop twelve times as many."""
    seed: int = 7
    checked: bool = True
    """Whether answers were compared with a reference."""
    state: str = "finished"


def language_workloads(plan: LanguagePlan) -> tuple[Workload, ...]:
    """A closed loop per number of users, an open one per rate."""
    common = {
        "batch_size": 1, "requests": 1, "seconds": 1.0, "max_seconds": 30.0, "rounds": plan.pairs,
        "prompt_tokens": PROMPT, "output_tokens": TOKENS, "limits": plan.limits,
    }  # fmt: skip
    closed = [
        Workload(scenario="single" if users == 1 else "concurrent", concurrency=users, **common)  # type: ignore[arg-type]
        for users in plan.users
    ]
    opened = [
        Workload(scenario="open", concurrency=64, arrivals="poisson", rate_per_s=rate, **common)  # type: ignore[arg-type]
        for rate in plan.rates
    ]
    return (*closed, *opened)


@simulated_once
def write_language_run(directory: Path, plan: LanguagePlan | None = None) -> Path:
    """Write the records of `plan` into `directory`, and return it."""
    plan = plan or LanguagePlan()
    rng = np.random.default_rng(plan.seed)
    arms = dict(zip("abcdefgh", plan.arms, strict=False))
    targets = ("native", "triton", "fastapi", "vllm")
    experiment = Experiment(
        arms=tuple(
            ArmRequest(label=label, target=target, transport=arm.transport)
            for (label, arm), target in zip(arms.items(), targets, strict=False)
        ),
        model="language:demo", weights="random:0", payload="tokens", transport="completions",
        workloads=language_workloads(plan), preset="quick", seed=plan.seed, equivalence_margin=0.03, threads=2,
    )  # fmt: skip
    for folder in ("blocks", "samples"):
        (directory / folder).mkdir(parents=True, exist_ok=True)
    _write(directory / "experiment.json", experiment)
    _write(directory / "environment.json", _environment())
    _write(directory / "arms.json", [_arm_record(label, arm) for label, arm in arms.items()])
    index, clock_ns = 0, ORIGIN_NS
    for workload in experiment.workloads:
        for pair in range(workload.rounds):
            for position, label in enumerate(order_of(list(arms), pair)):
                speed = float(np.exp(rng.normal(0.0, 0.01)))
                samples, rows = simulate(arms[label], workload, plan.answers, rng, clock_ns, speed)
                name = f"samples/{index:04d}.npy"
                store_samples(directory / name, [samples])
                store_tokens(directory / name, rows)
                end_ns, failed = int(samples["end_ns"].max()), int((samples["error"] >= 0).sum())
                record = BlockRecord(
                    index=index, workload=workload.name, round=pair, label=label, position=position,
                    started_at="2026-03-02T10:00:00Z", window_start_ns=clock_ns, window_end_ns=end_ns, samples=name,
                    requests=len(samples), items=len(samples) - failed, errors=failed,
                    error_messages=("the answer has 60 tokens instead of 64",) if failed else (),
                    generator_cpu_ns=int(rows.events["tokens"].sum()) * 9_000, server_cpu_ns=int(end_ns - clock_ns),
                    stages=_counted(len(samples) - failed), complete=True, reconnects=0,
                    transport=experiment.transport_of(experiment.arm(label)),
                    offered=len(samples) if workload.is_open else None,
                    due_span_ns=int(np.ptp(samples["intended_ns"])) if workload.is_open else None,
                    machine=machine(end_ns - clock_ns), generator_waited_ns=(end_ns - clock_ns) // 100,
                )  # fmt: skip
                _write(directory / "blocks" / f"{index:04d}.json", record)
                clock_ns, index = end_ns + 300_000_000, index + 1
    if plan.checked:
        _write(directory / TokensCompared.FILE, _compared(experiment, arms, rng))
    _write(directory / "run.json", RunState(state=plan.state, phase="done"))  # type: ignore[arg-type]
    return directory


def simulate(
    arm: TokenArm, workload: Workload, answers: int, rng: np.random.Generator, start_ns: int, speed: float
) -> tuple[Samples, TokenRows]:
    """One block; of an open loop all requests have their own pace, whatever the number in flight."""
    users = 4 if workload.is_open else workload.concurrency
    rows: list[tuple[float, int, list[tuple[float, int]]]] = []
    count = 12 * answers if workload.is_open else answers
    due_ms = np.cumsum(rng.exponential(1000.0 / workload.rate_per_s, count)) if workload.rate_per_s else None
    for user in range(1 if due_ms is not None else users):
        now_ms = 0.0
        for number in range(count):
            if due_ms is not None:
                now_ms = float(due_ms[number])
            chunks = _chunks(arm, users, rng, speed)
            rows.append((now_ms, user if due_ms is None else number, chunks))
            now_ms += chunks[-1][0]
    samples, described = np.zeros(len(rows), SAMPLE_DTYPE), np.zeros(len(rows), ANSWER_DTYPE)
    events: list[tuple[int, int, int, int]] = []
    for row, (begin_ms, user, chunks) in enumerate(sorted(rows)):
        tokens = sum(size for _, size in chunks)
        at_ns = [start_ns + int((begin_ms + at_ms) * 1e6) for at_ms, _ in chunks]
        samples[row] = (
            start_ns + int(begin_ms * 1e6), start_ns + int(begin_ms * 1e6), at_ns[0], at_ns[-1], 420, 230 * tokens, 1,
            user, 0, 200, 0 if tokens < TOKENS else -1,
        )  # fmt: skip
        joined = rng.random(len(chunks)) < arm.coalesced
        events += [(row, size, at, 1 + int(two)) for (_, size), at, two in zip(chunks, at_ns, joined, strict=True)]
        described[row] = (
            TOKENS, PROMPT, PROMPT, tokens, int(arm.usage * tokens), arm.cached, int(arm.distinct * tokens),
            len(chunks), int(arm.text * tokens), arm.hidden, row, LENGTH if tokens == TOKENS else STOP, BY_IDS, IDS,
        )  # fmt: skip
    return samples, TokenRows(np.array(events, EVENT_DTYPE), described)


def _chunks(arm: TokenArm, users: int, rng: np.random.Generator, speed: float) -> list[tuple[float, int]]:
    pace_ms = (arm.tpot_ms + arm.per_user_ms * (users - 1)) * speed
    tokens = 60 if rng.random() < arm.short_share else TOKENS
    at_ms = arm.ttft_ms * (1 + 0.05 * users) * speed * float(np.exp(rng.normal(0, 4 * arm.noise)))
    chunks, left = [(at_ms, arm.first_chunk)], tokens - arm.first_chunk
    while left > 0:
        size = min(arm.chunk, left)
        at_ms += pace_ms * size * float(np.exp(rng.normal(0, arm.noise)))
        at_ms += arm.stall_ms if rng.random() < arm.stall_share else 0.0
        chunks.append((at_ms, size))
        left -= size
    return chunks


def _counted(answers: int) -> StageTotals:
    """A server that counts its answers and reports no steps."""
    return StageTotals(
        requests=answers, items=answers, executions=None, queue_ns=None, compute_input_ns=None, compute_infer_ns=None,
        compute_output_ns=None,
    )  # fmt: skip


def _compared(experiment: Experiment, arms: dict[str, TokenArm], rng: np.random.Generator) -> list[TokensCompared]:
    records = []
    for workload in experiment.workloads:
        for label, arm in arms.items():
            answers = []
            for number in range(64):
                output = rng.integers(1, 4096, TOKENS).tolist()
                deficits, best = np.zeros(TOKENS), list(output)
                wrong = rng.random() < arm.wrong_share
                deficits[11] = 9.0 if wrong else arm.deficit
                if wrong:
                    best[11] = 0 if arm.masks_ends else 4095
                view = JudgedTokens(deficits=tuple(deficits.tolist()), best=tuple(best), largest=12.0)
                answers.append(view.beside(output, (0,), block=f"block {number // 8}", request=number, user=0))
            records.append(
                TokensCompared(
                    workload=workload.name, label=label, restart=0, answers=tuple(answers), precision="fp32",
                    noise=2e-6, weights_sha256="ab" * 32,
                )
            )  # fmt: skip
    return records


def _environment() -> Environment:
    return Environment(
        started_at="2026-03-02T10:00:00Z", command="abserve compare --model language:demo", git_commit=None,
        host={"cpu_model": "Simulated CPU 2.0 GHz", "cpu_count": 2, "memory_bytes": 25_769_803_776, "kernel": "6.1.0"},
        packages={"abserve": "0.1.0"}, gpu={"schema": "abserve.gpu-info/1", "status": "no_library", "devices": []},
        inputs={"kind": "prompts", "item": "request"},
    )  # fmt: skip


def _arm_record(label: str, arm: TokenArm) -> ArmRecord:
    in_effect: dict[str, object] = {
        "engine": "slots", "precision": "fp32", "device": "cpu", "threads": "2", "slots": 16, "max_length": 128,
        "weights": "random weights (seed 0)", "model": "language:demo", **arm.settings,
    }  # fmt: skip
    return ArmRecord(
        label=label, title=arm.title, target="native", url=f"http://127.0.0.1:81{ord(label)}", server_name="abserve",
        server_version="0.1.0", launched=True, argv=("abserve", "serve"), settings={}, in_effect=in_effect,
        model_config={"name": "demo"}, gpu_info=None, artefact=None,
    )  # fmt: skip


def _write(path: Path, record: object) -> None:
    path.write_bytes(msgspec.json.encode(record))
