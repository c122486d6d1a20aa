"""Encoders and sequence classifiers of Hugging Face's transformers: a well-known NAME, or a folder with a config.json.

Inputs are `input_ids`, `attention_mask` and, for models with more than one type of token, `token_type_ids`, as in the
official ONNX exports. An encoder answers with `last_hidden_state`, a sequence classifier (by `architectures` of its
configuration) with `logits`. A folder's own weights are the default ones.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from servers.models.descriptions import Identity
from servers.models.files import file_sha256, named_path, user_path
from servers.models.items import text_ids
from servers.models.modules import (
    fill_zero_weights,
    hub_file,
    option_of,
    quiet_transformers,
    read_state,
    ready,
    refuse_misfits,
)
from servers.models.specification import (
    ModelDescription,
    ModelSpecification,
    UnknownModelError,
    choose_from,
    served_name,
)
from servers.models.weights import PretrainedWeights, RandomWeights, WeightsError, WeightsSource, seeded
from servers.options.libraries import defer, stand_ins, without_collections, without_compiler
from servers.options.stages import stage
from servers.protocol.tensors import Array, Axis, TensorSpec

if TYPE_CHECKING:
    import torch

_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_ROBERTA = {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
_KNOWN: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "bert-base-uncased": ("google-bert/bert-base-uncased", "bert", {}),
    "bert-large-uncased": ("google-bert/bert-large-uncased", "bert", _LARGE),
    "distilbert-base-uncased": ("distilbert/distilbert-base-uncased", "distilbert", {}),
    "roberta-base": ("FacebookAI/roberta-base", "roberta", _ROBERTA),
}
"""Repository, type and the fields of the configuration that differ from the type's default, so that random weights need
no file."""

_NOT_FOR_INFERENCE = tuple(
    f"is_{name}_available" for name in ("scipy", "sklearn", "torch_distributed", "torch_flex_attn", "torchvision")
)
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_TAG = "pretrained"
_TYPES_FROM_PADDING = {
    "camembert", "data2vec-text", "esm", "ibert", "longformer", "luke", "mpnet", "roberta", "roberta-prelayernorm",
    "xlm-roberta", "xlm-roberta-xl", "xmod",
}  # fmt: skip
"""Models that count positions from the padding token's id + 1, and so take that many tokens less."""


def names() -> tuple[str, ...]:
    """The well-known models of this source; a folder with any other encoder or sequence classifier also works."""
    return tuple(_KNOWN)


def takes(reference: str) -> bool:
    """Whether the reference is a folder with a config.json, or a configuration itself."""
    path = user_path(reference)
    return (path / "config.json").is_file() or (path.suffix == ".json" and path.is_file())


def identity(name: str) -> Identity | None:
    """A folder or a configuration; None for a name."""
    if name in _KNOWN or not takes(name):
        return None
    path = named_path(name)
    file = path / "config.json" if path.is_dir() else path
    return Identity(f"transformers:{file}", (file,))


@contextmanager
def _for_inference() -> Iterator[None]:
    """Import modules of models without what transformers takes, where it is installed, for training, for assisted
    generation, for several GPUs and for a kind of attention that is not used here (`_attention`)."""
    import transformers

    defer("transformers.models")  # it would read all models' modules to know their names
    places = (transformers.utils, transformers.utils.import_utils)
    asked = [(place, name, vars(place)[name]) for place in places for name in _NOT_FOR_INFERENCE if name in vars(place)]
    try:
        for place, name, _ in asked:
            setattr(place, name, lambda: False)
        with without_compiler(), without_collections():
            yield
    finally:
        for place, name, available in asked:
            setattr(place, name, available)


@_for_inference()
def specify(name: str) -> ModelSpecification | None:
    """The specification of an encoder or a sequence classifier; None if the name is neither known nor a folder."""
    from transformers import AutoConfig

    if name in _KNOWN:
        repository, kind, fields = _KNOWN[name]
        return _specification(
            AutoConfig.for_model(kind, **fields),
            name=served_name(name),
            reference=f"transformers:{name}",
            title=name,
            pretrained_tags=lambda: (_TAG,),
            find_pretrained=partial(_find, repository),
        )
    if not takes(name):
        if "/" in name:
            raise UnknownModelError(
                f"transformers:{name}: no such folder with a config.json; download the model with: hf download {name} "
                "--local-dir DIR, and give DIR"
            )
        return None
    path = named_path(name)
    if path.name == "config.json":
        path = path.parent
    _refuse_own_code(path)
    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise UnknownModelError(f"{path.name}: transformers cannot read its configuration") from exc
    return _specification(
        config,
        name=served_name(path.stem if path.is_file() else path.name),
        reference=str(path),
        title=path.name,
        default_weights=_weights_of(path),
        definition_sha256=file_sha256(path if path.is_file() else path / "config.json"),
    )


