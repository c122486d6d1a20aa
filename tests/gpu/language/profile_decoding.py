"""Prints where a decoding step's time goes on a GPU, by rows: both forms, the share of the bandwidth, the kernels.

python -m tests.gpu.language.profile_decoding language:tinyllama-1.1b 1,16,64
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from servers.language.decoder import decoder_weights
from servers.language.forward import StepPlan
from servers.language.module import build_module
from servers.language.specification import language_model
from servers.language.triton_forward import MOST_FUSED_ROWS, StepSize, TritonForward, _StepIntegers

CONTEXT = 512


def copy_rate() -> float:
    source = torch.ones(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(10):
        torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        best = max(best, 2 * 2**30 / (time.perf_counter() - started))
    return best


def kernels_of(graph: torch.cuda.CUDAGraph) -> dict[str, Any]:
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        graph.replay()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events() or ():
        if event.device_type.name == "CUDA":
            times[event.name[:60]].append(event.time_range.elapsed_us())
    longest = sorted(times.items(), key=lambda item: -sum(item[1]))[:12]
    return {
        "count": sum(map(len, times.values())),
        "us": round(sum(map(sum, times.values())), 1),
        "by_name": {name: [len(each), round(sum(each) / len(each), 2)] for name, each in longest},
    }


def main(reference: str, batches: list[int]) -> None:
    model = language_model(reference)
    started = time.perf_counter()
    weights = decoder_weights(build_module(model, "cuda:0", "bf16"))
    forward = TritonForward(weights, max(batches), 2048, 128, 512)
    rate = copy_rate()
    parts = [weights.head, *(w for layer in weights.layers for w in (
        layer.qkv.weight, layer.out.weight, layer.up.weight, layer.down.weight))]  # fmt: skip
    size_bytes = sum(part.nbytes for part in parts)
    token_bytes = 2 * weights.shape.cached_size * weights.shape.layers
    say({"model": reference, "copy_GB_per_s": rate / 1e9, "load_s": time.perf_counter() - started})
    pool = torch.cuda.graph_pool_handle()
    with torch.inference_mode():
        for batch in batches:
            size = StepSize(batch, 0)
            for fused in (False, True) if batch <= MOST_FUSED_ROWS else (False,):
                started = time.perf_counter()
                forward._integers.zero_()
                _StepIntegers.of(forward._integers, size).positions.fill_(CONTEXT)
                milliseconds, graph = forward._capture(size, fused, pool)
                assert graph is not None
                limit = (size_bytes + batch * token_bytes * CONTEXT) / rate * 1e3
                say({
                    "rows": batch, "fused": fused, "ms": milliseconds, "share": limit / milliseconds,
                    "prepare_s": time.perf_counter() - started, "kernels": kernels_of(graph),
                })  # fmt: skip
    started = time.perf_counter()
    forward.warm_up()
    say({"warm_up_s": time.perf_counter() - started, **forward.describe()})
    plan = StepPlan([CONTEXT] * max(batches))
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(50):
        forward.step(plan)
    launched = time.perf_counter() - started
    torch.cuda.synchronize()
    say({"step_ms": (time.perf_counter() - started) * 20, "host_ms": launched * 20})


def say(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], [int(number) for number in sys.argv[2].split(",")])
