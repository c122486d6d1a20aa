"""A decoder's shape and weights, taken from a module of transformers and laid out for few and large products.

Q, K and V are one product, and so are gate and up. RoPE turns neighbours (2i, 2i+1) instead of halves (i, i + D/2): the
rows of Q and K are put into that order once, which no product of a query and a key can notice. Then one complex
multiplication is RoPE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from servers.engines.settings import EngineError

ARCHITECTURES = ("llama", "qwen2", "gpt2", "gpt_oss")
"""The model types of transformers that are laid out here."""
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Types whose frequencies do not depend on the length of the sequence."""
_ACTIVATIONS: Mapping[str, str] = {
    "silu": "silu", "swish": "silu", "gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The sizes of a decoder and what its layers consist of."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    """The width between the two products of the feed-forward part (of one expert)."""
    vocabulary: int
    epsilon: float
    scale: float
    """What the product of a query and a key is multiplied with."""
    centred: bool
    """LayerNorm with an offset (GPT-2); otherwise RMSNorm."""
    activation: str
    """silu: gated, silu(gate)·up. tanh and none: GELU of one product, approximated or not. clamped: gpt-oss."""
    experts: int = 0
    """How many experts each layer has; 0: one feed-forward part and no router."""
    chosen_experts: int = 0
    swiglu_alpha: float = 0.0
    swiglu_limit: float = 0.0

    @property
    def group(self) -> int:
        """Query heads that share one head of keys and values."""
        return self.heads // self.kv_heads

    @property
    def query_size(self) -> int:
        return self.heads * self.head_size

    @property
    def cached_size(self) -> int:
        """Numbers that one token keeps in one layer: its key and its value."""
        return 2 * self.kv_heads * self.head_size


@dataclass(slots=True)
class Affine:
    """A matrix [outputs, inputs], or a vector of gains, with what is added."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(slots=True)
class LayerWeights:
    """One layer. `up` has the gate's rows before the others where the activation is gated."""

    norm_1: Affine
    qkv: Affine
    out: Affine
    norm_2: Affine
    up: Affine
    """Of experts: weight [experts, hidden, 2·inner], gate and up in turns, as transformers has them."""
    down: Affine
    """Of experts: weight [experts, inner, hidden]."""
    window: int = 0
    """How many positions a query sees, its own included; 0: all."""
    sinks: Tensor | None = None
    """[heads] logits that take part in the softmax without a value."""
    router: Affine | None = None

    def parts(self) -> list[Affine]:
        """Its matrices and gains."""
        parts = [self.norm_1, self.qkv, self.out, self.norm_2, self.up, self.down, self.router]
        return [part for part in parts if part is not None]


@dataclass(slots=True)
class DecoderWeights:
    """All weights of a decoder, on one device in one precision."""

    shape: DecoderShape
    embedding: Tensor
    layers: list[LayerWeights]
    norm: Affine
    head: Tensor
    positions: Tensor | None
    """[positions, hidden], added to the embedding (GPT-2)."""
    frequencies: Tensor | None
    """[head_size/2] FP32 of RoPE."""
    rope_scale: float = 1.0
    """What the rotation is multiplied with (yarn)."""

    def tensors(self) -> Iterator[Any]:
        """All arrays of weights."""
        parts = [self.norm, *(part for layer in self.layers for part in layer.parts())]
        yield from (array for part in parts for array in (part.weight, part.bias) if array is not None)
        yield from (array for array in (self.embedding, self.head, self.positions) if array is not None)

    def rotations(self, length: int) -> Tensor:
        """[length, head_size/2] complex numbers: the rotation of each pair at each position."""
        assert self.frequencies is not None
        angles = torch.outer(
            torch.arange(length, device=self.frequencies.device, dtype=torch.float32), self.frequencies
        )
        return torch.polar(torch.full_like(angles, self.rope_scale), angles)


@dataclass(frozen=True, slots=True)
class WeightsHandover:
    """How another library takes the weights part by part, so that no more than one part is in memory twice."""

    prepare: Callable[[nn.Module], object]
    """Called with a part of the module before its parameters are read."""
    take: Callable[[LayerWeights], LayerWeights]
    """Called with each layer before the next one is prepared; what it returns is kept."""


_AS_THEY_ARE = WeightsHandover(lambda part: part, lambda layer: layer)


def decoder_weights(module: nn.Module, handover: WeightsHandover = _AS_THEY_ARE) -> DecoderWeights:
    """The weights of a `*ForCausalLM` of transformers. Raises `EngineError` for what is not laid out here. Fused
    matrices are new memory, all others are the module's own."""
    config: Any = module.config
    if config.model_type not in ARCHITECTURES:
        raise EngineError(
            f"this engine has no {config.model_type} models, only {', '.join(ARCHITECTURES)}; use --engine continuous"
        )
    with torch.no_grad():
        laid_out = _gpt2 if config.model_type == "gpt2" else _rotated
        return laid_out(module, config, handover)


def _prepared(handover: WeightsHandover, parts: Iterable[nn.Module]) -> Iterator[Any]:
    for part in parts:
        handover.prepare(part)
        yield part


def _head_of(module: Any, handover: WeightsHandover) -> Tensor:
    """The last matrix, which may be that of the embedding, already prepared."""
    module.tie_weights()
    handover.prepare(module.lm_head)
    head: Tensor = module.lm_head.weight.detach()
    return head


def _gpt2(module: Any, config: Any, handover: WeightsHandover) -> DecoderWeights:
    if config.scale_attn_by_inverse_layer_idx or config.reorder_and_upcast_attn or config.add_cross_attention:
        raise EngineError("this engine has no GPT-2 with scaled or upcast attention; use --engine continuous")
    head_size = config.n_embd // config.n_head
    shape = DecoderShape(
        layers=config.n_layer,
        hidden=config.n_embd,
        heads=config.n_head,
        kv_heads=config.n_head,
        head_size=head_size,
        inner=config.n_inner or 4 * config.n_embd,
        vocabulary=config.vocab_size,
        epsilon=config.layer_norm_epsilon,
        scale=head_size**-0.5 if config.scale_attn_weights else 1.0,
        centred=True,
        activation=_activation(config.activation_function, gated=False),
    )

    def transposed(part: Any) -> Affine:  # Conv1D keeps [inputs, outputs]
        return Affine(part.weight.detach().t().contiguous(), part.bias.detach())

    stack = module.transformer
    layers = [
        handover.take(
            LayerWeights(
                norm_1=_affine(block.ln_1),
                qkv=transposed(block.attn.c_attn),
                out=transposed(block.attn.c_proj),
                norm_2=_affine(block.ln_2),
                up=transposed(block.mlp.c_fc),
                down=transposed(block.mlp.c_proj),
            )
        )
        for block in _prepared(handover, stack.h)
    ]
    embedding, positions, norm = _prepared(handover, (stack.wte, stack.wpe, stack.ln_f))
    head = _head_of(module, handover)
    return DecoderWeights(
        shape, embedding.weight.detach(), layers, _affine(norm), head, positions.weight.detach(), None
    )


def _rotated(module: Any, config: Any, handover: WeightsHandover) -> DecoderWeights:
    stack = module.model
    rope = stack.rotary_emb
    if rope.rope_type not in _ROPE_TYPES:
        raise EngineError(f"this engine has no {rope.rope_type} RoPE; use --engine continuous")
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    experts = getattr(config, "num_local_experts", 0) or 0
    shape = DecoderShape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_size=head_size,
        inner=config.intermediate_size,
        vocabulary=config.vocab_size,
        epsilon=config.rms_norm_eps,
        scale=head_size**-0.5,
        centred=False,
        activation="clamped" if experts else _activation(config.hidden_act, gated=True),
        experts=experts,
        chosen_experts=config.num_experts_per_tok if experts else 0,
        swiglu_alpha=getattr(config, "swiglu_alpha", 1.702),
        swiglu_limit=getattr(config, "swiglu_limit", 7.0),
    )
    layers = [handover.take(_rotated_layer(layer, shape)) for layer in _prepared(handover, stack.layers)]
    embedding, norm = _prepared(handover, (stack.embed_tokens, stack.norm))
    return DecoderWeights(
        shape,
        embedding.weight.detach(),
        layers,
        _affine(norm),
        _head_of(module, handover),
        None,
        rope.inv_freq.detach().float(),
        float(rope.attention_scaling),
    )


