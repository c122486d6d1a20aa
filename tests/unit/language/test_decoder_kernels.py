"""The Triton kernels choose the tokens that torch's operators do, in Triton's interpreter, without a GPU."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from servers.engines.interface import PLANS_FOLDER
from servers.engines.settings import EngineError
from servers.language.decoder import decoder_weights
from servers.language.module import build_module
from servers.language.specification import language_model
from tests.interpreter import interpreted
from tests.language_answers import CONFIGS

pytest.importorskip("triton", reason="torch came without Triton")


QUICK = ("fused, short prompts",)
"""What the default run executes: steps with prompts are never fused, so it has both forms. The others take minutes."""
REST = ("plain", "fused", "fused, biases", "fused, window", "fused, group of three", "odd widths", "experts", "gpt2")


@cache
def tokens_of(cases: tuple[str, ...]) -> dict[str, Any]:
    """By case, the tokens of a few steps."""
    tokens: dict[str, Any] = interpreted(Path(__file__).with_name("interpreted_decoder.py"), *cases)
    return tokens


@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in REST)])
def test_kernels_choose_the_tokens_of_torch(case: str) -> None:
    report = tokens_of(QUICK if case in QUICK else REST)
    assert report[case]["kernels"] == report[case]["expected"]
    assert len({token for step in report[case]["expected"] for token in step}) > 3
    assert report[case]["can_fuse"] == (case not in ("odd widths", "experts", "gpt2"))


@pytest.mark.slow
def test_each_token_is_read_by_its_own_experts_only() -> None:
    """Two experts each; rows and tokens that only fill the size of a step have none."""
    assert tokens_of(REST)["experts"]["read"] == [80, 2, 34, 8, 4, 2]


def forward_of(*, graphs: bool = False, **fields: Any) -> Any:
    from servers.language.triton_forward import TritonForward

    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**CONFIGS["llama"], **fields}))
        weights = decoder_weights(build_module(language_model(f"language:{folder}")))
        return TritonForward(weights, 2, 64, 0 if graphs else 16, 48, graphs=graphs)


@pytest.mark.parametrize(
    ("fields", "fused"),
    [
        ({"hidden_size": 64, "intermediate_size": 96}, True),
        ({"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3}, False),
        ({"intermediate_size": 240}, False),
        ({"hidden_size": 96, "head_dim": 16, "num_attention_heads": 3, "num_key_value_heads": 3}, False),
    ],
)
def test_widths_that_no_tile_divides_are_multiplied_by_the_library(fields: dict[str, Any], fused: bool) -> None:
    assert forward_of(**fields).can_fuse is fused


@pytest.mark.parametrize("head_size", [8, 48, 80, 96, 100])
def test_heads_that_no_kernel_knows_are_refused_with_another_engine(head_size: int) -> None:
    with pytest.raises(EngineError, match=f"heads of {head_size} values.*--engine continuous"):
        forward_of(hidden_size=2 * head_size, num_attention_heads=2, num_key_value_heads=1, head_dim=head_size)


def test_a_later_start_has_the_same_forms_and_pieces_of_prompts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Planted times: in the second start the other forms would be faster."""
    monkeypatch.setenv(PLANS_FOLDER, str(tmp_path))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    described, captured = [], list[tuple[int, bool]]()
    for fused_ms, chunk_ms in ((1.0, 0.01), (3.0, 9.0)):
        forward = forward_of(graphs=True)

        def capture(size: Any, fused: bool, _pool: Any, fused_ms: float = fused_ms, chunk_ms: float = chunk_ms) -> Any:
            captured.append((size.chunk, fused))
            return (fused_ms if fused else 2.0) + chunk_ms * size.chunk, object()

        monkeypatch.setattr(forward, "_capture", capture)
        captured.clear()
        forward.warm_up()
        described.append(forward.describe())
    assert described[0] == described[1]
    assert sorted(described[0]["fused_rows"]) == [1, 2]
    assert described[0]["prompt_tokens_beside_rows"] == [32, 32]
    assert {fused for chunk, fused in captured if not chunk} == {True}
