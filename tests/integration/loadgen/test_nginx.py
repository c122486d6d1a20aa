"""Token streams behind a real nginx: what its buffers hide is not measured, and everything else is compared."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.integration.loadgen.conftest import await_true
from tests.integration.loadgen.test_language_run import compare, record
from tests.integration.native.conftest import free_port
from tests.toy_language_server import toy_process

NGINX = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
pytestmark = [
    pytest.mark.usefixtures("no_process_left"),
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed (apt-get install nginx)"),
]
CONFIGURATION = """\
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/1; proxy_temp_path {folder}/2; fastcgi_temp_path {folder}/3;
    uwsgi_temp_path {folder}/4; scgi_temp_path {folder}/5;
    server {{ listen 127.0.0.1:{on}; location / {{ proxy_pass {closing}; proxy_http_version 1.0; }} }}
    server {{ listen 127.0.0.1:{off}; location / {{ proxy_pass {url}; proxy_http_version 1.1; proxy_buffering off; }} }}
}}
"""
"""Over HTTP/1.1 nginx passes on each chunk of its upstream's chunked coding at once, whether or not it buffers."""
PACED = "--first-ms 20 --step-ms 8"
"""So slow that a busy machine still reads the tokens one by one."""


@pytest.fixture
def urls(tmp_path: Path) -> Iterator[tuple[str, str, str]]:
    """A planted server, an equal one behind an nginx that buffers, and the first behind one that does not."""
    assert NGINX is not None
    on, off = free_port(), free_port()
    configuration = tmp_path / "nginx.conf"
    with toy_process(PACED) as url, toy_process(f"{PACED} --framing close") as closing:
        configuration.write_text(CONFIGURATION.format(folder=tmp_path, url=url, closing=closing, on=on, off=off))
        command = [NGINX, "-p", str(tmp_path), "-e", "stderr", "-c", str(configuration)]
        with (tmp_path / "nginx.log").open("wb") as log, subprocess.Popen(command, stderr=log) as proxy:
            try:
                await_true(lambda: _listens(on) and _listens(off), "nginx listens")
                yield url, f"http://127.0.0.1:{on}", f"http://127.0.0.1:{off}"
            finally:
                proxy.kill()


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def test_tokens_that_a_proxy_holds_back_have_no_times(tmp_path: Path, urls: tuple[str, str, str]) -> None:
    """nginx passes an answer of 32 tokens on in a few pieces, each as large as its buffers."""
    straight, buffered, unbuffered = urls
    out = tmp_path / "run"
    arms = ("--a", straight, "--b", buffered, "--c", unbuffered)
    status, output = compare(out, *arms, "--scenarios", "single", "--output-tokens", "32")
    result = record(out, "result.json")
    assert result["state"]["state"] == "finished", (status, output)
    assert [workload["output_tokens"] for workload in result["experiment"]["workloads"]] == [32]
    assert (out / "report.html").is_file()
    verdicts = {(c["baseline"], c["arm"], c["metric"]): c for c in result["comparisons"]}
    for metric in ("ttft", "tpot"):
        comparison = verdicts["a", "b", metric]
        assert (comparison["ratio"], comparison["verdict"]) in ((None, "inconclusive"), (None, "invalid"))
        assert re.match(r"\S+:\d+: ", comparison["reason"])
        assert verdicts["a", "c", metric]["ratio"] is not None, verdicts["a", "c", metric]
    assert verdicts["a", "b", "answer_time"]["ratio"] is not None
    assert {summary["errors"] for summary in result["summaries"]} == {0}
    (held_back,) = (check for check in result["checks"] if check["name"] == "tokens_held_back")
    assert (held_back["state"], held_back["severity"], held_back["arms"]) == ("failed", "warns", ["b"])
