"""The models of open_clip, torchvision, timm and transformers against the libraries themselves, with random weights."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from servers.models.images import decode_jpeg, normalise, resize_and_crop
from servers.models.items import jpeg_paths
from servers.models.modules import fill_zero_weights, hollow, load_strictly, measure_size
from servers.models.registry import UnknownModelError, get_base, get_specification, known_references, payload_variants
from servers.models.specification import ModelSpecification
from servers.models.weights import (
    CheckpointWeights,
    PretrainedWeights,
    RandomWeights,
    WeightsError,
    parse_weights,
    pin,
)

if TYPE_CHECKING:
    import open_clip
    import timm
    import torchvision
    import transformers

SMALL = ("torchvision:resnet18", "timm:vit_tiny_patch16_224", "timm:resnet18", "timm:vit_small_patch16_224.dino")


@pytest.fixture(autouse=True, scope="module")
def libraries() -> None:
    """Imported by the one worker that executes these tests, not by each one that collects them."""
    global open_clip, timm, torchvision, transformers
    import open_clip
    import timm
    import torchvision
    import transformers


def answers(module: torch.nn.Module, *given: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return module(*given)


def arguments(specification: ModelSpecification, lengths: list[int], seed: int = 0) -> list[torch.Tensor]:
    assert specification.make_items is not None
    return [torch.from_numpy(array) for array in specification.make_items(seed, lengths).values()]


@pytest.mark.parametrize("reference", SMALL)
def test_an_image_model_is_the_librarys_own(reference: str) -> None:
    specification = get_specification(reference)
    module = specification.load_module(RandomWeights(3))
    library, _, name = reference.partition(":")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        own: Any = timm.create_model(name) if library == "timm" else torchvision.models.get_model(name)
    weights = module.state_dict()
    # Layers that the library leaves at zero are drawn, and norms have the scale of their inputs.
    drawn = {key: value for key, value in own.state_dict().items() if value.any() and not key.endswith("running_var")}
    assert all(torch.equal(weights[key], value) for key, value in drawn.items())
    own.load_state_dict(weights)
    images = torch.randn(2, *specification.inputs[0].item_shape, generator=torch.Generator().manual_seed(1))
    answer = answers(module, images)
    assert answer.shape[1:] == specification.outputs[0].item_shape
    torch.testing.assert_close(answer, answers(own.eval(), images), rtol=0, atol=0)
    assert [variant.payload for variant in payload_variants(specification)] == ["fp32", "uint8", "jpeg"]


@pytest.mark.parametrize("name", ["efficientnet_b0", "mobilenet_v3_large", "shufflenet_v2_x1_0", "inception_v3"])
def test_random_norms_leave_answers_that_halves_hold_and_that_differ(name: str) -> None:
    """As initialised the first two answer less than 1e-9, the others the same to every image."""
    specification = get_specification(f"torchvision:{name}")
    images = torch.randn(2, *specification.inputs[0].item_shape, generator=torch.Generator().manual_seed(1))
    images[1] = torch.nn.functional.avg_pool2d(images[1], 9, 1, 4) * 9
    answer = answers(specification.load_module(RandomWeights(0)), images)
    assert 0.01 < float(answer.square().mean().sqrt()) < 100
    assert float((answer[0] - answer[1]).norm()) > 0.02 * float(answer[1].norm())


def test_random_norms_do_not_depend_on_the_threads() -> None:
    specification, threads = get_specification("torchvision:resnet18"), torch.get_num_threads()
    states = []
    for count in (1, 2):
        torch.set_num_threads(count)
        try:
            states.append(specification.load_module(RandomWeights(0)).state_dict())
        finally:
            torch.set_num_threads(threads)
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_a_model_without_a_classifier_answers_with_an_embedding() -> None:
    specification = get_specification("timm:vit_small_patch16_224.dino")
    assert (specification.outputs[0].name, specification.outputs[0].shape) == ("embedding", (-1, 384))
    assert specification.kinds == {"embedding": "embedding"}
    assert specification.default_weights == "dino"
    assert get_specification("timm:resnet18").kinds == {"logits": "logits"}


@pytest.mark.parametrize(
    "reference",
    [
        "torchvision:resnet50",
        "torchvision:vit_b_16.IMAGENET1K_SWAG_E2E_V1",
        "timm:resnet18",
        "timm:vit_base_patch16_siglip_224",
    ],
)
@pytest.mark.parametrize("path", [jpeg_paths()[3], jpeg_paths()[9]], ids=lambda path: path.stem)
def test_preprocessing_is_the_librarys_own(reference: str, path: Path) -> None:
    preprocessing = get_specification(reference).preprocessing
    library, _, name = reference.partition(":")
    transform: Any
    if library == "timm":
        config = timm.data.resolve_data_config(timm.get_pretrained_cfg(name).to_dict())
        transform = timm.data.create_transform(**config)
    else:
        architecture, _, tag = name.partition(".")
        weights = torchvision.models.get_model_weights(architecture)
        transform = (weights[tag] if tag else weights.DEFAULT).transforms()
    data = path.read_bytes()
    ours = normalise(resize_and_crop(decode_jpeg(data), preprocessing)[np.newaxis], preprocessing)[0]
    theirs = transform(Image.open(io.BytesIO(data)).convert("RGB")).numpy()
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("step", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_every_architecture_and_tag_of_open_clip_has_a_specification(step: int) -> None:
    for architecture in open_clip.list_models()[::step]:
        specification = get_specification(f"open_clip:{architecture}")
        assert specification.outputs[0].shape == (-1, open_clip.get_model_config(architecture)["embed_dim"])
    for architecture, tag in open_clip.list_pretrained()[::step]:
        config = open_clip.get_pretrained_cfg(architecture, tag)
        assert config["resize_mode"] in ("shortest", "squash")
        found = get_specification(f"open_clip:{architecture}.{tag}").preprocessing
        assert (found.mean, found.interpolation) == (tuple(config["mean"]), config["interpolation"])


@pytest.mark.parametrize("architecture", ["RN50", "ViT-S-16-alt"])
def test_another_architecture_of_open_clip_is_its_own_visual(architecture: str) -> None:
    specification = get_specification(f"open_clip:{architecture}")
    module = specification.load_module(RandomWeights(0))
    with torch.device("meta"):
        own: Any = open_clip.CLIP(**open_clip.get_model_config(architecture)).eval().visual
    own.load_state_dict(module.state_dict(), assign=True)
    images = torch.randn(1, *specification.inputs[0].item_shape, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(answers(module, images), answers(own, images), rtol=0, atol=0)
    assert specification.fused_tower is (architecture != "RN50")


@pytest.mark.parametrize("reference", [*SMALL[:2], "open_clip:RN50"])
def test_a_checkpoint_gives_its_own_answers_and_must_fit(reference: str, tmp_path: Path) -> None:
    specification = get_specification(reference)
    path = tmp_path / "mine.pt"
    state = specification.load_module(RandomWeights(5)).state_dict()
    torch.save(state, path)
    source = pin(parse_weights(str(path)), specification.find_pretrained)
    loaded = specification.load_module(source).state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in state.items())
    first = next(iter(state))
    torch.save({key: value for key, value in state.items() if key != first}, path)
    with pytest.raises(WeightsError, match=f"lacks 1 tensors, {first}"):
        specification.load_module(CheckpointWeights(path))
    with pytest.raises(WeightsError, match="but the pin requires"):
        specification.load_module(source)


class Shared(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight


class Table(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("table", torch.arange(2.0), persistent=False)


class PlainTable(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.tables = {"rows": [torch.arange(2.0)]}


class ReadsValue(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.rate = torch.full((1,), 0.5).item()  # transformers replaces torch.linspace


@pytest.mark.parametrize("kind", [Shared, Table, PlainTable, ReadsValue, partial(torch.nn.BatchNorm1d, 2)])
def test_only_a_module_whose_tensors_are_all_in_its_weights_is_built_without_memory(kind: Any) -> None:
    state = torch.get_rng_state()
    module: Any = hollow(kind)
    assert any(value.is_meta for value in module.state_dict().values()) is isinstance(module, torch.nn.BatchNorm1d)
    assert torch.equal(torch.get_rng_state(), state)
    if kind in (Table, PlainTable):
        held = module.table if kind is Table else module.tables["rows"][0]
        assert torch.equal(held, torch.arange(2.0))


def test_weights_in_another_type_and_order_are_those_that_a_copy_would_have() -> None:
    own = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    state = {
        name: value.double() if value.is_floating_point() else value.int() for name, value in own.state_dict().items()
    }
    state["0.weight"] = state["0.weight"].T.contiguous().T
    module = load_strictly(
        hollow(lambda: torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))), state, "", ""
    )
    for (name, value), expected in zip(module.state_dict().items(), own.state_dict().values(), strict=True):
        assert (value.dtype, value.stride()) == (expected.dtype, expected.stride()), name
        assert torch.equal(value, expected)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_weights_stay_as_they_were_when_their_file_is_written_again(suffix: str, tmp_path: Path) -> None:
    specification, path = get_specification("torchvision:resnet18"), tmp_path / f"weights{suffix}"
    state = specification.load_module(RandomWeights(0)).state_dict()
    save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)
    module = specification.load_module(CheckpointWeights(path))
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.write(b"\xff" * size)
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())


def test_a_layer_is_drawn_only_if_all_its_weights_are_zero() -> None:
    some, none = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    with torch.no_grad():
        some.weight.zero_()[7, 7] = 1
        none.weight.zero_()
    before = some.weight.clone()
    fill_zero_weights(torch.nn.Sequential(some, none))
    assert torch.equal(some.weight, before)
    assert none.weight.any()


def test_a_tag_with_another_preprocessing_is_refused_with_the_model_that_has_it() -> None:
    for reference, tag in (
        ("torchvision:resnet50", "IMAGENET1K_V1"),
        ("timm:vit_base_patch16_224", "augreg_in1k"),
        ("open_clip:ViT-L-14", "laion2b_s32b_b82k"),
    ):
        specification = get_specification(reference)
        assert tag in specification.pretrained_tags()
        assert specification.find_pretrained is not None
        if get_specification(f"{reference}.{tag}").image == specification.image:
            continue
        with pytest.raises(WeightsError, match=f"another preprocessing; use --model {reference}.{tag}"):
            specification.find_pretrained(PretrainedWeights(tag))


def test_a_tag_of_torchvision_is_loaded_from_torchs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    specification = get_specification("torchvision:resnet18")
    state = specification.load_module(RandomWeights(2)).state_dict()
    (tmp_path / "checkpoints").mkdir()
    torch.save(state, tmp_path / "checkpoints/resnet18-f37072fd.pth")
    source = pin(parse_weights("IMAGENET1K_V1"), specification.find_pretrained)
    assert isinstance(source, PretrainedWeights)
    assert source.sha256
    assert torch.equal(specification.load_module(source).state_dict()["fc.weight"], state["fc.weight"])
    with pytest.raises(WeightsError, match="torchvision has no such tag for resnet18; did you mean IMAGENET1K_V1"):
        specification.load_module(PretrainedWeights("IMAGENET1K_V9"))


@pytest.mark.parametrize("reference", ["timm:vit_tiny_patch16_224", "transformers:distilbert-base-uncased"])
def test_a_tag_is_loaded_from_the_hubs_cache(reference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from safetensors.torch import save_file

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    specification = get_specification(reference)
    tag = specification.pretrained_tags()[0]
    with pytest.raises(WeightsError, match=f"--weights {tag}: the download failed"):
        specification.load_module(PretrainedWeights(tag))
    repository = "distilbert--distilbert-base-uncased" if tag == "pretrained" else f"timm--vit_tiny_patch16_224.{tag}"
    commit = "a" * 40
    folder = tmp_path / f"models--{repository}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text(commit)
    (folder / "snapshots" / commit).mkdir(parents=True)
    module = specification.load_module(RandomWeights(4))
    state = {key.removeprefix("model."): value for key, value in module.state_dict().items()}
    save_file(state, folder / "snapshots" / commit / "model.safetensors")
    source = pin(PretrainedWeights(tag), specification.find_pretrained)
    assert isinstance(source, PretrainedWeights)
    assert source.revision == commit
    loaded = specification.load_module(source).state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in module.state_dict().items())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder and a classifier of two layers, as transformers saves them, and what it saves besides."""
    root = tmp_path_factory.mktemp("hf")
    small: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    config = transformers.BertConfig(**small, vocab_size=200)
    transformers.BertForMaskedLM(config).save_pretrained(root / "Tiny-BERT")
    config.num_labels = 3
    transformers.BertForSequenceClassification(config).save_pretrained(root / "classifier")
    transformers.RobertaConfig(**small, vocab_size=200, type_vocab_size=1).save_pretrained(root / "roberta")
    transformers.T5Config().save_pretrained(root / "t5")
    return root


