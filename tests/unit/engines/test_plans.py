"""Plans of a convolutional model: what is chosen, what is never chosen, what is kept. On the CPU, planted times."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from servers.engines import choice
from servers.engines.interface import PLANS_FOLDER
from servers.engines.settings import EngineSettings
from servers.engines.torch import plans
from servers.engines.torch.engine import TorchEngine
from servers.engines.torch.plans import PLANS, ModulePlan, fastest, measuring_order
from servers.models.registry import payload_variants
from servers.models.specification import ModelSpecification, Preprocessing, image_specification
from servers.models.weights import RandomWeights
from servers.native.engine.process import EngineSide
from servers.native.front.documents import parameters_in_effect
from servers.native.front.inference import InferenceService
from servers.native.local_link import LocalLink
from servers.native.shared.memory import RequestMemory
from servers.native.shared.settings import NativeSettings
from servers.native.shared.statistics import Statistics
from servers.protocol.tensors import TensorSpec
from tests.host_copies import graph_mode_on_cpu

FIRST, LAST, FIRST_FOLDED, LAST_FOLDED, FUSED = PLANS
SIZE, CLASSES = 16, 5
Times = Mapping[ModulePlan, float]
EQUAL: Times = dict.fromkeys(PLANS, 1.0)


class Residual(nn.Module):
    """Convolutions of every kind with norms: plain, depthwise, with a bias, and one whose answer is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.depthwise, self.depthwise_norm = nn.Conv2d(8, 8, 3, 1, 1, groups=8), nn.BatchNorm2d(8, affine=False)
        self.wide, self.wide_norm = nn.Conv2d(8, 16, 1), nn.BatchNorm2d(16)
        self.twice, self.twice_norm = nn.Conv2d(16, 16, 3, 1, 1), nn.BatchNorm2d(16)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.depthwise_norm(self.depthwise(self.stem(images))).sigmoid()
        x = self.wide_norm(self.wide(x))
        convolved = self.twice(x)
        x = torch.relu(self.twice_norm(convolved) + convolved + x)
        scores: torch.Tensor = self.head(x.mean((2, 3)))
        return scores


class Branching(Residual):
    """Reads a value, so it cannot be traced."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images if images.sum() > 1e9 else images + 0)


class Untraced(Residual):
    """The answer of its first convolution is used twice, which a trace does not see."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        used = self.stem[0](images).amax((1, 2, 3)).unsqueeze(1) if isinstance(images, torch.Tensor) else 0.0
        return super().forward(images) + used


def with_statistics(module: nn.Module) -> nn.Module:
    """The module in eval mode with norms that change something."""
    generator = torch.Generator().manual_seed(0)
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d) and layer.running_mean is not None:
            assert layer.running_var is not None
            layer.running_mean.normal_(0, 0.3, generator=generator)
            layer.running_var.uniform_(0.5, 2, generator=generator)
    return module.eval().requires_grad_(False)


