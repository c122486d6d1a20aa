"""Addresses of servers as a user writes them."""

from __future__ import annotations

import pytest

from loadgen.client.connection import Address, AddressError
from loadgen.client.http import request_head
from loadgen.conformance.model import InferenceRequest, ServedModel
from loadgen.records.run import Access
from servers.protocol.examples import in_path


@pytest.mark.parametrize(
    "url",
    [
        "wss://x:1",
        "http://",
        "ftp://x",
        "http://x:port",
        "http://x:0",
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


@pytest.mark.parametrize("url", ["https://me:s3cret@x:1", "https://x/v1?key=s3cret", "https://x/v1#s3cret"])
def test_an_address_with_a_secret_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(AddressError, match=r"send (them|keys) with a header") as refused:
        Address.parse(url)
    assert "s3cret" not in str(refused.value)


def test_https_has_its_own_port_and_a_version_its_own_path() -> None:
    address = Address.parse("https://box/triton", Access(version="3"))
    assert (address.url, address.tls) == ("https://box:443/triton", True)
    assert address.model_path("m") == "/v2/models/m/versions/3"


NAMES = {
    "team/resnet": "team%2Fresnet",
    "half50%": "half50%25",
    "what?": "what%3F",
    "a b": "a%20b",
    "größe": "gr%C3%B6%C3%9Fe",
    "a#b": "a%23b",
    "100%25": "100%2525",
    '"q"': "%22q%22",
    "plain-1.2_x": "plain-1.2_x",
    "a&b=c;d:e": "a&b=c;d:e",
}


@pytest.mark.parametrize(("name", "segment"), NAMES.items())
def test_a_name_is_one_segment_of_every_path(name: str, segment: str) -> None:
    """Of requests, readiness, metadata, configuration, statistics, and of the conformance tool."""
    address = Address.parse("http://box:1/pre%20fix", Access(version="v/1"))
    line = request_head("GET", f"{address.model_path(name)}/ready", address).split(b"\r\n")[0].decode()
    assert line == f"GET /pre%20fix/v2/models/{segment}/versions/v%2F1/ready HTTP/1.1"
    assert ServedModel(name).path == f"/v2/models/{segment}/infer"
    asked = InferenceRequest(ServedModel(name), name, [], [], version="v/1")
    assert asked.path == f"/v2/models/{segment}/versions/v%2F1/infer"
    assert in_path(name) == segment
