"""An engine of language models measured without a server: prompts and decoding, by batch and length of the prompt.

Decoding is measured while all requests of a batch decode: from the moment at which each has its first token, for a
number of tokens of each. Its limit is the memory: a step reads the weights and every request's keys and values once.
So the rate is also given as a share of the bandwidth of a copy on the same device.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from servers.engines.settings import EngineError
from servers.language.engine import GeneratingEngine, GenerationRequest, GenerationSettings, make_engine
from servers.language.module import DTYPES, build_module, empty_module
from servers.language.reference import GivenAnswer, judge, own_noise
from servers.language.specification import LanguageModel

SCHEMA = "abserve.generation/1"
_JUDGED_ANSWERS = 8
"""So many answers of each batch are checked against the reference."""
_COPIED_BYTES = {"cpu": 2**28, "cuda": 2**30}
_COPIES = 10


@dataclass(frozen=True, slots=True)
class Repetition:
    """One batch of requests: its prompts read, then its tokens decoded."""

    prompt_ns: int
    """From adding the requests to the first token of the last one."""
    decode_ns: int
    decoded: int
    steps_ns: Sequence[int]
    step_tokens: Sequence[int]
    """Tokens that came at the end of each step."""
    context: float
    answers: Sequence[GivenAnswer]


def measure_generation(
    model: LanguageModel,
    settings: GenerationSettings,
    batches: Sequence[int],
    prompt_tokens: Sequence[int],
    tokens: int = 64,
    repetitions: int = 3,
    say: Callable[[str], object] = str,
) -> dict[str, Any]:
    """The document of all combinations. `settings.slots` is at least the largest batch. Raises `EngineError`,
    `WeightsError` and `UnknownModelError`."""
    say(f"loading {model.title} into {settings.engine}")
    started = time.perf_counter()
    import torch

    measured: list[tuple[dict[str, Any], Sequence[GivenAnswer]]] = []
    with closing(make_engine(model, settings)) as engine:
        engine.load()
        engine.warm_up()
        load_seconds = time.perf_counter() - started
        effective = engine.settings()
        device, precision = str(effective["device"]), str(effective["precision"])
        bandwidth = copy_bytes_per_s(device)
        for length in prompt_tokens:
            for batch in batches:
                say(f"measuring batch {batch} with prompts of {length} tokens")
                done = [
                    repeat(engine, model, batch, length, tokens, seed) for seed in range(repetitions + 1)
                ]  # the first warms up
                read = step_bytes(model, batch, statistics.mean(part.context for part in done[1:]), precision)
                measured.append((_measurement(batch, length, done[1:], read, bandwidth), done[-1].answers))
        memory = None if device == "cpu" else torch.cuda.max_memory_reserved(device)
    say("checking answers against the reference")
    module = build_module(model, device, precision)
    noise = 0.0
    rows = []
    for measurement, answers in measured:
        noise = max(noise, own_noise(module, answers))
        rows.append(measurement | _judged(module, answers))
    return {
        "schema": SCHEMA,
        "model": model.label,
        "engine": effective,
        "device_name": "CPU" if device == "cpu" else torch.cuda.get_device_name(device),
        "load_seconds": load_seconds,
        "copy_bytes_per_s": bandwidth,
        "largest_memory_bytes": memory,
        "reference_noise": noise,
        "measurements": rows,
    }


def copy_bytes_per_s(device: str) -> float:
    """Bytes that a copy on the device reads and writes per second: the fastest of a few."""
    import torch

    size = _COPIED_BYTES["cpu" if device == "cpu" else "cuda"]
    source, target = torch.ones((2, size), dtype=torch.uint8, device=device)
    fastest = float("inf")
    for _ in range(_COPIES):
        started = time.perf_counter()
        target.copy_(source)
        if source.is_cuda:
            torch.cuda.synchronize(source.device)
        fastest = min(fastest, time.perf_counter() - started)
    return 2 * size / fastest


def step_bytes(model: LanguageModel, batch: int, context: float, precision: str) -> float:
    """What one decoding step of a batch must read, each request with `context` tokens in its cache. All weights but
    tables of which a step takes a row per request; of a mixture the experts that routing at random would choose."""
    import torch

    module = empty_module(model)
    config = module.config.get_text_config()
    output = module.get_output_embeddings()
    tables = {id(part.weight) for part in module.modules() if isinstance(part, torch.nn.Embedding)}
    tables -= {id(output.weight)} if output is not None else set()
    experts = getattr(config, "num_local_experts", None)
    chosen = 1 - (1 - config.num_experts_per_tok / experts) ** batch if experts else 1.0
    numbers = sum(
        parameter.numel() * (chosen if ".experts." in name else 1.0)
        for name, parameter in module.named_parameters()
        if id(parameter) not in tables
    )
    heads = config.num_attention_heads
    kept_heads = getattr(config, "num_key_value_heads", None) or heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    contexts = sum(min(context, window) if window and "sliding" in kind else context for kind in kinds)
    numbers += batch * contexts * 2 * kept_heads * width
    return float(numbers * getattr(torch, DTYPES[precision]).itemsize)


def repeat(
    engine: GeneratingEngine, model: LanguageModel, batch: int, length: int, tokens: int, seed: int
) -> Repetition:
    """Read the prompts and decode `tokens` tokens of each request beyond the moment at which all decode."""
    low, high = model.prompt_ids
    prompts = np.random.default_rng([seed, batch, length]).integers(low, high + 1, (batch, length)).tolist()
    longest = engine.max_length - length
    outputs: list[list[int]] = [[] for _ in prompts]

    def step() -> int:
        count = 0
        for emission in engine.step():
            outputs[emission.number] += emission.tokens
            count += len(emission.tokens)
            if emission.finish is not None:
                raise EngineError(
                    emission.message
                    or f"batch {batch} with prompts of {length} tokens: an answer was full before the measurement "
                    f"ended; raise the maximum length of {engine.max_length}"
                )
        return count

    if longest < tokens + 1:
        raise EngineError(
            f"prompts of {length} tokens and {tokens} measured ones exceed the maximum length of {engine.max_length}"
        )
    started = time.perf_counter_ns()
    for number, prompt in enumerate(prompts):
        engine.add(GenerationRequest(number, prompt, longest))
    while not all(outputs):
        step()
    began = time.perf_counter_ns()
    before = [len(output) for output in outputs]
    stamps, counts = [began], []
    while any(len(output) - first < tokens for output, first in zip(outputs, before, strict=True)):
        if count := step():
            counts.append(count)
            stamps.append(time.perf_counter_ns())
    for number in range(batch):
        engine.cancel(number)
    while engine.active:
        engine.step()
    middles = [(first + len(output)) / 2 for output, first in zip(outputs, before, strict=True)]
    return Repetition(
        prompt_ns=began - started,
        decode_ns=stamps[-1] - began,
        decoded=sum(counts),
        steps_ns=np.diff(stamps).tolist(),
        step_tokens=counts,
        context=length + statistics.mean(middles),
        answers=[GivenAnswer(*pair) for pair in zip(prompts, outputs, strict=True)][:_JUDGED_ANSWERS],
    )


def _measurement(batch: int, length: int, done: Sequence[Repetition], read: float, bandwidth: float) -> dict[str, Any]:
    """One batch size at one length of the prompt; times are medians of the repetitions. Decoded tokens are those of all
    requests while all of them decode; while prompts are read, answers that have begun go on beside. `context` is the
    mean number of tokens in a request's cache."""
    prompt_s = statistics.median(part.prompt_ns for part in done) / 1e9
    rates = [part.decoded / part.decode_ns * 1e9 for part in done]
    steps_ms = [step_ns / 1e6 for part in done for step_ns in part.steps_ns]
    return {
        "batch": batch,
        "prompt_tokens": length,
        "prompt_tokens_per_s": batch * length / prompt_s,
        "first_token_ms": prompt_s * 1e3,
        "tokens_per_s": statistics.median(rates),
        "slowest_tokens_per_s": min(rates),
        "step_ms": statistics.median(steps_ms),
        "step_p99_ms": float(np.percentile(steps_ms, 99)),
        "context": statistics.mean(part.context for part in done),
        "step_bytes": read,
        "bandwidth_share": read * statistics.median(rates) / batch / bandwidth,
    }


