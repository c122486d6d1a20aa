"""Runs the decoder's Triton kernels in Triton's interpreter on the CPU and prints what the tests assert on; a script.

A process of its own, because a kernel is bound to the interpreter or the compiler when its module is imported.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from triton.runtime import interpreter  # type: ignore[import-untyped]

from servers.language import triton_forward
from servers.language.decoder import decoder_weights
from servers.language.forward import PromptPiece, SlotForward, StepPlan, TorchForward
from servers.language.module import build_module
from servers.language.specification import language_model
from servers.language.triton_forward import TritonForward
from tests.language_answers import CONFIGS

SLOTS, LENGTH = 2, 64
SMALL = {"vocab_size": 160, "eos_token_id": 0}
"""The interpreter takes a millisecond for each operation."""
LONG, SHORT = (40, 16, 3), (13, 7, 3)
ROTATED = {**SMALL, "num_hidden_layers": 2, "intermediate_size": 64, "hidden_size": 64}
CASES: dict[str, dict[str, Any]] = {
    "plain": {**CONFIGS["llama"], **ROTATED},
    "fused": {**CONFIGS["llama"], **ROTATED},
    "fused, short prompts": {**CONFIGS["llama"], **ROTATED},
    "fused, biases": {**CONFIGS["llama3-rope"], **ROTATED, "mlp_bias": False},
    "fused, window": {**CONFIGS["qwen2-window"], **ROTATED},
    "fused, group of three": {
        **CONFIGS["llama"],
        **ROTATED,
        "hidden_size": 96,
        "num_attention_heads": 6,
        "head_dim": 32,
    },
    "odd widths": {
        **CONFIGS["llama"],
        **ROTATED,
        "hidden_size": 144,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 80,
    },
    "experts": {
        **CONFIGS["gpt-oss"],
        **ROTATED,
        "num_local_experts": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "pad_token_id": 1,
    },
    "gpt2": {**CONFIGS["gpt2"], **SMALL, "n_layer": 2, "bos_token_id": 0},
}


def accept_new_numpy() -> None:
    """Triton 3.6 makes the bound of a loop by `int` of an array of one element, which NumPy 2.4 refuses."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def prompt(number: int, length: int) -> list[int]:
    return [(7 * number + 13 * place + place * place) % 150 + 1 for place in range(length)]


def answers(forward: SlotForward, read: list[int], lengths: tuple[int, int, int]) -> list[list[int]]:
    """The tokens chosen in steps that read prompts in pieces beside decoding rows, and move slots.

    `lengths` are those of one prompt and of the two pieces of another. `read` gets the pairs of a token and an expert
    of each step.
    """
    chosen: list[list[int]] = []

    def step(lengths: list[int], *pieces: PromptPiece) -> None:
        count = len(lengths) + sum(piece.last for piece in pieces)
        chosen.append(forward.step(StepPlan(lengths, pieces))[:count].tolist())
        if isinstance(forward, TritonForward) and forward.weights.shape.experts:
            read.append(int(forward._counts.sum()))

    one, piece, rest = lengths
    first, second = prompt(0, one), prompt(1, piece + rest)
    step([], PromptPiece(0, 0, first, last=True))
    step([one])
    step([one + 1], PromptPiece(1, 0, second[:piece], last=False))
    step([one + 2], PromptPiece(1, piece, second[piece:], last=True))
    step([one + 3, piece + rest])
    forward.move(1, 0, piece + rest + 1)  # the first answer has ended
    step([piece + rest + 1])
    return chosen


def compare(fields: dict[str, Any], fused: bool, short: bool) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(fields))
        model = language_model(f"language:{folder}")
        lengths = LONG
        if short:
            lengths = SHORT
            triton_forward.PROGRAMS = 8  # attention in few parts: each program takes the interpreter 20 ms
        kernels = TritonForward(decoder_weights(build_module(model)), SLOTS, LENGTH, 16, 48, graphs=False)
        if not fused:
            kernels.warm_up()
        kernels.cache.fill_(50.0)  # what an earlier request left
        kernels._fused = dict.fromkeys(kernels._row_buckets, fused)
        read: list[int] = []
        return {
            "can_fuse": kernels.can_fuse,
            "expected": answers(TorchForward(decoder_weights(build_module(model)), SLOTS, LENGTH), [], lengths),
            "kernels": answers(kernels, read, lengths),
            "read": read,
        }


if __name__ == "__main__":
    accept_new_numpy()
    report = {
        name: compare(CASES[name], name.startswith("fused"), name == "fused, short prompts")
        for name in sys.argv[1:] or CASES
    }
    sys.stdout.write(json.dumps(report))