def _rotated_layer(layer: Any, shape: DecoderShape) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    query, key, value = (_affine(part) for part in (attention.q_proj, attention.k_proj, attention.v_proj))
    if shape.experts:
        up = Affine(mlp.experts.gate_up_proj.detach(), mlp.experts.gate_up_proj_bias.detach())
        down = Affine(mlp.experts.down_proj.detach(), mlp.experts.down_proj_bias.detach())
    else:
        up, down = _joined(_affine(mlp.gate_proj), _affine(mlp.up_proj)), _affine(mlp.down_proj)
    sinks = getattr(attention, "sinks", None)
    return LayerWeights(
        norm_1=_affine(layer.input_layernorm),
        qkv=_joined(_in_pairs(query, shape.head_size), _in_pairs(key, shape.head_size), value),
        out=_affine(attention.o_proj),
        norm_2=_affine(layer.post_attention_layernorm),
        up=up,
        down=down,
        window=getattr(attention, "sliding_window", None) or 0,
        sinks=None if sinks is None else sinks.detach(),
        router=Affine(mlp.router.weight.detach(), mlp.router.bias.detach()) if shape.experts else None,
    )


def _activation(name: str, *, gated: bool) -> str:
    kind = _ACTIVATIONS.get(name)
    if kind is None or gated != (kind == "silu"):
        raise EngineError(f"the slots engine has no activation {name} for this model; use --engine continuous")
    return kind


def _affine(part: Any) -> Affine:
    bias = getattr(part, "bias", None)
    return Affine(part.weight.detach(), None if bias is None else bias.detach())


def _joined(*parts: Affine) -> Affine:
    """One matrix of the outputs of several."""
    bias = None
    if any(part.bias is not None for part in parts):
        zeros = [part.weight.new_zeros(len(part.weight)) if part.bias is None else part.bias for part in parts]
        bias = torch.cat(zeros)
    return Affine(torch.cat([part.weight for part in parts]), bias)


def _in_pairs(part: Affine, head_size: int) -> Affine:
    """The outputs i and i + D/2 of each head, which RoPE turns together, as neighbours."""

    def paired(tensor: Tensor) -> Tensor:
        halves = tensor.view(-1, 2, head_size // 2, *tensor.shape[1:])
        return halves.transpose(1, 2).reshape(tensor.shape)

    return Affine(paired(part.weight), None if part.bias is None else paired(part.bias))
