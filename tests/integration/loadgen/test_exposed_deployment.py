"""The files that put a tuning's winner behind TLS and keys: valid for Kubernetes and compose, and started."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import yaml
from tritonclient.utils import InferenceServerException

from loadgen.tune.exposed import (
    GRPC_PORT,
    PORT,
    SECRETS,
    TMP,
    TRITON_PORTS,
    compose_file,
    kubernetes_manifest,
    nginx_conf,
    secret_files,
)
from tests.certificates import Authority
from tests.integration.native.conftest import Server, free_ports, wait_until
from tests.integration.native.conftest import native as native

ROOT = Path(__file__).resolve().parents[3]
ARGUMENTS = ["--model", "openclip_vit_b32", "--engine", "null", "--threads", "4"]
NO_HEADERS: Mapping[str, str] = {}
KEY = {"Authorization": "Bearer 0123456789abcdef"}


@pytest.mark.parametrize("gpus", [0, 2])
@pytest.mark.parametrize("version", ["1.29", "1.37"])
@pytest.mark.parametrize("target", ["native", "triton"])
def test_kubernetes_takes_every_document(target: str, version: str, gpus: int) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    documents = list(yaml.safe_load_all(kubernetes_manifest(target, ARGUMENTS, 4, gpus)))
    kinds = ["Deployment", "Service", "NetworkPolicy"]
    assert [document["kind"] for document in documents] == [*(["ConfigMap"] if target == "triton" else []), *kinds]
    for document in documents:
        validator.validate(document, version, strict=True)
    server, *proxies = documents[-3]["spec"]["template"]["spec"]["containers"]
    assert server["command"][3:9] == ARGUMENTS
    ports = {port["containerPort"] for port in (proxies or [server])[0]["ports"]}
    assert ports == ({PORT} if target == "triton" else {PORT, GRPC_PORT})
    assert {each["port"] for each in documents[-1]["spec"]["ingress"][0]["ports"]} == ports
    assert server["resources"]["limits"].get("nvidia.com/gpu") == (str(gpus) if gpus else None)
    assert target == "native" or documents[0]["data"]["nginx.conf"] == nginx_conf()


@pytest.mark.parametrize("target", ["native", "triton"])
def test_compose_takes_the_file(target: str, tmp_path: Path) -> None:
    (tmp_path / "compose.yml").write_text(compose_file(target, ARGUMENTS, 4, 1))
    services = yaml.safe_load((tmp_path / "compose.yml").read_text())["services"]
    if target == "triton":
        assert (services["server"]["network_mode"], services["server"].get("ports")) == ("service:proxy", None)
        assert services["server"]["command"][services["server"]["command"].index("--host") + 1] == "127.0.0.1"
    else:
        assert list(services) == ["server"]
    if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("docker compose is not installed")
    for name in secret_files(target):
        (tmp_path / name).touch()
    command = ["docker", "compose", "-f", str(tmp_path / "compose.yml"), "config", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def started(tmp_path: Path) -> Iterator[tuple[int, int, Path]]:
    """The native server as its compose file starts it, but for its ports and the place of its secrets."""
    Authority(tmp_path).sign("tls")
    (tmp_path / "keys").write_text(f"{KEY['Authorization'].removeprefix('Bearer ')} requests=512  # team-a\n")
    service = yaml.safe_load(compose_file("native", ARGUMENTS, 1, 0))["services"]["server"]
    port, grpc_port = free_ports(2)
    ours = {"0.0.0.0": "127.0.0.1", str(PORT): str(port), str(GRPC_PORT): str(grpc_port)}
    command = [ours.get(word, word.replace(SECRETS, str(tmp_path))) for word in service["command"]]
    command[-1] = str(tmp_path / "artefacts")
    server = subprocess.Popen([sys.executable, "-m", *command])
    health = [str(ROOT / "docker/bin/http-health"), str(port), *service["healthcheck"]["test"][3:]]

    def ready() -> bool:
        assert server.poll() is None
        return not subprocess.run(health, capture_output=True, check=False).returncode

    try:
        wait_until(ready, "ready")
        yield port, grpc_port, tmp_path
    finally:
        server.terminate()
        server.wait(60)


@pytest.fixture
def exposed(native: Callable[..., Server], tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """The port of nginx before a ready server, and its certificate."""
    if shutil.which("nginx") is None:
        pytest.skip("nginx is not installed")
    server = native(grpc=True)
    (port,) = free_ports(1)
    Authority(tmp_path).sign("tls")
    (tmp_path / "keys.conf").write_text(f'"{KEY["Authorization"]}" team;\n')
    text = nginx_conf().replace(f"listen {PORT} ", f"listen 127.0.0.1:{port} ").replace(SECRETS, str(tmp_path))
    for inside, outside in zip(TRITON_PORTS, (server.port, server.grpc_port), strict=True):
        text = text.replace(f"127.0.0.1:{inside};", f"127.0.0.1:{outside};")
    (tmp_path / "nginx.conf").write_text(re.sub(rf"{TMP}/(?=(nginx.pid|\w+;))", f"{tmp_path}/", text))
    server.wait_ready()
    command = ["nginx", "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf"), "-g", "daemon off;"]
    proxy = subprocess.Popen(command)

    def answers() -> bool:
        assert proxy.poll() is None
        try:
            return ask(port, tmp_path, "/v2/health/ready")[0] == 200
        except OSError:
            return False

    wait_until(answers, "nginx answers")
    yield port, tmp_path
    proxy.terminate()
    proxy.wait(60)


def ask(
    port: int, folder: Path, path: str, body: bytes | None = None, headers: Mapping[str, str] = NO_HEADERS
) -> tuple[int, Any]:
    context = ssl.create_default_context(cafile=str(folder / "authority.pem"))
    connection = http.client.HTTPSConnection("localhost", port, timeout=60, context=context)
    try:
        connection.request("GET" if body is None else "POST", path, body, dict(headers))
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def infer_body() -> bytes:
    shape = [1, 3, 224, 224]
    tensor = {"name": "pixel_values", "datatype": "FP32", "shape": shape, "data": np.zeros(shape).ravel().tolist()}
    return json.dumps({"inputs": [tensor]}).encode()


@pytest.mark.parametrize("way", ["exposed", "started"])
def test_only_clients_with_a_key_are_answered(way: str, request: pytest.FixtureRequest) -> None:
    port, *_, folder = request.getfixturevalue(way)
    assert ask(port, folder, "/v2/health/live")[0] == 200
    path = "/v2/models/openclip_vit_b32/infer"
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": ""}):
        assert ask(port, folder, "/metrics", None, headers)[0] == 401
        assert ask(port, folder, path, infer_body(), headers)[0] == 401
    assert ask(port, folder, path, infer_body(), KEY)[0] == 200
    assert b"abserve_native_items_total" in ask(port, folder, "/metrics", None, KEY)[1]


@pytest.mark.parametrize("way", ["exposed", "started"])
def test_grpc_needs_the_key_as_well(way: str, request: pytest.FixtureRequest) -> None:
    *_, port, folder = request.getfixturevalue(way)
    tensor = tritonclient.grpc.InferInput("pixel_values", [1, 3, 224, 224], "FP32")
    tensor.set_data_from_numpy(np.zeros((1, 3, 224, 224), np.float32))
    certificates = str(folder / "authority.pem")
    client = tritonclient.grpc.InferenceServerClient(f"localhost:{port}", ssl=True, root_certificates=certificates)
    try:
        with pytest.raises(InferenceServerException, match="UNAUTHENTICATED"):
            client.infer("openclip_vit_b32", [tensor])
        headers = {name.lower(): value for name, value in KEY.items()}
        assert client.infer("openclip_vit_b32", [tensor], headers=headers).as_numpy("embedding").shape == (1, 512)
    finally:
        client.close()
