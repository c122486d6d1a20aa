"""Random weights: the same on every device and in every release, of the right size, and with answers worth checking."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from servers.language.module import build_module, count_parameters, write_folder
from servers.language.specification import language_model, language_names
from servers.language.weights import FileWeights, draw_tensor, parse_language_weights
from servers.models.weights import RandomWeights

PROMPT = [[3, 1, 4, 15, 9, 26, 5, 35, 8, 97]]


def greedy(module: Any, count: int, prompt: Any = None) -> list[int]:
    ids = torch.tensor(PROMPT if prompt is None else prompt)
    answer = module.generate(ids, do_sample=False, max_new_tokens=count, eos_token_id=None, pad_token_id=0)
    return list(answer[0, ids.shape[1] :].tolist())


def test_the_numbers_do_not_change() -> None:
    """All machines of a comparison and all later releases draw these."""
    drawn = draw_tensor("model.layers.0.mlp.up_proj.weight", (300, 1000), 64, 0)
    digest = hashlib.sha256(drawn.numpy().tobytes()).hexdigest()
    assert digest.startswith("a8b98a4c45b64d73"), digest


def test_the_numbers_are_as_random_as_they_need_to_be() -> None:
    drawn = draw_tensor("a.weight", (512, 1024), 256, 0)
    assert drawn.std().item() == pytest.approx(1.3 / 16, rel=0.01)
    assert abs(drawn.mean().item()) < 0.001
    assert drawn.unique().numel() > 0.97 * drawn.numel()  # of 2**24 values, and a multiple of 2**19 draws
    for other in (draw_tensor("b.weight", (512, 1024), 256, 0), draw_tensor("a.weight", (512, 1024), 256, 1)):
        assert abs(torch.corrcoef(torch.stack([drawn.flatten(), other.flatten()]))[0, 1].item()) < 0.01
    rows = torch.corrcoef(drawn[:64])
    assert (rows - torch.eye(64)).abs().max().item() < 0.2
    bias, norm = draw_tensor("a.bias", (4096,), 256, 0), draw_tensor("norm.weight", (4096,), 256, 0)
    assert bias.std().item() == pytest.approx(0.1, rel=0.05)
    assert norm.mean().item() == pytest.approx(1.0, abs=0.01)


def test_the_mean_of_gelu_does_not_pass_and_routers_choose_clearly() -> None:
    after_gelu = draw_tensor("transformer.h.0.mlp.c_proj.weight", (3072, 768), 768, 0)
    assert after_gelu.sum(0).abs().max().item() < 1e-4
    assert after_gelu.std().item() == pytest.approx(1.3 / 768**0.5, rel=0.01)
    router = draw_tensor("model.layers.0.mlp.router.weight", (32, 2880), 2880, 0)
    assert router.std().item() == pytest.approx(5.2 / 2880**0.5, rel=0.02)


@pytest.mark.parametrize("name", language_names())
def test_the_known_counts_of_parameters_are_right(name: str) -> None:
    model = language_model(f"language:{name}")
    assert count_parameters(replace(model, known_parameters=None)) == count_parameters(model)


@pytest.mark.parametrize(
    ("name", "different"), [("demo", 70), ("tiny", 70), pytest.param("gpt2", 58, marks=pytest.mark.slow)]
)
def test_answers_do_not_repeat(name: str, different: int) -> None:
    module = build_module(language_model(f"language:{name}"))
    answers = [greedy(module, 96, [[seed + 1, 2, 3, 4, 5, 6, 7, 8]]) for seed in range(3)]
    assert all(len(set(answer)) > different for answer in answers), [len(set(answer)) for answer in answers]
    assert answers[0] != answers[1] != answers[2]


def test_the_usual_scale_would_repeat() -> None:
    module = build_module(language_model("language:demo"))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(torch.ones_like(parameter) if "norm" in name else torch.randn_like(parameter) * 0.02)
    assert len(set(greedy(module, 96))) < 20


def test_every_precision_has_the_same_weights_rounded() -> None:
    model = language_model("language:tiny")
    exact, rounded = build_module(model), build_module(model, precision="bf16")
    for name, parameter in exact.named_parameters():
        assert torch.equal(parameter.bfloat16(), rounded.get_parameter(name)), name
    assert exact.lm_head.weight is exact.model.embed_tokens.weight
    assert exact.model.rotary_emb.inv_freq.isfinite().all()
    assert exact.model.rotary_emb.inv_freq[0] == 1


def test_a_written_folder_answers_alike(tmp_path: Path) -> None:
    model = language_model("language:tiny", "random:3")
    write_folder(model, tmp_path, "fp32")
    again = language_model(str(tmp_path))
    assert isinstance(again.weights, FileWeights)
    assert (again.vocabulary, again.eos, again.prompt_ids) == (model.vocabulary, model.eos, model.prompt_ids)
    assert count_parameters(again) == count_parameters(model)
    expected = greedy(build_module(model), 16)
    assert greedy(build_module(again), 16) == expected
    other = language_model("language:tiny", str(tmp_path / "model.safetensors"))
    assert greedy(build_module(other), 16) == expected


@pytest.mark.gpu
def test_a_gpu_draws_the_same_bytes() -> None:
    for name in ("a.weight", "a.bias"):
        drawn = [draw_tensor(name, (1000, 1237), 64, 5, device) for device in ("cpu", "cuda")]
        assert torch.equal(drawn[0], drawn[1].cpu())


def test_a_folder_may_have_a_name_that_begins_like_a_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("random-start", "random"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    assert isinstance(parse_language_weights("random-start", RandomWeights(0)), FileWeights)
    assert parse_language_weights("random", RandomWeights(1)) == RandomWeights(0)
