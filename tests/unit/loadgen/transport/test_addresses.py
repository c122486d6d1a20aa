"""Addresses of servers as a user writes them."""

from __future__ import annotations

import pytest

from loadgen.records.run import Access
from loadgen.transport.requests import Address, AddressError


@pytest.mark.parametrize(
    "url",
    [
        "wss://x:1",
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


def test_an_address_with_a_password_is_refused_without_showing_it() -> None:
    with pytest.raises(AddressError, match="send them with a header") as refused:
        Address.parse("https://me:s3cret@x:1")
    assert "s3cret" not in str(refused.value)


def test_https_has_its_own_port_and_a_version_its_own_path() -> None:
    address = Address.parse("https://box/triton", Access(version="3"))
    assert (address.url, address.tls) == ("https://box:443/triton", True)
    assert address.model_path("m") == "/v2/models/m/versions/3"
