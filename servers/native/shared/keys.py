"""The keys of clients: where they stand, whether a request brings one of them, and how many requests it may have.

A key is found by its keyed hash: 10,000 keys cost one look-up, and how long that takes says nothing about any of them.
What the requests of a key are at a time stands in memory that all front ends of a server share, each with a row.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path

import structlog

from servers.language.specification import is_language_model
from servers.native.shared.errors import HttpError, OverLimitError
from servers.native.shared.settings import NativeSettings
from servers.options.defaults import OptionError
from servers.options.launch import check_exposure

log = structlog.get_logger("abserve.server")

VARIABLE = "ABSERVE_API_KEYS"
"""Keys for containers, written as in a file. Not a setting: settings are arguments of processes, which `ps` shows."""
LEAST_CHARACTERS, MOST_CHARACTERS = 16, 512
MOST_FILE_BYTES = 16 * 2**20
NO_KEY = "send one of the server's keys: Authorization: Bearer KEY"
OPEN_PATHS = frozenset({"/v2/health/live", "/v2/health/ready"})
OPEN_METHODS = frozenset({"ServerLive", "ServerReady"})
METRICS_PATHS = frozenset({"/metrics", "/gpu-info"})
MOST_LIMITED_KEYS = 65_536
LIMITS = {
    "requests": "requests at a time",
    "slots": "slots of a language model at a time",
}
"""What may stand behind a key, as NAME=NUMBER, and of what that is the most."""
_KEY = re.compile(rb"[!-~]{%d,%d}" % (LEAST_CHARACTERS, MOST_CHARACTERS))
_LIMIT = re.compile(rb"(%s)=([1-9][0-9]{0,5})" % "|".join(LIMITS).encode())
_TAG_BYTES = 8
_COMMENT = re.compile(rb"(?:^|\s)#.*")
_BEARER = re.compile(rb"bearer +(\S+)\s*", re.IGNORECASE)


class KeyCounts:
    """How many requests limited keys have at a time: for each process a row, in which it alone counts.

    A key has its cell for as long as it is in use, so that a request which began before the keys changed is taken off
    where it was counted.
    """

    def __init__(self, processes: int) -> None:
        self._file = os.memfd_create("abserve-keys", os.MFD_CLOEXEC)
        self._row_bytes = 4 * MOST_LIMITED_KEYS
        tags_bytes = _TAG_BYTES * MOST_LIMITED_KEYS
        os.ftruncate(self._file, tags_bytes + processes * self._row_bytes)  # pages are taken when they are written
        self._memory = mmap.mmap(self._file, 0)
        self._tags = memoryview(self._memory)[:tags_bytes].cast("Q")
        self._counts = memoryview(self._memory)[tags_bytes:].cast("i")
        self.number = 0
        """Of this process."""

    def cells(self, tags: Sequence[int]) -> dict[int, int]:
        """The cells of these keys, of which each process has the same. Raises `OptionError` if they are too many."""
        fcntl.lockf(self._file, fcntl.LOCK_EX)  # front ends read the same file at the same time
        try:
            before = {tag: cell for cell, tag in enumerate(self._tags) if tag}
            wanted = {tag: before[tag] for tag in tags if tag in before}
            kept = set(wanted.values())
            free = (cell for cell in range(MOST_LIMITED_KEYS) if cell not in kept and not self.count(cell))
            for tag in tags:
                if tag not in wanted:
                    try:
                        wanted[tag] = next(free)
                    except StopIteration:
                        raise OptionError(f"more than {MOST_LIMITED_KEYS:,} keys have limits") from None
            for tag, cell in wanted.items():
                self._tags[cell] = tag
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)
        return wanted

    def count(self, cell: int) -> int:
        """How many requests the key of this cell has, in all processes."""
        return sum(self._counts[cell::MOST_LIMITED_KEYS])

    def add(self, cell: int, change: int) -> None:
        """This process has begun or ended a request of it."""
        self._counts[self.number * MOST_LIMITED_KEYS + cell] += change

    def forget(self, number: int) -> None:
        """The process of this number has ended, and with it all requests that it had."""
        start = _TAG_BYTES * MOST_LIMITED_KEYS + number * self._row_bytes
        self._memory[start : start + self._row_bytes] = bytes(self._row_bytes)


class KeyLimit:
    """How many requests one key may have at a time. Belongs to the event loop."""

    __slots__ = ("_cell", "_counts", "_most", "_refusal")

    def __init__(self, counts: KeyCounts, cell: int, name: str, most: int) -> None:
        self._counts, self._cell, self._most = counts, cell, most
        self._refusal = f"this key may have {most} {LIMITS[name]} ({name}={most}): send this one when another has ended"

    def take(self) -> None:
        """Count one more, until `leave`. Raises `OverLimitError`."""
        # Counted before the others are looked at: of two front ends at the same time none is let in too much.
        self._counts.add(self._cell, 1)
        if self._counts.count(self._cell) > self._most:
            self._counts.add(self._cell, -1)
            raise OverLimitError(self._refusal)

    def leave(self) -> None:
        """One of them has ended. Before its client can see its answer, and sends the next one to another front end."""
        self._counts.add(self._cell, -1)

    def stay(self) -> None:
        """One that has left counts again, until `leave`: its client does not read its answer."""
        self._counts.add(self._cell, 1)


Limits = dict[str, int]


class Keys:
    """The keys that a server takes; front ends have those of the process that has started them."""

    def __init__(
        self, file: Path | None, variable: str | None, *, open_metrics: bool, tokens: bool, processes: int
    ) -> None:
        """`tokens`: the server has a language model; `processes` may count requests. Raises `OptionError`, which quotes
        no key."""
        self._file = file
        self._variable = variable
        self._open_paths = OPEN_PATHS | (METRICS_PATHS if open_metrics else frozenset())
        self._secret = secrets.token_bytes(32)
        self._names = ("requests", "slots") if tokens else ("requests",)
        self.counts = KeyCounts(processes)
        self._limits = self._read()

    @classmethod
    def of(cls, settings: NativeSettings) -> Keys | None:
        """The keys of the settings and the environment; None: neither has one, and every request is answered."""
        variable = os.environ.get(VARIABLE)
        if settings.api_key_file is None and variable is None:
            if settings.open_metrics:
                raise OptionError("--open-metrics is for a server with keys: add --api-key-file FILE")
            keys = "--api-key-file FILE, --tls-client-ca FILE"
            check_exposure(settings.host, anyone=bool(settings.anyone or settings.tls_client_ca), keys=keys)
            return None
        return cls(
            settings.api_key_file,
            variable,
            open_metrics=settings.open_metrics,
            tokens=is_language_model(settings.model),
            processes=max(1, 2 * (settings.fronts or 0)),  # as many as partitions of their memory
        )

    def reload(self) -> bool:
        """Take the keys that the file has now; if it cannot be read, those before stay. Returns whether it could."""
        try:
            self._limits = self._read()
        except OptionError as error:
            log.error("the keys before are kept", reason=str(error))  # noqa: TRY400  the sentence says it all
            return False
        return True

    def admit_path(self, path: str, authorizations: Sequence[bytes]) -> KeyLimit | None:
        """The limit of the only Authorization header's key; None: it has none. Raises `HttpError` unless the path needs
        no key, or the header brings one."""
        known, limit = self.find(authorizations)
        if not known and path not in self._open_paths:
            raise HttpError(401, NO_KEY)
        return limit

    def find(self, authorizations: Sequence[bytes]) -> tuple[bool, KeyLimit | None]:
        """Whether this is one Authorization header, with one of the keys, and the limit of that."""
        match = _BEARER.fullmatch(authorizations[0]) if len(authorizations) == 1 else None
        key = None if match is None else self._hash(match[1])
        return key in self._limits, self._limits.get(key)

    def _hash(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, digest_size=32, key=self._secret).digest()

    def _read(self) -> dict[bytes | None, KeyLimit | None]:
        keys: dict[bytes, Limits] = {}
        if self._variable is not None:
            self._add(keys, VARIABLE, self._variable.encode())
        if self._file is not None:
            try:
                with self._file.open("rb") as opened:
                    content = opened.read(MOST_FILE_BYTES + 1)
            except OSError as exc:
                raise OptionError(f"--api-key-file {self._file} cannot be read: {exc.strerror}") from exc
            if len(content) > MOST_FILE_BYTES:
                raise OptionError(f"--api-key-file {self._file} has more than {MOST_FILE_BYTES >> 20} MiB")
            self._add(keys, f"--api-key-file {self._file}", content)
        most: dict[bytes, tuple[int, str]] = {}
        for key, limits in keys.items():
            if applied := [(limits[name], name) for name in self._names if name in limits]:
                most[key] = min(applied)
        cells = self.counts.cells([_tag(key) for key in most]) if most else {}
        limited = {key: KeyLimit(self.counts, cells[_tag(key)], name, count) for key, (count, name) in most.items()}
        return {key: limited.get(key) for key in keys}

    def _add(self, keys: dict[bytes, Limits], source: str, content: bytes) -> None:
        empty = True
        for number, line in enumerate(content.splitlines(), 1):
            if not (words := _COMMENT.sub(b"", line).split()):
                continue
            empty, where = False, f"line {number} of {source}"
            if not _KEY.fullmatch(words[0]) or _LIMIT.fullmatch(words[0]):
                raise OptionError(
                    f"{where} is not a key: a key has {LEAST_CHARACTERS} to {MOST_CHARACTERS} "
                    "printable ASCII characters without spaces, such as `openssl rand -hex 32` writes"
                )
            matches = [_LIMIT.fullmatch(word) for word in words[1:]]
            limits = {match[1].decode(): int(match[2]) for match in matches if match is not None}
            if len(limits) < len(matches):  # the words are not quoted: they may be keys
                raise OptionError(
                    f"{where}: behind a key stand only its limits, each once, such as "
                    + " ".join(f"{name}=8" for name in LIMITS)
                )
            if keys.setdefault(self._hash(words[0]), limits) != limits:
                raise OptionError(f"{where}: the same key has other limits before; leave one of the lines out")
        if empty:  # a key was meant: a secret that is not there must not open the server
            raise OptionError(f"{source} has no key: write one per line, or leave it out")


def _tag(key: bytes) -> int:
    return int.from_bytes(key[:_TAG_BYTES]) or 1
