"""A language model as it is served, found by its reference; nothing here imports torch or transformers to describe one.

    language:demo, language:gpt2, …   a shape that is known here, with random weights
    language:/folder, /folder         a folder with the config.json of a causal model, and its weights if it has any
    transformers:NAME                 the same from the cache of Hugging Face's hub, or a folder; never downloaded

`--weights` is random:SEED, or a folder or a .safetensors file, either pinned by @sha256:HEX.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from servers.language.weights import (
    FileWeights,
    LanguageWeights,
    has_weights,
    parse_language_weights,
    pin_language_weights,
)
from servers.models.files import named_path, user_path
from servers.models.specification import UnknownModelError, choose_from, served_name
from servers.models.weights import RandomWeights
from servers.protocol.examples import completion_commands

PREFIX = "language:"
_ARCHITECTURE_ENDING = "ForCausalLM"
_GPT2_HEAD = "GPT2LMHeadModel"
_LARGEST_CONFIG_BYTES = 16 * 2**20
_LARGEST_VOCABULARY = 2**24


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """One causal model of text: token ids in, token ids out. With `fields` its transformers configuration."""

    reference: str
    """language:demo, or language: and an absolute path. `label` has no folders."""
    name: str
    """The name on a server."""
    title: str
    architecture: str
    """The class of transformers, such as Qwen2ForCausalLM."""
    fields: Mapping[str, Any]
    """The content of config.json."""
    vocabulary: int
    """Token ids are at least 0 and below this."""
    eos: tuple[int, ...]
    """The ids that end an answer."""
    max_length: int
    """The most tokens of one prompt and its answer together."""
    prompt_ids: tuple[int, int]
    """The first and the last id that a random prompt may use: no special token is between them."""
    weights: LanguageWeights
    folder: Path | None = None
    """Where config.json is; None for a shape that is known here."""
    known_parameters: int | None = None
    """How many numbers the weights are; None: count them with `servers.language.module.count_parameters`."""

    @property
    def label(self) -> str:
        """The reference without folders of this machine, for configurations that clients read and people publish."""
        return self.reference if self.folder is None else f"{PREFIX}{self.folder.name}"

    max_batch_size: ClassVar[None] = None
    cannot_pad: ClassVar[str] = "a language model has no batches to pad"

    def for_process(self, _model: str, _weights: str | None) -> dict[str, str]:
        """The options for a process in any folder: a path is absolute, weights are pinned. Raises `WeightsError`."""
        return {"model": self.reference, "weights": pin_language_weights(self.weights, self.fields).text}

    def examples(self, url: str) -> tuple[str, ...]:
        """Commands for a shell that send one request to a server at that URL."""
        return completion_commands(url, self.name)

    @property
    def hidden_size(self) -> int:
        return int(self.fields.get("hidden_size") or self.fields["n_embd"])

    @property
    def config(self) -> Any:
        """The configuration of transformers, a new object. Raises `UnknownModelError` if this release has no such
        model."""
        from transformers import AutoConfig

        try:
            return AutoConfig.for_model(**self.fields)
        except (ValueError, TypeError, KeyError) as exc:
            raise UnknownModelError(
                f"{self.title}: this release of transformers cannot read its configuration"
            ) from exc


def _qwen2(**fields: Any) -> Mapping[str, Any]:
    return {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True, **fields}


_KNOWN: Mapping[str, tuple[str, int, tuple[int, int], Mapping[str, Any]]] = MappingProxyType({
    "demo": ("Demo (Qwen2 of 7 M parameters)", 6_953_216, (1, 4095), _qwen2(
        vocab_size=4096, hidden_size=256, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=1024, max_position_embeddings=4096, eos_token_id=0,
    )),
    "tiny": ("Tiny (Qwen2 of 0.2 M parameters)", 188_992, (1, 1023), _qwen2(
        vocab_size=1024, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=256, max_position_embeddings=1024, eos_token_id=0,
    )),
    "gpt2": ("GPT-2 small", 124_439_808, (0, 50255), {
        "model_type": "gpt2", "architectures": [_GPT2_HEAD], "vocab_size": 50257, "n_positions": 1024, "n_embd": 768,
        "n_layer": 12, "n_head": 12, "bos_token_id": 50256, "eos_token_id": 50256,
    }),
    "tinyllama-1.1b": ("TinyLlama 1.1B", 1_100_048_384, (3, 31999), {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 2048,
        "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4, "intermediate_size": 5632,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2,
        "tie_word_embeddings": False,
    }),
    "qwen2-1.5b": ("Qwen2 1.5B", 1_543_714_304, (0, 151642), _qwen2(
        vocab_size=151936, hidden_size=1536, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
        intermediate_size=8960, max_position_embeddings=32768, bos_token_id=151643, eos_token_id=[151645, 151643],
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )),
    "gpt-oss-20b": ("gpt-oss 20B", 20_914_757_184, (0, 199997), {
        "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "vocab_size": 201088, "hidden_size": 2880,
        "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
        "max_position_embeddings": 131072, "eos_token_id": [200002, 199999, 200012], "pad_token_id": 199999,
        "tie_word_embeddings": False,
    }),
})  # fmt: skip
"""Title, parameters, first and last id for prompts, and the configuration of each shape."""


def language_names() -> tuple[str, ...]:
    """The names that may follow `language:`, besides folders."""
    return tuple(_KNOWN)


def is_language_model(reference: str) -> bool:
    """Whether `--model` names a language model; a folder does if its config.json says so."""
    if reference.startswith(PREFIX):
        return True
    folder = _folder_of(reference)
    if folder is None:
        return False
    try:
        return _architecture(_read_object(folder / "config.json")) is not None
    except UnknownModelError:
        return False


def language_model(reference: str, weights: str | None = None) -> LanguageModel:
    """The model of a reference with its weights; None: its own, or random:0 if it has none. Reads no weights. Raises
    `UnknownModelError` and `WeightsError`."""
    name = reference.removeprefix(PREFIX)
    if reference.startswith(PREFIX) and name in _KNOWN:
        title, parameters, prompt_ids, fields = _KNOWN[name]
        return _model(
            fields,
            reference=reference,
            name=served_name(name),
            title=title,
            prompt_ids=prompt_ids,
            weights=parse_language_weights(weights, RandomWeights(0)),
            known_parameters=parameters,
        )
    folder = _folder_of(name)
    if folder is None:
        raise UnknownModelError(
            f"unknown language model {reference!r}; {choose_from(name, _KNOWN)} A folder with the config.json of a "
            "causal model also works: language:/FOLDER"
            if "/" not in name
            else f"{reference}: no such folder with a config.json; download the model with: hf download NAME "
            "--local-dir DIR, and give language:DIR"
        )
    fields = _read_object(folder / "config.json")
    if fields.get("auto_map"):
        raise UnknownModelError(
            f"{folder.name} needs code of its own (auto_map in config.json), which abserve never runs"
        )
    own = FileWeights(folder) if has_weights(folder) else RandomWeights(0)
    eos = _ids(_read_object(folder / "generation_config.json", {}).get("eos_token_id"))
    return _model(
        fields,
        reference=f"{PREFIX}{folder}",
        name=served_name(folder.name),
        title=folder.name,
        prompt_ids=_between_special_ids(folder, fields, eos),
        weights=parse_language_weights(weights, own),
        folder=folder,
        eos=eos,
    )


def _model(fields: Mapping[str, Any], eos: Sequence[int] = (), **rest: Any) -> LanguageModel:
    architecture = _architecture(fields)
    if architecture is None:
        raise UnknownModelError(
            f"{rest['title']}: {', '.join(fields.get('architectures') or ['its configuration'])} is not a causal "
            "language model; its architectures must name one that ends in ForCausalLM"
        )
    length = fields.get("max_position_embeddings") or fields.get("n_positions")
    for key, value, largest in (
        ("vocab_size", fields.get("vocab_size"), _LARGEST_VOCABULARY),
        ("max_position_embeddings", length, 2**31),
        ("hidden_size", fields.get("hidden_size") or fields.get("n_embd"), 2**20),
    ):
        if not isinstance(value, int) or not 0 < value <= largest:
            raise UnknownModelError(f"{rest['title']}: config.json must give {key} as a whole number, not {value!r}")
    return LanguageModel(
        architecture=architecture,
        fields=MappingProxyType(dict(fields)),
        vocabulary=fields["vocab_size"],
        eos=tuple(eos) or _ids(fields.get("eos_token_id")),
        max_length=int(length or 0),
        **rest,
    )


def _architecture(fields: Mapping[str, Any]) -> str | None:
    """The causal class that a configuration names."""
    names = fields.get("architectures")
    return next(
        (
            name
            for name in (names if isinstance(names, list) else ())
            if isinstance(name, str) and (name.endswith(_ARCHITECTURE_ENDING) or name == _GPT2_HEAD)
        ),
        None,
    )


def _folder_of(reference: str) -> Path | None:
    """The folder with a config.json that a path, or transformers:NAME in the hub's cache, names."""
    name = reference.removeprefix("transformers:")
    try:
        folder = user_path(name)
        if (folder / "config.json").is_file():
            return named_path(folder)
    except OSError:  # a path that nobody may read, or that is too long
        return None
    if name == reference or name.count("/") > 1:
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def _read_object(path: Path, missing: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """The JSON object of a file; `missing` if there is no file. Raises `UnknownModelError`."""
    try:
        if missing is not None and not path.is_file():
            return missing
        if path.stat().st_size > _LARGEST_CONFIG_BYTES:
            raise UnknownModelError(f"{path.name} of {path.parent.name} is larger than any such file")
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as exc:
        raise UnknownModelError(f"{path.name} of {path.parent.name} cannot be read as JSON") from exc
    if not isinstance(document, dict):
        raise UnknownModelError(f"{path.name} of {path.parent.name} is not a JSON object")
    return document


def _ids(value: object) -> tuple[int, ...]:
    """The ids of a field that holds one, several or none."""
    values = value if isinstance(value, list) else [value]
    return tuple(item for item in values if isinstance(item, int) and not isinstance(item, bool) and item >= 0)


def _between_special_ids(folder: Path, fields: Mapping[str, Any], eos: Iterable[int]) -> tuple[int, int]:
    """The longest range of ids in the vocabulary without a special token."""
    special = {*eos, *(id for key in ("bos", "eos", "pad") for id in _ids(fields.get(f"{key}_token_id")))}
    tokenizer = folder / "tokenizer_config.json"
    added = _read_object(tokenizer, {}).get("added_tokens_decoder")
    special |= {int(id) for id in (added if isinstance(added, dict) else {}) if id.isdecimal()}
    vocabulary = fields.get("vocab_size")
    size = vocabulary if isinstance(vocabulary, int) else 0
    bounds = sorted({-1, size, *(id for id in special if id < size)})
    return max(((low + 1, high - 1) for low, high in pairwise(bounds)), key=lambda ends: ends[1] - ends[0])
