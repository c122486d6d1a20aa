"""The headline: at most 32 words whatever the run, who leads by how much, in names; what does not fit is left out."""

from __future__ import annotations

import msgspec
import pytest

from loadgen.metrics.claims import rank
from loadgen.metrics.comparisons import Outcome
from loadgen.records.names import names_of
from loadgen.records.run import Access, ArmRequest
from loadgen.verdict.headline import MOST_WORDS, _claims, consequence, headline, word_count
from loadgen.verdict.result import Result, analyse
from tests.golden.synthetic_run import SimulatedArm, write_run
from tests.golden.test_golden_reports import PLANS
from tests.unit.loadgen.metrics.test_several_arms import compared


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    return {name: analyse(write_run(tmp_path_factory.mktemp(name), plan)) for name, plan in PLANS.items()}


def made(result: Result, cause: str = "") -> str:
    return headline(result.experiment, result.arms, result.comparisons, result.verdict.rankings, result.checks, cause)


def called(*arms: ArmRequest) -> list[str]:
    return list(names_of(arms, ()).values())


@pytest.mark.parametrize("name", PLANS)
def test_it_has_at_most_32_words_and_the_result_holds_it(results: dict[str, Result], name: str) -> None:
    result = results[name]
    assert 0 < word_count(result.headline) <= MOST_WORDS == 32
    assert result.headline.endswith(".")


def test_it_says_who_leads_by_how_much_and_where_the_other_does(results: dict[str, Result]) -> None:
    assert results["decided"].headline == (
        "Triton handles 1.47 times the load of PyTorch (native) with 16 users (1.35 to 1.60). "
        "It is ahead at 7 of 8 loads, PyTorch (native) at 1."
    )
    assert results["identical"].headline.startswith("No winner between PyTorch (native) and Triton: no meaningful")


@pytest.mark.parametrize(("beside_c", "ahead"), [("inconclusive", False), ("baseline_better", True)])
def test_of_several_servers_one_is_ahead_where_it_beats_all_of_them(
    results: dict[str, Result], beside_c: Outcome, ahead: bool
) -> None:
    """A beats B; C, whose figures vary, measured last and is not shown to be slower than A."""
    result = results["four-arms"]
    at_one = [
        compared("a", "b", 0.5, "baseline_better"), compared("a", "c", 0.4, beside_c),
        compared("b", "c", 0.8, "inconclusive"),
    ]  # fmt: skip
    loads = [load.name for load in result.experiment.workloads if load.has_blocks][:2]
    comparisons = [msgspec.structs.replace(each, workload=load) for load in loads for each in at_one]
    text = headline(result.experiment, result.arms, comparisons, rank(comparisons, lambda _: "a"), ())
    assert "2.00 times the load" in text
    assert ("ahead at both loads" in text) is ahead


@pytest.mark.parametrize(("beside_c", "said"), [("inconclusive", False), ("baseline_better", True)])
def test_an_arm_is_not_called_ahead_of_one_that_it_is_not_separated_from(beside_c: Outcome, said: bool) -> None:
    """B beats C, and A, whose figures vary, measured first."""
    first, second = compared("a", "b", 0.9, "inconclusive"), compared("a", "c", 0.5, beside_c)
    main = compared("b", "c", 0.55, "baseline_better")
    (ranking,) = rank([first, second, main], lambda _: "a")
    wordings = _claims(main, {label: label.upper() for label in "abc"}, "with 16 users", ranking)
    assert any("ahead, not separated" in wording for wording in wordings) is said
    assert all("B handles 1.82 times the load of C" in wording for wording in wordings)


def test_a_run_that_is_not_valid_says_so_before_it_names_a_leader(results: dict[str, Result]) -> None:
    assert results["killed"].headline.startswith("No verdict at 1 of 8 loads; otherwise Triton handles")
    assert results["no-parity"].headline.startswith("No verdict: ")
    assert "handles" not in results["no-parity"].headline
    assert [bool(results[name].verdict.consequence) for name in ("decided", "identical", "killed")] == [
        True, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "who"), [("other_processes", "because of the machine: "), ("request_errors", "because of Triton: ")]
)
def test_a_run_without_a_verdict_says_whose_fault_it_is(results: dict[str, Result], fault: str, who: str) -> None:
    result = results["no-parity"]
    checks = tuple(
        msgspec.structs.replace(check, name=fault, arms=("b",) if "Triton" in who else ())
        for check in result.checks
        if check.severity == "invalidates" and not check.ok
    )
    assert headline(result.experiment, result.arms, result.comparisons, result.verdict.rankings, checks).startswith(
        f"No verdict {who}"
    )


@pytest.mark.parametrize(
    ("cause", "kept"),
    [
        (", of which 5.1× is Triton's queue delay", ", of which 5.1× is Triton's queue delay"),
        (", with different precision (native FP32, Triton FP16)", ", with different precision"),
        (", with " + " and ".join(["different precision (native FP32, Triton FP16)"] * 7), ""),
    ],
)
def test_what_explains_the_lead_comes_before_what_other_workloads_show(
    results: dict[str, Result], cause: str, kept: str
) -> None:
    text = made(results["decided"], cause)
    assert word_count(text) <= MOST_WORDS
    assert kept in text
    assert text.startswith("Triton")
    assert "1.35 to 1.60" in text, "the interval stays"
    assert "PyTorch (native) at 1" in text or "PyTorch (native) is ahead at other loads" in text