def _refuse_own_code(path: Path) -> None:
    """Raises `UnknownModelError` for a configuration that names code of the model's own, which transformers would ask
    on the terminal whether to execute."""
    from transformers import CONFIG_MAPPING

    file = path if path.is_file() else path / "config.json"
    try:
        named = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as exc:
        raise UnknownModelError(f"{path.name}: transformers cannot read its configuration") from exc
    if isinstance(named, dict) and named.get("auto_map") and named.get("model_type") not in CONFIG_MAPPING:
        raise UnknownModelError(
            f"{path.name} needs code of its own (auto_map in {file.name}), which abserve never executes; serve it from "
            "a FILE.py:FUNCTION"
        )


def _specification(config: Any, **fields: Any) -> ModelSpecification:
    title, largest = fields["title"], getattr(config, "max_position_embeddings", None)
    if not isinstance(getattr(config, "vocab_size", None), int) or getattr(config, "is_encoder_decoder", False):
        raise UnknownModelError(
            f"{title}: a {config.model_type} model is not an encoder of text or a sequence classifier; serve it from a "
            "FILE.py"
        )
    classifier = any("ForSequenceClassification" in architecture for architecture in config.architectures or ())
    if classifier:
        _check_padding(config, title)
    pad, largest = config.pad_token_id or 0, largest if isinstance(largest, int) and largest > 0 else 512
    if config.model_type in _TYPES_FROM_PADDING:
        largest -= pad + 1
    inputs, id_counts = ["input_ids", "attention_mask"], {"input_ids": config.vocab_size}
    if (getattr(config, "type_vocab_size", 0) or 0) > 1:
        inputs.append("token_type_ids")
        id_counts["token_type_ids"] = config.type_vocab_size
    if classifier:
        output = TensorSpec("logits", "FP32", (-1, config.num_labels))
    else:
        output = TensorSpec("last_hidden_state", "FP32", (-1, -1, config.hidden_size))
    places = dict.fromkeys(inputs if classifier else [*inputs, output.name], 1)
    padding = {"input_ids": pad, "attention_mask": 0, "token_type_ids": 0}
    specification = ModelSpecification(
        version="1",
        inputs=tuple(TensorSpec(name, "INT64", (-1, -1)) for name in inputs),
        outputs=(output,),
        kinds={"logits": "logits"} if classifier else {},
        axes=(
            Axis(
                "sequence", min(128, largest), largest, places=places, padding={name: padding[name] for name in inputs}
            ),
        ),
        item="sequence",
        max_batch_size=32,
        id_counts=id_counts,
        load_module=partial(_load, config, classifier, title, fields.get("find_pretrained")),
        **fields,
    )
    return replace(specification, make_items=item_maker(specification))


def item_maker(described: ModelDescription) -> Callable[[int, Sequence[int]], Mapping[str, Array]]:
    """Makes items of uniform token ids."""
    pad = described.axes[0].padding["input_ids"]
    return partial(_token_ids, described.id_counts["input_ids"], pad, [tensor.name for tensor in described.inputs])


def _check_padding(config: Any, title: str) -> None:
    """Raises `UnknownModelError` for a decoder that cannot tell which token of an item is the last."""
    import transformers

    auto: Any = transformers.AutoModelForSequenceClassification
    if type(config) not in auto._model_mapping or "pad_token_id" not in inspect.getsource(_class(auto, config).forward):
        return
    pad = config.pad_token_id
    if pad is None or not 0 <= pad < config.vocab_size:
        ends = getattr(config, "eos_token_id", None)
        example = ends if isinstance(ends, int) and 0 <= ends < config.vocab_size else "ID"
        fault = "names no padding token" if pad is None else f"has the padding token {pad}, outside its vocabulary"
        raise UnknownModelError(
            f"{title} classifies the last token before the padding, and its configuration {fault}; write "
            f'"pad_token_id": {example} into its config.json'
        )


