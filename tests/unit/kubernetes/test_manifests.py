"""The manifests of docker/kubernetes as `kubectl apply -k` would send them: valid, hardened, probed, in agreement."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from loadgen.entry import build
from tests.compose.stand_ins import pinned_images

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "docker/kubernetes"
OVERLAYS = ("gpu", "cpu", "compare/gpu", "compare/cpu", "record/gpu", "record/cpu")
SERVERS = ("gpu", "cpu")
BUILDER = ["kustomize", "build"] if shutil.which("kustomize") else ["kubectl", "kustomize"]
VERSIONS = ("1.29", "1.33", "1.37")
"""Of the API, from the oldest that providers still support to the newest with a published schema."""

pytestmark = pytest.mark.skipif(shutil.which(BUILDER[0]) is None, reason="neither kustomize nor kubectl is installed")
Resource = dict[str, Any]


@cache
def built(overlay: str) -> list[Resource]:
    """What the overlay builds, each resource as a document."""
    done = subprocess.run([*BUILDER, str(FOLDER / overlay)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return list(yaml.safe_load_all(done.stdout))


def resource(overlay: str, kind: str, name: str) -> Resource:
    (only,) = [one for one in built(overlay) if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return only


def pods(overlay: str) -> dict[str, Resource]:
    """The pod template of every workload, by the workload's name."""
    return {
        one["metadata"]["name"]: one["spec"]["template"] for one in built(overlay) if "template" in one.get("spec", {})
    }


def containers(overlay: str) -> Iterator[tuple[str, Resource]]:
    for name, pod in pods(overlay).items():
        for container in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]:
            yield name, container


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_resource_fits_the_published_schema(overlay: str, version: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for document in built(overlay):
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("overlay", SERVERS)
def test_both_servers_locust_and_the_results_are_there(overlay: str) -> None:
    expected = {"native", "triton", "locust-master", "locust-worker", "results"}
    assert set(pods(overlay)) == expected | ({"gpu-exporter"} if overlay == "gpu" else set())
    assert resource(overlay, "Deployment", "locust-worker")["spec"]["replicas"] > 1


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_meet_the_restricted_level_and_have_read_only_roots(overlay: str) -> None:
    for name, pod in pods(overlay).items():
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"], name
        assert spec["securityContext"]["runAsUser"] > 0, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert spec["automountServiceAccountToken"] is spec["enableServiceLinks"] is False, name
        assert not {"hostPID", "hostIPC", "hostNetwork"} & set(spec), name
        assert not [volume for volume in spec["volumes"] if "hostPath" in volume], name
    for name, container in containers(overlay):
        no_more = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert container["securityContext"] == {"readOnlyRootFilesystem": True, **no_more}, name
        assert {"cpu", "memory"} <= set(container["resources"]["requests"]), name
        assert {"cpu", "memory"} <= set(container["resources"]["limits"]), name


@pytest.mark.parametrize("overlay", SERVERS)
def test_whatever_listens_is_probed(overlay: str) -> None:
    for name, pod in pods(overlay).items():
        for container in pod["spec"]["containers"]:
            if "ports" in container:
                assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container), name


@pytest.mark.parametrize("overlay", SERVERS)
def test_both_servers_get_the_same(overlay: str) -> None:
    native, triton = (pods(overlay)[name]["spec"] for name in ("native", "triton"))
    assert native["containers"][0]["resources"] == triton["containers"][0]["resources"]
    assert native.get("tolerations") == triton.get("tolerations")
    gpus = native["containers"][0]["resources"]["limits"].get("nvidia.com/gpu")
    assert gpus == (1 if overlay == "gpu" else None)
    before = triton.get("initContainers", [])
    planned = {container["name"]: container["resources"]["limits"].get("nvidia.com/gpu") for container in before}
    assert planned == ({"models": 1, "triton-tensorrt": None, "plan": 1} if overlay == "gpu" else {})


