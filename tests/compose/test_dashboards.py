"""Every dashboard query has data in a real Prometheus with the real rules; servers and GPU are stand-ins."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.compose.queries import dashboard_queries, variables

ROOT = Path(__file__).resolve().parents[2]
SCRAPE_SECONDS = 0.5
DATA_SECONDS = 60
STAGES = ("queue", "compute_input", "compute_infer", "compute_output")
COUNTERS = (
    *(f'nv_inference_{name}{{model="b"}}' for name in ("count", "exec_count", "request_success")),
    *(f'nv_inference_{stage}_duration_us{{model="b"}}' for stage in (*STAGES, "request")),
    'nv_inference_request_failure{model="b",reason="REJECTED"}',
    *(f'abserve_native_{name}_total{{model="a"}}' for name in ("items", "executions", "requests_success")),
    'abserve_native_requests_failure_total{model="a",reason="queue_full"}',
    'abserve_native_stage_seconds_total{model="a",stage="queue"}',
    *(
        f'abserve_native_{name}_duration_seconds_{part}{{model="a"}}'
        for name in ("queue", "request")
        for part in ("sum", "count")
    ),
    *(f'abserve_load_{name}_total{{name="infer"}}' for name in ("requests", "failures", "response_bytes")),
    *(
        f'{name}_seconds_bucket{{model="a",name="infer",le="{bound}"}}'
        for name in ("abserve_native_request_duration", "abserve_load_latency", "abserve_load_send_lag")
        for bound in ("1", "+Inf")
    ),
)
GAUGES = (
    "nv_inference_pending_request_count", "abserve_native_pending_requests", "abserve_load_users",
    "abserve_load_workers", "abserve_load_running", "abserve_load_cpu_ratio", "abserve_run_valid",
    "abserve_run_running", "abserve_run_start_timestamp_seconds", "abserve_run_arm_info", "abserve_comparison_ratio",
    "abserve_comparison_ratio_low", "abserve_comparison_ratio_high",
)  # fmt: skip


class StandIns(BaseHTTPRequestHandler):
    """One page with what both servers, the load generator and the results exporter export."""

    def do_GET(self) -> None:
        lines = [f"{counter} {time.time():.3f}" for counter in COUNTERS]
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write("\n".join([*lines, *(f"{name} 1" for name in GAUGES), ""]).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Prometheus that scrapes the stand-ins and our exporter over a scripted GPU."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tests"))  # scripted_gpu finds its neighbour like that in its container, too
        from tests.compose.scripted_gpu import scripted_exporter
    folder = tmp_path_factory.mktemp("prometheus")
    stand_ins = ThreadingHTTPServer(("127.0.0.1", 0), StandIns)
    threading.Thread(target=stand_ins.serve_forever, daemon=True).start()
    exporter = scripted_exporter("127.0.0.1", 0)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    configuration = {
        "global": {"scrape_interval": f"{int(SCRAPE_SECONDS * 1000)}ms", "evaluation_interval": "1s"},
        "rule_files": [str(ROOT / "docker/prometheus/rules.yml")],
        "scrape_configs": [
            {"job_name": str(port), "scrape_timeout": "400ms", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
            for port in (stand_ins.server_port, exporter.port)
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
             f"--web.listen-address={address}"],
            stdout=log, stderr=log,
        )  # fmt: skip
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(timeout=60)
        exporter.close()
        stand_ins.shutdown()
        stand_ins.server_close()


def ask(prometheus: str, path: str, **parameters: str) -> Any:
    """The data of a response; None while Prometheus is starting. Fails for a query that it refuses."""
    try:
        with urllib.request.urlopen(f"{prometheus}/api/v1/{path}?{urllib.parse.urlencode(parameters)}") as response:
            return json.load(response)["data"]
    except urllib.error.HTTPError as exc:
        raise AssertionError(exc.read().decode()) from exc
    except OSError:
        return None


def has_data(prometheus: str, query: str) -> bool:
    found = ask(prometheus, "query", query=query)
    return bool(found and any(series["value"][1] != "NaN" for series in found["result"]))


def test_every_dashboard_query_has_data(prometheus: str) -> None:
    missing = dict(dashboard_queries())
    assert len(missing) > 40
    deadline = time.monotonic() + DATA_SECONDS
    while missing and time.monotonic() < deadline:
        missing = {name: query for name, query in missing.items() if not has_data(prometheus, query)}
        time.sleep(SCRAPE_SECONDS)
    assert missing == {}


def test_every_variable_has_values(prometheus: str) -> None:
    offered = {}
    for name, query in variables().items():
        series, label = re.fullmatch(r"label_values\(([\w:]+), (\w+)\)", query).groups()  # type: ignore[union-attr]
        deadline = time.monotonic() + DATA_SECONDS
        while not (values := ask(prometheus, f"label/{label}/values", **{"match[]": series})):
            assert time.monotonic() < deadline, name
            time.sleep(SCRAPE_SECONDS)
        offered[name] = values
    assert set(offered) == {"server", "model", "gpu"}
    assert offered["model"] == ["a", "b"]
    assert offered["server"] == ["native", "triton"]
