"""Mode tuned: oneDNN's products where they are faster and right, and the module's own where they are not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, cycle
from math import inf
from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson
import pytest
import torch
from torch import nn

from servers.engines import choice
from servers.engines.interface import PLANS_FOLDER
from servers.engines.settings import EngineSettings
from servers.engines.torch import products
from servers.engines.torch.engine import TorchEngine
from servers.engines.torch.products import Product, TunedProducts, packed_linear
from servers.models.specification import ModelSpecification
from servers.models.weights import RandomWeights
from servers.protocol.tensors import Axis, TensorSpec

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
    planted_times(monkeypatch, lambda call: 1 if is_packed(call) else 2)


def is_packed(call: Any) -> bool:
    return getattr(call, "func", None) is not nn.functional.linear and not isinstance(call.func, nn.Module)


def planted_times(monkeypatch: pytest.MonkeyPatch, time_ms: Callable[[Any], float]) -> None:
    """What is measured is also executed, on a machine that disturbs nothing, however slow it is."""
    monkeypatch.setattr(products, "MOST_SECONDS", inf)
    monkeypatch.setattr(choice, "cpu_ns", lambda call: (call(), round(time_ms(call) * 1e6))[1])


@pytest.fixture(autouse=True)
def same_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv(PLANS_FOLDER, str(tmp_path / "plans"))
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
    def time_ms(call: Any) -> float:
        if not is_packed(call):
            return 1.0
        batch = call.args[0]
        return slower if batch.dim() == 4 and len(batch) == rows else 0.5

    planted_times(monkeypatch, time_ms)
    module = Tokens().eval().requires_grad_(False)
    tuned = TunedProducts(module, *BATCHES)
    assert tuned.changed is taken
    assert any("forward" in vars(layer) for layer in module.modules()) is taken


@pytest.mark.parametrize(("advantage", "noise", "won"), [(0.8, 0.1, True), (0.96, 0.02, False), (1.1, 0.3, False)])
def test_a_race_is_won_by_a_clear_lead(
    advantage: float, noise: float, won: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call takes its time and what other programs add, which is often as much again."""
    decided = []
    for seed in range(40):
        random = np.random.default_rng(seed)
        monkeypatch.setattr(
            choice, "cpu_ns", lambda call, random=random: int(call() * 1e6 * random.lognormal(0, noise))
        )
        pairs = [(lambda: 1.0, lambda: advantage), (lambda: 4.0, lambda: 4 * advantage)]
        decided.append(choice.race(pairs, 60, 0.94, 1.05))
    assert sum(race.won is won for race in decided) >= 38
    assert max(race.rounds for race in decided) <= choice.MOST_ROUNDS


def test_a_race_alternates_and_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    order, times = list[int](), chain([1, 1], cycle([1, 2]))
    monkeypatch.setattr(choice, "cpu_ns", lambda call: (call(), next(times))[1])
    pairs: list[Any] = [(lambda: order.append(0), lambda: order.append(1))]
    race = choice.race(pairs, 0, 0.97, 1.05)  # the sides win in turn
    assert order[:8] == [0, 1, 0, 1, 1, 0, 0, 1]
    assert (race.won, race.rounds, race.decided) == (False, choice.CLEAR_LEAD, True)
    assert choice.race(pairs, 60, 0.97, 1.05).rounds == choice.MOST_ROUNDS
    race = choice.race(pairs, 60, 0.97, 1.05, 0)
    assert (race.won, race.rounds, race.decided) == (False, 0, False)


@pytest.mark.parametrize(("other_ns", "won"), [(500, True), (2000, False)])
def test_forms_that_are_far_apart_need_three_rounds(other_ns: int, won: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "cpu_ns", lambda call: call())
    race = choice.race([(lambda: 1000, lambda: other_ns)], 60, 0.97, 1.05)
    assert (race.won, race.rounds, race.decided) == (won, choice.FEWEST_ROUNDS, True)


