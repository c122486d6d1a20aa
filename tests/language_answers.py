"""Small language models of every architecture, prompts, the answers of transformers, and what gathers an engine's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from servers.language.engine import Emission, GeneratingEngine, GenerationRequest
from servers.language.module import build_module
from servers.language.specification import LanguageModel, language_model

LONGEST = 16
PROMPTS: Sequence[Sequence[int]] = [
    [(7 * number + 13 * place + place * place) % 1000 + 1 for place in range(length)]
    for number, length in enumerate((1, 2, 7, 16, 33, 40))
]

ROTATED = {
    "vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "max_position_embeddings": 256, "eos_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **ROTATED},
    "llama3-rope": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], **ROTATED, "attention_bias": True,
        "mlp_bias": True, "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "qwen2-window": {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], **ROTATED, "use_sliding_window": True,
        "sliding_window": 8, "max_window_layers": 1,
    },
    "gpt2": {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 1000, "n_positions": 256,
        "n_embd": 64, "n_layer": 3, "n_head": 4, "eos_token_id": 0,
    },
    "gpt-oss": {
        "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], **ROTATED, "head_dim": 32,
        "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 8, "pad_token_id": 999,
    },
}  # fmt: skip


def model_of(name: str, folder: Path) -> LanguageModel:
    """The small model of one of the architectures."""
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    return language_model(f"language:{folder}")


def generated(module: Any, prompt: Sequence[int], length: int) -> list[int]:
    """The greedy answer of transformers, without regard to EOS."""
    ids = torch.tensor([list(prompt)], device=module.device)
    answer = module.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    tokens: list[int] = answer[0, len(prompt) :].tolist()
    return tokens


@cache
def tiny() -> LanguageModel:
    return language_model("language:tiny")


@cache
def expected() -> list[list[int]]:
    """The answers of tiny to the prompts."""
    module = build_module(tiny())
    return [generated(module, prompt, LONGEST) for prompt in PROMPTS]


class Answers:
    """Gathers emissions by request, and holds that each is finished once."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.finishes: dict[int, str] = {}

    def take(self, emissions: Sequence[Emission]) -> None:
        for emission in emissions:
            assert emission.number not in self.finishes
            self.tokens.setdefault(emission.number, []).extend(emission.tokens)
            if emission.finish is not None:
                self.finishes[emission.number] = emission.finish


def finish(engine: GeneratingEngine, answers: Answers) -> Answers:
    for _ in range(1000):
        if not (engine.active or engine.waiting):
            return answers
        answers.take(engine.step())
    raise AssertionError("the engine never became idle")


def assert_generates_as(module: Any, engine: GeneratingEngine, prompts: Sequence[Sequence[int]], length: int) -> None:
    """The engine's answers are those of the module; later prompts, more than there are slots, are read beside running
    answers."""
    prompts = [[token % 900 for token in prompt] for prompt in prompts]
    answers = Answers()
    for number, prompt in enumerate(prompts):
        engine.add(GenerationRequest(number, prompt, length))
        answers.take(engine.step())
    finish(engine, answers)
    assert answers.tokens == {number: generated(module, prompt, length) for number, prompt in enumerate(prompts)}
    assert len(set(answers.tokens[3])) > 10, "degenerate weights"
