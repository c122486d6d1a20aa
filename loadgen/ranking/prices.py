"""The price file of `abserve rank`: reading it, and which prices are for a machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from loadgen.base.documents import DocumentError, one_line, printable
from loadgen.base.strict_yaml import read_mapping
from loadgen.records.ranks import Machine, Price, PriceFile

EXAMPLES = Path(__file__).parent / "prices.yaml"
"""Dated public prices that abserve ships as examples."""
ADD_A_PRICE = (
    "add an entry with machine, match, price_per_hour, currency, kind, provider, source and date to a price file and "
    "give it with --prices FILE (see docs/rank.md)"
)


def read_prices(path: Path) -> tuple[Price, ...]:
    """The entries of a price file, with printable texts. Raises `DocumentError`, which names the file and the place."""
    content = read_mapping(path, "a price file", "prices: []")
    try:
        file: PriceFile = msgspec.convert(_printable(content), PriceFile)
    except msgspec.ValidationError as exc:
        raise DocumentError(f"{path}: {one_line(str(exc))}; docs/rank.md describes every key") from exc
    for place, price in enumerate(file.prices):
        match = price.match
        if match.gpu is None and match.gpu_count is not None:
            raise DocumentError(
                f"{path}: prices[{place}].match: gpu_count needs gpu; leave both out for a machine without"
            )
        least, most = match.cpu_count_min, match.cpu_count_max
        if least is not None and most is not None and least > most:
            raise DocumentError(f"{path}: prices[{place}].match: cpu_count_min {least} is above cpu_count_max {most}")
        if price.term is not None and price.kind != "reserved":
            raise DocumentError(f"{path}: prices[{place}]: only a reserved price has a term; remove it or set the kind")
    return file.prices


def matches(price: Price, machine: Machine) -> bool:
    """Whether a price is for this machine."""
    match = price.match
    if match.gpu is None:
        if machine.gpus:
            return False
    elif not machine.gpus or not all(match.gpu.casefold() in name.casefold() for name in machine.gpus):
        return False
    if match.gpu_count is not None and match.gpu_count != len(machine.gpus):
        return False
    if match.cpu is not None and match.cpu.casefold() not in (machine.cpu_model or "").casefold():
        return False
    cores = machine.cpu_count
    if match.cpu_count_min is not None and (cores is None or cores < match.cpu_count_min):
        return False
    return match.cpu_count_max is None or (cores is not None and cores <= match.cpu_count_max)


def prices_of(machine: Machine, prices: Sequence[Price]) -> tuple[Price, ...]:
    """All prices for this machine, by currency, kind and amount."""
    matching = [price for price in prices if matches(price, machine)]
    return tuple(sorted(matching, key=lambda price: (price.currency, price.kind, price.price_per_hour)))


def _printable(value: object) -> object:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {_printable(key): _printable(inner) for key, inner in value.items()}
    return [_printable(inner) for inner in value] if isinstance(value, list) else value
