"""The generator's process, driven by its messages against a fake server."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

from loadgen.client.endpoint import Endpoint
from loadgen.client.generator import GeneratorProcess
from loadgen.client.messages import BlockOutcome, GeneratorError, Open
from tests.integration.loadgen.conftest import FAULTY_GENERATOR, await_true, fake_servers, prepared


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GeneratorProcess]:
    """One for all tests that leave it usable."""
    process = GeneratorProcess(tmp_path_factory.mktemp("generator") / "generator.log")
    yield process
    process.stop()


@pytest.fixture(scope="module")
def url(generator: GeneratorProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that takes 50 ms, for which bodies of 1 and 4 images are prepared."""
    with fake_servers() as start:
        yield prepared(generator, tmp_path_factory.mktemp("bodies"), start("--delay-ms", "50"))


def block(
    generator: GeneratorProcess,
    url: str,
    path: Path | None,
    *,
    batch_size: int = 1,
    concurrency: int = 1,
    requests: int,
) -> BlockOutcome:
    command = Open(
        url=url,
        batch_size=batch_size,
        concurrency=concurrency,
        requests=requests,
        seconds=0,
        max_seconds=20,
        timeout_s=10,
        samples_path=None if path is None else str(path),
    )
    generator.open(command)
    return generator.go(command)


def test_users_start_together_and_share_the_requests(
    generator: GeneratorProcess, tmp_path: Path, fake_url: Callable[..., str]
) -> None:
    """The server takes 400 ms, in which eight users start on a busy machine, too."""
    url = prepared(generator, tmp_path, fake_url("--delay-ms", "400"))
    outcome = block(generator, url, tmp_path / "0000.npy", concurrency=8, requests=24)
    samples = np.load(tmp_path / "0000.npy")
    assert len(samples) == outcome.requests == 24
    starts = np.sort(samples["send_ns"])[:8]
    assert outcome.window_start_ns <= starts.min()
    assert starts.max() < samples["first_byte_ns"].min(), "the last user started after the first one had its answer"
    assert (np.bincount(samples["user"]) >= 2).all()
    assert outcome.window_end_ns >= samples["end_ns"].max(), "the cool-down is part of the window"
    assert 0 < outcome.cool_down <= 8 * 3, "while the last counted requests are under way the others go on"
    assert outcome.cool_down_ns > outcome.cool_down * 400e6
    serial_ns = (samples["end_ns"] - samples["send_ns"]).sum()
    assert outcome.window_end_ns - outcome.window_start_ns < serial_ns / 4, "the users waited for each other"
    assert 0 < outcome.cpu_ns < outcome.window_end_ns - outcome.window_start_ns


def test_a_warm_up_stores_nothing(generator: GeneratorProcess, url: str, tmp_path: Path) -> None:
    outcome = block(generator, url, None, batch_size=4, requests=3)
    assert (outcome.requests, outcome.errors) == (3, 0)
    assert not list(tmp_path.glob("*.npy*"))


def test_the_settling_request_is_in_no_sample(generator: GeneratorProcess, url: str, tmp_path: Path) -> None:
    before = Endpoint(url).statistics("openclip_vit_b32")
    block(generator, url, tmp_path / "0000.npy", requests=3)
    after = Endpoint(url).statistics("openclip_vit_b32")
    assert before is not None
    assert after is not None
    assert after["inference_count"] - before["inference_count"] == 3 + 1
    assert len(np.load(tmp_path / "0000.npy")) == 3


def test_many_users_of_a_slow_model_settle_in_turn(
    generator: GeneratorProcess, tmp_path: Path, fake_url: Callable[..., str]
) -> None:
    """64 connections of an open loop to a model that takes 100 ms per request. All of them at once would wait for
    6.4 s, which is beyond the time limit of a request, though the rate is not beyond the model."""
    url = prepared(generator, tmp_path, fake_url("--delay-ms", "100", "--slots", "1"))
    command = Open(
        url=url, batch_size=1, concurrency=64, requests=5, seconds=0.5, max_seconds=20, timeout_s=2,
        arrivals="constant", rate_per_s=5.0, samples_path=str(tmp_path / "0000.npy"),
    )  # fmt: skip
    generator.open(command)
    outcome = generator.go(command)
    assert (outcome.requests, outcome.errors, outcome.cut_reason) == (5, 0, None)
    assert outcome.first_answer_ns is not None
    assert 100e6 < outcome.first_answer_ns < 2e9, "without the wait for the turn"


def test_a_model_that_stops_answering_while_users_settle_is_named(
    generator: GeneratorProcess, tmp_path: Path, fake_url: Callable[..., str]
) -> None:
    """Every user could connect, so the message is not about connecting."""
    url = prepared(generator, tmp_path, fake_url("--delay-ms", "1500"))
    command = Open(url=url, batch_size=1, concurrency=3, requests=5, seconds=0, max_seconds=20, timeout_s=1)
    with pytest.raises(GeneratorError, match=r"^no complete response within 1 s$"):
        generator.open(command)


@pytest.fixture
def impatient_generator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GeneratorProcess]:
    """One whose limits for connecting and settling are short."""
    patch = "import loadgen.client.messages as m; m.CONNECT_SECONDS = 0.5; m.SETTLING_FACTOR = 0.5"
    program = f"{patch}; import runpy; runpy.run_module('loadgen.client.worker', run_name='__main__')"
    with monkeypatch.context() as patched:
        patched.setattr("loadgen.client.generator.OWN_MODULE", (sys.executable, "-c", program))
        process = GeneratorProcess(tmp_path / "generator.log")
    yield process
    process.stop()


