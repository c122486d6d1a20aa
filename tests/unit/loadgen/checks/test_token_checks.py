"""Every check of streamed answers can fail, and takes the verdict from what it covers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from loadgen.checks.registry import CHECKS
from loadgen.findings.tokens import deficit_limit, share_found, wrong_answers
from loadgen.measure.token_answers import JudgedTokens
from loadgen.records.checks import Check
from loadgen.records.machine import Calibration, TokenCeiling
from loadgen.records.probes import CacheProbe, TokensCompared
from loadgen.records.targets import Kind
from loadgen.records.tokens import CUT, ECHO, ECHO_DIFFERS
from loadgen.verdict.result import Result, analyse
from tests.language_runs import LanguagePlan, TokenArm, write_language_run

Edit = Callable[[Path], None]
SOUND = TokenArm()


def plan(b: TokenArm = SOUND, **changes: object) -> LanguagePlan:
    return replace(LanguagePlan(arms=(SOUND, b), users=(1, 4), pairs=4), **changes)  # type: ignore[arg-type]


def judged(result: Result, name: str) -> Check:
    named = [made for made in result.checks if made.name == name]
    return min(named, key=lambda made: (made.ok is not False, made.ok is not None))


def edit_answers(directory: Path, **changes: int) -> None:
    """Change every answer of B."""
    for path in sorted((directory / "blocks").glob("*.json")):
        block = json.loads(path.read_text())
        if block["label"] == "b":
            stored = directory / block["samples"].replace(".npy", ".answers.npy")
            answers = np.load(stored)
            for name, value in changes.items():
                answers[name] = value
            content = stored.read_bytes()
            stored.write_bytes(content[: len(content) - answers.nbytes] + answers.tobytes())


def in_effect(directory: Path, **settings: object) -> None:
    """Change settings of B."""
    path = directory / "arms.json"
    arms = json.loads(path.read_text())
    arms[1]["in_effect"] |= settings
    path.write_text(json.dumps(arms))


def one_answer(directory: Path) -> None:
    path = directory / TokensCompared.FILE
    records = json.loads(path.read_text())
    for record in records:
        for answer in record["answers"]:
            answer["digest"] = "same" if record["label"] == "b" else answer["digest"]
    path.write_text(json.dumps(records))


def remembers(directory: Path) -> None:
    probes = [
        {"label": label, "fresh_ns": [50_000_000] * 12, "repeated_ns": [repeated] * 48}
        for label, repeated in (("a", 50_000_001), ("b", 9_000_000))
    ]
    (directory / CacheProbe.FILE).write_text(json.dumps(probes))


def counts_more(directory: Path) -> None:
    """Somebody else asked B, too."""
    for path in (directory / "blocks").glob("*.json"):
        block = json.loads(path.read_text())
        if block["label"] == "b":
            block["stages"]["requests"] += 20
            path.write_text(json.dumps(block))


def lacks_time(directory: Path) -> None:
    path = directory / "experiment.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"minutes": 5.0, "left_out": ["concurrent(16)"]}))


def asked(directory: Path, **body: object) -> None:
    """Edit the request of B: these fields differ from the usual ones."""
    path = directory / "experiment.json"
    content = json.loads(path.read_text())
    content["arms"][1]["body"] = body
    path.write_text(json.dumps(content))


def renamed(directory: Path) -> None:
    asked(directory, max_tokens=None, max_completion_tokens="{output_tokens}", cache_salt=None)


def probed(directory: Path, equal: int, firsts: int) -> None:
    """Add what the probe found: so many equal first tokens of B."""
    path = directory / TokensCompared.FILE
    found = TokensCompared(workload="probe", label="b", restart=0, answers=(), firsts=firsts, equal_firsts=equal)
    path.write_bytes(msgspec.json.encode([*json.loads(path.read_text()), found]))


def probed_at_any_temperature(directory: Path) -> None:
    probed(directory, 0, 20)
    asked(directory, temperature=None)


FAULTS: list[tuple[str, str, str, Edit | None, LanguagePlan]] = [
    ("time_for_all", "warns", "concurrent(16) is left out", lacks_time, plan()),
    ("answer_lengths", "invalidates", "of Triton are too short", None, plan(TokenArm(short_share=0.05))),
    ("request_errors", "invalidates", "60 tokens instead of 64", None, plan(TokenArm(short_share=0.05))),
    ("finish_reasons", "warns", "have no end", lambda d: edit_answers(d, flags=1 | CUT), plan()),
    ("prompts_received", "invalidates", "part of it", lambda d: edit_answers(d, prompt_tokens=16), plan()),
    ("prompts_received", "invalidates", "of Triton", lambda d: edit_answers(d, flags=ECHO | ECHO_DIFFERS | 1), plan()),
    ("token_counts", "invalidates", "usage of", None, plan(TokenArm(usage=0.5))),
    ("tokens_agree", "invalidates", "of 64 answers of Triton have wrong tokens", None, plan(TokenArm(wrong_share=0.2))),
    ("tokens_agree", "invalidates", "min_tokens", None, plan(TokenArm(wrong_share=0.2, masks_ends=True))),
    ("answers_depend_on_prompts", "invalidates", "Triton gives the same answer", one_answer, plan()),
    ("distinct_tokens", "invalidates", "of Triton most tokens are repeats", None, plan(TokenArm(distinct=0.1))),
    ("cached_prompts", "invalidates", "prompt tokens of Triton came from a cache", None, plan(TokenArm(cached=16))),
    ("repeated_requests", "invalidates", "so Triton answers from a cache", remembers, plan()),
    ("chunk_sizes", "warns", "native 1.00, Triton 3.76", None, plan(TokenArm(chunk=4))),
    ("events_read", "warns", "of the events of Triton", None, plan(TokenArm(coalesced=0.3))),
    ("tokens_held_back", "warns", "of the answers of Triton", None, plan(TokenArm(first_chunk=64))),
    ("tokens_held_back", "warns", "100 % of the answers of Triton", None, plan(TokenArm(coalesced=1.0))),
    ("hidden_tokens", "warns", "tokens of Triton", None, plan(TokenArm(hidden=3))),
    ("text_per_token", "invalidates", "native 4.00, Triton 2.00", None, plan(TokenArm(text=2.0))),
    ("text_per_token", "warns", "native 4.00, Triton 3.50", None, plan(TokenArm(text=3.5))),
    ("stalled_answers", "warns", "of Triton stalled", None, plan(TokenArm(stall_share=0.01))),
    ("same_speculation", "invalidates", "Triton ngram", lambda d: in_effect(d, speculative="ngram"), plan()),
    ("same_slots", "warns", "native 16, Triton 4", lambda d: in_effect(d, slots=4), plan()),
    ("same_max_length", "warns", "native 128, Triton 4096", lambda d: in_effect(d, max_length=4096), plan()),
    ("same_protocol", "warns", "Triton generate_stream", None, plan(TokenArm(transport="generate_stream"))),
    (
        "same_first_tokens",
        "invalidates",
        "0 of 16 answers of Triton begin as those of native",
        lambda d: probed(d, 0, 16),
        plan(),
    ),
    ("same_first_tokens", "invalidates", "1 of 20 answers of Triton", lambda d: probed(d, 1, 20), plan()),
    ("same_first_tokens", "warns", "2 of 20 answers of Triton", lambda d: probed(d, 2, 20), plan()),
    ("same_first_tokens", "warns", "0 of 15 answers of Triton", lambda d: probed(d, 0, 15), plan()),
    ("same_first_tokens", "warns", "9 of 20 answers of Triton", lambda d: probed(d, 9, 20), plan()),
    ("same_first_tokens", "warns", "0 of 20 answers of Triton", probed_at_any_temperature, plan()),
    (
        "same_request_fields",
        "warns",
        "Triton was asked without ignore_eos",
        lambda d: asked(d, ignore_eos=None),
        plan(),
    ),
    ("same_request_fields", "warns", "Triton was asked with top_k=1", lambda d: asked(d, top_k=1), plan()),
    (
        "same_request_fields",
        "informs",
        "without max_tokens, cache_salt and with max_completion_tokens",
        renamed,
        plan(),
    ),
    ("server_counts", "warns", "Triton: it counted", counts_more, plan()),
    ("generator_scheduled", "invalidates", "waited for a core for 40 %", lambda d: slow_client(d, waited=0.4), plan()),
    ("generator_cpu_per_token", "warns", "µs of CPU per token", lambda d: slow_client(d, core=0.4), plan()),
]


def slow_client(directory: Path, waited: float = 0.0, core: float = 0.0) -> None:
    """Edit every block: the load generator waited for, and used, such shares of a core."""
    for path in (directory / "blocks").glob("*.json"):
        block = json.loads(path.read_text())
        window_ns = block["window_end_ns"] - block["window_start_ns"]
        changes = {"generator_cpu_ns": int(core * window_ns), "generator_waited_ns": int(waited * window_ns)}
        path.write_text(json.dumps(block | changes))


def test_a_dear_token_is_harmless_while_a_core_is_nearly_idle(tmp_path: Path) -> None:
    write_language_run(tmp_path, plan())
    slow_client(tmp_path, core=0.2)
    cost = judged(analyse(tmp_path), "generator_cpu_per_token")
    assert cost.ok
    assert isinstance(cost.value, float)
    assert cost.value > 15.0
    assert "20 % of a core" in cost.detail


def test_the_cost_of_a_token_counts_those_of_the_cool_down(tmp_path: Path) -> None:
    """The CPU time of a block includes them."""
    write_language_run(tmp_path, plan())
    slow_client(tmp_path, core=0.2)
    before = judged(analyse(tmp_path), "generator_cpu_per_token").value
    for path in (tmp_path / "blocks").glob("*.json"):
        block = json.loads(path.read_text())
        path.write_text(json.dumps(block | {"cool_down_tokens": 64 * block["requests"]}))
    after = judged(analyse(tmp_path), "generator_cpu_per_token").value
    assert isinstance(before, float)
    assert after == pytest.approx(before / 2)


def test_a_sound_run_is_valid(tmp_path: Path) -> None:
    result = analyse(write_language_run(tmp_path, plan()))
    assert result.valid
    language = {name for name, definition in CHECKS.items() if definition.of is Kind.TOKENS}
    assert {made.name for made in result.checks if made.name in language and made.ok is not True} == set()
    others = {name for name, definition in CHECKS.items() if definition.of is Kind.TENSORS}
    assert not others & {made.name for made in result.checks}


@pytest.mark.parametrize(
    ("name", "severity", "words", "edit", "planted"), FAULTS, ids=[f"{f[0]}-{n}" for n, f in enumerate(FAULTS)]
)
def test_a_planted_fault_fails_its_check(
    tmp_path: Path, name: str, severity: str, words: str, edit: Edit | None, planted: LanguagePlan
) -> None:
    write_language_run(tmp_path, planted)
    if edit:
        edit(tmp_path)
    result = analyse(tmp_path)
    failed = judged(result, name)
    assert failed.ok is False
    assert failed.severity == severity
    assert words in failed.detail
    assert failed.remedy
    assert len(set(result.verdict.caveats)) == len(result.verdict.caveats)
    if severity == "invalidates":
        assert not result.valid
        assert {made.verdict for made in result.comparisons} == {"invalid"}


@pytest.mark.parametrize(
    ("ceiling", "ok", "severity"), [(1e6, True, "warns"), (1600.0, False, "warns"), (900.0, False, "invalidates")]
)
def test_a_generator_that_could_not_receive_more_takes_the_verdict(
    tmp_path: Path, ceiling: float, ok: bool, severity: str
) -> None:
    """A sends about 1,090 chunks a second to 16 users."""
    write_language_run(tmp_path, plan(users=(16,)))
    tokens = TokenCeiling(
        transport="completions", concurrency=16, measured_tokens_per_s=ceiling, cpu_us_per_token=1e6 / ceiling,
        tokens_per_s=ceiling,
    )  # fmt: skip
    calibration = Calibration(
        fingerprint="", made_at="", command="", host={}, packages={}, sink_processes=1, seconds=1.0, workloads=(),
        tokens=(tokens,),
    )  # fmt: skip
    (tmp_path / Calibration.FILE).write_bytes(msgspec.json.encode(calibration))
    result = analyse(tmp_path)
    made = judged(result, "generator_ceiling")
    assert (made.ok, made.severity) == (ok, severity)
    assert "chunks/s" in made.detail
    assert result.valid == (severity == "warns")


def test_every_check_of_tokens_has_a_fault_above() -> None:
    language = {name for name, definition in CHECKS.items() if definition.of is Kind.TOKENS}
    assert language <= {fault[0] for fault in FAULTS}


def test_without_a_reference_the_run_is_not_called_wrong_but_the_check_says_so(tmp_path: Path) -> None:
    """A model that abserve does not know has none; where there should be one, its absence takes the verdict."""
    write_language_run(tmp_path, plan(checked=False))
    result = analyse(tmp_path)
    assert (judged(result, "tokens_agree").ok, result.valid) == (None, True)
    write_language_run(tmp_path, plan())
    path = tmp_path / TokensCompared.FILE
    records = json.loads(path.read_text())
    path.write_text(json.dumps([record for record in records if record["label"] == "a"]))
    result = analyse(tmp_path)
    assert judged(result, "tokens_agree").detail == "no answers of Triton were compared"
    assert not result.valid
    path.write_text(json.dumps([{**record, "answers": [], "error": "out of memory"} for record in records]))
    assert judged(analyse(tmp_path), "tokens_agree").detail == "out of memory"


def test_what_would_be_found_is_of_the_arms_that_a_load_has(tmp_path: Path) -> None:
    write_language_run(tmp_path, plan())
    detail = judged(analyse(tmp_path), "tokens_agree").detail
    experiment = json.loads((tmp_path / "experiment.json").read_text())
    experiment["arms"].append(experiment["arms"][0] | {"label": "c"})
    for workload in experiment["workloads"]:
        workload["arms"] = ["a", "b"]
    (tmp_path / "experiment.json").write_text(json.dumps(experiment))
    assert judged(analyse(tmp_path), "tokens_agree").detail == detail


def compared(deficit: float, precision: str = "fp32", noise: float = 0.0, largest: float = 12.0) -> TokensCompared:
    judged = JudgedTokens(deficits=(0.0, deficit), best=(5, 7), largest=largest)
    answer = judged.beside([5, 6], (0,), block="block 0", request=0, user=0)
    return TokensCompared(
        workload="single", label="b", restart=0, answers=(answer,), precision=precision, noise=noise
    )  # fmt: skip


@pytest.mark.parametrize(
    ("record", "is_wrong"),
    [
        (compared(6.8e-6), False),
        (compared(0.003), True),
        (compared(0.19, "bf16"), False),
        (compared(9.8, "bf16"), True),
        (compared(0.6, "fp32", noise=0.2), False),
        (compared(0.9, "fp32", noise=0.2), True),
        (compared(float("inf"), "bf16"), True),
        (compared(float("nan"), "bf16"), True),
    ],
)
def test_the_limit_follows_precision_and_the_reference_itself(record: TokensCompared, is_wrong: bool) -> None:
    assert bool(wrong_answers(record)) is is_wrong
    assert deficit_limit(record, 12.0) >= 4 * (record.noise or 0.0)


def test_a_reference_that_judged_fewer_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="judged 1 of 2 tokens"):
        JudgedTokens(deficits=(0.0,), best=(5,)).beside([5, 6], (0,), block="block 0", request=0, user=0)


def test_the_power_of_a_sample_is_known() -> None:
    """What 64 checked answers find with 95 % is one wrong answer in 22."""
    assert share_found(64) == pytest.approx(1 / 22, rel=0.03)
    assert 1.0 - (1.0 - share_found(64)) ** 64 == pytest.approx(0.95)
    assert share_found(0) == 1.0
