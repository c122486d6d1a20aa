"""Fused convolutions: answers stay, what cannot be fused is left alone, and the kernels are right on odd sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from servers.engines.torch.convolutions import (
    ACTIVATIONS,
    FusedConvolution,
    PooledMean,
    fused_convolutions,
    layer_calls,
)
from servers.engines.torch.norms import folded_norms, with_layers
from servers.models.registry import get_specification
from servers.models.weights import RandomWeights
from tests.interpreter import interpreted

SIZE = 12


def fused_in(module: nn.Module) -> list[FusedConvolution]:
    return [layer for layer in module.modules() if isinstance(layer, FusedConvolution)]


@torch.no_grad()
@pytest.mark.parametrize(
    ("reference", "left", "activations"),
    [
        ("torchvision:resnet18", 3, {"relu"}),  # the convolutions of residuals, whose biases others have
        ("timm:resnet18", 3, {"relu"}),
        ("torchvision:mobilenet_v2", 0, {"relu6", "none"}),
        ("torchvision:mobilenet_v3_small", 0, {"relu", "hardswish", "hardsigmoid", "none"}),
        ("torchvision:efficientnet_b0", 0, {"silu", "sigmoid", "none"}),
        ("torchvision:squeezenet1_0", 0, {"relu"}),
        ("torchvision:densenet121", None, {"relu"}),  # most of its convolutions precede no norm, and have no bias
    ],
)
def test_library_models_answer_as_before(reference: str, left: int | None, activations: set[str]) -> None:
    pytest.importorskip(reference.partition(":")[0])
    module = get_specification(reference).load_module(RandomWeights(0))
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    folded = module
    if any(isinstance(layer, nn.BatchNorm2d) for layer in module.modules()):
        folded = with_layers(module, folded_norms(module, [images]))
    fused = fused_convolutions(folded, [images])
    torch.testing.assert_close(fused(images), module(images), atol=1e-4, rtol=1e-3)
    assert {layer.activation for layer in fused_in(fused)} == activations
    if left is not None:
        convolutions = [layer for layer in fused.modules() if type(layer) is nn.Conv2d]
        assert len(convolutions) == left
        assert not any(layer.bias is not None for layer in convolutions)
    assert not any(isinstance(layer, nn.ReLU) for layer in fused.modules()) or reference.endswith("densenet121")
    torch.testing.assert_close(fused(images[:1]), module(images[:1]), atol=1e-4, rtol=1e-3)  # another batch size


@torch.no_grad()
def test_layers_are_called_alone_on_what_they_get_in_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    module = get_specification("torchvision:mobilenet_v3_small").load_module(RandomWeights(0))
    folded = with_layers(module, folded_norms(module, [torch.randn(2, 3, 64, 64)]))
    fused = fused_convolutions(folded, [torch.randn(2, 3, 64, 64)])
    seen = list[tuple[nn.Module, list[tuple[int, ...] | None]]]()
    for layer in fused.modules():
        if isinstance(layer, (FusedConvolution, PooledMean)):
            layer.register_forward_pre_hook(
                lambda layer, given: seen.append(
                    (layer, [value if value is None else tuple(value.shape) for value in given])
                )
            )
    for rows in (1, 3):
        fused(torch.randn(rows, 3, 64, 64))
    expected, seen = seen, []
    for call in layer_calls(fused, [1, 3], torch.float32, torch.device("cpu")):
        call()
    assert sorted(map(str, seen)) == sorted(map(str, expected))
    assert any(None in shapes for _, shapes in seen)  # gates without a residual


class Sums(nn.Module):
    """`out` of two convolutions and what else stands between them and their sum."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        bias = how not in ("broadcast", "scaled")  # else there is nothing that can be fused
        self.one, self.other = nn.Conv2d(3, 4, 3, padding=1, bias=bias), nn.Conv2d(3, 4, 1, bias=bias)

    def forward(self, images: Tensor) -> Tensor:
        one, other = self.one(images), self.other(images)
        if self.how == "sum":
            return torch.relu(one + other)
        if self.how == "used twice":
            return torch.relu(one + other) + one
        if self.how == "broadcast":
            return torch.relu(one + other.mean((2, 3), keepdim=True))
        if self.how == "scaled":
            return torch.relu(torch.add(one, other, alpha=2))
        other += one
        return torch.relu(other) if self.how == "into the other" else torch.relu(one) + other


@torch.no_grad()
@pytest.mark.parametrize(
    ("how", "fused", "residuals"),
    [
        ("sum", 1, 1),
        ("used twice", 2, 1),  # behind the other convolution; the first one keeps its bias
        ("broadcast", 0, 0),
        ("scaled", 0, 0),
        ("into the other", 1, 1),
    ],
)
def test_sums(how: str, fused: int, residuals: int) -> None:
    module, images = Sums(how).eval(), torch.randn(2, 3, SIZE, SIZE)
    if not fused:
        with pytest.raises(ValueError, match="nothing that can be fused"):
            fused_convolutions(module, [images])
        return
    made = fused_convolutions(module, [images])
    torch.testing.assert_close(made(images), module(images))
    calls = [node for node in made.graph.nodes if str(node.target).startswith("fused_")]
    assert (len(calls), sum(len(node.args) == 2 for node in calls)) == (fused, residuals)
    if how == "sum":
        assert [layer.bias for layer in made.modules() if type(layer) is nn.Conv2d] == [None]
        assert module.one.bias is not None
        assert module.other.bias is not None


