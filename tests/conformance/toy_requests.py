"""The toy server's requests: heads, chunks and inference documents read, answers written."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import numpy as np

MODEL = "toy"
WIDTH = 4
MAX_HEAD_BYTES = 65_536
MAX_BATCH = 8
MAX_CHUNKS = 65_536
REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 413: "Too Large"}


class RefusalError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def check_request(document: Any, binary: bytes, any_output: bool) -> Any:
    if len(document["inputs"]) != 1:
        raise RefusalError(400, "the model has exactly one input")
    (entry,) = document["inputs"]
    if entry["name"] != "x":
        raise RefusalError(400, "the model's only input is x")
    if entry["datatype"] != "FP32":
        raise RefusalError(400, "input x has datatype FP32")
    shape = entry["shape"]
    if any(type(size) is not int or size < 0 for size in shape):
        raise RefusalError(400, "a dimension in the shape is negative or no integer")
    if int(np.prod([1, *shape], dtype=object)) >= 2**63:
        raise RefusalError(400, "the shape's product overflows 64 bits")
    if len(shape) != 2 or shape[1] != WIDTH:
        raise RefusalError(400, f"input x has shape [-1, {WIDTH}], expected of every request")
    if not 1 <= shape[0] <= MAX_BATCH:
        raise RefusalError(400, f"the batch size must be 1 to {MAX_BATCH}")
    parameters = entry.get("parameters", {})
    names = [output["name"] for output in document.get("outputs", [])]
    if not any_output and (len(set(names)) != len(names) or set(names) - {"y"}):
        raise RefusalError(400, "the model's only output is y, and it can be asked for once")
    if "binary_data_size" in parameters:
        size, expected = parameters["binary_data_size"], shape[0] * WIDTH * 4
        if type(size) is not int or size != expected or len(binary) != size:
            raise RefusalError(400, f"the shape has {expected} bytes, {size} were declared and {len(binary)} came")
        return np.frombuffer(binary, "<f4").reshape(shape)
    return np.asarray(entry["data"], "<f4").reshape(shape)


async def read_head(reader: asyncio.StreamReader) -> bytes:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        line = await reader.readuntil(b"\n")
        head += line
        if not line.endswith(b"\r\n"):
            raise RefusalError(400, "a line does not end with CR LF")
        if len(head) > MAX_HEAD_BYTES:
            raise RefusalError(431, "the request's head is larger than this server takes")
    return head


def parse_head(head: bytes) -> tuple[str, str, dict[str, str]]:
    lines = head.decode("latin-1").split("\r\n")
    parts = lines[0].split(" ")
    if len(parts) != 3 or parts[2] not in ("HTTP/1.1", "HTTP/1.0"):
        raise RefusalError(400, "the request line is broken")
    headers: dict[str, str] = {}
    for line in lines[1:-2]:
        name, separator, value = line.partition(":")
        if not separator or not name or (name.lower() in headers and name.lower() == "content-length"):
            raise RefusalError(400, "a header line is broken")
        headers[name.lower()] = value.strip()
    if len(lines) > 200:
        raise RefusalError(431, "too many headers")
    return parts[0], parts[1], headers


async def read_chunks(reader: asyncio.StreamReader, limit: int) -> bytes:
    body = bytearray()
    for _ in range(MAX_CHUNKS):
        line = (await reader.readline()).strip()
        if not re.fullmatch(rb"[0-9a-fA-F]{1,8}", line):
            raise RefusalError(400, "a chunk's size is broken")
        size = int(line, 16)
        if len(body) + size > limit:
            raise RefusalError(413, f"the body exceeds the limit of {limit} bytes")
        body += (await reader.readexactly(size + 2))[:size]
        if size == 0:
            return bytes(body)
    raise RefusalError(400, f"the body has more than {MAX_CHUNKS} chunks")


def render(status: int, body: bytes, headers: dict[str, str], method: str) -> bytes:
    lines = [f"HTTP/1.1 {status} {REASONS.get(status, 'Other')}", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + (b"" if method == "HEAD" else body)