def test_a_block_is_refused_when_connections_or_first_answers_take_too_long(
    impatient_generator: GeneratorProcess, tmp_path: Path, fake_url: Callable[..., str]
) -> None:
    """Each with its own words and limit: both used to be "only 1 of 8 users could connect" after 30 s."""
    url = prepared(impatient_generator, tmp_path, fake_url("--delay-ms", "300", "--slots", "1"))
    command = Open(url=url, batch_size=1, concurrency=8, requests=5, seconds=0, max_seconds=20, timeout_s=20)
    with pytest.raises(
        GeneratorError, match=r"only [2-7] of 8 users had a first answer, where one .* alone took 0\.\d"
    ):
        impatient_generator.open(command)
    with socket.create_server(("127.0.0.1", 0), backlog=1) as full:  # nobody accepts
        elsewhere = f"http://127.0.0.1:{full.getsockname()[1]}"
        with pytest.raises(GeneratorError, match=r"after 0\.5 s only [1-7] of 8 users could connect"):
            impatient_generator.open(msgspec.structs.replace(command, url=elsewhere))


def test_refusals_leave_it_usable(generator: GeneratorProcess, url: str, unused_url: str, tmp_path: Path) -> None:
    with pytest.raises(GeneratorError, match="no bodies of batch size 7"):
        block(generator, url, None, batch_size=7, requests=1)
    with pytest.raises(GeneratorError, match="Connection refused"):
        block(generator, unused_url, tmp_path / "0000.npy", requests=1)
    assert not list(tmp_path.glob("*.npy*"))
    assert block(generator, url, tmp_path / "0001.npy", requests=1).requests == 1


def test_many_blocks_do_not_make_it_grow(generator: GeneratorProcess, url: str, tmp_path: Path) -> None:
    child = next(p for p in psutil.Process().children() if "loadgen.client.worker" in p.cmdline())

    def rounds(count: int) -> None:
        for number in range(count):
            block(generator, url, tmp_path / f"{number:04d}.npy", concurrency=4, requests=4)

    rounds(5)
    before = child.memory_info().rss
    descriptors = child.num_fds()
    rounds(15)
    assert child.memory_info().rss - before < 15e6
    assert child.num_fds() <= descriptors + 2


@pytest.mark.parametrize("rate_per_s", [None, 50.0])
def test_too_few_descriptors_refuse_a_block_and_leave_nothing_behind(
    generator: GeneratorProcess, url: str, tmp_path: Path, rate_per_s: float | None
) -> None:
    """Whichever descriptor is the one too many: that of the timer came last, and left the users alive."""
    child = next(p for p in psutil.Process().children() if "loadgen.client.worker" in p.cmdline())
    command = Open(
        url=url, batch_size=1, concurrency=4, requests=8, seconds=0, max_seconds=20, timeout_s=10,
        samples_path=str(tmp_path / "0000.npy"), rate_per_s=rate_per_s,
        arrivals="closed" if rate_per_s is None else "constant",
    )  # fmt: skip
    block(generator, url, None, requests=1)  # with what is opened once for all blocks
    before = _, most = child.rlimit(psutil.RLIMIT_NOFILE)
    held, refused, outcome = child.num_fds(), [], None
    for spare in range(-4, 12):
        child.rlimit(psutil.RLIMIT_NOFILE, (held + spare, most))
        try:
            generator.open(command)
            outcome = generator.go(command)
            break
        except GeneratorError as exc:
            refused.append(str(exc))
        await_true(lambda: not child.net_connections(), "the users' connections are closed")
        assert not list(tmp_path.glob("*.npy*"))
        assert child.num_fds() <= held
    child.rlimit(psutil.RLIMIT_NOFILE, before)
    assert outcome is not None
    assert outcome.requests == 8
    assert any("cannot keep time" in reason and "ulimit -n" in reason for reason in refused)
    assert all("oo many open files" in reason for reason in refused)


def test_files_in_the_current_folder_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("locust", "msgspec", "code", "inputs"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    monkeypatch.chdir(tmp_path)
    process = GeneratorProcess(tmp_path / "generator.log")
    try:
        with pytest.raises(GeneratorError, match="no bodies of batch size 1"):
            block(process, "http://127.0.0.1:1", None, requests=1)
    finally:
        process.stop()


def test_an_error_in_another_encoding_is_an_error_and_not_a_lost_request(
    generator: GeneratorProcess, tmp_path: Path, fake_url: Callable[..., str]
) -> None:
    url = prepared(generator, tmp_path, fake_url("--error-every", "5", "--latin1", "--good-first", "1"))
    outcome = block(generator, url, tmp_path / "0000.npy", requests=20)
    assert (outcome.requests, outcome.errors, outcome.cut_reason) == (20, 4, None)
    assert outcome.error_messages == ('HTTP 503: {"error": "zu sp\ufffdt"}',)
    assert len(np.load(tmp_path / "0000.npy")) == 20


def test_a_fault_of_the_generator_is_the_failure_of_its_request(
    tmp_path: Path, fake_url: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loadgen.client.generator.OWN_MODULE", FAULTY_GENERATOR)
    generator = GeneratorProcess(tmp_path / "generator.log")
    try:
        url = prepared(generator, tmp_path, fake_url())
        outcome = block(generator, url, tmp_path / "0000.npy", requests=20)
    finally:
        generator.stop()
    assert (outcome.requests, outcome.errors, outcome.cut_reason) == (20, 1, None)
    assert outcome.error_messages == ("the client could not read the answer: RuntimeError('ours')",)