def test_a_folder_of_transformers_is_served_with_its_own_weights(folders: Path) -> None:
    encoder, classifier = get_base(str(folders / "Tiny-BERT")), get_base(f"transformers:{folders / 'classifier'}")
    assert (encoder.name, encoder.label, encoder.outputs[0].shape) == ("tiny_bert", "Tiny-BERT", (-1, -1, 32))
    assert (classifier.outputs[0].shape, dict(classifier.kinds)) == ((-1, 3), {"logits": "logits"})
    for specification, kind in (
        (encoder, transformers.AutoModel),
        (classifier, transformers.AutoModelForSequenceClassification),
    ):
        own: Any = kind.from_pretrained(specification.reference).eval()
        weights = pin(parse_weights(specification.default_weights), None)
        assert weights.label.startswith("checkpoint model.safetensors, SHA-256 ")
        given = arguments(specification, [4, 7])
        names = [tensor.name for tensor in specification.inputs]
        assert names == ["input_ids", "attention_mask", "token_type_ids"]
        with torch.inference_mode():
            expected = own(**dict(zip(names, given, strict=True)))[0]
        torch.testing.assert_close(answers(specification.load_module(weights), *given), expected, rtol=0, atol=1e-6)
    with pytest.raises(WeightsError, match=r"not the weights of classifier: it lacks .* tensors, bert\.pooler"):
        classifier.load_module(parse_weights(encoder.default_weights))


