"""How FP32 is multiplied: every switch of torch says the same, the older ones too, which raise where they differ."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from servers.engines.torch.device import fp32_products, set_fp32_products


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    set_fp32_products(tf32=False)


@pytest.mark.parametrize("tf32", [True, False])
def test_every_switch_of_torch_says_the_same(tf32: bool) -> None:
    set_fp32_products(tf32=not tf32)
    set_fp32_products(tf32=tf32)
    assert fp32_products() == dict.fromkeys(("matmul", "convolution"), "tf32" if tf32 else "ieee")
    assert torch.backends.cudnn.allow_tf32 is tf32  # what torch.export asks
    assert torch.backends.cuda.matmul.allow_tf32 is tf32
