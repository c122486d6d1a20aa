"""Encoders and sequence classifiers of Hugging Face's transformers, such as transformers:bert-base-uncased."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from servers.contract.tensors import Array, TensorSpec
from servers.models.specification import Axis, ModelSpecification
from servers.models.weights import RandomWeights, WeightsError, WeightsSource, seeded

if TYPE_CHECKING:
    import torch

_KNOWN = {"bert-base-uncased": "BertConfig", "distilbert-base-uncased": "DistilBertConfig"}
"""Models whose configuration is the default of a class of transformers, so that random weights need no file."""


def names() -> tuple[str, ...]:
    """The well-known models of this source."""
    return tuple(_KNOWN)


def specify(name: str) -> ModelSpecification | None:
    """The specification of an encoder; None if there is none of that name."""
    if name not in _KNOWN:
        return None
    import transformers

    config = getattr(transformers, _KNOWN[name])()
    inputs = [TensorSpec("input_ids", "INT64", (-1, -1)), TensorSpec("attention_mask", "INT64", (-1, -1))]
    output = TensorSpec("last_hidden_state", "FP32", (-1, -1, config.hidden_size))
    places = {tensor.name: 1 for tensor in (*inputs, output)}
    return ModelSpecification(
        name=re.sub(r"[^a-z0-9]+", "_", name.lower()),
        reference=f"transformers:{name}",
        title=name,
        version="1",
        inputs=tuple(inputs),
        outputs=(output,),
        axes=(
            Axis(
                "sequence",
                default=128,
                largest=config.max_position_embeddings,
                places=places,
                padding={"input_ids": config.pad_token_id or 0, "attention_mask": 0},
            ),
        ),
        id_counts={"input_ids": config.vocab_size},
        item="sequence",
        max_batch_size=32,
        make_items=partial(_token_ids, config.vocab_size, config.pad_token_id or 0),
        load_module=_loader(config),
    )


def _loader(config: Any) -> Callable[[WeightsSource], torch.nn.Module]:
    def load(source: WeightsSource) -> torch.nn.Module:
        import transformers

        if not isinstance(source, RandomWeights):
            raise WeightsError("only random weights yet")
        with seeded(source.seed):
            model = transformers.AutoModel.from_config(config)  # type: ignore[no-untyped-call]
        return _encoder(model.eval().requires_grad_(False))

    return load


def _encoder(model: torch.nn.Module) -> torch.nn.Module:
    import torch

    class Encoder(torch.nn.Module):
        """Token ids and mask, int64 (n, s), to the last hidden state, float (n, s, hidden)."""

        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            hidden: torch.Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask, return_dict=False)[0]
            return hidden

    return Encoder(model).eval()


def _token_ids(vocabulary: int, pad: int, seed: int, lengths: Sequence[int]) -> Mapping[str, Array]:
    """Uniform token ids without the first thousand, which are special or unused in BERT's vocabulary."""
    generator = np.random.default_rng(seed)
    longest = max(lengths)
    mask = (np.arange(longest) < np.asarray(lengths)[:, None]).astype(np.int64)
    ids = generator.integers(min(1000, vocabulary // 2), vocabulary, (len(lengths), longest), np.int64)
    return {"input_ids": np.where(mask == 1, ids, pad), "attention_mask": mask}
