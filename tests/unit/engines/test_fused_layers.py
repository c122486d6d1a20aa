"""Fused layers: answers stay in every shape, what cannot be fused is left alone, and only what is faster executes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from servers.engines.agreement import proof_batch
from servers.engines.interface import PLANS_FOLDER
from servers.engines.settings import EngineSettings
from servers.engines.torch import plans
from servers.engines.torch.engine import TorchEngine
from servers.engines.torch.exported_graphs import restored, stored
from servers.engines.torch.fused_layers import Patches, Product, SumNorm, dynamic_shapes, exported_module, fused_layers
from servers.engines.torch.plans import FUSED_LAYERS, OWN_LAYERS
from servers.models.registry import get_specification
from servers.models.specification import ModelSpecification
from servers.models.weights import RandomWeights
from tests.host_copies import graph_mode_on_cpu
from tests.interpreter import interpreted
from tests.tiny_bert import write_tiny_bert

WIDTH, HEADS = 16, 2


class Block(nn.Module):
    """Attention and two linear layers. `how` says where the norms stand and what else is there."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        bias = how != "no bias"
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(3))
        self.out, self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 32, bias=bias), nn.Linear(32, WIDTH)
        self.norm, self.last_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.5)
        for layer in (self.norm, self.last_norm):
            nn.init.normal_(layer.weight)
            nn.init.normal_(layer.bias)

    def attended(self, values: Tensor, mask: Tensor) -> Tensor:
        rows, length, _ = values.shape
        layers = self.query, self.key, self.value
        query, key, value = (layer(values).view(rows, length, HEADS, -1).transpose(1, 2) for layer in layers)
        found = functional.scaled_dot_product_attention(query, key, value, mask)
        answer: Tensor = self.out(found.transpose(1, 2).reshape(rows, length, WIDTH))
        return answer

    def forward(self, values: Tensor, mask: Tensor) -> Tensor:
        if self.how == "norms first":
            values = values + self.attended(self.norm(values), mask)
            return values + self.last(functional.gelu(self.first(self.last_norm(values))))
        values = self.dropout(self.attended(values, mask)) + values
        before = values * 2 if self.how == "sum read before" else 0.0
        values = self.norm(values) + before
        inner = self.first(values)
        behind = functional.gelu(inner) + (inner.mean() if self.how == "read twice" else 0.0)
        total = self.last(behind) + (values.mean(1, keepdim=True) if self.how == "broadcast" else values)
        before = total * 2 if self.how == "sum read before" else 0.0
        answer: Tensor = self.last_norm(total)
        return answer + total if self.how == "sum read" else answer + before


class Blocks(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(how) for _ in range(2))

    def forward(self, values: Tensor, known: Tensor) -> Tensor:
        mask = (known > 0)[:, None, None, :].expand(-1, 1, values.shape[1], -1)
        for block in self.blocks:
            values = block(values, mask)
        return values


