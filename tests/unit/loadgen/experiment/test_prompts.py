"""Prompts: unique from their first ids on, made again from their numbers, and patched without a change of length."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.client.connection import Address, assemble
from loadgen.client.generation import for_stream, prepare_prompts
from loadgen.experiment.prompts import PromptError, PromptPlan, PromptShape
from loadgen.records.run import TOKEN_TRANSPORTS, TokenTransport

PLAN = PromptPlan(low=3, high=1023, seed=11)
NUMBERS = st.integers(0, 2**41)


@given(st.sets(NUMBERS, min_size=2, max_size=50), st.integers(2, 5000))
def test_different_numbers_make_different_ids(numbers: set[int], vocabulary: int) -> None:
    plan = PromptPlan(low=10, high=9 + vocabulary, seed=0)
    shape = PromptShape(64, 1)
    count = plan.varying(shape)
    capacity = vocabulary**count
    made = {tuple(plan.numbered(number, count)) for number in numbers}
    assert len(made) == len({number % capacity for number in numbers})
    assert all(10 <= token <= 9 + vocabulary for ids in made for token in ids)
    assert len({len(plan.patch(number, count)) for number in numbers}) == 1


def test_successive_numbers_differ_in_their_first_id() -> None:
    first = [PLAN.numbered(number, 4)[0] for number in range(10**9, 10**9 + 500)]
    assert len(set(first)) > 300
    assert 300 < np.mean(first) < 720


@pytest.mark.parametrize("transport", TOKEN_TRANSPORTS)
@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("shape", [PromptShape(32, 64), PromptShape(2, 1), PromptShape(1, 1), PromptShape(40, 8, 16)])
def test_a_patched_body_carries_the_prompt_of_its_numbers(
    transport: TokenTransport, text: bool, shape: PromptShape
) -> None:
    plan = PromptPlan(low=3, high=1023, seed=11, text=text)
    prompts = prepare_prompts(transport, "m", plan, shape, iter(range(77, 200)))
    salts = set()
    for body, request in enumerate(prompts.requests):
        number, patches = prompts.patches(body)
        content = b"".join(assemble(b"", request.pieces, patches))
        assert len(content) == len(request.body)
        document = json.loads(content)
        sent = document.get("prompt", document.get("input_ids", document.get("text_input")))
        ids = [int(word[1:]) for word in sent.split()] if text else sent
        assert ids == prompts.prompt(body, number).tolist() == plan.prompt(shape, body, number).tolist()
        assert len(ids) == shape.prompt_tokens
        assert document["max_tokens"] == shape.output_tokens
        salts.add(document.get("cache_salt"))
    salted = transport == "completions" and not shape.shared_prefix
    assert len(salts) == (len(prompts.requests) if salted else 1)
    head = for_stream(prompts.requests[0], transport, Address.parse("http://h:1/v1"), "m").head
    assert head.startswith(b"POST /v1/" if transport == "completions" else b"POST /v1/v2/models/m/generate_stream ")
    assert b"/v1/v1" not in head


def test_a_shared_prefix_is_the_same_in_all_prompts() -> None:
    shape = PromptShape(40, 8, 16)
    prompts = np.array([PLAN.prompt(shape, body, number) for number, body in enumerate(range(32))])
    assert (prompts[:, :16] == prompts[0, :16]).all()
    assert len({tuple(row) for row in prompts[:, 16:20].tolist()}) == 32
    assert ((prompts >= 3) & (prompts <= 1023)).all()
    other = PromptPlan(low=3, high=1023, seed=12).prompt(shape, 0, 0)
    assert (other[:16] != prompts[0, :16]).any()


def test_prompts_that_cannot_differ_are_refused() -> None:
    with pytest.raises(PromptError, match="at least two token ids"):
        PromptPlan(low=3, high=3, seed=0).prepared(PromptShape(4, 4))
    with pytest.raises(PromptError, match="leaves nothing of a prompt of 16 that differs"):
        PLAN.prepared(PromptShape(16, 4, 16))
    assert PLAN.prepared(PromptShape(16, 4, 15))[0].shape == (16,)
