"""Case 16: raw requests that are almost right, from one seed: 8 verbs, 20 routes, broken heads and bodies."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

from loadgen.conformance.case import Case
from loadgen.conformance.model import Model
from loadgen.conformance.records import Door, Fact, Observation, expect
from loadgen.conformance.subject import Subject

VERBS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE")
ROUTES = (
    "/v2",
    "/v2/",
    "/v2/health/live",
    "/v2/health/ready",
    "/v2/models/{model}",
    "/v2/models/{model}/ready",
    "/v2/models/{model}/config",
    "/v2/models/{model}/stats",
    "/v2/models/{model}/infer",
    "/v2/models/{model}/versions/1",
    "/v2/models/{model}/versions/1/infer",
    "/v2/models/{model}/versions/999/infer",
    "/v2/models/stats",
    "/v2/models/no_such/infer",
    "/v2/repository/index",
    "/v2/repository/models/no_such/load",
    "/v2/repository/models/no_such/unload",
    "/v2/systemsharedmemory/status",
    "/v2/systemsharedmemory/region/no_such/register",
    "/v2/%2e%2e/%00/\u00ff",
)
DECLARED_5XX = frozenset({"501", "503", "505"})
"""Not offered, overloaded and unknown HTTP version are answers; every other 5xx is a fault."""
ANSWER_SECONDS = 5.0
HEADERS = (
    b"Content-Type: application/json",
    b"Content-Type: application/octet-stream",
    b"Inference-Header-Content-Length: 0",
    b"Inference-Header-Content-Length: 17",
    b"Inference-Header-Content-Length: -1",
    b"Content-Encoding: gzip",
    b"Accept-Encoding: gzip, deflate, br",
    b"Expect: 100-continue",
    b"Connection: close",
    b"X-\xc3\xa9: \xff\xfe",
    b": no name",
    b"X-Empty:",
    b"Upgrade: h2c",
    b"Range: bytes=0-1",
)


@dataclass(frozen=True, slots=True)
class FuzzRequest:
    """The bytes of one request; `index` and the seed make it again."""

    index: int
    data: bytes
    head_only: bool


def make_request(seed: int, index: int, model: Model, authority: str) -> FuzzRequest:
    """A pure function of its arguments."""
    chance = random.Random(f"{seed}/{index}")
    verb, route = chance.choice(VERBS), chance.choice(ROUTES).replace("{model}", model.name)
    lines = [f"{verb} {route} HTTP/1.1".encode("latin-1"), f"Host: {authority}".encode()]
    lines += chance.sample(HEADERS, chance.randrange(0, 4))
    body = _body(chance, model)
    if body or verb not in {"GET", "HEAD"}:
        length = len(body) if chance.random() < 0.85 else chance.choice((0, 1, len(body) + 5, 2**40, -1))
        lines.append(b"Content-Length: %d" % length)
    data = b"\r\n".join(lines) + b"\r\n\r\n" + body
    if chance.random() < 0.2:
        data = _mutate(chance, data)
    return FuzzRequest(index, data, data.startswith(b"HEAD "))


def fuzz(subject: Subject, count: int, seed: int) -> Observation:
    """Send them one after the other, each on its own connection, until one ends the server."""
    counts: Counter[str] = Counter()
    faults: list[str] = []
    for index in range(count):
        request = make_request(seed, index, subject.model, subject.authority)
        try:
            with subject.connect() as connection:
                answer = connection.exchange(request.data, ANSWER_SECONDS, head_only=request.head_only, end=True)
        except OSError:
            break
        counts[answer.status] += 1
        if answer.status.startswith("5") and answer.status not in DECLARED_5XX:
            faults.append(f"{answer.status} to request {index}")
    sent = sum(counts.values())
    seen = ", ".join(f"{number}×{status}" for status, number in counts.most_common())
    return Observation(
        facts=(
            Fact(f"{count} requests of seed {seed}", sent == count, seen if sent == count else f"ended after {sent}"),
            Fact("no 5xx", not faults, f"{len(faults)}: {', '.join(faults[:5])}" if faults else "none"),
            Fact(
                "every request ends", not counts["silent"], f"{counts['silent']} unanswered after {ANSWER_SECONDS:g} s"
            ),
        )
    )


def fuzz_case(count: int, seed: int) -> Case:
    """The corpus row for so many requests; with 0 it is a row that says how to ask for them."""
    title = f"{count:,} raw fuzz requests ({len(VERBS)} verbs × {len(ROUTES)} routes)"

    def probe(subject: Subject, _: Door) -> Observation:
        return fuzz(subject, count, seed)

    return Case("16", title, probe, expect(note="no crash, no 5xx but 501, 503 and 505"), destructive=True)


def _body(chance: random.Random, model: Model) -> bytes:
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
