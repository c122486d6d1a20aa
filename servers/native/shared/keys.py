"""The keys of clients: where they stand, and whether a request brings one of them.

A key is found by its keyed hash: 10,000 keys cost one look-up, and how long that takes says nothing about any of them.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path

import structlog

from servers.native.shared.errors import HttpError
from servers.native.shared.settings import NativeSettings
from servers.options.defaults import OptionError

log = structlog.get_logger("abserve.server")

VARIABLE = "ABSERVE_API_KEYS"
"""Keys for containers, written as in a file. Not a setting: settings are arguments of processes, which `ps` shows."""
LEAST_CHARACTERS, MOST_CHARACTERS = 16, 512
MOST_FILE_BYTES = 16 * 2**20
NO_KEY = "send one of the server's keys: Authorization: Bearer KEY"
OPEN_PATHS = frozenset({"/v2/health/live", "/v2/health/ready"})
OPEN_METHODS = frozenset({"ServerLive", "ServerReady"})
METRICS_PATHS = frozenset({"/metrics", "/gpu-info"})
_KEY = re.compile(rb"[!-~]{%d,%d}" % (LEAST_CHARACTERS, MOST_CHARACTERS))
_COMMENT = re.compile(rb"(?:^|\s)#.*")
_BEARER = re.compile(rb"bearer +(\S+)\s*", re.IGNORECASE)


def _is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address; True for a name that has none, which cannot be bound either."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return True
    return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)


class Keys:
    """The keys that a server takes; front ends have those of the process that has started them."""

    def __init__(self, file: Path | None, variable: str | None, *, open_metrics: bool) -> None:
        """Raises `OptionError`, which quotes no key."""
        self._file = file
        self._variable = variable
        self._open_paths = OPEN_PATHS | (METRICS_PATHS if open_metrics else frozenset())
        self._secret = secrets.token_bytes(32)
        self._hashes = self._read()

    @classmethod
    def of(cls, settings: NativeSettings) -> Keys | None:
        """The keys of the settings and the environment; None: neither has one, and every request is answered."""
        variable = os.environ.get(VARIABLE)
        if settings.api_key_file is None and variable is None:
            if settings.open_metrics:
                raise OptionError("--open-metrics is for a server with keys: add --api-key-file FILE")
            if not settings.anyone and not _is_loopback(settings.host):
                raise OptionError(
                    f"--host {settings.host} lets other machines use the server without a key: add "
                    "--api-key-file FILE, or --anyone if something in front protects it"
                )
            return None
        return cls(settings.api_key_file, variable, open_metrics=settings.open_metrics)

    def reload(self) -> bool:
        """Take the keys that the file has now; if it cannot be read, those before stay. Returns whether it could."""
        try:
            self._hashes = self._read()
        except OptionError as error:
            log.error("the keys before are kept", reason=str(error))  # noqa: TRY400  the sentence says it all
            return False
        return True

    def admit_path(self, path: str, authorizations: Sequence[bytes]) -> None:
        """Raise `HttpError` unless the path needs no key, or the only Authorization header brings one."""
        if path not in self._open_paths and not self.knows(authorizations):
            raise HttpError(401, NO_KEY)

    def knows(self, authorizations: Sequence[bytes]) -> bool:
        """Whether this is one Authorization header, with one of the keys."""
        match = _BEARER.fullmatch(authorizations[0]) if len(authorizations) == 1 else None
        return match is not None and self._hash(match[1]) in self._hashes

    def _hash(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, digest_size=32, key=self._secret).digest()

    def _read(self) -> frozenset[bytes]:
        hashes: set[bytes] = set() if self._variable is None else self._hashes_of(VARIABLE, self._variable.encode())
        if self._file is not None:
            try:
                with self._file.open("rb") as opened:
                    content = opened.read(MOST_FILE_BYTES + 1)
            except OSError as exc:
                raise OptionError(f"--api-key-file {self._file} cannot be read: {exc.strerror}") from exc
            if len(content) > MOST_FILE_BYTES:
                raise OptionError(f"--api-key-file {self._file} has more than {MOST_FILE_BYTES >> 20} MiB")
            hashes |= self._hashes_of(f"--api-key-file {self._file}", content)
        return frozenset(hashes)

    def _hashes_of(self, source: str, content: bytes) -> set[bytes]:
        hashes: set[bytes] = set()
        for number, line in enumerate(content.splitlines(), 1):
            key = _COMMENT.sub(b"", line).strip()
            if key and not _KEY.fullmatch(key):
                raise OptionError(
                    f"line {number} of {source} is not a key: a key has {LEAST_CHARACTERS} to {MOST_CHARACTERS} "
                    "printable ASCII characters without spaces, such as `openssl rand -hex 32` writes"
                )
            if key:
                hashes.add(self._hash(key))
        if not hashes:  # a key was meant: a secret that is not there must not open the server
            raise OptionError(f"{source} has no key: write one per line, or leave it out")
        return hashes