def test_names_are_short_and_unlike_each_other() -> None:
    native = ArmRequest(label="a", target="native")
    fronts = ArmRequest(label="b", target="native", settings={"fronts": "4"})
    one = ArmRequest(label="a", target="native", settings={"fronts": "1"})
    assert called(native, ArmRequest(label="b", target="triton")) == ["native", "Triton"]
    assert called(one, fronts) == ["native with 1 front", "native with 4 fronts"]
    assert called(native, fronts) == ["native", "native with 4 fronts"]
    assert called(native, msgspec.structs.replace(native, label="b")) == ["native (A)", "native (B)"], "nothing differs"
    assert called(msgspec.structs.replace(native, label="old"), fronts) == ["old", "native"], "the user's own label"
    urls = [
        ArmRequest(label=label, target=f"https://me:secret@models.example:{port}/v2")
        for label, port in (("a", 1), ("b", 2))
    ]
    assert called(*urls) == ["models.example:1", "models.example:2"]
    versions = [
        msgspec.structs.replace(urls[0], label=label, access=Access(version=version)) for label, version in ("a1", "b2")
    ]
    assert called(*versions) == ["models.example:1 with version 1", "models.example:1 with version 2"]
    long = [msgspec.structs.replace(url, target=f"http://{'x' * 100}:{url.target[-4]}") for url in urls]
    assert len(set(called(*long))) == 2
    assert all(len(name) < 50 for name in called(*long))


def test_the_settings_of_a_server_tell_an_arm_from_its_defaults(results: dict[str, Result]) -> None:
    """An arm without the setting is called by the value that its server reports."""
    record = results["decided"].arms[0]
    asked = ArmRequest(label="b", target="native", settings={"max-batch-size": "8"})
    names = names_of([ArmRequest(label="a", target="native"), asked], [record])
    assert names == {"a": "native with max batch size 32", "b": "native with max batch size 8"}


def test_arms_of_one_server_are_told_apart_by_one_setting_where_one_suffices() -> None:
    onnx = {"tritonserver": "/opt/tritonserver", "backend": "onnxruntime", "batching": "dynamic", "instances": "1"}
    torch = {"tritonserver": "/opt/tritonserver", "backend": "python", "engine": "torch", "instances": "2"}
    asked = [ArmRequest(label=label, target="triton", settings=of) for label, of in (("b", onnx), ("c", torch))]
    assert called(*asked) == ["Triton with backend onnxruntime", "Triton with backend python"]


def test_an_arm_is_told_by_as_few_settings_as_tell_it_from_all_others() -> None:
    onnx = {"tritonserver": "t", "backend": "onnxruntime", "cudnn-conv-algo-search": "1", "batch-multiple": "1"}
    torch = {"tritonserver": "t", "engine": "torch"}
    asked = [onnx, torch, torch | {"instances": "1"}, torch | {"instances": "4"}]
    assert called(*(ArmRequest(label=f"c{place}", target="triton", settings=of) for place, of in enumerate(asked))) == [
        "Triton with backend onnxruntime",
        "Triton with engine torch",
        "Triton with engine torch and 1 instance",
        "Triton with engine torch and 4 instances",
    ]


def test_of_several_arms_it_gives_the_order_and_the_best_beside_the_next(results: dict[str, Result]) -> None:
    text = results["four-arms"].headline
    assert text.startswith(
        "Ranking with 16 users: Triton and native (C) (not separated), then native (A) and native (D)"
    )
    assert "Triton handles 1.46 times the load of native (A)" in text


def test_what_it_means_is_the_tail_and_the_servers_or_the_money(results: dict[str, Result]) -> None:
    result = results["decided"]
    shown = result.verdict.consequence
    assert " ms by PyTorch (native) and " in shown
    assert "1,000 images/s at this load take 10 servers with PyTorch (native) or 7 servers with Triton" in shown
    priced = msgspec.structs.replace(result.experiment, price=3.6)
    costs = consequence(priced, result.arms, result.comparisons, result.verdict.rankings)
    assert "a million images cost" in costs.lower()
    assert "servers" not in costs


def test_a_detail_that_is_too_long_is_not_the_headline(results: dict[str, Result]) -> None:
    result = results["no-parity"]
    long = tuple(
        msgspec.structs.replace(check, detail="word " * 60, title="title " * 60) if check.ok is not True else check
        for check in result.checks
    )
    text = made(msgspec.structs.replace(result, checks=long))
    assert text == "No verdict."


def test_no_winner_counts_what_is_equal_and_what_is_open(results: dict[str, Result]) -> None:
    assert made(results["identical"]).endswith("at 3 of 8 loads, inconclusive at 5.")
    assert SimulatedArm() == PLANS["identical"].a == PLANS["identical"].b


def test_what_is_decided_about_the_load_served_comes_before_a_leading_metric_without_a_winner(
    results: dict[str, Result],
) -> None:
    """Tokens per second were decided where TPOT leads, and the headline began with "No winner"."""
    result = results["identical"]
    decided = tuple(
        msgspec.structs.replace(c, metric="latency_p50", leading=True)
        if c.leading
        else msgspec.structs.replace(c, metric="throughput", higher_is_better=True, unit="images/s", ratio=1.06,
                                     ci95=(1.04, 1.08), verdict="arm_better")
        if (c.workload, c.metric) == ("concurrent(16)", "latency_p50")
        else c
        for c in result.comparisons
    )  # fmt: skip
    text = made(msgspec.structs.replace(result, comparisons=decided))
    assert text.startswith("Triton handles 1.06 times the load of PyTorch (native) with 16 users")
    against = tuple(
        msgspec.structs.replace(c, verdict="baseline_better", ratio=0.5, ci95=(0.4, 0.6), metric="throughput")
        if (c.workload, c.metric) == ("single", "latency_p90")
        else c
        for c in decided
    )
    assert made(msgspec.structs.replace(result, comparisons=against)).startswith("No winner")