def test_a_folder_of_links_to_blobs_is_served_with_its_weights(folders: Path, tmp_path: Path) -> None:
    """As Hugging Face's cache holds a model: the files' names and endings are those of the links."""
    (tmp_path / "snapshot").mkdir()
    for number, file in enumerate(sorted((folders / "Tiny-BERT").iterdir())):
        (tmp_path / f"blob{number}").write_bytes(file.read_bytes())
        (tmp_path / "snapshot" / file.name).symlink_to(f"../blob{number}")
    (tmp_path / "latest").symlink_to("snapshot")
    for name in ("snapshot", "latest", "snapshot/config.json"):
        specification = get_base(str(tmp_path / name))
        weights = pin(parse_weights(specification.default_weights), None)
        assert weights.label.startswith("checkpoint model.safetensors, SHA-256 ")
        specification.load_module(weights)


def test_padding_does_not_change_the_answers_of_real_tokens(folders: Path) -> None:
    for name in ("Tiny-BERT", "roberta"):
        specification = get_base(str(folders / name))
        module = specification.load_module(RandomWeights(0))
        given = arguments(specification, [5, 9])
        alone = answers(module, *(tensor[:1, :5] for tensor in given))
        torch.testing.assert_close(answers(module, *given)[:1, :5], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_an_encoder_can_be_exported_and_traced_for_any_size(folders: Path) -> None:
    specification = get_base(str(folders / "Tiny-BERT"))
    module = specification.load_module(RandomWeights(0))
    given, other = arguments(specification, [5, 9]), arguments(specification, [3, 7, 11], seed=1)
    sizes = tuple({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC} for _ in given)
    exported = torch.export.export(module, tuple(given), dynamic_shapes=sizes).module()
    traced: Any = torch.jit.trace(module, tuple(given), check_trace=False)
    for form in (exported, traced):
        torch.testing.assert_close(answers(form, *other), answers(module, *other), rtol=1e-5, atol=1e-5)


def test_positions_that_count_from_the_padding_token_leave_fewer_tokens(folders: Path) -> None:
    specification = get_base(str(folders / "roberta"))
    (axis,) = specification.axes
    assert axis.largest == 512 - 2
    assert [tensor.name for tensor in specification.inputs] == ["input_ids", "attention_mask"]
    assert axis.padding["input_ids"] == 1
    assert specification.default_weights == "random:0"
    module = specification.load_module(RandomWeights(0))
    assert answers(module, *arguments(specification, [axis.largest])).shape == (1, axis.largest, 32)
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        answers(module, *arguments(specification, [axis.largest + 1]))


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("transformers:bert", "did you mean transformers:bert-base-uncased or transformers:bert-large-uncased"),
        ("transformers:org/model", "download the model with: hf download org/model"),
        ("torchvision:resnet51", "did you mean torchvision:resnet50 or .*List all names with: abserve models torch"),
        ("torchvision:resnet50.IMAGENET1K_V3", "torchvision:resnet50 has no weights .*; did you mean IMAGENET1K_V"),
        ("timm:resnet18.no_tag", "timm:resnet18 has no weights 'no_tag'; use one of: "),
        ("open_clip:ViT-B-16.opena", "open_clip:ViT-B-16 has no weights .*; did you mean openai"),
        ("open_clip:ViT-B-33", "did you mean open_clip:ViT-B-32"),
        ("open_clip:xyz", "unknown model 'open_clip:xyz'; list all names with: abserve models open_clip$"),
        ("vit_base", "did you mean timm:vit_base_patch16_224"),
        ("nosuch", "unknown model 'nosuch'; list all names with: abserve models$"),
    ],
)
def test_an_unknown_name_gets_the_closest(reference: str, message: str) -> None:
    with pytest.raises(UnknownModelError, match=message):
        get_specification(reference)