def example(rows: int, length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    known = torch.ones(rows, length, dtype=torch.int64)
    known[-1, length // 2 + 1 :] = 0
    return torch.randn(rows, length, WIDTH, generator=generator), known


def fused(module: nn.Module, inputs: Sequence[Tensor], shapes: Sequence[dict[int, Any]]) -> Any:
    """The graph with fused layers, from one that was stored, which has the same code as the exported one."""
    exported = exported_module(module, inputs, shapes)
    nodes = orjson.loads(orjson.dumps(stored(exported, module)))
    fused_layers(exported)
    read = fused_layers(restored(nodes, module, torch.device("cpu")))
    assert len(read.graph.nodes) == len(exported.graph.nodes)
    assert [str(node.target) for node in read.graph.nodes] == [str(node.target) for node in exported.graph.nodes]
    return read


@torch.no_grad()
@pytest.mark.parametrize(
    ("how", "norms", "with_sum", "gelu"),
    [
        ("", 4, 0, 2),
        ("norms first", 3, 3, 2),  # not the first norm, before which nothing is added
        ("sum read", 4, 2, 2),
        ("sum read before", 4, 4, 2),
        ("broadcast", 2, 0, 2),
        ("read twice", 4, 0, 0),
        ("no bias", 4, 0, 0),
    ],
)
def test_answers_stay(how: str, norms: int, with_sum: int, gelu: int) -> None:
    torch.manual_seed(0)
    module = Blocks(how).eval()
    batch, length = torch.export.Dim("batch", min=1), torch.export.Dim("length", min=1, max=64)
    graph = fused(module, example(3, 7), [{0: batch, 1: length}] * 2)
    for rows, size in ((1, 7), (3, 7), (2, 11), (5, 3)):
        torch.testing.assert_close(graph(*example(rows, size)), module(*example(rows, size)), atol=1e-5, rtol=1e-5)
    sums = [layer for layer in graph.modules() if isinstance(layer, SumNorm)]
    products = [layer for layer in graph.modules() if isinstance(layer, Product)]
    assert (len(sums), sum("with_sum=True" in repr(layer) for layer in sums)) == (norms, with_sum)
    assert sum(layer.gelu for layer in products) == gelu
    assert [tuple(layer.weight.shape) for layer in products if not layer.gelu] == [(3 * WIDTH, WIDTH)] * 2
    assert sum(getattr(node.target, "__name__", "") == "_as_numbers" for node in graph.graph.nodes) == 1
    assert sum(parameter.numel() for parameter in graph.parameters()) == sum(one.numel() for one in module.parameters())


@torch.no_grad()
def test_nothing_to_fuse() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).eval()
    with pytest.raises(ValueError, match="nothing that can be fused"):
        fused(module, [torch.randn(3, 4)], [{0: torch.export.Dim("batch", min=1)}])


@torch.no_grad()
@pytest.mark.parametrize(
    ("reference", "norms", "gelu"),
    [
        ("", 4, 2),
        pytest.param("transformers:distilbert-base-uncased", 12, 6, marks=pytest.mark.slow),
        pytest.param("transformers:bert-base-uncased", 24, 12, marks=pytest.mark.slow),
    ],
)
def test_library_models_answer_as_before(reference: str, norms: int, gelu: int, tmp_path: Path) -> None:
    """By default DistilBERT with two small layers."""
    transformers = pytest.importorskip("transformers")
    config = transformers.DistilBertConfig(vocab_size=99, dim=32, n_heads=2, n_layers=2, hidden_dim=64)
    config.save_pretrained(tmp_path)
    specification = get_specification(reference or str(tmp_path))
    module = specification.load_module(RandomWeights(0))

    def batch(rows: int, share: float) -> list[Tensor]:
        inputs = proof_batch(specification, rows, rows, share).inputs
        return [torch.from_numpy(inputs[tensor.name]) for tensor in specification.inputs]

    graph = fused(module, batch(3, 0.34), dynamic_shapes(specification))
    for rows, share in ((1, 0.5), (4, 0.3)):
        torch.testing.assert_close(graph(*batch(rows, share)), module(*batch(rows, share)), atol=1e-5, rtol=1e-4)
    assert sum(isinstance(layer, SumNorm) for layer in graph.modules()) == norms
    assert sum(isinstance(layer, Product) and layer.gelu for layer in graph.modules()) == gelu


class Attending(nn.Module):
    """Patches of images, and `nn.MultiheadAttention` to what `how` says."""

    def __init__(self, how: str, *, batch_first: bool) -> None:
        super().__init__()
        self.how, self.batch_first = how, batch_first
        self.patches = nn.Conv2d(3, WIDTH, 4, 4, bias=how != "no bias")
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first, bias=how != "no bias")
        self.norm = nn.LayerNorm(WIDTH)
        self.mask = nn.Buffer(torch.full((4, 4), float("-inf")).triu(1))

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        tokens = tokens if self.batch_first else tokens.transpose(0, 1)
        key = tokens + 1 if self.how == "another" else tokens
        padding = images.mean((1, 2, 3))[:, None].expand(-1, 4) > 9 if self.how == "padding" else None
        mask = {"mask": self.mask, "boolean mask": self.mask < 0}.get(self.how)
        attended, weights = self.attention(
            tokens, key, key, key_padding_mask=padding, need_weights=self.how == "weights", attn_mask=mask
        )
        answer: Tensor = self.norm(attended + tokens)
        answer = answer if self.batch_first else answer.transpose(0, 1)
        return answer if weights is None else answer + weights.mean(2, keepdim=True)