@pytest.mark.parametrize(("rounds", "decided"), [(choice.CLEAR_LEAD - 1, False), (choice.CLEAR_LEAD, True)])
def test_a_lead_that_is_not_clear_in_time_is_none(rounds: int, decided: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No round begins that would end after the deadline: each takes as long as the one before it."""
    clock, times = [0.0], cycle([2, 1, 1, 1])
    monkeypatch.setattr(choice, "monotonic", lambda: clock[0])
    monkeypatch.setattr(choice, "cpu_ns", lambda call: (call(), next(times))[1])

    def call() -> None:
        clock[0] += 1.5

    race = choice.race([(call, call)], 60, 0.97, 1.05, 3 * (rounds + 1) + 1)
    assert (race.won, race.rounds, race.decided) == (False, rounds, decided)
    assert clock == [3 * (rounds + 1)]


def test_threads_sleep_while_products_are_measured() -> None:
    """libgomp's threads spin briefly where a process has more of them than there are cores."""
    before = set(threading.enumerate())
    with products._sleeping_threads():
        (second_pool,) = set(threading.enumerate()) - before
    assert not second_pool.is_alive()


def noisy(seed: int) -> Callable[[Any], float]:
    """Packed products take as long as others, and other programs add up to as much again."""
    random = np.random.default_rng(seed)
    return lambda _call: float(random.uniform(1, 2))


def test_two_starts_choose_the_same_whatever_else_the_machine_does(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = list[Any]()
    for seed in range(4):
        planted_times(monkeypatch, noisy(seed) if seed else lambda call: 1 if is_packed(call) else 2)
        starts.append(loaded())
        monkeypatch.setattr(products, "race", lambda *_: pytest.fail("measured again"))
    details = [engine.describe().details for engine in starts]
    assert len({str(each["choices"]) for each in details}) == 1
    assert len({str(each["kernels"]) for each in details}) == 1
    assert details[0]["products"] == details[1]["products"]
    np.testing.assert_array_equal(scores(starts[0], 3), scores(starts[-1], 3))


@pytest.mark.parametrize("faster", [False, True])
def test_a_second_start_executes_one_item_with_each_form(faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    planted_times(monkeypatch, lambda call: 1 if is_packed(call) is faster else 2)
    loaded()
    items, forward = list[int](), Tokens.forward

    def seen(module: Tokens, images: torch.Tensor) -> torch.Tensor:
        items.append(len(images))
        return forward(module, images)

    monkeypatch.setattr(Tokens, "forward", seen)
    details = loaded().describe().details
    assert ("relative_error_to_fp32" in details) is faster
    assert items == ([1, 1] if faster else [1])


def test_an_axis_has_its_default_size_where_products_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    planted_times(monkeypatch, lambda call: 1 if is_packed(call) else 2)
    own = replace(
        specification(),
        inputs=(TensorSpec("images", "FP32", (-1, -1, 3)),),
        outputs=(TensorSpec("scores", "FP32", (-1, -1, 5)),),
        axes=(Axis("length", 12, 24, places={"images": 1, "scores": 1}),),
        load_module=lambda _: nn.Sequential(nn.Linear(3, 5)).eval().requires_grad_(False),
    )
    engine = TorchEngine(own, EngineSettings("torch", mode="tuned", device="cpu", threads=1), RandomWeights(0))
    engine.load()
    measured: Any = engine.describe().details["products"]
    assert measured[0]["product"].endswith("12 and 48 rows")


def test_a_stored_choice_with_wrong_answers_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    planted_times(monkeypatch, lambda call: 1 if is_packed(call) else 2)
    right = loaded().describe().details
    monkeypatch.setattr(products, "packed_linear", wrong(1.1))
    engine = loaded()
    assert "untuned: with" in str(engine.describe().details["kernels"])
    assert engine.describe().details["choices"] != right["choices"]
    np.testing.assert_array_equal(scores(engine, 2), scores(loaded("eager"), 2))


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"key": 0, "choice": {}}', None])
def test_a_damaged_choice_is_made_again_in_one_sentence(
    content: bytes | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    planted_times(monkeypatch, lambda call: 1 if is_packed(call) else 2)
    first = loaded().describe().details
    assert "choice_trouble" not in first
    (path,) = (tmp_path / "plans").glob("*.json")
    stored = orjson.loads(path.read_bytes())
    path.write_bytes(orjson.dumps({**stored, "choice": {"sizes": [3]}}) if content is None else content)
    again = loaded().describe().details
    assert str(path) in str(again["choice_trouble"])
    assert again["choices"] == first["choices"]
    assert orjson.loads(path.read_bytes()) == stored
    assert "choice_trouble" not in loaded().describe().details


def test_what_a_busy_machine_could_not_decide_is_soon_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    planted_times(monkeypatch, lambda call: 1 if is_packed(call) else 2)
    with monkeypatch.context() as patched:
        patched.setattr(products, "MOST_SECONDS", 0)
        engine = loaded()
    undecided = engine.describe().details["choices"]
    assert len(cast("list[Any]", engine.describe().details["products"])) == 1, "the first one ends the choosing"
    np.testing.assert_array_equal(scores(engine, 2), scores(loaded("eager"), 2))
    assert loaded().describe().details["choices"] == undecided
    monkeypatch.setattr(choice, "time", lambda: time.time() + choice.UNDECIDED_SECONDS + 1)
    decided = loaded().describe().details
    assert decided["choices"] != undecided
    assert "choice_trouble" not in decided
    monkeypatch.setattr(products, "race", lambda *_: pytest.fail("measured again"))
    assert loaded().describe().details["choices"] == decided["choices"]


def test_a_choice_that_cannot_be_stored_is_made_and_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(PLANS_FOLDER, str(tmp_path / "file"))
    planted_times(monkeypatch, lambda call: 1 if is_packed(call) else 2)
    details = loaded().describe().details
    assert "7 of 7" in str(details["kernels"])
    assert PLANS_FOLDER in str(details["choice_trouble"])


def test_two_starts_at_once_choose_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one waits for the first, which chooses what the second would not."""
    measuring, going_on, measured = threading.Event(), threading.Event(), list[int]()

    def race_of_one(*_arguments: object) -> choice.Race:
        measured.append(threading.get_ident())
        measuring.set()
        assert going_on.wait(60)
        return choice.Race(measured[0] == threading.get_ident(), [2.0, 2.0], [1.0, 1.0], 6)

    monkeypatch.setattr(products, "race", race_of_one)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(loaded)
        assert measuring.wait(60)
        second = threads.submit(loaded)
        with monkeypatch.context() as patched:
            waits = threading.Event()
            patched.setattr(choice, "sleep", lambda _seconds: waits.set())
            assert waits.wait(60)
            going_on.set()
            details = [start.result().describe().details for start in (first, second)]
    assert len(set(measured)) == 1
    assert details[0]["choices"] == details[1]["choices"]


def test_few_convolutions_are_left_alone() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(4 * 9, 2000)).eval().requires_grad_(False)
    with products.noted_shapes(module) as shapes:
        module(torch.zeros(1, 3, 4, 4))
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
