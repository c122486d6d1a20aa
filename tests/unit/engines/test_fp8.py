"""FP8: what is refused without a GPU. Its answers are tested on one (tests/gpu)."""

from __future__ import annotations

import pytest
from torch import nn

from servers.engines.interface import EngineError
from servers.engines.settings import EngineSettings
from servers.engines.torch.forms import check_capability, has_fp8_product


def test_fp8_needs_a_gpu_that_has_it() -> None:
    with pytest.raises(
        EngineError, match=r"does not offer precision fp8 on cpu: torchao .* 8\.9 and newer; use one of"
    ):
        EngineSettings("torch", "fp8", device="cpu").mode_on("cpu")
    assert EngineSettings("torch", "fp8", device="cuda:0").mode_on("cuda") == "graph"
    check_capability((8, 9), "an Ada")
    check_capability((9, 0), "a Hopper")
    with pytest.raises(EngineError, match=r"8\.9 or newer, and NVIDIA T4 has 7\.5; use precision bf16"):
        check_capability((7, 5), "NVIDIA T4")


@pytest.mark.parametrize(("sizes", "wanted"), [((32, 16), True), ((32, 1000), False), ((30, 16), False)])
def test_layers_of_other_sizes_stay_in_bf16(sizes: tuple[int, int], wanted: bool) -> None:
    assert has_fp8_product(nn.Linear(*sizes)) is wanted


def test_the_last_product_of_an_attention_stays_in_bf16() -> None:
    """torchao's weights have no product for the way in which nn.MultiheadAttention calls it."""
    attention = nn.MultiheadAttention(32, 4)
    assert not has_fp8_product(attention.out_proj)
