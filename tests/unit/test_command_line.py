"""The command line as a user meets it: help at 80 columns, and mistakes answered by one sentence with the remedy."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict
from itertools import chain
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner, Result

from loadgen.entry import EXAMPLES, GROUPS, build
from loadgen.experiment.settings import PANELS
from servers.commands.engine import _show as show
from servers.engines.agreement import Disagreement, OutputDifference
from servers.engines.interface import EngineDescription
from servers.engines.processors import nvidia_device_present
from servers.measuring.measurement import EngineTimes, Reference, batch_row
from servers.models.registry import get_variant

ROOT_COMMAND = typer.main.get_command(build())


def every_command(command=ROOT_COMMAND, words: tuple[str, ...] = ()):
    """Words and command of all that can be called, groups included."""
    yield words, command
    for name in getattr(command, "commands", {}):
        yield from every_command(command.get_command(None, name), (*words, name))


COMMANDS = dict(every_command())


def called(*arguments: object, columns: int = 80) -> Result:
    return CliRunner().invoke(build(), [str(argument) for argument in arguments], env={"COLUMNS": str(columns)})


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_fits_80_columns_and_cuts_nothing(words: tuple[str, ...]) -> None:
    has_all = any(one.name == "help_all" for one in COMMANDS[words].params)
    done = called(*words, "--help-all" if has_all else "--help")
    assert done.exit_code == 0
    assert max(map(len, done.output.splitlines())) <= 80
    shown = {word.rstrip(",") for word in done.output.split()}
    options = [option for one in COMMANDS[words].params if not getattr(one, "hidden", False) for option in one.opts]
    assert [option for option in options if option.startswith("--") and option not in shown] == []
    assert "…" not in done.output
    assert "..." not in done.output.replace("COMMAND [ARGS]...", "").replace("RUN...", "").replace("{RESULT}...", "")


def sections_of(help_text: str) -> dict[str, list[str]]:
    """The first words of the lines of each section, by its title."""
    sections: dict[str, list[str]] = {}
    for line in help_text.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            sections[line[:-1]] = []
        elif line.startswith("  ") and line[2] != " " and sections:
            list(sections.values())[-1].append(line.split()[0])
    return sections


def test_help_names_every_command_that_is_not_hidden_in_its_group() -> None:
    sections = sections_of(called("--help").output)
    assert list(sections) == ["Examples", "Options", *GROUPS]
    listed = [name for group in GROUPS for name in sections[group]]
    shown = [name for (name, *rest), command in list(COMMANDS.items())[1:] if not rest and not command.hidden]
    assert sorted(listed) == sorted(shown)
    assert {"compare": "Compare", "models": "Explore", "serve": "Serve", "doctor": "Machine"}.items() <= {
        name: group for group in GROUPS for name in sections[group]
    }.items()


def test_the_list_of_commands_says_what_each_says_of_itself() -> None:
    """Although it imports none of them."""
    text = " ".join(called("--help").output.split())
    for words, command in COMMANDS.items():
        if len(words) == 1 and not command.hidden:
            assert f" {words[0]} {' '.join(command.help.partition(chr(10) * 2)[0].split())}" in text


def test_the_examples_of_the_help_are_commands_that_exist() -> None:
    for example, _ in EXAMPLES:
        _, name, *options = example.split()
        known = {flag for parameter in COMMANDS[name,].params for flag in parameter.opts}
        assert {option for option in options if option.startswith("-")} <= known


def test_compare_shows_ten_options_and_names_the_way_to_the_rest() -> None:
    sections = sections_of(called("compare", "--help").output)
    assert list(sections) == ["Arguments", "Main options", "Other options"]
    assert len(sections["Main options"]) == 10
    assert sections["Other options"] == ["--help-all", "-h,"]
    everything = sections_of(called("compare", "--help-all").output)
    assert list(everything) == ["Arguments", *PANELS, "Other options"]
    assert everything["Main options"] == sections["Main options"]
    assert {"--fail-if", "--a-grpc", "--rates", "--junit", "--c"} <= set(chain(*everything.values()))


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (("comparee",), 2, "No such command 'comparee'. Did you mean 'compare'"),
        (
            ("compare", "--concurency", "4"),
            2,
            "No such option: --concurency. Did you mean --concurrency?",
        ),
        (("compare", "--modle", "x"), 2, "error: No such option: --modle. Did you mean --model?\n"),
        (("compare", "--a-modle", "x"), 2, "error: No such option: --a-modle. Did you mean --a-model or --model"),
        (("compare", "--g-insecur"), 2, "error: No such option: --g-insecur. Did you mean --g-insecure or"),
        (("compare", "--zzz"), 2, "error: No such option: --zzz\n"),
        (("--versoin",), 2, "error: No such option: --versoin. Did you mean --version?\n"),
        (("diff", "no-such-run", "other"), 2, "no-such-run does not exist; give a folder that"),
        (("engine", "--seconds", "-1"), 2, "error: --seconds -1.0: must be greater than or equal to 0.01"),
        (("engine", "--json", "/proc/none/x.json"), 2, "--json /proc/none/x.json: give the path of a file in a folder"),
        (("conformance", "http://[::1]:1", "--markdown", "/proc/none/x.md"), 2, "--markdown /proc/none/x.md: give"),
        (("export", "--precision", "fp8"), 2, "no file has the precision 'fp8'; use one of: fp32, fp16, int8"),
        (("export", "--payload", "jpeg"), 2, "export the payload uint8, which it executes"),
        (("triton-repo", "--out", "/proc/none"), 1, "error: cannot write /proc/none: "),
        (
            ("conformance", "--launch", "native", "--only", "35"),
            2,
            "1 to 34",
        ),
    ],
)
def test_a_mistake_is_answered_by_a_sentence(arguments: tuple[str, ...], status: int, sentence: str) -> None:
    done = called(*arguments, columns=300)
    assert done.exit_code == status
    assert sentence in done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("serve triton --engine tensorflow", "error: unknown engine 'tensorflow'; did you mean tensorrt?"),
        ("serve triton --device gpu", "error: unknown device 'gpu'; use auto, cpu or cuda:N"),
        ("serve triton --precision bf16", "error: the onnxruntime engine has no precision 'bf16'; did you mean"),
        ("serve triton --device cpu --precision tf32", "does not offer precision tf32 on cpu; use one of: fp32, fp16"),
        pytest.param(
            "serve triton --device cuda:0",
            "--device cpu or auto",
            marks=pytest.mark.skipif(nvidia_device_present(), reason="here is one"),
        ),
        ("gpu-exporter --host no-such-host.invalid", "choose another --port or --host"),
    ],
)
def test_so_is_one_of_a_server(arguments: str, sentence: str) -> None:
    """In a process of their own, since they take over signals and standard output."""
    done = subprocess.run(
        [sys.executable, "-m", "loadgen.entry", *arguments.split()],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 2
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


MISTAKES = [
    ("compare --concurency 4", "--concurrency"),
    ("compare --preset fulll", "--preset: unknown value fulll; did you mean full?"),
    ("compare --scenarios single,batchd", "--scenarios: unknown value batchd; did you mean batched?"),
    ("compare --transport gprc", "--transport: unknown value gprc; did you mean grpc?"),
    ("compare --payload unit8", "--payload: unknown value unit8; did you mean uint8?"),
    ("compare --a natve", "--a: unknown server natve; did you mean native, or give a URL"),
    ("compare --a-option max-queue-delay-us", "write it as KEY=VALUE"),
    ("compare --a-option http-port=8000", "abserve chooses free ports"),
    ("compare --rounds many", "--rounds many: must be a valid integer"),
    ("compare --minutes 3 --rounds 3", "give one of them"),
    ("compare --scenarios open", "--rates 20,50"),
    ("compare --transport shm --b http://192.0.2.1:8000", "use --transport http"),
    ("compare --junit no-such-folder/j.xml", "in a folder that exists"),
    ("compare --out file.yaml", "--out file.yaml is a file; give a folder"),
    ("compare --out /proc/none", "--out /proc/none: cannot write to /proc"),
    ("compare --out run", "--out run already holds a run; give another folder"),
    ("compare --best --out chosen", "--out chosen already holds a comparison with --best; give another folder, or"),
    ("compare --out tuned", "--out tuned already holds a tuning; give another folder, or continue it with --resume"),
    ("compare no-such.yaml", "no-such.yaml: No such file or directory; give the path of an experiment file"),
    ("compare file.yaml", "file.yaml: unknown key concurency; did you mean concurrency?"),
    ("compare --a native --b native --model openclip_vit_b23", "unknown model 'openclip_vit_b23'"),
    ("compare --a native --b native --weights missing.pt", "missing.pt: no such file"),
    ("compare --a native --b native --a-option engne=null", "No such option: --engne"),
    ("compare --a native --b native --a-option mode=graf", "no mode 'graf'; did you mean graph?"),
    ("compare --a native --b native --batch-sizes 64 --b-option max-batch-size=16", "it accepts at most 16"),
    ("compare --a http://127.0.0.1:1 --b native", "start it, or correct the URL"),
    ("noise-floor --b triton", "leave the other arms out"),
    ("report run --format htm", "no run|unreadable|cannot be read|is not"),
    ("diff old new", "old does not exist"),
    ("calibrate --transports htp", "--transports: unknown value htp; did you mean http?"),
    ("calibrate --batch-sizes 0", "give whole numbers from 1"),
]


@pytest.mark.parametrize(("line", "words"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_a_mistake_is_one_sentence_with_status_2_and_nothing_is_written(
    line: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.yaml").write_text("concurency: 3\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "experiment.json").write_text("{}")
    for folder, name in (("chosen", "best.json"), ("tuned", "tuning.json")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    done = called(*line.split(), columns=300)
    assert done.exit_code == 2, done.output
    sentences = [
        text for text in done.output.splitlines() if text and not text.startswith(("asking ", "checking ", "reading "))
    ]
    assert len(sentences) == 1, done.output
    assert any(one in sentences[0] for one in words.split("|")), done.output
    assert sorted(tmp_path.rglob("*")) == before


def test_a_null_engine_claims_no_floating_point_operations(capsys: pytest.CaptureFixture[str]) -> None:
    specification = get_variant("openclip_vit_b32", "fp32")
    wrong = Disagreement({"embedding": OutputDifference("embedding", 1.0, 1.0, 0.006)})
    times = EngineTimes(1, Reference({}, None, 8_800_000), wrong, 0, [2_000] * 662, None)
    engine = asdict(EngineDescription("null", "1", "fp32", "eager", "cpu", 1, 32, "none", {}))
    document = {"engine": engine, "matrix_product_tflops": None, "load_seconds": 0.0}
    show(Console(width=100), specification, document | {"batches": [batch_row(times, specification, None)]})
    row = next(line.split() for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["1"])
    assert row == ["1", "0.002", "0.002", "500,000"]
