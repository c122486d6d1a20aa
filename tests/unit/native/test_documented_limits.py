"""docs/native-server.md names limits that exist, with their defaults."""

from __future__ import annotations

import re
from pathlib import Path

from servers.language.options import TOKENS_ONLY
from servers.native.front.connections import READ_BYTES
from servers.native.front.inference import DECODING_S
from servers.native.grpc.call import (
    MANY_ARRIVING,
    MANY_WAITING,
    MOST_TOGETHER,
    MOST_WAITING,
    PRESSED_S,
    STREAM_WINDOW,
    WAITING_BYTES,
)
from servers.native.grpc.connection import (
    BLOCK_BYTES_PER_CREDIT,
    CALLS_PER_CREDIT,
    CREDIT_BYTES,
    CREDIT_PER_ANSWER,
    CREDIT_PER_S,
    FIELDS_PER_CREDIT,
    MAX_CALLS,
    MAX_CREDIT,
    SCARCE_SHARE,
    TURN_NS,
    TURNS_NS,
)
from servers.native.grpc.http2 import (
    MAX_BLOCK_BYTES,
    MAX_DECODED_BYTES,
    MAX_KNOWN_BYTES,
    MAX_METADATA_BYTES,
    MAX_SETTINGS,
)
from servers.native.grpc.inference import max_message_bytes
from servers.native.grpc.messages import MAX_FIELDS
from servers.native.http import connection
from servers.native.http.connection import PIECES_PER_TURN
from servers.native.http.parser import FREE_CHUNKS, MIN_MEAN_CHUNK_BYTES
from servers.native.shared.limits import CONTROL_BODY_BYTES, KEYLESS_LINGER_BYTES, MAX_INFLATING, STREAM_UNREAD_BYTES
from servers.native.shared.memory import UNCOUNTED_BYTES
from servers.native.shared.settings import NativeSettings
from servers.native.shared.tls import HANDSHAKE_S, MAX_HANDSHAKES
from servers.protocol.codec import MAX_ID_CHARACTERS
from servers.protocol.values import MAX_BYTES_ELEMENTS, MAX_DIMENSIONS, MAX_SPECIAL_BYTES

TEXT = (Path(__file__).resolve().parents[3] / "docs/native-server.md").read_text()
ROWS = dict(re.findall(r"^\| `([a-z_]+)` \| ([0-9]+) \|", TEXT, re.MULTILINE))


def test_every_row_is_a_setting_with_its_default() -> None:
    for name, default in ROWS.items():
        assert float(default) == NativeSettings.model_fields[name].default
        assert NativeSettings.model_fields[name].description


def test_every_limit_has_a_row() -> None:
    for name in NativeSettings.model_fields:
        if name.startswith("max_") and name not in ("max_queue_delay_us", *TOKENS_ONLY):
            assert name in ROWS


def test_the_fixed_limits_are_as_written() -> None:
    assert f"`data` nests at most {MAX_DIMENSIONS} levels" in TEXT
    assert f"at most {MAX_ID_CHARACTERS:,} characters" in TEXT
    assert f"at most {CONTROL_BODY_BYTES // 1024} KiB" in TEXT
    assert f"at most {MAX_BYTES_ELEMENTS:,} BYTES elements" in TEXT
    assert f"at most {MAX_FIELDS:,} fields" in TEXT
    assert f"at most {MAX_SPECIAL_BYTES // 2**20} MiB" in TEXT
    assert f"at most {PIECES_PER_TURN} requests, or pieces" in TEXT
    assert f"Beyond {FREE_CHUNKS} chunks they must have {MIN_MEAN_CHUNK_BYTES} bytes on average" in TEXT
    assert f"At most {MAX_INFLATING} compressed bodies" in TEXT
    assert f"{DECODING_S:g} s for all of them" in TEXT


def test_the_limits_of_grpc_are_as_written() -> None:
    text = " ".join(TEXT.split())
    assert f"A call may send {STREAM_WINDOW // 2**20} MiB before" in text
    assert f"{MANY_WAITING} wait before the connection is not read, {MOST_WAITING:,} if" in text
    assert f"together have {MOST_TOGETHER:,} waiting messages" in text
    assert f"counts {WAITING_BYTES // 1024} KiB beside its bytes" in text
    assert SCARCE_SHARE == 4
    assert f"has {PRESSED_S:g} seconds when less than a quarter of `max_held_bytes` is left" in text
    assert f"at most {MAX_CALLS} calls" in text
    assert f"A gRPC connection with more than {MANY_ARRIVING} arriving messages" in text
    assert f"Metadata have at most {MAX_METADATA_BYTES // 1024} KiB" in text
    assert MAX_BLOCK_BYTES == MAX_DECODED_BYTES
    assert f"a header block {MAX_BLOCK_BYTES // 1024} KiB, before and after decompression" in text
    assert f"and settings {MAX_SETTINGS} entries" in text
    assert f"remembers header blocks of {MAX_KNOWN_BYTES // 1024} KiB per connection" in text
    assert f"one more per {FIELDS_PER_CREDIT} fields and per {BLOCK_BYTES_PER_CREDIT} bytes" in text
    assert f"one more per {CALLS_PER_CREDIT} open calls" in text
    assert f"has {MAX_CREDIT:,}; it gets {CREDIT_PER_ANSWER} back per answer" in text
    assert f"one per {CREDIT_BYTES} bytes of a message, and {CREDIT_PER_S:,} per second" in text
    assert f"After {TURN_NS / 1e6:g} ms the other connections" in text
    assert f"has {TURNS_NS / 1e6:g} ms in each turn" in text


def test_the_sizes_of_a_connection_are_those_of_the_code() -> None:
    settings, kib, mib = NativeSettings(), 1024, 2**20
    reads = READ_BYTES // kib
    slack = (max_message_bytes(settings) - settings.max_body_bytes) // kib
    body, unread = f"{settings.max_body_bytes // mib} MiB", f"{STREAM_UNREAD_BYTES // mib} MiB"
    keyless = f"{KEYLESS_LINGER_BYTES // mib} MiB"
    lingers = f"{connection.LINGER_BYTES // mib} MiB within {connection.LINGER_S:g} s; without a key {keyless}"
    idle = f"{settings.keep_alive_timeout_s:g} s"
    handshake = f"{HANDSHAKE_S:g} s, {MAX_HANDSHAKES} at once"
    rows = [
        (f"{settings.max_header_bytes // kib} KiB, {settings.max_headers} headers", f"{MAX_METADATA_BYTES // kib} KiB"),
        (body, f"{body} and {slack} KiB"),
        (f"{reads} KiB", f"{reads} KiB"),
        ("1", f"{MAX_CALLS}"),
        (f"{UNCOUNTED_BYTES // kib} KiB", f"{UNCOUNTED_BYTES // kib} KiB"),
        (f"{unread}, then cut off", f"{unread}, then cut off"),
        (lingers, f"{keyless} without a key"),
        (idle, idle),
        (handshake, handshake),
    ]
    table = TEXT.partition("### Sizes of one connection")[2].partition("## ")[0]
    assert re.findall(r"^\| [a-zT][^|]* \| ([^|]*) \| ([^|]*) \|$", table, re.MULTILINE) == rows


def test_modules_that_are_named_exist() -> None:
    folder = Path(__file__).resolve().parents[3] / "servers/native"
    named = set(re.findall(r"`((?!tests/)[a-z_/0-9]+\.py)`", TEXT))
    assert named
    assert {name for name in named if not (folder / name).exists()} == set()