@pytest.mark.parametrize("overlay", SERVERS)
def test_services_lead_to_ports_of_pods(overlay: str) -> None:
    services = [one for one in built(overlay) if one["kind"] == "Service"]
    assert {one["metadata"]["name"] for one in services} == {"native", "triton", "locust-master"}
    for service in services:
        labels = service["spec"]["selector"].items()
        (pod,) = [one for one in pods(overlay).values() if labels <= one["metadata"]["labels"].items()]
        ports = {port["name"]: port["containerPort"] for one in pod["spec"]["containers"] for port in one["ports"]}
        for port in service["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]


@pytest.mark.parametrize("overlay", SERVERS)
def test_the_recorder_stands_between_the_service_and_the_server(overlay: str) -> None:
    server, recorder = pods(f"record/{overlay}")["native"]["spec"]["containers"]
    listening, served = ([port["containerPort"] for port in one["ports"]] for one in (recorder, server))
    words = recorder["command"][-1].split()
    options = dict(zip(words[3::2], words[4::2], strict=False))
    assert [options[name].rpartition(":")[2] for name in ("--listen", "--grpc-listen")] == [*map(str, listening)]
    assert [options[name].rpartition(":")[2] for name in ("--to", "--grpc-to")] == [*map(str, served)]
    names = [port["name"] for port in recorder["ports"]]
    service = resource(f"record/{overlay}", "Service", "native")["spec"]
    assert [port["targetPort"] for port in service["ports"]] == names
    policy = resource(f"record/{overlay}", "NetworkPolicy", "load-to-recorder")["spec"]
    assert [port["port"] for port in policy["ingress"][0]["ports"]] == names


@pytest.mark.parametrize("overlay", SERVERS)
def test_only_load_reaches_the_servers(overlay: str) -> None:
    policies = {one["metadata"]["name"]: one["spec"] for one in built(overlay) if one["kind"] == "NetworkPolicy"}
    assert policies["nothing-else"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    to_servers = policies["load-to-servers"]
    assert to_servers["podSelector"] == {"matchLabels": {"app.kubernetes.io/component": "server"}}
    assert [rule["from"] for rule in to_servers["ingress"]] == [
        [{"podSelector": {"matchLabels": {"app.kubernetes.io/component": "load"}}}]
    ]
    component = {name: pod["metadata"]["labels"]["app.kubernetes.io/component"] for name, pod in pods(overlay).items()}
    assert {name for name in component if component[name] == "server"} == {"native", "triton"}
    assert {name for name in component if component[name] == "load"} == {"locust-master", "locust-worker"}
    job = resource(f"compare/{overlay}", "Job", "compare")["spec"]["template"]
    assert job["metadata"]["labels"]["app.kubernetes.io/component"] == "load"


@pytest.mark.parametrize("overlay", SERVERS)
def test_settings_have_the_names_and_defaults_of_the_compose_file(overlay: str) -> None:
    (settings,) = [one["data"] for one in built(overlay) if one["metadata"]["name"].startswith("settings-")]
    example = dict(re.findall(r"^#([A-Z_]+)=(.*)$", (ROOT / ".env.example").read_text(), re.MULTILINE))
    assert {name: example[name] for name in settings if name != "THREADS"} == {
        name: value for name, value in settings.items() if name != "THREADS"
    }
    assert settings["THREADS"] == pods(overlay)["native"]["spec"]["containers"][0]["resources"]["limits"]["cpu"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_images_are_those_of_the_compose_file(overlay: str) -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    known = {service["image"] for service in services.values()} | set(pinned_images().values())
    unknown = {container["image"] for _, container in containers(overlay)} - known
    assert not unknown, "make pin-images, or the version of an image in docker-compose.yml"


@pytest.mark.parametrize("overlay", SERVERS)
def test_the_job_runs_the_experiment_once_and_ends_with_its_status(overlay: str, tmp_path: Path) -> None:
    job = resource(f"compare/{overlay}", "Job", "compare")["spec"]
    assert job["backoffLimit"] == 0
    spec = job["template"]["spec"]
    assert spec["restartPolicy"] == "Never"
    (container,) = spec["containers"]
    assert container["command"][:3] == ["abserve", "compare", "/experiment/experiment.yaml"]
    (data,) = [one["data"] for one in built(f"compare/{overlay}") if one["kind"] == "ConfigMap"]
    (tmp_path / "experiment.yaml").write_text(data["experiment.yaml"])
    urls = set(re.findall(r"http://[\w:]+", data["experiment.yaml"]))
    assert urls == {"http://native:8100", "http://triton:8000"}
    done = CliRunner().invoke(build(), ["compare", str(tmp_path / "experiment.yaml"), "--print-experiment"])
    assert done.exit_code == 0, done.output
    served = {f"openclip_vit_b32{ending}" for ending in (("_onnx", "_tensorrt") if overlay == "gpu" else ())}
    assert set(re.findall(r"openclip_vit_b32_\w+", done.output)) == served