def test_a_model_that_is_neither_encoder_nor_classifier_is_refused(folders: Path) -> None:
    with pytest.raises(UnknownModelError, match="a t5 model is not an encoder of text or a sequence classifier"):
        get_base(str(folders / "t5"))


def test_counted_operations_are_those_that_the_libraries_publish(folders: Path) -> None:
    resnet = get_base("torchvision:resnet18")
    assert measure_size(resnet)[0] == 11_689_512
    assert resnet.flops_per_item == measure_size(resnet)[1] == pytest.approx(2 * 1.814e9, rel=1e-3)
    assert measure_size(get_base("timm:resnet18"))[1] == pytest.approx(resnet.flops_per_item, rel=0.01)
    tokens, hidden, inner = 128, 32, 64
    layer = 2 * tokens * (4 * hidden**2 + 2 * hidden * inner) + 2 * 2 * tokens**2 * hidden
    _, flops = measure_size(get_base(str(folders / "Tiny-BERT")))
    assert flops == 2 * layer + 2 * hidden**2  # and the pooler


def test_well_known_names_are_cheap_to_describe() -> None:
    for reference in known_references():
        specification = get_base(reference)
        assert specification.reference == reference
        assert specification.default_weights == "random:0"


def test_random_weights_leave_no_layer_at_zero() -> None:
    """torchvision starts the head of its vision transformers at zero, so every answer would be zero."""
    specification = get_specification("torchvision:vit_b_32")
    module = specification.load_module(RandomWeights(0))
    weights = {name: value for name, value in module.named_parameters() if name.endswith("weight")}
    assert all(value.any() for value in weights.values())
    one, other = answers(module, torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0)))
    assert not torch.allclose(one, other)