@torch.no_grad()
@pytest.mark.parametrize("batch_first", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", ["", "mask", "no bias", "another", "padding", "boolean mask", "weights"])
def test_attention_and_patches(how: str, batch_first: bool) -> None:
    """Only attention to the own input with a mask of numbers, or none, has another code; the answers never change."""
    torch.manual_seed(0)
    module = Attending(how, batch_first=batch_first).eval()
    images = torch.randn(3, 3, 8, 8)
    graph = fused(module, [images], [{0: torch.export.Dim("batch", min=1)}])
    assert type(module.attention) is nn.MultiheadAttention
    for rows in (1, 2, 5):
        images = torch.randn(rows, 3, 8, 8)
        torch.testing.assert_close(graph(images), module(images), atol=1e-5, rtol=1e-5)
    operations = [node.target for node in graph.graph.nodes]
    unbinds = torch.ops.aten.unbind.int in operations
    assert unbinds == (how in ("", "mask", "no bias"))
    assert sum(isinstance(layer, Patches) for layer in graph.modules()) == 1
    assert torch.ops.aten.conv2d.default not in operations


@torch.no_grad()
@pytest.mark.parametrize(("window", "options"), [((2, 2), {}), ((4, 2), {}), ((3, 3), {}), ((2, 2), {"bias": False})])
def test_patches_are_the_convolution(window: tuple[int, int], options: Any) -> None:
    """With windows that leave a rest of the image, too."""
    convolution = nn.Conv2d(3, 5, window, window, **options)
    patches = Patches(convolution.weight, convolution.bias)
    for layout in (torch.contiguous_format, torch.channels_last):
        images = torch.randn(2, 3, 8, 12).contiguous(memory_format=layout)
        torch.testing.assert_close(patches(images), convolution(images), atol=1e-5, rtol=1e-5)


class Viewed(nn.Module):
    """Three products of one input as flat rows, which cannot be seen in one merged product without a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, values: Tensor) -> Tensor:
        first, second, third = (layer(values) for layer in self.layers)
        return first.view(-1) + second.unsqueeze(0).view(-1) + third.view(-1, 2, WIDTH // 2).flatten()


@torch.no_grad()
def test_merged_products_may_be_viewed_across_their_rows() -> None:
    module, values = Viewed().eval(), torch.randn(3, 5, WIDTH)
    graph = fused(module, [values], [{0: torch.export.Dim("batch", min=1)}])
    assert sum(isinstance(layer, Product) for layer in graph.modules()) == 1
    torch.testing.assert_close(graph(values), module(values), atol=1e-5, rtol=1e-5)


class Mixed(nn.Module):
    """LayerNorm of a sum of half and single precision, and of a sum of single precision alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.last = nn.Linear(WIDTH, WIDTH).half(), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        normal: Tensor = self.norm(self.layer(values.half()) + values)
        return self.last(normal + values)


@torch.no_grad()
def test_sums_of_two_datatypes_are_not_fused() -> None:
    module, values = Mixed().eval(), torch.randn(3, WIDTH)
    graph = fused(module, [values], [{0: torch.export.Dim("batch", min=1)}])
    assert sum(isinstance(layer, SumNorm) for layer in graph.modules()) == 1
    torch.testing.assert_close(graph(values), module(values), atol=1e-3, rtol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("options", [{"padding": 1}, {"stride": 1}, {"dilation": 2}, {"groups": 3, "out_channels": 6}])
def test_other_convolutions_stay(options: Any) -> None:
    convolution = nn.Conv2d(**{"in_channels": 3, "out_channels": 4, "kernel_size": 2, "stride": 2, **options})
    module = nn.Sequential(convolution, nn.Flatten(2), nn.Linear(25, 8), nn.GELU()).eval()
    images = torch.randn(3, 3, 10, 10)
    module[2] = nn.Linear(convolution(images).flatten(2).shape[2], 8)
    graph = fused(module, [images], [{0: torch.export.Dim("batch", min=1)}])
    assert not any(isinstance(layer, Patches) for layer in graph.modules())
    torch.testing.assert_close(graph(images), module(images), atol=1e-5, rtol=1e-5)


Times = dict[str, float]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> ModelSpecification:
    pytest.importorskip("transformers")
    return get_specification(str(write_tiny_bert(tmp_path_factory.mktemp("model"), num_hidden_layers=1)))


@pytest.fixture
def loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small: ModelSpecification
) -> Iterator[Callable[..., TorchEngine]]:
    """Engines in mode graph on the CPU, with planted times of both plans by rows and an empty store of choices each."""
    graph_mode_on_cpu(monkeypatch)
    engines: list[TorchEngine] = []
    threads = torch.get_num_threads()

    def load(planted: dict[int, tuple[float, float]], folder: str = "") -> TorchEngine:
        def measure(calls: Any, *_: Any) -> dict[str, float]:
            for _title, call in calls:
                call()
            times = zip((OWN_LAYERS.title, FUSED_LAYERS.title), planted[len(calls[0][1].args[0][0])], strict=True)
            return {title: time for title, time in times if title in dict(calls)}

        monkeypatch.setattr(plans, "graph_times_ms", measure)
        monkeypatch.setattr(plans, "MEASURING_SECONDS", 600.0)  # on a busy machine
        monkeypatch.setenv(PLANS_FOLDER, str(tmp_path / (folder or str(len(engines)))))
        settings = EngineSettings("torch", "fp32", "graph", "cpu", 1, 2, pad_to=(16,))
        engine = TorchEngine(small, settings, RandomWeights(0))
        engine.load()
        engines.append(engine)
        return engine

    yield load
    for engine in engines:
        engine.close()
    torch.set_num_threads(threads)


def plans_of(engine: TorchEngine) -> list[str]:
    """Of batches of one and two."""
    by_rows: Any = engine.describe().details["plans"]
    return [by_rows["1"], by_rows["2"]]


@pytest.mark.parametrize(
    ("planted", "chosen", "kernels"),
    [
        ({1: (1.0, 0.8), 2: (2.0, 1.8)}, [FUSED_LAYERS] * 2, "fused layers"),
        ({1: (1.0, 0.8), 2: (2.0, 2.2)}, [FUSED_LAYERS, OWN_LAYERS], "2 plans by batch size"),
        ({1: (1.0, 1.3), 2: (2.0, 1.8)}, [OWN_LAYERS, FUSED_LAYERS], "2 plans by batch size"),
        ({1: (1.0, 0.99), 2: (2.0, 1.99)}, [OWN_LAYERS] * 2, "own module"),  # within the margin the simpler one
    ],
)
def test_the_faster_plan_executes(
    loaded: Any, small: ModelSpecification, planted: dict[int, tuple[float, float]], chosen: Any, kernels: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    called = list[int]()
    calls = SumNorm.forward

    def counted(self: SumNorm, one: Tensor, other: Tensor) -> Any:
        called.append(len(one))
        return calls(self, one, other)

    monkeypatch.setattr(SumNorm, "forward", counted)
    engine = loaded(planted)
    details = engine.describe().details
    assert plans_of(engine) == [plan.title for plan in chosen]
    assert details["plan_times_ms"]["1"] == dict(zip(("own layers", "fused layers"), planted[1], strict=True))
    assert set(details["plan_origins"].values()) == {"measured"}
    assert details["kernels"].endswith(kernels)
    for rows in (1, 2):
        called.clear()
        inputs = proof_batch(small, rows, 3, 0.1).inputs
        expected = small.load_module(RandomWeights(0))(*map(torch.from_numpy, inputs.values()))
        known = inputs["attention_mask"].astype(bool)
        actual = engine.infer(inputs)["last_hidden_state"]
        np.testing.assert_allclose(actual[known], expected.detach().numpy()[known], atol=1e-4)
        assert bool(called) == (chosen[rows - 1] is FUSED_LAYERS)


def test_a_later_start_has_the_same_plans_and_compares_them(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = loaded({1: (1.0, 0.8), 2: (2.0, 2.2)}, "store").describe().details
    with monkeypatch.context() as patched:  # exporting takes seconds
        patched.setattr(plans, "exported_module", lambda *_: pytest.fail("exported again"))
        again = loaded({1: (1.0, 1.8), 2: (2.0, 1.2)}, "store").describe().details
    assert again["plans"] == first["plans"] == {"1": FUSED_LAYERS.title, "2": OWN_LAYERS.title}
    assert again["choices"] == first["choices"]
    assert set(again["plan_origins"].values()) == {"cached"}
    assert "plan_times_ms" not in again
    monkeypatch.setattr(SumNorm, "forward", lambda self, one, _: functional.layer_norm(one, (len(self.weight),)))
    worse = loaded({1: (1.0, 0.8), 2: (2.0, 2.2)}, "store").describe().details
    assert set(worse["plans"].values()) == {OWN_LAYERS.title}
    assert worse["choices"] != first["choices"]


def test_a_batch_size_with_wrong_answers_keeps_its_own_layers(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have the fused ones; what fails is not the batch of the check at load, which has three rows."""
    calls = SumNorm.forward

    def wrong(self: SumNorm, one: Tensor, other: Tensor) -> Any:
        return calls(self, one, other * (3 if len(one) == 1 else 1))

    def failing(self: SumNorm, one: Tensor, other: Tensor) -> Any:
        return wrong(self, one, other) if len(one) > 1 else functional.linear(one, other)

    for planted in (wrong, failing):
        monkeypatch.setattr(SumNorm, "forward", planted)
        details = loaded({1: (1.0, 0.8), 2: (2.0, 1.8)}).describe().details
        assert details["plans"] == {"1": OWN_LAYERS.title, "2": FUSED_LAYERS.title}
        assert FUSED_LAYERS.title in details["plans_left_out"]


def test_wrong_answers_and_failures_leave_the_module_as_it_is(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    faster = {1: (1.0, 0.5), 2: (1.0, 0.5)}
    with monkeypatch.context() as patched:
        patched.setattr(SumNorm, "forward", lambda self, one, _other: functional.layer_norm(one, (len(self.weight),)))
        engine = loaded(faster)
        assert plans_of(engine) == [OWN_LAYERS.title] * 2
        assert engine.describe().details["plans_left_out"].keys() == {FUSED_LAYERS.title}
    with monkeypatch.context() as patched:

        def fails(*_arguments: object) -> None:
            raise RuntimeError("torch.export does not know this")

        patched.setattr(plans, "fused_layers", fails)
        engine = loaded(faster)
        assert plans_of(engine) == [OWN_LAYERS.title] * 2
        assert "does not know this" in engine.describe().details["plans_left_out"][FUSED_LAYERS.title]


def test_the_kernel_is_torchs_norm() -> None:
    """In Triton's interpreter: odd widths, and nothing is written behind."""
    errors = interpreted(Path(__file__).with_name("interpreted_sum_norm.py"))
    assert errors
    assert not {case: error for case, error in errors.items() if not error <= (2e-2 if "float16" in case else 1e-5)}