def _judged(module: Any, answers: Sequence[GivenAnswer]) -> dict[str, float]:
    """How far a chosen token's logit was below the reference's largest, and the shares of tokens that are the
    reference's own choice, and that are different within an answer."""
    judged = judge(module, answers)
    best = [
        chosen == own
        for answer, view in zip(answers, judged, strict=True)
        for chosen, own in zip(answer.output, view.best, strict=True)
    ]
    return {
        "largest_deficit": max(max(view.deficits) for view in judged),
        "best_share": statistics.mean(best),
        "distinct_share": statistics.mean(len(set(answer.output)) / len(answer.output) for answer in answers),
    }


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "batch": lambda row: f"{row['batch']}",
    "prompt": lambda row: f"{row['prompt_tokens']}",
    "prompt tokens/s": lambda row: f"{row['prompt_tokens_per_s']:,.0f}",
    "first token ms": lambda row: f"{row['first_token_ms']:.2f}",
    "tokens/s": lambda row: f"{row['tokens_per_s']:,.0f}",
    "step ms": lambda row: f"{row['step_ms']:.3f}",
    "p99 ms": lambda row: f"{row['step_p99_ms']:.3f}",
    "bandwidth": lambda row: f"{row['bandwidth_share']:.1%}",
    "deficit": lambda row: f"{row['largest_deficit']:.2g}",
    "best": lambda row: f"{row['best_share']:.1%}",
    "distinct": lambda row: f"{row['distinct_share']:.0%}",
}


def table_of(document: dict[str, Any]) -> list[str]:
    """The measurements as lines of text, a title first."""
    noise, copied = document["reference_noise"], document["copy_bytes_per_s"] / 1e9
    cells = [list(COLUMNS), *([form(row) for form in COLUMNS.values()] for row in document["measurements"])]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    engine = document["engine"]
    title = (
        f"{document['model']}, {engine['engine']}, {engine['precision']}, {document['device_name']}; a copy moves "
        f"{copied:,.0f} GB/s, the reference's own noise is {noise:.2g}"
    )
    return [title, *("  ".join(map(str.rjust, row, widths)) for row in cells)]
