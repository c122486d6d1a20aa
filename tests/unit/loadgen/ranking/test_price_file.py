"""A price file is read strictly, and every shipped example has a date and a source."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgen.base.documents import DocumentError
from loadgen.ranking.prices import EXAMPLES, read_prices

GOOD = """prices:
  - {machine: m, match: {}, price_per_hour: 1.5, currency: EUR, kind: reserved, term: 1 year, provider: P,
     source: "https://example.org", date: 2026-11-01}
"""


def test_a_price_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(GOOD)
    (price,) = read_prices(path)
    assert (price.price_per_hour, price.currency, price.term, str(price.date)) == (1.5, "EUR", "1 year", "2026-11-01")


def test_an_empty_file_has_no_prices(tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text("")
    assert read_prices(path) == ()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("price_per_hour: 1.5", "price_per_hour: -1", "prices[0].price_per_hour"),
        ("price_per_hour: 1.5", "price_per_hour: .nan", "price_per_hour"),
        ("price_per_hour: 1.5", "price_per_hour: .inf", "price_per_hour"),
        ("price_per_hour: 1.5", "price_per_hour: '1.5'", "price_per_hour"),
        ("currency: EUR", "currency: euro", "currency"),
        ("currency: EUR, ", "", "missing required field `currency`"),
        ("kind: reserved", "kind: cheap", "kind"),
        ("kind: reserved", "kind: spot", "only a reserved price has a term"),
        ("date: 2026-11-01", "date: yesterday", "date"),
        ("machine: m", "machine: m, colour: red", "unknown field `colour`"),
        ("machine: m", "machine: ''", "machine"),
        ("match: {}", "match: {gpu_count: 2}", "gpu_count needs gpu"),
        ("match: {}", "match: {cpu_count_min: 9, cpu_count_max: 8}", "cpu_count_min 9 is above cpu_count_max 8"),
        ("machine: m", "machine: m, machine: n", "machine is given twice"),
        ("machine: m", "machine: &x m", "prices.yaml"),
        (GOOD, "- a\n", "write keys with values, as in: prices: []"),
        (GOOD, "price: []\n", "unknown field `price`"),
        (GOOD, "prices: [\n", "prices.yaml:"),
        (GOOD, "a: !!python/object:os.system {}\n", "could not determine a constructor"),
        (GOOD, "a: 1\n" * 20_000, "a price file has at most"),
    ],
)
def test_what_is_wrong_is_named(old: str, new: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(GOOD.replace(old, new))
    if "&x" in new:  # an anchor alone changes nothing
        assert read_prices(path)[0].machine == "m"
        return
    with pytest.raises(DocumentError) as error:
        read_prices(path)
    assert str(path) in str(error.value)
    assert message in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="give the path of a price file"):
        read_prices(tmp_path / "none.yaml")


def test_the_examples_are_dated_and_have_a_source() -> None:
    prices = read_prices(EXAMPLES)
    assert {price.kind for price in prices} == {"on-demand", "spot", "reserved"}
    assert all(price.source.startswith("https://") for price in prices)
    assert "EXAMPLES, not offers" in EXAMPLES.read_text().splitlines()[0]
