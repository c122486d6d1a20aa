"""Unloading and loading over HTTP and gRPC: accepted work is finished, later work is refused, nothing is lost."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

CONTROL = ("--allow-model-control", "true", "--max-queue-delay-us", "0")


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_unload_and_load_with_tritonclient(controlled, kind):
    server = controlled(*CONTROL, grpc=True)
    server.open("load", "infer")
    server.wait_ready()
    module = tritonclient.http if kind == "http" else tritonclient.grpc
    client = module.InferenceServerClient(server.address if kind == "http" else server.grpc_address)
    assert server.infer([5.0] * 4).status == 200
    client.unload_model("rows")
    client.unload_model("rows")
    assert (server.folder / "closed").exists()
    assert json.loads(server.request("GET", "/gpu-info").body)["runtime"] is None  # nothing executes any more
    assert not client.is_server_ready()
    assert not client.is_model_ready("rows")
    refused = server.infer([5.0] * 4)
    assert refused.status == 404
    assert "unloaded" in json.loads(refused.body)["error"]
    with tritonclient.grpc.InferenceServerClient(server.grpc_address) as other:
        with pytest.raises(InferenceServerException, match="unloaded") as caught:
            other.get_model_config("rows")
        assert "NOT_FOUND" in caught.value.status()
    index = json.loads(server.request("POST", "/v2/repository/index").body)
    assert index == [{"name": "rows", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"}]
    assert server.status("/v2/health/live") == 200
    client.load_model("rows")
    client.load_model("rows")
    assert client.is_server_ready()
    assert json.loads(server.infer([6.0] * 4).body)["outputs"][0]["data"] == [6.0] * 4
    assert server.model_stats()["inference_count"] == 2
    client.close()


def test_unload_finishes_accepted_requests_and_load_waits_for_the_warm_up(controlled):
    server = controlled(*CONTROL)
    server.open("load")
    server.wait_ready()
    with ThreadPoolExecutor(4) as pool:
        accepted = [pool.submit(server.infer, [1.0] * 4)]
        server.wait_until(lambda: (server.folder / "infer-reached").exists(), "the engine is busy")
        accepted.append(pool.submit(server.infer, [2.0] * 4))
        server.wait_until(lambda: server.metric("abserve_native_pending_requests") == 1, "the second waits")
        unloading = pool.submit(server.request, "POST", "/v2/repository/models/rows/unload")
        server.wait_until(lambda: server.status("/v2/models/rows/ready") == 404, "it is being unloaded")
        assert server.infer([3.0] * 4).status == 404
        assert not unloading.done()
        server.open("infer")
        assert [future.result().status for future in accepted] == [200, 200]
        assert unloading.result().status == 200
        for gate in ("load", "load-reached"):
            (server.folder / gate).unlink()
        loading = pool.submit(server.request, "POST", "/v2/repository/models/rows/load")
        server.wait_until(lambda: (server.folder / "load-reached").exists(), "it is being loaded")
        assert server.status("/v2/health/ready") == 503
        assert server.infer([3.0] * 4).status == 503
        server.open("load")
        assert loading.result().status == 200
        assert server.infer([3.0] * 4).status == 200


def test_a_load_that_fails_is_told_and_can_be_tried_again(controlled):
    server = controlled(*CONTROL)
    server.open("load", "infer")
    server.wait_ready()
    assert server.request("POST", "/v2/repository/models/rows/unload").status == 200
    (server.folder / "load").write_text("fail")
    failed = server.request("POST", "/v2/repository/models/rows/load")
    assert failed.status == 500
    assert "failed to load" in json.loads(failed.body)["error"]
    assert server.status("/v2/health/ready") == 503
    (server.folder / "load").write_text("")
    assert server.request("POST", "/v2/repository/models/rows/load").status == 200
    assert server.infer([1.0] * 4).status == 200


NAMES = ("../etc", "..", "n" * 256, "a\nb", "other", "/etc/passwd")


@pytest.mark.parametrize("action", ["load", "unload"])
def test_names_that_are_no_model_are_refused(open_server, action):
    with tritonclient.grpc.InferenceServerClient(open_server.grpc_address) as client:
        for name in NAMES:
            answer = open_server.request("POST", f"/v2/repository/models/{quote(name, safe='')}/{action}")
            assert answer.status in (400, 404)
            assert set(json.loads(answer.body)) == {"error"}
            with pytest.raises(InferenceServerException) as caught:
                getattr(client, f"{action}_model")(name)
            assert caught.value.status() in ("StatusCode.INVALID_ARGUMENT", "StatusCode.NOT_FOUND")
    assert open_server.status("/v2/health/ready") == 200


def test_a_load_brings_no_files_and_no_configuration(open_server, tmp_path):
    for parameters in ({"config": "{}"}, {f"file:{tmp_path}/x": "Y2FuYXJ5"}, {"file:../../x": "Y2FuYXJ5"}, [1]):
        body = json.dumps({"parameters": parameters}).encode()
        answer = open_server.request("POST", "/v2/repository/models/openclip_vit_b32/load", body)
        assert answer.status == 400
    assert list(tmp_path.iterdir()) == []
    client = tritonclient.grpc.InferenceServerClient(open_server.grpc_address)
    with client, pytest.raises(InferenceServerException, match="no configuration"):
        client.load_model("openclip_vit_b32", config="{}")


def test_without_the_switch_it_is_refused_and_the_switch_is_named(null_server):
    for action in ("load", "unload"):
        answer = null_server.request("POST", f"/v2/repository/models/openclip_vit_b32/{action}")
        assert answer.status == 400
        assert "--allow-model-control" in json.loads(answer.body)["error"]
    assert null_server.status("/v2/health/ready") == 200


@pytest.mark.parametrize("fronts", [0, 2])
def test_loads_that_wait_keep_nobody_from_the_server_s_metadata(controlled, fronts):
    """More of them than there are threads for what blocks filled these, and `GET /v2` waited for the last load."""
    server = controlled(*CONTROL, "--fronts", str(fronts), "--allow-shared-memory", "true", grpc=True)
    server.open("load", "infer")
    server.wait_ready()
    assert server.request("POST", "/v2/repository/models/rows/unload").status == 200
    for name in ("load", "load-reached"):
        (server.folder / name).unlink()
    metadata = server.request("GET", "/v2").body
    with ThreadPoolExecutor(24) as pool, tritonclient.grpc.InferenceServerClient(server.grpc_address) as client:
        loading = [pool.submit(server.request, "POST", "/v2/repository/models/rows/load") for _ in range(24)]
        try:
            server.wait_until((server.folder / "load-reached").exists, "the first one loads")
            for _ in range(4):
                assert server.request("GET", "/v2").body == metadata
                assert client.get_server_metadata(client_timeout=60).name == "abserve-native"
            assert not any(future.done() for future in loading)
        finally:
            server.open("load")
        assert {future.result().status for future in loading} == {200}
    assert server.infer([6.0] * 4).status == 200
