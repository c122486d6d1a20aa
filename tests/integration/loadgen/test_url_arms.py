"""`abserve compare` on servers given by URL: TLS, headers whose values stay secret, versions."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from loadgen.entry import build
from loadgen.launch import deployment
from loadgen.measure import runner
from tests.certificates import Authority
from tests.integration.loadgen.conftest import FAKE, UNWATCHED_ABSERVE

pytestmark = pytest.mark.usefixtures("no_process_left")

LOCUSTFILE = Path(__file__).parents[3] / "loadgen" / "scenarios.py"
QUICK = ("--scenarios", "single", "--rounds", "2", "--no-gpu-control", "--model", "fake", "--inputs", "random")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    made = Authority(tmp_path_factory.mktemp("authority"))
    made.sign("server")
    return made


def refusal(*options: str) -> str:
    """What a comparison says that is refused before it runs, on one line."""
    done = CliRunner().invoke(build(), ["compare", *QUICK, *options], env={"COLUMNS": "200"})
    assert done.exit_code == 2, done.output
    return " ".join(done.output.split())


def here(url: str) -> str:
    """HOST:PORT of a URL."""
    return url.rpartition("/")[2]


def watched(out: Path, *options: str, **environment: str) -> tuple[int, str, str]:
    """A comparison with the arguments of all processes that it starts: its status, output, and the arguments."""
    command = [*UNWATCHED_ABSERVE, "compare", *QUICK, "--out", str(out), *options]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **environment}
    )
    arguments = set()
    while process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            try:
                arguments.add(" ".join(child.cmdline()))
                child.wait(0.01)
            except (psutil.NoSuchProcess, psutil.TimeoutExpired):
                continue
    arguments.discard(" ".join(command))  # of a child that has not yet executed its own program
    assert process.stdout is not None
    with process.stdout:
        return process.returncode, process.stdout.read(), "\n".join(arguments)


def test_a_run_over_tls_with_a_header_and_a_version_keeps_the_secrets(
    tmp_path: Path, authority: Authority, fake_url: Callable[..., str]
) -> None:
    """One value comes from a variable, the other from the command line; no file and no process may show either."""
    common = ("--model", "fake", "--tls", str(authority.folder / "server.pem"), "--client-ca", str(authority.file))
    first = fake_url(*common, "--version", "7", "--want-header", "authorization=bearer s3cret-of-a")
    second = fake_url(*common, "--want-header", "x-key=s3cret-of-b")
    client = str(authority.sign("client"))
    status, output, arguments = watched(
        tmp_path / "run",
        *("--a", first.replace("http:", "https:"), "--a-version", "7", "--a-header", "Authorization=Bearer $TOKEN_A"),
        *("--a-ca", str(authority.file), "--a-cert", client),
        *("--b", second.replace("http:", "https:"), "--b-header", "X-Key=s3cret-of-b", "--b-insecure"),
        *("--b-cert", client),
        TOKEN_A="s3cret-of-a",
    )  # fmt: skip
    assert status in (0, 1), output
    result = json.loads((tmp_path / "run/result.json").read_bytes())
    assert json.loads((tmp_path / "run/run.json").read_bytes())["state"] == "finished", output
    assert all(not json.loads(path.read_bytes())["errors"] for path in (tmp_path / "run/blocks").glob("*.json"))
    assert [words in output for words in ("connecting", "done", "starting the servers", "stopping the servers")] == [
        True, True, False, False,
    ]  # fmt: skip
    assert "loadgen.client.worker" in arguments
    assert "s3cret" not in arguments
    assert "s3cret" not in output
    kept = [path for path in (tmp_path / "run").rglob("*") if path.is_file() and b"s3cret" in path.read_bytes()]
    assert kept == []
    stored = json.loads((tmp_path / "run/experiment.json").read_bytes())
    assert [arm["access"]["header"] for arm in stored["arms"]] == [{"Authorization": "Bearer $TOKEN_A"}, {"X-Key": "…"}]
    checks = {check["name"]: check for check in result["checks"]}
    assert (checks["certificates"]["state"], checks["same_encryption"]["state"]) == ("failed", "passed")
    assert re.search(r"the certificate of \S+:\d+ was not verified", checks["certificates"]["detail"])


@pytest.mark.slow  # by default the run above keeps the secrets
def test_a_server_that_repeats_a_secret_does_not_get_it_stored(tmp_path: Path, fake_url: Callable[..., str]) -> None:
    url = fake_url("--model", "fake", "--error-every", "3", "--good-first", "160")
    header = ("--a-header", "Authorization=Bearer $TOKEN_A")
    _, output, _ = watched(tmp_path / "run", "--a", url, *header, "--b", url, TOKEN_A="s3cret-of-a")
    messages = [
        text
        for path in (tmp_path / "run/blocks").glob("*.json")
        for text in json.loads(path.read_bytes())["error_messages"]
    ]
    assert "HTTP 503: the queue is full for bearer …" in messages, output
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert [path for path in files if b"s3cret" in path.read_bytes()] == []
    assert "s3cret" not in output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--a-header", "s3cret"), "--a-header …: write it as KEY=VALUE, as in X-Team=search"),
        (("--a-header", "A=s3cret\r\nEvil: 1"), "header A holds a line break"),
        (("--a-header", "A=$NOT_SET_ANYWHERE"), "the variable NOT_SET_ANYWHERE for the header A is not set"),
        (("--a-header", "Transfer-Encoding=s3cret"), "Transfer-Encoding follows from the request"),
        (("--a-header", "Inference-Header-Content-Length=9"), "cannot be set"),
        (("--a-header", "A B=s3cret"), "a name with characters that HTTP does not allow"),
        (("--a-header", "A=s3cret", "--a-header", "a=s3cret"), "the header a is given twice"),
        (("--a-ca", "x.pem"), "--a-ca has no effect without TLS"),
        (("--a", "https://127.0.0.1:1", "--a-key", "x.pem"), "add --a-cert FILE"),
        (("--a", "https://127.0.0.1:1", "--a-ca", "none.pem"), "none.pem is not a file of CA certificates"),
        (("--a", "https://me:s3cret@127.0.0.1:1"), "send them with a header"),
        (("--a", "native", "--a-version", "2"), "--a-version has no effect on native"),
        (("--a-version", "../2"), "--a-version ../2"),
    ],
)
def test_options_that_cannot_work_are_refused_without_showing_a_value(options: tuple[str, ...], words: str) -> None:
    shown = refusal("--a", "http://127.0.0.1:1", "--b", "http://127.0.0.1:1", *options)
    assert words in shown
    assert "s3cret" not in shown
    assert "Traceback" not in shown


def test_a_server_that_is_not_what_its_url_says_is_refused_at_the_start(
    tmp_path: Path, authority: Authority, fake_url: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for user in (deployment, runner):
        monkeypatch.setattr(user, "RUNNING_READY_SECONDS", 0.5)  # all of them are ready or never will be
    authority.sign("old", expired=True)
    plain = fake_url("--model", "fake")
    expired = fake_url("--model", "fake", "--tls", str(authority.folder / "old.pem"))
    grpc = ("--transport", "grpc", "--b-grpc", here(plain))
    refusals = (
        (("--a", plain.replace("http:", "https:")), "if the server does not speak TLS, give its address with http://"),
        (("--a", expired), "it speaks TLS: give https://127.0.0.1:"),
        (("--a", expired.replace("http:", "https:")), "signed by an unknown authority"),
        (("--a", expired.replace("http:", "https:"), "--a-ca", str(authority.file)), "certificate has expired"),
        (("--a", plain, "--a-version", "3"), "version 3 of model fake is not ready"),
        (("--a", plain, *grpc, "--a-grpc", here(plain)), "does not speak gRPC"),
        (("--a", plain, *grpc, "--a-grpc", here(expired)), "it speaks TLS: give grpcs://127.0.0.1:"),
        (("--a", plain, *grpc, "--a-grpc", f"grpcs://{here(expired)}"), "signed by an unknown authority"),
    )
    for options, words in refusals:
        assert words in refusal("--b", plain, *options, "--out", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("served", "words"),
    [
        (("--model", "bert_onnx"), "serves bert_onnx, not bert; add --b-model bert_onnx"),
        (("--model", "resnet"), "serves resnet, not bert; add --b-model resnet"),
        (("--model", "resnet", "--also", "bert-v2"), "serves bert-v2, resnet, not bert; add --b-model bert-v2"),
        (
            ("--model", "resnet", "--also", "vit"),
            "serves resnet, vit, not bert; name one of them with --b-model",
        ),
        (("--model", "bert", "--startup-ms", "60000"), "is live, but model bert is not ready after 0.5 s"),
    ],
)
def test_a_server_without_the_model_names_what_it_serves(
    served: tuple[str, ...], words: str, fake_url: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for user in (deployment, runner):
        monkeypatch.setattr(user, "RUNNING_READY_SECONDS", 0.5)
    own, other = fake_url("--model", "bert"), fake_url(*served)
    assert words in refusal("--model", "bert", "--a", own, "--b", other)


def test_a_server_without_a_list_of_models_is_told_as_before(
    tmp_path: Path, fake_url: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for user in (deployment, runner):
        monkeypatch.setattr(user, "RUNNING_READY_SECONDS", 0.5)
    for number, (body, status) in enumerate([("", 404), ("{}", 200), ("[1]", 200), ('[{"name": "bert"}]', 200)]):
        lies = tmp_path / f"{number}.json"
        lies.write_text(json.dumps({"/v2/repository/index": [body, status, 0]}))
        url = fake_url("--model", "other", "--lies", str(lies))
        shown = refusal("--model", "bert", "--a", url, "--b", url)
        assert "model bert is not ready after 0.5 s; start it, or correct the URL or --a-model" in shown


def test_the_stored_experiment_asks_for_its_hidden_values_again(tmp_path: Path) -> None:
    command = [*UNWATCHED_ABSERVE, "compare", "--a", "http://127.0.0.1:1", "--b", "http://127.0.0.1:1"]
    printed = subprocess.run(
        [*command, "--a-header", "A=s3cret", "--b-header", "B=$TOKEN_A", "--print-experiment"],
        capture_output=True, text=True, check=True, env={**os.environ, "TOKEN_A": "s3cret"},
    ).stdout  # fmt: skip
    assert "s3cret" not in printed
    assert "B: $TOKEN_A" in printed
    file = tmp_path / "experiment.yaml"
    file.write_text(printed)
    again = subprocess.run(
        [*UNWATCHED_ABSERVE, "compare", str(file)], capture_output=True, text=True, check=False,
        env={**os.environ, "TOKEN_A": "s3cret"},
    )  # fmt: skip
    assert again.returncode == 2
    assert "the value of the header A was not stored; give it again" in " ".join(again.stderr.split())


def test_locust_takes_the_same_options(tmp_path: Path, authority: Authority, fake_url: Callable[..., str]) -> None:
    subprocess.run([sys.executable, str(FAKE), "samples", "--out", str(tmp_path / "images")], check=True)
    served = ("--tls", str(authority.folder / "server.pem"), "--version", "7", "--want-header", "x-key=s3cret")
    url = fake_url(*served).replace("http:", "https:")
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--host", url, "--headless", "--only-summary"]
    command += ["-u", "2", "-r", "2", "-t", "2s", "--samples-dir", str(tmp_path / "images")]
    command += ["--samples-out", str(tmp_path / "raw"), "--model-version", "7", "--ca", str(authority.file)]
    environment = {**os.environ, "KEY_OF_TEST": "s3cret"}
    done = subprocess.run(
        [*command, "--header", "X-Key=$KEY_OF_TEST"],
        capture_output=True, text=True, timeout=90, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "raw").glob("*.json")
    about = json.loads(path.read_bytes())
    assert (about["requests"] > 5, about["errors"]) == (True, 0)
    assert "s3cret" not in done.stdout + done.stderr + path.read_text()
    missing = subprocess.run(
        [*command, "--header", "X-Key=$NOT_SET_ANYWHERE"], capture_output=True, text=True, timeout=90, check=False
    )
    assert missing.returncode == 1
    assert "the variable NOT_SET_ANYWHERE for the header X-Key is not set" in missing.stderr