def _weights_of(path: Path) -> str:
    """The default weights of a folder: its file, or random ones if it has only a configuration."""
    if path.is_file():
        return "random:0"
    file = next((path / name for name in _WEIGHTS if (path / name).is_file()), None)
    if file is None and any(path.glob("*.index.json")):
        raise UnknownModelError(
            f"{path.name}: its weights are in several files; save them as one, with "
            "model.save_pretrained(DIR, max_shard_size='100GB')"
        )
    return str(file or "random:0")


def _find(repository: str, source: PretrainedWeights) -> Path:
    if source.tag != _TAG:
        raise WeightsError(f"{option_of(source)}: there is no such tag; {choose_from(source.tag, [_TAG])}")
    return hub_file(source, repository, _WEIGHTS)


@_for_inference()
def _load(config: Any, classifier: bool, title: str, find: Any, source: WeightsSource) -> torch.nn.Module:
    import transformers

    auto: Any = transformers.AutoModelForSequenceClassification if classifier else transformers.AutoModel
    _import_class(auto, config)
    if isinstance(source, RandomWeights):
        with seeded(source.seed), quiet_transformers():
            model = auto.from_config(
                config, attn_implementation=_attention(auto, config), dtype="float32", trust_remote_code=False
            )
            fill_zero_weights(model)
        return _first_output(ready(model))
    option, state = option_of(source), read_state(source, find)
    try:  # the library's own loader knows the names that older files use
        with quiet_transformers():
            model, report = _class(auto, config).from_pretrained(
                None,
                config=config,
                trust_remote_code=False,
                state_dict=state,
                output_loading_info=True,
                attn_implementation=_attention(auto, config),
                dtype="float32",
            )
    except RuntimeError as exc:
        raise WeightsError(f"{option}: not the weights of {title}: a tensor has another shape") from exc
    missing = {name for name in report["missing_keys"] if classifier or not name.startswith("pooler.")}
    # A file with more than the encoder, such as the head of pre-training, is fine.
    refuse_misfits(option, title, missing, set(), set(report["mismatched_keys"]))
    return _first_output(ready(model))


@stage("import")
def _import_class(auto: Any, config: Any) -> None:
    """Import the model's module, without torch's tensors of several devices: transformers asks of every weight whether
    it is one. A transformers that needs more of them imports them."""
    before = set(sys.modules)
    try:
        with stand_ins("torch.distributed.tensor", "torch.distributed.tensor.placement_types"):
            _class(auto, config)
    except Exception:  # noqa: BLE001  a library that is imported raises what it likes
        for name in set(sys.modules) - before:
            if name.startswith("transformers."):
                del sys.modules[name]
        _class(auto, config)


def _class(auto: Any, config: Any) -> Any:
    classes = auto._model_mapping[type(config)]
    return classes[0] if isinstance(classes, tuple) else classes


def _attention(auto: Any, config: Any) -> str:
    """Scaled dot-product attention, which torch exports, traces and captures; the model's own code if it has none."""
    return "sdpa" if getattr(_class(auto, config), "_supports_sdpa", False) else "eager"


def _first_output(model: torch.nn.Module) -> torch.nn.Module:
    import torch

    class FirstOutput(torch.nn.Module):
        """Token ids, mask and types, int64 (n, s), to the model's first output."""

        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(
            self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
        ) -> torch.Tensor:
            types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
            output: torch.Tensor = self.model(
                input_ids=input_ids, attention_mask=attention_mask, return_dict=False, **types
            )[0]
            return output

    return FirstOutput(model).eval()


def _token_ids(
    vocabulary: int, pad: int, inputs: Sequence[str], seed: int, lengths: Sequence[int]
) -> Mapping[str, Array]:
    """Uniform token ids; see `text_ids`."""
    generator = np.random.default_rng(seed)
    mask = (np.arange(max(lengths)) < np.asarray(lengths)[:, None]).astype(np.int64)
    ids = generator.integers(*text_ids(vocabulary), mask.shape, np.int64)
    arrays = {"input_ids": np.where(mask == 1, ids, pad), "attention_mask": mask, "token_type_ids": np.zeros_like(mask)}
    return {name: arrays[name] for name in inputs}