OWN_CODE = """
open({marker!r}, "w")
from transformers import PretrainedConfig
class Own(PretrainedConfig):
    model_type = "own"
"""


@pytest.mark.parametrize(
    "given", ["", *(pytest.param(name, marks=pytest.mark.slow) for name in ("config.json", "other.json"))]
)
@pytest.mark.parametrize("kind", ["own", None])
def test_code_in_a_models_folder_is_never_executed_and_never_asked_about(
    tmp_path: Path, given: str, kind: str | None
) -> None:
    folder, marker = tmp_path / "own", tmp_path / "EXECUTED"
    folder.mkdir()
    config = {"auto_map": {"AutoConfig": "own.Own", "AutoModel": "own.Own"}, "vocab_size": 9, "hidden_size": 8}
    for name in ("config.json", "other.json"):
        (folder / name).write_text(json.dumps(config | ({"model_type": kind} if kind else {})))
    (folder / "own.py").write_text(OWN_CODE.format(marker=str(marker)))
    done = subprocess.run(
        [sys.executable, "-m", "loadgen.entry", "models", str(folder / given)],
        input="y\n", capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "needs code of its own (auto_map in " in done.stderr
    assert "[y/N]" not in done.stdout + done.stderr
    assert not marker.exists()


def test_a_known_type_needs_no_code_though_its_folder_names_some(tmp_path: Path) -> None:
    config = transformers.DistilBertConfig(vocab_size=30, dim=8, n_heads=2, n_layers=1, hidden_dim=8)
    (tmp_path / "config.json").write_text(json.dumps({**config.to_dict(), "auto_map": {"AutoConfig": "own.Own"}}))
    assert [one.name for one in get_specification(str(tmp_path)).inputs] == ["input_ids", "attention_mask"]


DECODERS: dict[str, dict[str, object]] = {
    "gpt2": {"vocab_size": 99, "n_embd": 32, "n_layer": 1, "n_head": 2, "eos_token_id": 7},
    "llama": {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
              "intermediate_size": 64, "eos_token_id": [5, 7]},
}  # fmt: skip


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("pad", [None, -1, 99])
def test_a_classifier_of_the_last_token_needs_a_padding_token(tmp_path: Path, kind: str, pad: int | None) -> None:
    architecture = {"gpt2": "GPT2", "llama": "Llama"}[kind] + "ForSequenceClassification"
    config: dict[str, object] = {
        "model_type": kind,
        "architectures": [architecture],
        **DECODERS[kind],
        "pad_token_id": pad,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    example = {"gpt2": '"pad_token_id": 7 into', "llama": '"pad_token_id": ID into'}[kind]
    with pytest.raises(UnknownModelError, match=example):
        get_base(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({**config, "pad_token_id": 7}))
    specification = get_base(str(tmp_path))
    module = specification.load_module(RandomWeights(0))
    assert answers(module, *arguments(specification, [4, 9])).shape == (2, 2)
    encoder = tmp_path / "encoder.json"
    encoder.write_text(json.dumps({**config, "architectures": [], "pad_token_id": None}))
    assert [tensor.name for tensor in get_base(str(encoder)).outputs] == ["last_hidden_state"]
