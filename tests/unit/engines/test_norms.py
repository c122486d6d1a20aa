"""Batch norms in the weights of convolutions: values stay, and what is no norm of one convolution is left alone."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

from servers.engines.torch.norms import folded_norms, with_layers
from tests.unit.engines.test_plans import SIZE, Branching, Residual, Untraced, with_statistics


@torch.no_grad()
def test_folding_keeps_values_and_leaves_the_module_alone() -> None:
    module = with_statistics(Residual())
    state, images = deepcopy(module.state_dict()), torch.randn(2, 3, SIZE, SIZE)
    expected, folded = module(images), with_layers(module, folded_norms(module, [images]))
    torch.testing.assert_close(folded(images), expected, atol=1e-5, rtol=1e-5)
    assert [type(layer) for layer in folded.modules()].count(nn.BatchNorm2d) == 1
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())


@torch.no_grad()
@pytest.mark.parametrize("source", ["torchvision", "timm"])
def test_every_norm_of_a_library_model_is_folded(source: str) -> None:
    if source == "timm":
        module = pytest.importorskip("timm").create_model("mobilenetv3_small_050")  # its norms hold an activation
    else:
        module = pytest.importorskip("torchvision").models.mobilenet_v3_small(weights=None)
    module = with_statistics(module)
    images = torch.randn(1, 3, 64, 64)
    folded = with_layers(module, folded_norms(module, [images]))
    assert not any(isinstance(layer, nn.BatchNorm2d) for layer in folded.modules())
    torch.testing.assert_close(folded(images), module(images), atol=1e-4, rtol=1e-3)


class Shared(nn.Module):
    """One convolution with two norms, of which neither may be folded."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.first, self.second = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.BatchNorm2d(3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.convolution(self.first(self.convolution(images))))
        return out


@pytest.mark.parametrize(
    "module",
    [
        Shared(),
        nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU(), nn.BatchNorm2d(3)),
        nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, track_running_stats=False)),
    ],
)
def test_a_norm_that_is_not_that_of_one_convolution_is_not_folded(module: nn.Module) -> None:
    with pytest.raises(ValueError, match="no batch norm directly follows a convolution"):
        folded_norms(with_statistics(module), [torch.randn(1, 3, SIZE, SIZE)])


@pytest.mark.parametrize(("module", "reason"), [(Branching, "control flow"), (Untraced, "its answer differs")])
def test_a_model_whose_trace_cannot_be_relied_on_is_refused(module: type[nn.Module], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        folded_norms(with_statistics(module()), [torch.randn(2, 3, SIZE, SIZE)])
