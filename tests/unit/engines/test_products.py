"""Mode tuned: oneDNN's products where they are faster and right, and the module's own where they are not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from servers.engines.settings import EngineSettings
from servers.engines.torch import products
from servers.engines.torch.engine import TorchEngine
from servers.engines.torch.products import Product, TunedProducts, alternating_ns, packed_linear
from servers.models.specification import ModelSpecification
from servers.models.weights import RandomWeights
from servers.protocol.tensors import TensorSpec

WIDTH, TOKENS = 32, 6
BATCHES = [torch.zeros(1, 3, 4, TOKENS)], [torch.zeros(4, 3, 4, TOKENS)]
PACKED_LINEAR = packed_linear


class Tokens(nn.Module):
    """An encoder layer of torch, an attention whose batch comes second, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, WIDTH, 2, stride=2)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 4, 64, activation="gelu", batch_first=True)
        self.attention = nn.MultiheadAttention(WIDTH, 2)
        self.head = nn.Linear(WIDTH, 5, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.encoder(self.first(images).flatten(2).transpose(1, 2))
        turned = tokens.transpose(0, 1)
        mixed, _ = self.attention(turned, turned, turned, need_weights=False)
        scores: torch.Tensor = self.head(mixed.mean(0))
        return scores


def specification() -> ModelSpecification:
    def load(_source: object) -> nn.Module:
        torch.manual_seed(0)
        return Tokens().eval().requires_grad_(False)

    return ModelSpecification(
        name="m",
        title="m",
        version="1",
        inputs=(TensorSpec("images", "FP32", (-1, 3, 4, TOKENS)),),
        outputs=(TensorSpec("scores", "FP32", (-1, 5)),),
        max_batch_size=8,
        load_module=load,
    )


def loaded(mode: str = "tuned") -> TorchEngine:
    engine = TorchEngine(specification(), EngineSettings("torch", mode=mode, device="cpu", threads=1), RandomWeights(0))
    engine.load()
    return engine


def scores(engine: TorchEngine, rows: int) -> Any:
    images = np.random.default_rng(rows).standard_normal((rows, 3, 4, TOKENS), np.float32)
    return engine.infer({"images": images})["scores"]


@pytest.fixture
def always_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every measurement says that oneDNN takes half of the time, and no convolution is too small."""
    monkeypatch.setattr(products, "LEAST_CONVOLUTIONS", 0.0)
    monkeypatch.setattr(products, "alternating_ns", lambda first, second, _: (first(), second(), (2.0, 1.0))[2])


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("always_faster")
def test_answers_agree_with_the_modules_own_at_every_batch_size() -> None:
    tuned, eager = loaded(), loaded("eager")
    assert tuned.describe().mode == "tuned"
    kernels = "the model's own module, 7 of 7 linear products and all 1 convolutions prepacked by oneDNN"
    assert tuned.describe().details["kernels"] == kernels
    assert tuned.describe().details["relative_error_to_fp32"] is not None
    assert eager.describe().details["kernels"] == "the model's own module"
    for rows in (1, 3, 8):
        np.testing.assert_allclose(scores(tuned, rows), scores(eager, rows), atol=1e-5)


class Normed(Tokens):
    """As `Tokens`, with a batch norm behind the convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(self.first, nn.BatchNorm2d(WIDTH))  # type: ignore[assignment]
        self.encoder, self.attention = nn.Identity(), nn.Identity()  # type: ignore[assignment]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.first(images).flatten(2).mean(2))
        return scores


@pytest.mark.usefixtures("always_faster")
def test_batch_norms_are_in_the_weights_of_packed_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Normed().eval().requires_grad_(False)
    norm: Any = list(module.first.children())[1]
    norm.running_mean.normal_(0, 0.3)
    norm.running_var.uniform_(0.5, 2)
    images = torch.randn(4, 3, 4, TOKENS)
    expected = module(images)
    tuned = TunedProducts(module, [images[:1]], [images])
    assert "all 1 convolutions with 1 batch norms prepacked by oneDNN" in tuned.description
    with monkeypatch.context() as patched:
        patched.setattr(nn.functional, "batch_norm", None)
        torch.testing.assert_close(module(images), expected, atol=1e-5, rtol=1e-5)
    tuned.restore()
    assert torch.equal(module(images), expected)
    assert not any("forward" in vars(layer) for layer in module.modules())


@pytest.mark.usefixtures("always_faster")
def test_every_product_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = loaded()
    for name in ("linear", "conv2d"):
        monkeypatch.setattr(nn.functional, name, None)
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", None)
    monkeypatch.setattr(torch, "_native_multi_head_attention", None)
    assert scores(engine, 2).shape == (2, 5)


def wrong(factor: float) -> Callable[..., Product]:
    def planted(weight: torch.Tensor, bias: torch.Tensor | None, rows: int) -> Product:
        product = PACKED_LINEAR(weight, bias, rows)
        return lambda inputs: product(inputs) * factor

    return planted


@pytest.mark.usefixtures("always_faster")
@pytest.mark.parametrize("factor", [1.01, float("nan")])
def test_a_layer_with_a_wrong_product_keeps_its_own(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    monkeypatch.setattr(products, "packed_linear", wrong(factor))
    engine = loaded()
    assert engine.describe().details["kernels"] == "the model's own module, all 1 convolutions prepacked by oneDNN"
    np.testing.assert_allclose(scores(engine, 2), scores(loaded("eager"), 2), atol=1e-5)


@pytest.mark.usefixtures("always_faster")
@pytest.mark.parametrize("factor", [1.1, float("nan")])
def test_a_model_with_wrong_answers_falls_back_and_says_so(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    monkeypatch.setattr(products, "packed_linear", wrong(factor))
    monkeypatch.setattr(
        products, "agreeing_product", lambda _size, weight, bias, _items: wrong(factor)(weight, bias, 8)
    )
    engine = loaded()
    assert "untuned: with 7 of 7 linear products" in str(engine.describe().details["kernels"])
    assert ("scores contains NaN" if factor != 1.1 else "relative error") in str(engine.describe().details["kernels"])
    np.testing.assert_array_equal(scores(engine, 2), scores(loaded("eager"), 2))


def test_a_slow_product_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(weight: torch.Tensor, bias: torch.Tensor | None, rows: int) -> Product:
        product = PACKED_LINEAR(weight, bias, rows)
        return lambda inputs: [product(inputs) for _ in range(100)][-1]

    monkeypatch.setattr(products, "packed_linear", slow)
    monkeypatch.setattr(products, "convolution_changes", lambda _shapes: [])
    engine = loaded()
    assert engine.describe().details["kernels"] == "the model's own module, oneDNN's prepacked products are not faster"
    details: Any = engine.describe().details["products"]
    assert [size["chosen"] for size in details] == [False] * len(details) != []
    np.testing.assert_array_equal(scores(engine, 2), scores(loaded("eager"), 2))


@pytest.mark.parametrize(("rows", "slower", "taken"), [(1, 1.06, False), (4, 1.06, False), (4, 1.04, True)])
def test_a_whole_model_that_is_slower_with_one_batch_keeps_its_own_products(
    rows: int, slower: float, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def times(_first: object, second: Any, _seconds: float) -> tuple[float, float]:
        if not isinstance(second, partial):  # a product, not the whole module
            return 2.0, 1.0
        (batch,) = second.args[0]
        return (1.0, slower) if len(batch) == rows else (1.0, 0.5)

    monkeypatch.setattr(products, "alternating_ns", times)
    module = Tokens().eval().requires_grad_(False)
    tuned = TunedProducts(module, *BATCHES)
    assert tuned.changed is taken
    assert any("forward" in vars(layer) for layer in module.modules()) is taken


def test_few_convolutions_are_left_alone() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(4 * 9, 2000)).eval().requires_grad_(False)
    shapes = products._input_shapes(module, [torch.zeros(1, 3, 4, 4)])
    assert products.convolution_changes(shapes) == []
    assert len(products.convolution_changes({module[0]: shapes[module[0]]})) == 1


@pytest.mark.usefixtures("always_faster")
def test_restore_gives_a_module_its_own_products_back() -> None:
    module = Tokens().eval().requires_grad_(False)
    tuned = TunedProducts(module, *BATCHES)
    assert tuned.changed
    assert module.encoder.activation_relu_or_gelu == 0
    tuned.restore()
    assert not any("forward" in vars(layer) for layer in module.modules())
    assert module.encoder.activation_relu_or_gelu == 2


@pytest.mark.usefixtures("always_faster")
def test_what_the_fast_attention_does_not_do_is_the_layers_own() -> None:
    layer = nn.MultiheadAttention(WIDTH, 4, batch_first=True).eval().requires_grad_(False)

    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            mixed: torch.Tensor = self.layer(tokens, tokens, tokens, need_weights=False)[0]
            return mixed

    tokens, other = torch.randn(2, 5, WIDTH), torch.randn(2, 7, WIDTH)
    ignored = torch.arange(5).expand(2, 5) > 2
    calls: list[Callable[[], Any]] = [
        lambda: layer(tokens, tokens, tokens),
        lambda: layer(tokens, other, other, need_weights=False),
        lambda: layer(tokens, tokens, tokens, key_padding_mask=ignored, need_weights=False),
        lambda: layer(tokens, tokens, tokens, attn_mask=torch.ones(5, 5).triu(1).bool(), need_weights=False),
        lambda: layer(tokens[0], tokens[0], tokens[0], need_weights=False),
        lambda: layer(tokens, tokens, tokens, need_weights=False),
    ]
    expected = [call() for call in calls]
    assert TunedProducts(Alone(), [tokens[:1]], [tokens]).changed
    for call, (answer, weights) in zip(calls, expected, strict=True):
        tuned_answer, tuned_weights = call()
        torch.testing.assert_close(tuned_answer, answer)
        assert (tuned_weights is None) == (weights is None)


def test_times_alternate_within_their_seconds() -> None:
    order: list[int] = []

    def busy(count: int) -> Callable[[], None]:
        def call() -> None:
            sum(range(count))
            order.append(count)

        return call

    started = time.monotonic()
    first, second = alternating_ns(busy(10_000), busy(40_000), 0.02)
    assert order == [10_000, 40_000] * (len(order) // 2)
    assert 0 < first < second
    assert time.monotonic() - started < 2
