"""The files that put a tuning's winner behind TLS and keys: valid for Kubernetes and compose, started with nginx."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import ssl
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import yaml
from tritonclient.utils import InferenceServerException

from loadgen.tune.exposed import PORT, PORTS, SECRETS, TMP, compose_file, kubernetes_manifest, nginx_conf
from tests.certificates import Authority
from tests.integration.native.conftest import Server, free_ports, wait_until
from tests.integration.native.conftest import native as native

ARGUMENTS = ["--model", "openclip_vit_b32", "--engine", "null", "--threads", "4"]
NO_HEADERS: Mapping[str, str] = {}
KEY = {"Authorization": "Bearer 0123456789abcdef"}


@pytest.mark.parametrize("gpus", [0, 2])
@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_kubernetes_takes_every_document(version: str, gpus: int) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    documents = list(yaml.safe_load_all(kubernetes_manifest("native", ARGUMENTS, 4, gpus)))
    assert [document["kind"] for document in documents] == ["ConfigMap", "Deployment", "Service", "NetworkPolicy"]
    for document in documents:
        validator.validate(document, version, strict=True)
    server, proxy = documents[1]["spec"]["template"]["spec"]["containers"]
    assert server["command"][3:9] == ARGUMENTS
    assert "ports" not in server
    assert proxy["ports"] == [{"name": "https", "containerPort": PORT}]
    assert server["resources"]["limits"].get("nvidia.com/gpu") == (str(gpus) if gpus else None)
    assert documents[0]["data"]["nginx.conf"] == nginx_conf("native")


def test_compose_takes_the_file(tmp_path: Path) -> None:
    (tmp_path / "compose.yml").write_text(compose_file("native", ARGUMENTS, 4, 1))
    services = yaml.safe_load((tmp_path / "compose.yml").read_text())["services"]
    assert (services["server"]["network_mode"], services["server"].get("ports")) == ("service:proxy", None)
    assert services["server"]["command"][services["server"]["command"].index("--host") + 1] == "127.0.0.1"
    if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("docker compose is not installed")
    command = ["docker", "compose", "-f", str(tmp_path / "compose.yml"), "config", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def exposed(native: Callable[..., Server], tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """The port of nginx before a ready server, and its certificate."""
    if shutil.which("nginx") is None:
        pytest.skip("nginx is not installed")
    server = native(grpc=True)
    (port,) = free_ports(1)
    Authority(tmp_path).sign("tls")
    (tmp_path / "keys.conf").write_text(f'"{KEY["Authorization"]}" team;\n')
    text = nginx_conf("native").replace(f"listen {PORT} ", f"listen 127.0.0.1:{port} ").replace(SECRETS, str(tmp_path))
    for inside, outside in zip(PORTS["native"], (server.port, server.grpc_port), strict=True):
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


def test_only_clients_with_a_key_get_through_the_proxy(exposed) -> None:
    port, folder = exposed
    assert ask(port, folder, "/v2/health/live")[0] == 200
    path = "/v2/models/openclip_vit_b32/infer"
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": ""}):
        assert ask(port, folder, "/metrics", None, headers)[0] == 401
        assert ask(port, folder, path, infer_body(), headers)[0] == 401
    assert ask(port, folder, path, infer_body(), KEY)[0] == 200
    assert b"abserve_native_items_total" in ask(port, folder, "/metrics", None, KEY)[1]


def test_grpc_needs_the_key_as_well(exposed) -> None:
    port, folder = exposed
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
