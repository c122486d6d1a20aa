"""Cases 16 and 35, which run only on request: fuzzing with raw requests, and memory growth under steady load."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter, sleep

from loadgen.client.connection import quoted
from loadgen.conformance.case import Case
from loadgen.conformance.model import ServedModel
from loadgen.conformance.records import Fact, NotApplicableError, Protocol
from loadgen.conformance.servers import Subject

VERBS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE")
# fmt: off
ROUTES = (
    "/v2", "/v2/", "/v2/health/live", "/v2/health/ready", "/v2/models/{model}", "/v2/models/{model}/ready",
    "/v2/models/{model}/config", "/v2/models/{model}/stats", "/v2/models/{model}/infer",
    "/v2/models/{model}/versions/1", "/v2/models/{model}/versions/1/infer", "/v2/models/{model}/versions/999/infer",
    "/v2/models/stats", "/v2/models/no_such/infer", "/v2/repository/index", "/v2/repository/models/no_such/load",
    "/v2/repository/models/no_such/unload", "/v2/systemsharedmemory/status",
    "/v2/systemsharedmemory/region/no_such/register", "/v2/%2e%2e/%00/\u00ff",
)
HEADERS = (
    b"Content-Type: application/json", b"Content-Type: application/octet-stream",
    b"Inference-Header-Content-Length: 0", b"Inference-Header-Content-Length: 17",
    b"Inference-Header-Content-Length: -1", b"Content-Encoding: gzip", b"Accept-Encoding: gzip, deflate, br",
    b"Expect: 100-continue", b"Connection: close", b"X-\xc3\xa9: \xff\xfe", b": no name", b"X-Empty:",
    b"Upgrade: h2c", b"Range: bytes=0-1",
)
# fmt: on
ALLOWED_5XX = frozenset({"501", "503", "505"})
"""Unsupported, overloaded and unknown HTTP version; any other 5xx is a fault."""
FUZZ_SECONDS = 5.0
BOUND_BYTES = 100_000_000
SETTLE_SECONDS = 0.5
RESPONSE_SECONDS = 60.0


def make_request(seed: int, index: int, model: ServedModel, authority: str) -> bytes:
    """One raw request, a pure function of its arguments."""
    chance = random.Random(f"{seed}/{index}")
    verb, route = chance.choice(VERBS), chance.choice(ROUTES).replace("{model}", quoted(model.name))
    lines = [f"{verb} {route} HTTP/1.1".encode("latin-1"), f"Host: {authority}".encode()]
    lines += chance.sample(HEADERS, chance.randrange(0, 4))
    body = _body(chance, model)
    if body or verb not in {"GET", "HEAD"}:
        length = len(body) if chance.random() < 0.85 else chance.choice((0, 1, len(body) + 5, 2**40, -1))
        lines.append(b"Content-Length: %d" % length)
    data = b"\r\n".join(lines) + b"\r\n\r\n" + body
    return _mutate(chance, data) if chance.random() < 0.2 else data


def _body(chance: random.Random, model: ServedModel) -> bytes:
    kind = chance.randrange(5)
    if kind == 0:
        return b""
    if kind == 1:
        return chance.randbytes(chance.randrange(1, 200))
    tensor = model.inputs[0]
    text = (
        f'{{"inputs":[{{"name":"{tensor.name}","shape":[1,{chance.randrange(-3, 9)}],'
        f'"datatype":"{tensor.datatype}","data":[{chance.choice(("0", "1e400", "null", "[[]]", "NaN"))}]}}]}}'
    ).encode()
    return _mutate(chance, text) if kind == 2 else text


def _mutate(chance: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.randrange(1, 6)):
        if not changed:
            break
        position = chance.randrange(len(changed))
        action = chance.randrange(3)
        if action == 0:
            changed[position] = chance.randrange(256)
        elif action == 1:
            del changed[position]
        else:
            changed[position:position] = chance.randbytes(chance.randrange(1, 4))
    return bytes(changed) if chance.random() < 0.7 else bytes(changed[: chance.randrange(len(changed) + 1)])


def fuzz(subject: Subject, count: int, seed: int) -> Iterator[Fact]:
    """Send raw requests one after the other, each on a new connection, until all are sent or the server is gone."""
    counts: Counter[str] = Counter()
    faults: list[str] = []
    for index in range(count):
        data = make_request(seed, index, subject.model, subject.authority)
        try:
            with subject.connect() as connection:
                response = connection.request(data, FUZZ_SECONDS, head_only=data.startswith(b"HEAD "), end=True)
        except OSError:
            break
        counts[response.status] += 1
        if response.status.startswith("5") and response.status not in ALLOWED_5XX:
            faults.append(f"{response.status} to request {index}")
    sent = counts.total()
    seen = ", ".join(f"{number}×{status}" for status, number in counts.most_common())
    silent = f"{counts['silent']} unanswered after {FUZZ_SECONDS:g} s"
    yield Fact(f"{count} requests of seed {seed}", sent == count, seen if sent == count else f"ended after {sent}")
    yield Fact("no 5xx", not faults, f"{len(faults)}: {', '.join(faults[:5])}" if faults else "none")
    yield Fact("every request ends", not counts["silent"], silent)


def fuzz_case(count: int, seed: int) -> Case:
    """Case 16 with this many requests."""
    title = f"{count:,} raw fuzz requests ({len(VERBS)} verbs × {len(ROUTES)} routes)"
    note = "no crash, no 5xx except 501, 503 and 505"
    return Case("16", title, lambda subject, _: fuzz(subject, count, seed), "", note=note, destructive=True)


def growth_case(
    *, seconds: float = 20.0, rounds: int = 10, concurrency: int = 20, batch: int = 8, bound_bytes: int = BOUND_BYTES
) -> Case:
    """Case 35: resident memory over rounds of steady load. The first half fills caches and buffers, so only growth
    after it counts as a leak."""

    def growth(subject: Subject, _: Protocol) -> Iterator[Fact]:
        request = subject.infer_bytes(subject.model.binary(subject.model.rows(batch)))
        counts: Counter[bool] = Counter()
        resident = [_resident(subject)]
        for _round in range(rounds):
            counts += _load(subject, request, seconds, concurrency)
            sleep(SETTLE_SECONDS)
            resident.append(_resident(subject))
        grown = resident[-1] - resident[len(resident) // 2]
        answered = f"{counts[True]} answered, {counts[False]} failed"
        yield Fact("requests answered", counts[False] == 0 and counts[True] > 0, answered)
        yield Fact(f"growth from the midpoint < {bound}", grown < bound_bytes, f"{grown / 1e6:+.1f} MB")

    bound = f"{bound_bytes / 1e6:g} MB"
    title = f"{seconds:g} s × {rounds} rounds at concurrency {concurrency}, batch {batch}"
    return Case("35", title, growth, "", note=f"memory growth < {bound} from the midpoint", destructive=True)


def _load(subject: Subject, request: bytes, seconds: float, concurrency: int) -> Counter[bool]:
    """How many requests were answered 200, and how many were not."""
    end = perf_counter() + seconds

    def user(_: int) -> Counter[bool]:
        counts: Counter[bool] = Counter()
        try:
            with subject.connect() as connection:
                received = True
                while received and perf_counter() < end:
                    response = connection.request(request, RESPONSE_SECONDS)
                    received = response.received
                    counts[response.succeeded] += 1
        except OSError:
            counts[False] += 1
        return counts

    with ThreadPoolExecutor(concurrency) as pool:
        return sum(pool.map(user, range(concurrency)), Counter[bool]())


def _resident(subject: Subject) -> int:
    now = subject.resident_bytes()
    if now is None:
        raise NotApplicableError("the server's memory cannot be read; use --launch or --pid")
    return now
