"""Addresses of servers as a user writes them."""

from __future__ import annotations

import pytest

from loadgen.transport.requests import Address, AddressError


@pytest.mark.parametrize(
    "url",
    [
        "wss://x:1",
        "https://me:word@x:1",
        "http://",
        "ftp://x",
        "http://x:port",
        "http://[::1",
        "http://a..b",
        f"http://{'x' * 64}:1",
    ],
)
def test_unusable_addresses_show_a_valid_one(url: str) -> None:
    with pytest.raises(AddressError, match=r"http://127\.0\.0\.1:8100"):
        Address.parse(url)


def test_addresses_are_normalised() -> None:
    assert Address.parse("localhost:8000/triton/").url == "http://localhost:8000/triton"
    assert Address.parse("http://[::1]:8000").authority == "[::1]:8000"
