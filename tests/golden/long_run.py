"""A long run that never happened: few workloads, many blocks of a fast server, as a run by time stores them.

`python -m tests.golden.long_run DIR MEGABYTES` analyses one and prints the peak of the process's memory.
"""

from __future__ import annotations

import math
import resource
import sys
from pathlib import Path

import msgspec
import numpy as np

from loadgen.records.run import BlockRecord, Experiment, Workload
from loadgen.records.samples import SAMPLE_DTYPE, Samples, store_samples
from tests.golden.synthetic_run import ORIGIN_NS, Plan, write_run

BLOCK_REQUESTS = 31_250
"""2 MB of samples."""
USERS = 16


def write_long_run(directory: Path, megabytes: int) -> Path:
    """Write the records of a run with so many megabytes of samples: a closed and an open loop on two arms."""
    loads: tuple[Workload, ...] = (
        Workload(
            scenario="concurrent", batch_size=1, concurrency=USERS, requests=BLOCK_REQUESTS, seconds=1.0,
            max_seconds=30.0, rounds=1,
        ),
        Workload(
            scenario="concurrent", batch_size=1, concurrency=USERS, requests=BLOCK_REQUESTS, seconds=1.0,
            max_seconds=30.0, rounds=1, arrivals="poisson", rate_per_s=10_000.0,
        ),
    )  # fmt: skip
    tiny = msgspec.structs.replace(loads[0], requests=20)
    write_run(directory, Plan(workloads=(tiny,), pairs=1))
    like = msgspec.json.decode((directory / "blocks" / "0000.json").read_bytes(), type=BlockRecord)
    rounds = max(2, megabytes * 1_000_000 // (BLOCK_REQUESTS * SAMPLE_DTYPE.itemsize * 2 * len(loads)))
    path = directory / "experiment.json"
    experiment = msgspec.json.decode(path.read_bytes(), type=Experiment)
    loads = tuple(msgspec.structs.replace(load, rounds=rounds) for load in loads)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(experiment, workloads=loads)))
    rng, start_ns, index = np.random.default_rng(1), ORIGIN_NS, 0
    for pair in range(rounds):
        for position, label in enumerate("ab" if pair % 4 in (0, 3) else "ba"):
            for load in loads:
                speed = math.exp(rng.normal(0.0, 0.01)) * (1.0 if label == "a" else 0.9)
                samples = _open(rng, start_ns, speed) if load.is_open else _closed(rng, start_ns, speed)
                end_ns = int(samples["end_ns"].max())
                is_open = {"offered": len(samples), "due_span_ns": int(np.ptp(samples["intended_ns"]))}
                record = msgspec.structs.replace(
                    like, index=index, workload=load.name, round=pair, label=label, position=position,
                    samples=f"samples/{index:04d}.npy", requests=len(samples), items=len(samples), stages=None,
                    window_start_ns=start_ns, window_end_ns=end_ns, generator_cpu_ns=(end_ns - start_ns) // 9,
                    **(is_open if load.is_open else {}),
                )  # fmt: skip
                store_samples(directory / record.samples, [samples])
                (directory / "blocks" / f"{index:04d}.json").write_bytes(msgspec.json.encode(record))
                start_ns, index = end_ns + 500_000_000, index + 1
    return directory


def _closed(rng: np.random.Generator, start_ns: int, speed: float) -> Samples:
    each = BLOCK_REQUESTS // USERS
    took = (rng.lognormal(math.log(1.5e6 * speed), 0.3, (USERS, each))).astype(np.int64)
    ends = np.cumsum(took, axis=1)
    samples = _samples(start_ns + (ends - took).ravel(), start_ns + ends.ravel())
    samples["user"] = np.repeat(np.arange(USERS), each)
    return samples[np.argsort(samples["send_ns"], kind="stable")]


def _open(rng: np.random.Generator, start_ns: int, speed: float) -> Samples:
    due = np.cumsum(rng.exponential(1e5, BLOCK_REQUESTS)).astype(np.int64)
    took = rng.lognormal(math.log(0.5e6 * speed), 0.3, BLOCK_REQUESTS).astype(np.int64)
    samples = _samples(start_ns + due, start_ns + due + took)
    samples["user"] = np.arange(BLOCK_REQUESTS) % USERS
    return samples


def _samples(due_ns: np.ndarray, end_ns: np.ndarray) -> Samples:
    samples = np.zeros(len(due_ns), dtype=SAMPLE_DTYPE)
    samples["intended_ns"] = samples["send_ns"] = due_ns
    samples["first_byte_ns"] = samples["end_ns"] = end_ns
    samples["batch"], samples["status"], samples["error"] = 1, 200, -1
    samples["request_bytes"], samples["response_bytes"] = 602_412, 2_348
    return samples


if __name__ == "__main__":
    from loadgen.verdict.result import analyse

    directory = Path(sys.argv[1])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    analyse(directory)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    sys.stdout.write(f"{before:.0f} {peak:.0f}\n")