def specification_of(
    module: Callable[[], nn.Module] = Residual, payload: str = "fp32", reference: str = "test:cnn"
) -> ModelSpecification:
    def load(_source: object) -> nn.Module:
        torch.manual_seed(0)
        return with_statistics(module())

    pixels = Preprocessing(size=SIZE, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
    base = image_specification(reference, pixels, TensorSpec("logits", "FP32", (-1, CLASSES)), "logits", load)
    return next(variant for variant in payload_variants(base) if variant.payload == payload)


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[int, Times]:
    """Planted times by rows; what is measured is also executed. Other rows: all plans take the same time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(PLANS_FOLDER, raising=False)
    planted: dict[int, Times] = {}

    def measure(calls: Any, *_: Any) -> dict[str, float]:
        for _, call in calls:
            call()
        of_rows = {plan.title: ms for plan, ms in planted.get(len(calls[0][1].args[0][0]), EQUAL).items()}
        return {title: of_rows[title] for title, _ in calls}

    monkeypatch.setattr(plans, "graph_times_ms", measure)
    return planted


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, times: object) -> Iterator[Callable[..., TorchEngine]]:
    """Engines in mode graph on the CPU, where a bucket's function takes the place of its graph."""
    graph_mode_on_cpu(monkeypatch)
    engines: list[TorchEngine] = []
    threads = torch.get_num_threads()

    def load(specification: ModelSpecification, rows: int = 4) -> TorchEngine:
        options = EngineSettings("torch", "fp32", "graph", "cpu", 1, rows)
        engine = TorchEngine(specification, options, RandomWeights(0))
        engine.load()
        engines.append(engine)
        return engine

    yield load
    for engine in engines:
        engine.close()
    torch.set_num_threads(threads)


def answers_agree(engine: TorchEngine, specification: ModelSpecification) -> bool:
    module = specification.load_module(RandomWeights(0))
    generator = np.random.default_rng(5)
    for rows in (1, 2, 3, 4):
        raw = generator.integers(0, 256, (rows, SIZE, SIZE, 3), np.uint8)
        scaled = (raw.transpose(0, 3, 1, 2).astype(np.float32) / 255 - 0.4) * 3
        if specification.payload == "uint8":
            mean, std = (np.array(each, np.float32).reshape(3, 1, 1) for each in ((0.5, 0.4, 0.3), (0.2, 0.3, 0.4)))
            pixels, sent = (raw.transpose(0, 3, 1, 2).astype(np.float32) / 255 - mean) / std, raw
        else:
            pixels = sent = scaled
        expected = module(torch.from_numpy(np.ascontiguousarray(pixels))).numpy()
        actual: Any = engine.infer({"pixel_values": np.ascontiguousarray(sent)})["logits"]
        np.testing.assert_allclose(actual, expected, atol=1e-4, rtol=1e-4)
    return True


def plans_of(engine: TorchEngine) -> Any:
    return engine.describe().details["plans"]


def prefers(*order: ModulePlan) -> Times:
    """Times in which each plan takes half as long again as the one before."""
    ranked = [*order, *(plan for plan in PLANS if plan not in order)]
    return {plan: 1.5**place for place, plan in enumerate(ranked)}


@pytest.mark.parametrize(
    ("measured", "chosen"),
    [
        ({FIRST: 1.0, LAST: 0.5, LAST_FOLDED: 0.4}, LAST_FOLDED),
        ({FIRST: 1.0, LAST: 0.99, LAST_FOLDED: 0.985}, FIRST),
        ({FIRST: 1.0, LAST: 0.9, LAST_FOLDED: 0.89}, LAST),
        ({LAST_FOLDED: 3.0}, LAST_FOLDED),
    ],
)
def test_the_simplest_plan_within_the_margin_is_the_fastest(measured: Times, chosen: ModulePlan) -> None:
    assert fastest({plan.title: ms for plan, ms in measured.items()}) == chosen.title


def test_both_ends_are_measured_before_what_lies_between() -> None:
    assert measuring_order((1, 2, 4, 8, 12, 16)) == [16, 1, 4, 2, 8, 12]
    assert measuring_order((3,)) == [3]


@pytest.mark.parametrize("payload", ["fp32", "uint8"])
@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_computes_the_model(loaded: Any, times: dict[int, Times], plan: ModulePlan, payload: str) -> None:
    times.update(dict.fromkeys((1, 2, 4), prefers(plan)))
    specification = specification_of(payload=payload)
    engine = loaded(specification)
    assert plans_of(engine) == dict.fromkeys(("1", "2", "4"), plan.title)
    assert engine.describe().details["kernels"] == f"the model's own module, {plan.title}"
    assert answers_agree(engine, specification)


def test_a_plan_executes_in_its_layout_and_without_its_norms(loaded: Any, times: dict[int, Times]) -> None:
    times.update({1: prefers(LAST_FOLDED), 2: prefers(FIRST), 4: prefers(LAST_FOLDED)})
    engine = loaded(specification_of())
    form = engine._form
    assert form is not None
    convolutions = [layer for layer in form.module.modules() if isinstance(layer, nn.Conv2d)]
    assert all(layer.weight.is_contiguous(memory_format=torch.channels_last) for layer in convolutions)
    assert sum(isinstance(layer, nn.BatchNorm2d) for layer in form.module.modules()) == 1  # see Residual.twice
    assert plans_of(engine) == {"1": LAST_FOLDED.title, "2": FIRST.title, "4": LAST_FOLDED.title}
    details = engine.describe().details
    assert details["kernels"] == "the model's own module, 2 plans by batch size"
    assert details["plan_times_ms"]["2"][FIRST.title] == 1.0
    assert details["plan_seconds"] >= 0
    assert set(details["plan_seconds_each"]) == {plan.title for plan in PLANS}
    assert set(details["plan_origins"].values()) == {"measured"}


def test_the_settings_in_effect_have_the_plan_of_each_batch_size(loaded: Any, times: dict[int, Times]) -> None:
    times.update({1: prefers(LAST_FOLDED), 2: prefers(FIRST), 4: prefers(LAST_FOLDED)})
    server, specification = NativeSettings(), specification_of()
    memory = RequestMemory.alone(server)
    link = LocalLink(EngineSide(server, [], [], memory.arena))
    service = InferenceService(0, specification, server, link, memory, Statistics(4))
    service.description = loaded(specification).describe()
    expected = "1, 4: channels-last, batch norms folded; 2: channels-first"
    assert parameters_in_effect(service)["plans"] == expected


@pytest.mark.parametrize("factor", [1.1, float("nan")])
def test_a_plan_with_wrong_answers_is_never_chosen(
    loaded: Any, times: dict[int, Times], factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault is in the layout, so all plans with it are wrong, though they are the fastest."""
    times.update(dict.fromkeys((1, 2, 4), prefers(FUSED, LAST_FOLDED, LAST, FIRST_FOLDED)))
    in_layout = plans._in_layout

    def wrong(layout: torch.memory_format, module: nn.Module, arguments: Any) -> Any:
        (images,) = in_layout(layout, module, arguments)
        return (images * factor if layout == torch.channels_last else images,)

    monkeypatch.setattr(plans, "_in_layout", wrong)
    specification = specification_of()
    engine = loaded(specification)
    assert set(plans_of(engine).values()) == {FIRST_FOLDED.title}
    assert set(engine.describe().details["plans_left_out"]) == {LAST.title, LAST_FOLDED.title, FUSED.title}
    assert answers_agree(engine, specification)


def test_a_plan_may_be_wrong_for_one_batch_size_only(
    loaded: Any, times: dict[int, Times], monkeypatch: pytest.MonkeyPatch
) -> None:
    times.update(dict.fromkeys((1, 2, 4), prefers(LAST)))
    in_layout = plans._in_layout

    def wrong(layout: torch.memory_format, module: nn.Module, arguments: Any) -> Any:
        (images,) = in_layout(layout, module, arguments)
        return (images * 2 if layout == torch.channels_last and len(images) == 2 else images,)

    monkeypatch.setattr(plans, "_in_layout", wrong)
    assert plans_of(loaded(specification_of())) == {"1": LAST.title, "2": FIRST.title, "4": LAST.title}


def test_a_plan_that_fails_costs_only_itself(
    loaded: Any, times: dict[int, Times], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No memory for channels-last at four rows; one plan cannot be built at all."""
    times.update(dict.fromkeys((1, 2, 4), prefers(LAST, FIRST_FOLDED)))
    in_layout, built = plans._in_layout, plans.ConvolutionalModule._built

    def full(layout: torch.memory_format, module: nn.Module, arguments: Any) -> Any:
        if layout == torch.channels_last and len(arguments[0]) == 4:
            raise torch.OutOfMemoryError("out of memory")
        return in_layout(layout, module, arguments)

    def fails(self: Any, plan: ModulePlan) -> Any:
        if plan == FIRST_FOLDED:
            raise AssertionError("planted")
        return built(self, plan)

    monkeypatch.setattr(plans, "_in_layout", full)
    monkeypatch.setattr(plans.ConvolutionalModule, "_built", fails)
    specification = specification_of()
    engine = loaded(specification)
    assert plans_of(engine) == {"1": LAST.title, "2": LAST.title, "4": FIRST.title}
    left_out: Any = engine.describe().details["plans_left_out"]
    assert left_out[FIRST_FOLDED.title] == "planted"
    assert left_out[LAST.title] == "batches of 4: out of memory"
    assert answers_agree(engine, specification)


def test_where_nothing_can_be_measured_the_simplest_plan_executes(
    loaded: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(*_arguments: object) -> Times:
        raise RuntimeError("no events")

    monkeypatch.setattr(plans, "graph_times_ms", fails)
    engine = loaded(specification_of())
    assert set(plans_of(engine).values()) == {FIRST.title}
    assert set(engine.describe().details["plan_origins"].values()) == {"not measured"}
    assert not list(tmp_path.rglob("*.json"))


def test_where_no_plan_is_right_the_module_executes_as_it_came(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_in_layout", lambda _layout, _module, arguments: (arguments[0] * 2,))
    specification = specification_of()
    engine = loaded(specification)
    assert plans_of(engine) == {}
    assert engine.describe().details["kernels"] == "the model's own module"
    assert answers_agree(engine, specification)


def test_a_size_without_time_has_the_plan_of_the_nearest_one(
    loaded: Any, times: dict[int, Times], monkeypatch: pytest.MonkeyPatch
) -> None:
    times.update({1: prefers(LAST), 8: prefers(LAST_FOLDED)})
    measure, measured = plans.PlannedModule._measure, list[int]()

    def slow(self: Any, rows: int) -> None:
        measure(self, rows)
        measured.append(rows)
        if len(measured) == 2:
            self._started -= plans.MEASURING_SECONDS

    monkeypatch.setattr(plans.PlannedModule, "_measure", slow)
    engine = loaded(specification_of(), 8)
    assert measured == [8, 1]
    assert plans_of(engine) == {"1": LAST.title, "2": LAST.title, "4": LAST_FOLDED.title, "8": LAST_FOLDED.title}
    assert engine.describe().details["plan_origins"]["2"] == "not measured"


def test_the_wait_for_another_start_takes_none_of_the_time_to_choose(
    loaded: Any, times: dict[int, Times], monkeypatch: pytest.MonkeyPatch
) -> None:
    times.update({1: prefers(LAST), 2: prefers(FIRST), 4: prefers(LAST_FOLDED)})
    clock = [0.0]

    @contextmanager
    def held(_: object) -> Iterator[None]:
        clock[0] += 2 * plans.MEASURING_SECONDS
        yield

    monkeypatch.setattr(plans, "monotonic", lambda: clock[0])
    monkeypatch.setattr(choice.ChoiceCache, "held", held)
    engine = loaded(specification_of())
    assert set(engine.describe().details["plan_origins"].values()) == {"measured"}
    assert plans_of(engine) == {"1": LAST.title, "2": FIRST.title, "4": LAST_FOLDED.title}


def test_a_model_that_cannot_be_traced_or_is_traced_wrongly_keeps_its_norms(
    loaded: Any, times: dict[int, Times]
) -> None:
    times.update(dict.fromkeys((1, 2, 4), prefers(LAST_FOLDED, FIRST_FOLDED, LAST)))
    for module, reason in ((Branching, "control flow"), (Untraced, "with folded batch norms its answer differs")):
        specification = specification_of(module, reference=f"test:{module.__name__}")
        engine = loaded(specification)
        assert set(plans_of(engine).values()) == {LAST.title}
        assert reason in str(engine.describe().details["plans_left_out"])
        assert answers_agree(engine, specification)


def test_a_kept_choice_is_not_measured_again_but_compared(
    loaded: Any, times: dict[int, Times], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    times.update({1: prefers(LAST), 2: prefers(LAST), 4: prefers(FIRST_FOLDED)})
    specification = specification_of()
    first = plans_of(loaded(specification))
    assert len(list((tmp_path / "abserve" / "plans").glob("*.json"))) == 1
    times.update(dict.fromkeys((1, 2, 4, 8), prefers(LAST_FOLDED)))  # would be chosen now
    again = loaded(specification)
    assert plans_of(again) == first
    assert set(again.describe().details["plan_origins"].values()) == {"cached"}
    assert "plan_times_ms" not in again.describe().details
    assert answers_agree(again, specification)
    # A larger batch is measured, and what is kept stays.
    assert plans_of(loaded(specification, 8)) == {**first, "8": LAST_FOLDED.title}
    loaded(specification, 3)
    assert plans_of(loaded(specification, 8)) == {**first, "8": LAST_FOLDED.title}

    in_layout = plans._in_layout

    def wrong(layout: torch.memory_format, module: nn.Module, arguments: Any) -> Any:
        (images,) = in_layout(layout, module, arguments)
        return (images * 1.5 if layout == torch.channels_last else images,)

    monkeypatch.setattr(plans, "_in_layout", wrong)
    worse = loaded(specification, 8)
    assert plans_of(worse)["4"] == FIRST_FOLDED.title
    assert LAST.title not in plans_of(worse).values()
    assert answers_agree(worse, specification)


@pytest.mark.parametrize("changed", ["model", "torch", "precision", "gpu", "abserve"])
def test_a_choice_of_something_else_is_not_used(
    loaded: Any, times: dict[int, Times], changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded(specification_of())
    times.update(dict.fromkeys((1, 2, 4), prefers(LAST)))
    specification, key_of = specification_of(), choice.cache_key
    if changed == "model":
        specification = specification_of(lambda: nn.Sequential(Residual(), nn.Identity()))
    else:
        monkeypatch.setattr(plans, "cache_key", lambda *arguments: {**key_of(*arguments), changed: "another"})
    assert set(plans_of(loaded(specification)).values()) == {LAST.title}


@pytest.mark.parametrize("content", [b"", b"[]", b'{"key": {}}', b'{"key": 0, "plans": []}'])
def test_a_damaged_file_is_measured_again(loaded: Any, times: dict[int, Times], content: bytes, tmp_path: Path) -> None:
    loaded(specification_of())
    (path,) = (tmp_path / "abserve" / "plans").glob("*.json")
    path.write_bytes(content)
    times.update(dict.fromkeys((1, 2, 4), prefers(LAST)))
    assert set(plans_of(loaded(specification_of())).values()) == {LAST.title}


def test_the_choice_is_kept_in_the_folder_that_the_user_names(
    loaded: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(PLANS_FOLDER, str(tmp_path / "named"))
    loaded(specification_of())
    assert [path.parent for path in tmp_path.rglob("*.json")] == [tmp_path / "named"]


def test_a_folder_that_cannot_be_written_changes_nothing(
    loaded: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert set(plans_of(loaded(specification_of())).values()) == {FIRST.title}


def test_a_vision_tower_executes_as_what_is_fastest(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own layers, fused ones, or the lean tower, which took 1.1 times as long as fused ones for ViT-B/16."""
    transformer = pytest.importorskip("open_clip.transformer")

    def tower() -> nn.Module:
        sizes = {"image_size": SIZE, "patch_size": 8, "width": 16, "layers": 2, "heads": 2, "mlp_ratio": 2.0}
        return transformer.VisionTransformer(**sizes, output_dim=CLASSES)

    fastest_for = {1: plans.LEAN_TOWER, 2: plans.FUSED_LAYERS, 4: plans.OWN_LAYERS}

    def measure(calls: Any, *_: Any) -> dict[str, float]:
        fast = fastest_for[len(calls[0][1].args[0][0])]
        return {title: 1.0 if title == fast.title else 2.0 for title, _ in calls}

    monkeypatch.setattr(plans, "graph_times_ms", measure)
    monkeypatch.setattr(plans, "MEASURING_SECONDS", 600.0)  # on a busy machine
    specification = replace(specification_of(tower, "uint8"), fused_tower=True)
    for _ in range(2):  # the second start reads what the first one chose
        engine = loaded(specification)
        assert plans_of(engine) == {str(rows): plan.title for rows, plan in fastest_for.items()}
        assert answers_agree(engine, specification)


def test_a_model_with_few_convolutions_has_no_plans(loaded: Any) -> None:
    def patches() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(128, CLASSES))

    engine = loaded(specification_of(patches))
    assert plans_of(engine) == {}
    assert "plan_seconds" not in engine.describe().details
