"""The mode traced: the own module's answers at any batch size, warm at once, described as they are."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from servers.engines.batches import Bucket
from servers.engines.factory import build_engine
from servers.engines.interface import Engine, EngineError
from servers.engines.settings import KINDS, EngineSettings
from servers.engines.torch import forms
from servers.engines.torch.forms import OWN_MODULE, TRACE, plain_form, to_torchscript
from servers.models.images import normalise
from servers.models.registry import get_specification, get_variant, payload_variants
from servers.models.samples import corpus_pixels
from servers.models.specification import ModelSpecification
from servers.models.uint8_module import UInt8Images, to_precision
from servers.models.weights import RandomWeights
from tests.small_tower import EMBEDDING, small_tower, with_small_tower

WEIGHTS = RandomWeights(0)
BATCHES = (1, 2, 5)
Loaded = tuple[Engine, str]


def engine_of(mode: str, payload: str) -> Engine:
    settings = EngineSettings("torch", "fp32", mode, "cpu", 1, 8)
    variants = payload_variants(with_small_tower(get_specification("openclip_vit_b32")))
    return build_engine(variants[payload == "uint8"], WEIGHTS, settings, None)


@pytest.fixture(scope="module", params=["uint8", "fp32"])
def loaded(request: pytest.FixtureRequest) -> Iterator[Loaded]:
    payload = request.param
    threads = torch.get_num_threads()
    engine = engine_of("traced", payload)
    engine.load()
    yield engine, payload
    engine.close()
    engine.close()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def pixels(specification: ModelSpecification) -> np.ndarray:
    return corpus_pixels(specification, max(BATCHES))


def test_every_batch_size_is_answered_as_eagerly(
    loaded: Loaded, pixels: np.ndarray, specification: ModelSpecification
) -> None:
    engine, payload = loaded
    given = pixels if payload == "uint8" else normalise(pixels, specification.preprocessing)
    eager = engine_of("eager", payload)
    eager.load()
    expected: np.ndarray = eager.infer({"pixel_values": given})["embedding"]
    eager.close()
    for rows in BATCHES:
        answer: np.ndarray = engine.infer({"pixel_values": given[-rows:].copy()})["embedding"]
        assert (answer.dtype.name, answer.shape) == ("float32", (rows, EMBEDDING))
        np.testing.assert_allclose(answer, expected[-rows:], atol=1e-5)


def test_the_description_names_mode_and_api(loaded: Loaded) -> None:
    engine, _ = loaded
    seen = engine.describe()
    assert (seen.mode, seen.precision, seen.device) == ("traced", "fp32", "cpu")
    assert seen.details["kernels"] == f"{TRACE} of {OWN_MODULE}"
    # What the frozen module has inlined, not what it still lists as parameters, which is nothing.
    assert seen.details["parameters"] == sum(one.numel() for one in small_tower().parameters())


def test_another_mode_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(EngineError, match="mode compile on cpu; use one of: auto, tuned, eager, traced"):
        engine_of("compile", "fp32").load()
    assert [modes[0] for modes in KINDS["torch"].modes.values()] == ["tuned", "graph"]  # what auto takes


class _Embedding(torch.nn.Module):
    """A tower in small: the normalised pixels' first values through one layer, in the layer's own type."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 8)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = torch.nn.functional.gelu(self.layer(pixels.flatten(1)[:, :16]))
        return answer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_half_tower_gets_pixels_that_were_normalised_in_fp32(dtype: torch.dtype) -> None:
    """On a device `plain_form` does just this."""
    variant = get_variant("openclip_vit_b32", "uint8")
    raw = torch.randint(0, 256, (5, 224, 224, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
    tower = _Embedding().eval().requires_grad_(False)
    built = plain_form(tower, variant, torch.device("cpu"), dtype, 8, traced=True)
    expected = to_precision(UInt8Images(tower, variant.preprocessing).eval(), dtype)(raw)
    assert (expected.dtype, {p.dtype for p in built.parameters}) == (dtype, {dtype})
    assert built.kernels == f"{TRACE} of {OWN_MODULE}"
    for rows in (1, 2, 5):
        out = torch.full((rows, 8), float("nan"))
        with torch.no_grad():
            built.build(Bucket(rows))([raw[:rows]], [out])
        torch.testing.assert_close(
            out, expected[:rows].float(), rtol=1e-2, atol=1e-5 if dtype == torch.float32 else 0.01
        )


def rows_of(count: int) -> tuple[torch.Tensor]:
    return (torch.randn(count, 40, generator=torch.Generator().manual_seed(count)),)


class _Pointwise(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x * 1.5 + 2) / 3


@pytest.fixture
def _cpu_fuser() -> Iterator[None]:
    """torch.jit's fuser as on a GPU, only interpreted: torch's wheels have no LLVM."""
    torch._C._jit_override_can_fuse_on_cpu(True)
    torch._C._jit_set_te_must_use_llvm_cpu(False)
    yield
    torch._C._jit_set_te_must_use_llvm_cpu(True)
    torch._C._jit_override_can_fuse_on_cpu(False)


def executed(module: torch.nn.Module, rows: int) -> set[str]:
    given = rows_of(rows)
    with profile(activities=[ProfilerActivity.CPU]) as profiler, torch.no_grad():
        module(*given)
    return {event.name for event in profiler.events() or ()}


@pytest.mark.usefixtures("_cpu_fuser")
def test_after_load_no_batch_size_is_left_to_compile() -> None:
    """The first call at any size runs the fused function, which load has compiled."""
    script, _ = to_torchscript(_Pointwise().eval(), rows_of, 32, title="it")
    for rows in (7, 1, 2, 32, 5):
        names = executed(script, rows)
        assert "fused_mul_add_gelu_div" in names
        assert not {"aten::mul", "aten::gelu"} & names
        if rows > 1:
            assert "fallback_function" not in names


def test_one_image_at_a_time_is_optimised_at_load_too() -> None:
    """torch keeps no plan before a function's second call, and raises here."""
    script, _ = to_torchscript(_Pointwise().eval(), rows_of, 1, title="it")
    assert len(script.get_debug_state().execution_plans) == 1  # type: ignore[operator]


def test_a_fuser_that_fails_is_left_out_and_the_description_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "FUSED", [("NO SUCH KIND", 1)])
    script, kernels = to_torchscript(_Pointwise().eval(), rows_of, 8, title="it")
    assert kernels.startswith("torch.jit.trace of it, without its fuser, which failed: ")
    assert "\n" not in kernels
    with torch.no_grad():
        torch.testing.assert_close(script(*rows_of(5)), _Pointwise()(*rows_of(5)))


class _ScaledByRows(torch.nn.Module):
    """A trace bakes the factor in, and answers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * int(x.shape[0])


class _ReshapedByRows(torch.nn.Module):
    """A trace bakes the shape in, and fails."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(int(x.shape[0]), 4, 10).flatten(1)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (_ScaledByRows(), "does not compute the model: .*, more than 0.001"),
        (_ReshapedByRows(), r"failed: .*shape '\[2, 4, 10\]' is invalid"),
    ],
    ids=["wrong", "bound"],
)
def test_what_torchscript_does_not_compute_is_refused(module: torch.nn.Module, message: str) -> None:
    with pytest.raises(EngineError, match=f"{message}.*; use mode eager") as caught:
        to_torchscript(module.eval(), rows_of, 8, title="it")
    assert "\n" not in str(caught.value)