@torch.no_grad()
def test_a_layer_that_is_called_twice_is_left_alone() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution, self.last = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 2, 1)

        def forward(self, images: Tensor) -> Tensor:
            return self.last(self.convolution(self.convolution(images).relu()).relu()).relu()

    module, images = Twice().eval(), torch.randn(1, 3, SIZE, SIZE)
    fused = fused_convolutions(module, [images])
    assert len(fused_in(fused)) == 1
    torch.testing.assert_close(fused(images), module(images))


@torch.no_grad()
def test_a_trace_that_answers_otherwise_is_refused() -> None:
    class Deciding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(3, 3, 1)

        def forward(self, images: Tensor) -> Tensor:
            more = 1.0 if isinstance(images, Tensor) else 0.0  # the symbols of a trace are no tensors
            values: Tensor = self.convolution(images).relu() + more
            return values

    with pytest.raises(ValueError, match="its answer differs"):
        fused_convolutions(Deciding().eval(), [torch.randn(1, 3, SIZE, SIZE)])


@torch.no_grad()
def test_an_input_that_changes_before_the_sum_is_refused() -> None:
    """The convolution executes where its sum stood, so it would read the changed input."""

    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(3, 3, 1)

        def forward(self, images: Tensor) -> Tensor:
            values = images + 0.0
            convolved = self.convolution(values)
            values.relu_()
            total: Tensor = convolved + values
            return total

    with pytest.raises(ValueError, match="its answer differs"):
        fused_convolutions(Changing().eval(), [torch.randn(1, 3, SIZE, SIZE)])


@pytest.fixture(scope="module", params=["quick", pytest.param("all", marks=pytest.mark.slow)])
def report(request: pytest.FixtureRequest) -> Any:
    """Quick: with a bias, a residual and gates, and with none of them. The rest has each of them alone, and every
    precision and number of columns with both."""
    script = Path(__file__).with_name("interpreted_convolutions.py")
    return {"cases": request.param, **interpreted(script, request.param)}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_kernel_is_torchs_functions(report: Any, activation: str) -> None:
    """In place, with odd sizes; FP16 is off by a rounding at most."""
    errors = {case: value for case, value in report["errors"].items() if f" {activation} " in case}
    assert len(errors) == {"quick": 12, "all": 24}[report["cases"]]
    wrong = {case: value for case, value in errors.items() if not value <= (2e-2 if "float16" in case else 2e-6)}
    assert not wrong


def test_the_kernel_keeps_nan(report: Any) -> None:
    assert report["nan"]


@pytest.mark.parametrize("kind", ["depthwise", "pointwise", "means"])
def test_other_kernels_are_torchs_functions(report: Any, kind: str) -> None:
    if report[kind] is None:
        pytest.skip("Triton's interpreter has no loops with this NumPy")
    assert report[kind]
    limits = {"depthwise": 1e-5, "means": 1e-6, "pointwise": 1e-2}
    wrong = {
        case: value
        for case, value in report[kind].items()
        if not value <= (2e-2 if "float16" in case else limits[kind])
    }
    assert not wrong


class Gated(nn.Module):
    """A block of squeeze and excitation before a convolution, and what may stand between them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.pooled, self.squeeze = nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 8, 1)
        self.last = nn.Conv2d(8, 4, 3 if how == "window" else 1, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        gates = torch.sigmoid(self.squeeze(self.pooled(images)))
        values = images * images if self.how == "same shape" else gates * images
        answer: Tensor = self.last(values)
        return answer + values[:, :4] if self.how == "used twice" else answer


@torch.no_grad()
@pytest.mark.parametrize(
    ("how", "gated"), [("", True), ("window", False), ("same shape", False), ("used twice", False)]
)
def test_gates(how: str, gated: bool) -> None:
    """Only those of single pixels, whose products nothing else reads."""
    module, images = Gated(how).eval(), torch.randn(2, 8, SIZE, SIZE)
    fused = fused_convolutions(module, [images])
    torch.testing.assert_close(fused(images), module(images))
    assert any(len(node.args) == 3 for node in fused.graph.nodes if node.op == "call_module") == gated
    assert not any(isinstance(layer, nn.AdaptiveAvgPool2d) for layer in fused.modules())


@torch.no_grad()
def test_means_of_the_pixels_only() -> None:
    """A pool with larger answers stays."""
    module = nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(2), nn.Conv2d(4, 4, 1), nn.AdaptiveAvgPool2d((1, 1))
    )
    images = torch.randn(2, 3, SIZE, SIZE)
    fused = fused_convolutions(module.eval(), [images])
    torch.testing.assert_close(fused(images), module(images))
    assert [layer.output_size for layer in fused.modules() if isinstance(layer, nn.AdaptiveAvgPool2d)] == [2]
