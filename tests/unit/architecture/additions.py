"""One toy of everything that may be added, as lines that a contributor would write, and a program that uses them all.

`ADDITIONS` has by what is added the lines per file: (the text after which they stand, the lines). The program adds them
to the files' texts as they are imported, and prints as JSON what became of each toy.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
END = ""
"""After the last line of a file."""
TOY_PROBE = ROOT / "tests/unit/loadgen/measure/probes/toy_probe.py"

ADDITIONS: Mapping[str, Mapping[str, Sequence[tuple[str, str]]]] = {
    "a metric that a report shows": {
        "loadgen/metrics/registry.py": [
            (
                END,
                'register(Metric("toy_time", "toy time", "ms", False, kind=Kind.TOKENS, of_requests=latencies_ms, '
                'heading=(9, "toy time, ms")))',
            )
        ]
    },
    "a check": {
        "loadgen/checks/run.py": [
            (
                END,
                '@check("the moon is not full", "The moon is full", "invalidates", "Wait for two weeks.")\n'
                "def moon(facts: Facts) -> Iterator[Judgement]:\n"
                '    yield Judgement(False, f"full over {len(facts.blocks)} blocks", 1.0, 0.9)',
            )
        ]
    },
    "a probe": {
        "loadgen/measure/probes/toy.py": [(END, TOY_PROBE.read_text())],
        "loadgen/findings/registry.py": [('        "best",\n', '        "toy",\n')],
    },
    "a section of a report": {
        "loadgen/report/sections/conditions.py": [
            (
                END,
                'def weather(_: Result) -> doc.Section:\n    return doc.Section("Weather", (doc.Text("Rain."),))',
            )
        ],
        "loadgen/report/contents.py": [('("Conditions", (', "conditions.weather, ")],
    },
    "a transport": {
        "loadgen/records/targets.py": [
            ('Literal["http", "grpc", "shm"', ', "pigeon"'),
            ('"shm": Route("shared memory", shares_memory=True),\n', '    "pigeon": Route("carrier pigeon"),\n'),
        ],
        "loadgen/client/transports.py": [
            (
                "WIRES: Mapping[Transport, Wire] = {",
                '"pigeon": Wire(prepare_body, _http_connection, _for_server),',
            )
        ],
    },
    "a transport of prompts": {
        "loadgen/records/targets.py": [
            ('Literal["completions", "generate_stream", "text", "chat"', ', "letter"'),
            (
                '"chat": Route("OpenAI\'s chat", Kind.TOKENS, is_text=True),\n',
                '    "letter": Route("letters", Kind.TOKENS, is_text=True),\n',
            ),
        ],
        "loadgen/client/generation.py": [
            (
                "PROMPT_FORMS: Mapping[TokenTransport, PromptForm] = {\n",
                '    "letter": PromptForm({"dear": ""}, b\'"\', lambda address, model: f"/{model}/letters"),\n',
            )
        ],
    },
    "a kind of arm": {
        "loadgen/records/targets.py": [
            ('"fastapi", "litserve", "vllm"', ', "toy"'),
            ("TARGETS: Mapping[str, Target] = {\n", '    "toy": Target("Toy", ("http",), (), ports=("http-port",)),\n'),
        ],
    },
    "a scenario": {
        "loadgen/records/scenarios.py": [
            ('"open", "traffic", "slo", "surface", ', '"burst", '),
            (
                "SCENARIOS: Mapping[Scenario, ScenarioEntry] = {",
                '"burst": ScenarioEntry(lambda _: "in a burst"),',
            ),
        ],
        "loadgen/experiment/plan.py": [
            (
                "LOADS: Mapping[Scenario, Callable[[ExperimentSettings, Workload, bool], list[Workload]]] = {",
                '"burst": lambda _, single, __: [msgspec.structs.replace(single, scenario="burst", concurrency=9)],',
            )
        ],
    },
}


class Added(SourceFileLoader):
    """Imports the modules of `ADDITIONS` with the lines that are added to them."""

    def __init__(self) -> None:
        self.lines: dict[str, list[tuple[str, str]]] = {}
        for files in ADDITIONS.values():
            for path, lines in files.items():
                self.lines.setdefault(path.removesuffix(".py").replace("/", "."), []).extend(lines)
        super().__init__("additions", __file__)

    def find_spec(self, name: str, _: object = None, __: ModuleType | None = None) -> ModuleSpec | None:
        path = str(ROOT / f"{name.replace('.', '/')}.py")
        return spec_from_file_location(name, path, loader=self) if name in self.lines else None

    def get_filename(self, name: str | None = None) -> str:
        return str(ROOT / f"{(name or '').replace('.', '/')}.py")

    def get_code(self, name: str) -> CodeType:
        path = Path(self.get_filename(name))
        text = path.read_text() if path.exists() else ""
        for place, lines in self.lines[name]:
            if place == END:
                text += f"\n\n{lines}\n"
            else:
                assert text.count(place) == 1, (name, place)
                text = text.replace(place, place + lines)
        return compile(text, str(path), "exec")


def rendered(directory: Path) -> str:
    """The report of a run."""
    from loadgen.report.contents import result_document
    from loadgen.report.renderers.markdown import render_markdown
    from loadgen.verdict.result import analyse

    return render_markdown(result_document(analyse(directory)))


def changed(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


PLANNER = """
import json, sys
print(json.dumps({"argv": sys.argv, "env": {}, "http_url": "http://127.0.0.1:1", "model": "m", "title": "Toy"}))
"""


def main(folder: Path) -> dict[str, Any]:
    """What became of every toy, by what is added."""
    import numpy as np

    from loadgen.client.connection import Address
    from loadgen.client.endpoint import Signature, TensorSignature
    from loadgen.client.generation import PROMPT_FORMS, prepare_prompts
    from loadgen.client.inputs import SampleInputs
    from loadgen.client.outputs import HEADER_LENGTH
    from loadgen.client.transports import InferenceTarget, prepare, read_answer
    from loadgen.experiment.language import token_workloads
    from loadgen.experiment.plan import PlanError, make_arms, make_workloads, plan_combinations
    from loadgen.experiment.prompts import PromptPlan, PromptShape
    from loadgen.experiment.settings import ExperimentSettings
    from loadgen.findings.registry import probes
    from loadgen.launch.embedded import EmbeddedDeployment
    from loadgen.measure.planning import check_reachable
    from loadgen.metrics.claims import place
    from loadgen.records.store import RunStore
    from loadgen.verdict.result import analyse
    from tests.golden.synthetic_run import Plan, write_run
    from tests.hostile_server import hostile_server
    from tests.language_runs import LanguagePlan, write_language_run

    settings = ExperimentSettings.model_validate
    burst = make_workloads(settings({"scenarios": "burst", "preset": "smoke"}))
    store = RunStore(folder / "run")
    run = write_run(store.directory, Plan(pairs=2, requests=40, workloads=burst))
    changed(run / "experiment.json", transport="pigeon")
    for path in (run / "blocks").glob("*.json"):
        changed(path, transport="pigeon")
    (toy_probe,) = (probe for probe in probes() if probe.finding is not None and probe.finding.STUDY == "temperature")
    toy_probe.measure(SimpleNamespace(enter=print_nothing, store=store))
    result, page = analyse(run), rendered(run)
    tokens = write_language_run(folder / "tokens", LanguagePlan(users=(1,), pairs=2, answers=4))
    changed(tokens / "experiment.json", transport="letter")
    page_of_tokens = rendered(tokens)

    arms = make_arms(settings({"arms": {"a": "native", "b": "toy"}}))
    refusal = ""
    try:
        check_reachable(arms[1], "grpc")
    except PlanError as exc:
        refusal = str(exc)
    server = EmbeddedDeployment("toy", {}, folder / "log", abserve=(sys.executable, "-c", PLANNER))
    server.check("m")

    signature = Signature("m", (TensorSignature("x", "FP32", (-1, 2)),), (TensorSignature("y", "FP32", (-1, 1)),))
    request = prepare("pigeon", SampleInputs({"x": np.zeros((1, 2), np.float32)}, "synthetic"), signature, [0])  # type: ignore[arg-type]
    with hostile_server() as http:
        described = {"name": "y", "datatype": "FP32", "shape": [1, 1], "parameters": {"binary_data_size": 4}}
        head, values = json.dumps({"outputs": [described]}).encode(), np.array([[7.0]], np.float32).tobytes()
        http.answers["/v2/models/m/infer"] = 200, {HEADER_LENGTH: str(len(head))}, head + values
        target = InferenceTarget("pigeon", http.url, "m")  # type: ignore[arg-type]
        connection = target.connection([request], timeout_s=60.0)
        try:
            outputs = read_answer(connection, connection.send(target.sendable(request)))
        finally:
            connection.close()
    letter: Any = "letter"
    prompts = prepare_prompts(letter, "m", PromptPlan(low=1, high=50, seed=0), PromptShape(4, 2), iter(range(9)))
    loads = token_workloads(settings({"model": "language:demo", "transport": "letter", "scenarios": "single"}))
    return {
        "a metric that a report shows": ["toy time, ms" in page_of_tokens],
        "a check": [
            [check.state for check in result.checks if check.name == "moon"],
            result.valid,
            "Wait for two weeks." in page,
        ],
        "a probe": [result.studies["temperature"].warm, "The room has 31 °C, too warm." in page],
        "a section of a report": ["Rain." in page],
        "a transport": [
            [combination.title for combination in plan_combinations((), settings({"transport": "pigeon"}))],
            float(outputs["y"][0, 0]),
            "over carrier pigeon" in page,
        ],
        "a transport of prompts": [
            [load.name for load in loads],
            json.loads(prompts.requests[0].body)["dear"] != "",
            PROMPT_FORMS[letter].path(Address("127.0.0.1", 1), "m"),
            "over letters" in page_of_tokens,
        ],
        "a kind of arm": [arms[1].embedded, refusal, server.model],
        "a scenario": [
            [load.name for load in burst],
            [summary.workload for summary in result.summaries if summary.label == "a"],
            place(burst[0]),
        ],
    }


def print_nothing(_: str) -> None:
    """The phase of a run that has no terminal."""


if __name__ == "__main__":
    sys.meta_path.insert(0, Added())
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]))))
