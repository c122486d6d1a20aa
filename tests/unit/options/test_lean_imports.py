"""What a start does not import: torch's compiler and SymPy take seconds, and no form of these models needs them."""

import json
import subprocess
import sys
import textwrap
from types import SimpleNamespace

from servers.models.sources.transformers import _import_class, specify
from servers.options.libraries import called_later, stand_ins

STEPS = """
import json, sys, torch
from pathlib import Path
from torch import nn
from servers.engines.torch.convolutions import fused_convolutions
from servers.models.modules import hollow
from servers.models.registry import get_specification
from servers.models.weights import RandomWeights
from servers.options.libraries import without_compiler

seen = {}

def note(step):
    seen[step] = [name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules]

class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.place = nn.Parameter(torch.randn(3))
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 1))

    def forward(self, images):
        return self.layers(images) + self.place.sum()

fused_convolutions(Images().eval(), [torch.ones(2, 3, 8, 8)])
note("convolutions")
assert hollow(Images).place.is_meta
note("hollow")

folder = Path(sys.argv[1])
sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=100)
(folder / "config.json").write_text(json.dumps({"model_type": "bert", **sizes}))
module = get_specification(f"transformers:{folder}").load_module(RandomWeights(0))
tokens = torch.ones(2, 8, dtype=torch.int64)
with torch.inference_mode():
    assert module(tokens, tokens).shape == (2, 8, 32)
note("encoder")
import transformers
seen["read"] = type(transformers.models) is not type(sys)  # another class lists the names of all models
assert transformers.models.gpt2.GPT2Config is transformers.GPT2Config

with without_compiler():
    later = torch.compiler.disable(lambda value: value + 1)
note("disabled")
assert later(1) == 2
seen["called"] = "torch._dynamo" in sys.modules
torch.compile(nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))
print(json.dumps(seen))
"""


def test_a_start_imports_neither_torchs_compiler_nor_sympy(tmp_path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(STEPS), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen.pop("called")
    assert not seen.pop("read")
    assert seen == {"convolutions": [], "hollow": [], "encoder": [], "disabled": []}


def test_a_stand_in_has_every_class_and_no_instances(tmp_path, monkeypatch) -> None:
    (tmp_path / "asks_whether.py").write_text("from made.up.sorts import Sort\nSORT = Sort(1, axis=2)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with stand_ins("made", "made.up", "made.up.sorts"):
        import asks_whether  # type: ignore[import-not-found]
    assert not isinstance(1, type(asks_whether.SORT))
    assert not [name for name in sys.modules if name.startswith("made")]


def test_a_library_whose_function_is_called_later_is_imported_then(tmp_path, monkeypatch) -> None:
    (tmp_path / "slow_library.py").write_text("def twice(value, *, more=0):\n    return 2 * value + more\n")
    (tmp_path / "takes_twice.py").write_text("from slow_library import twice\n")
    monkeypatch.syspath_prepend(tmp_path)
    with called_later("slow_library", "twice"), called_later("not_installed_at_all", "twice"):
        import takes_twice  # type: ignore[import-not-found]
    assert {"slow_library", "not_installed_at_all"}.isdisjoint(sys.modules)
    assert takes_twice.twice(3, more=1) == 7
    assert sys.modules.pop("slow_library").twice(3) == 6
    del sys.modules["takes_twice"]


def test_a_library_that_needs_more_than_stand_ins_gets_the_real_modules() -> None:
    asked: list[bool] = []

    class Mapping:
        def __getitem__(self, _: object) -> object:
            asked.append("torch.distributed.tensor" in sys.modules)
            sys.modules["transformers.half_imported"] = SimpleNamespace()  # type: ignore[assignment]
            if len(asked) == 1:
                raise TypeError("Shard() takes no arguments")
            return object

    _import_class(SimpleNamespace(_model_mapping=Mapping()), None)
    assert len(asked) == 2
    assert sys.modules.pop("transformers.half_imported", None) is not None


def test_a_transformers_that_asks_for_less_is_imported_all_the_same(monkeypatch) -> None:
    import transformers

    monkeypatch.delattr(transformers.utils, "is_torch_flex_attn_available")
    assert specify("bert-base-uncased") is not None
