"""The cpu profile of docker-compose.yml, run for real: health, hardening, a comparison, cold starts, load, kills.

The tests share one stack and run in this order; later ones use the runs and the load of earlier ones.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from loadgen.client.bodies import prepare_body
from loadgen.client.endpoint import Endpoint
from loadgen.client.inputs import read_inputs, write_samples
from loadgen.launch.compose import ComposeDeployment
from loadgen.launch.deployment import Deployment, DeploymentError
from loadgen.measure.probes.cold_start_measurement import measure_container_cold_start
from tests.compose.queries import dashboard_queries

pytestmark = [pytest.mark.compose, pytest.mark.timeout(2400)]

ROOT = Path(__file__).resolve().parents[2]
MODEL = "openclip_vit_b32"
READY_SECONDS = 240.0
RESTART_SECONDS = 240.0
LONG_RUNNING = (
    "gpu-exporter-cpu", "locust-master", "locust-worker", "native-cpu", "prometheus", "results", "triton-cpu",
)  # fmt: skip


def by_service(stack: Any) -> dict[str, dict[str, Any]]:
    return {one["Config"]["Labels"]["com.docker.compose.service"]: one for one in stack.containers()}


def docker(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False, timeout=120)


def wait_until(condition: Any, what: str, seconds: float) -> Any:
    deadline = time.monotonic() + seconds
    while True:
        try:
            value = condition()
        except OSError:
            value = None
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.5)


def healthy(stack: Any, service: str) -> bool:
    state = by_service(stack)[service]["State"]
    return bool(state["Running"] and state.get("Health", {"Status": "healthy"})["Status"] == "healthy")


def test_up_returns_when_all_is_ready(stack: Any, record_property: Any) -> None:
    for service in LONG_RUNNING:
        assert healthy(stack, service), service
    assert by_service(stack)["models-cpu"]["State"]["ExitCode"] == 0
    for port in ("NATIVE_PORT", "TRITON_PORT"):
        assert Endpoint(stack.url(port)).ready(MODEL)
    sizes = {
        image: int(docker("image", "inspect", "-f", "{{.Size}}", image).stdout) / 1e6
        for image in ("abserve/servers:0.1.0", "abserve/load:0.1.0", *stack.base_images.settings.values())
    }
    for name, value in {**stack.seconds, **sizes}.items():
        record_property(name, round(value, 1))
    sys.stdout.write(f"\nbase images: {stack.base_images.origins}\n")
    sys.stdout.write("".join(f"{name}: {value:.0f} s\n" for name, value in stack.seconds.items()))
    sys.stdout.write("".join(f"{name}: {size:.0f} MB\n" for name, size in sizes.items()))


def test_containers_can_do_no_more_than_they_must(stack: Any) -> None:
    for service, container in by_service(stack).items():
        host = container["HostConfig"]
        assert host["ReadonlyRootfs"], service
        assert host["CapDrop"] == ["ALL"], service
        assert not host["Privileged"], service
        assert 0 < host["Memory"] == host["MemorySwap"], service
        assert host["PidsLimit"] > 0, service
        assert container["Config"]["User"].split(":")[0] not in {"", "0", "root"}, service
        assert not any("docker.sock" in mount["Source"] for mount in container["Mounts"]), service
        for published in (host["PortBindings"] or {}).values():
            assert {binding["HostIp"] for binding in published} == {"127.0.0.1"}, service
    for service in LONG_RUNNING:
        name = by_service(stack)[service]["Name"].lstrip("/")
        tried = docker("exec", name, "sh", "-c", "id -u; touch /usr/x /etc/x 2>/dev/null && echo written")
        assert tried.stdout.split()[:1] != ["0"], service
        assert "written" not in tried.stdout, service


def test_an_image_is_the_one_of_its_digest_whatever_its_tag_becomes(stack: Any, tmp_path: Path) -> None:
    registry, pinned = stack.base_images.registry, stack.base_images.settings["PROMETHEUS_IMAGE"]
    before = by_service(stack)["prometheus"]
    assert before["Config"]["Image"] == pinned
    assert "@sha256:" in pinned
    if registry is None:
        pytest.skip("the images were pulled: their registry's tags cannot be moved")
    name = pinned.partition("@")[0].removeprefix(f"{registry.address}/")
    moved = registry.push(stack.base_images.settings["PYTHON_IMAGE"], name)
    assert moved != pinned
    assert stack.compose("pull", "prometheus").returncode == 0
    assert stack.compose("up", "--detach", "--wait", "--no-build", "prometheus").returncode == 0
    after = by_service(stack)["prometheus"]
    assert (after["Id"], after["Image"]) == (before["Id"], before["Image"])

    digest = "0" * 64
    unknown = stack.compose("pull", "prometheus", PROMETHEUS_IMAGE=f"{registry.address}/{name}@sha256:{digest}")
    assert unknown.returncode != 0
    assert "not found" in unknown.stderr or "unknown" in unknown.stderr

    settings = tmp_path / "compose.yml"
    settings.write_text(f"image: ${{PROMETHEUS_IMAGE:-{pinned}}}\n")
    done = subprocess.run(
        [sys.executable, ROOT / "docker/pin_images.py", settings], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert settings.read_text() == f"image: ${{PROMETHEUS_IMAGE:-{moved}}}\n"
    assert pinned.partition("@")[2] in done.stdout


def test_a_second_up_changes_nothing(stack: Any) -> None:
    before = {service: one["State"]["StartedAt"] for service, one in by_service(stack).items()}
    done = stack.compose("up", "--detach", "--wait", "--no-build")
    assert done.returncode == 0, done.stderr
    after = {service: one["State"]["StartedAt"] for service, one in by_service(stack).items()}
    assert {service for service in before if before[service] != after[service]} <= {"models-cpu"}
    log = docker("logs", by_service(stack)["models-cpu"]["Name"].lstrip("/")).stdout
    assert "sample inputs: up to date" in log


def test_locust_drives_both_servers_from_its_workers(stack: Any) -> None:
    def locust(path: str, **form: str) -> bytes:
        data = None if path.startswith("/stats") else urllib.parse.urlencode(form).encode()
        with urllib.request.urlopen(f"{stack.url('LOCUST_PORT')}{path}", data, timeout=30) as answer:
            return bytes(answer.read())

    done = stack.compose("up", "--detach", "--wait", "--no-build", "--scale", "locust-worker=2")
    assert done.returncode == 0, done.stderr

    def workers() -> int:
        return len(json.loads(locust("/stats/requests")).get("workers", []))

    growing = "sum(rate(abserve_load_latency_seconds_count[30s])) > 0"
    wait_until(lambda: workers() == 2, "two workers", 60)
    for host in ("http://native:8100", "http://triton:8000"):
        locust("/swarm", user_count="2", spawn_rate="2", host=host, user_classes="Concurrent")
        wait_until(
            lambda: json.loads(locust("/stats/requests"))["stats"][-1]["num_requests"] > 20, f"load on {host}", 120
        )
        stats = json.loads(locust("/stats/requests"))
        assert stats["stats"][-1]["num_failures"] == 0, stats["errors"]
        wait_until(lambda: stack.query("abserve_load_running == 1", seconds=20), "Prometheus saw the test", 60)
        wait_until(lambda: stack.query(growing, seconds=20), "Prometheus saw the load grow", 60)
        locust("/stop")
        wait_until(lambda: json.loads(locust("/stats/requests"))["state"] == "stopped", "the test ended", 30)


def test_a_comparison_by_url(stack: Any) -> None:
    out = stack.results / "by-url"
    command = [
        sys.executable, "-P", "-m", "loadgen.entry", "compare", "--a", stack.url("NATIVE_PORT"),
        "--b", stack.url("TRITON_PORT"), "--scenarios", "single,concurrent", "--rounds", "2", "--concurrency", "4",
        "--requests", "30", "--out", str(out),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=900)
    result = json.loads((out / "result.json").read_text())
    assert result["state"]["state"] == "finished", done.stderr
    assert result["parity"]["ok"]
    assert {c["scenario"] for c in result["comparisons"] if c["ratio"]} == {"single", "concurrent(4)"}
    assert all(block["errors"] == 0 for block in result["blocks"])
    wait_until(lambda: stack.query('abserve_comparison_ratio{run="by-url"}', seconds=30), "the verdict's metrics", 60)


def test_a_comparison_of_the_running_stack(stack: Any) -> None:
    out = stack.results / "by-deployment"
    command = [
        sys.executable, "-P", "-m", "loadgen.entry", "compare", "--deployment", "compose",
        "--compose-project", stack.project, "--scenarios", "cold-start,single", "--rounds", "2", "--out", str(out),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=1500)
    sys.stdout.write(done.stdout[-6000:])
    result = json.loads((out / "result.json").read_text())
    assert result["state"]["state"] == "finished", done.stderr
    assert result["parity"]["ok"]
    assert {c["scenario"] for c in result["comparisons"] if c["ratio"]} == {"cold-start", "single"}
    assert all(block["errors"] == 0 for block in result["blocks"])
    starts = result["studies"]["cold_start"]["containers"]
    assert [start["error"] for start in starts if start["error"]] == []
    for label in "ab":
        assert [s["caches"] for s in starts if s["label"] == label] == ["cached"] * 3 + ["uncached"]
    for start in starts:
        assert 0 < start["started_ns"] < start["milestones_ns"]["process"] < start["ready_ns"]
        assert start["ready_ns"] < start["first_answer_ns"]
        assert list(start["batch_answers_ns"]) == ["1", "8"]
        assert start["service"] in (done.stdout + (out / "summary.md").read_text())
    for service in ("native-cpu", "triton-cpu"):
        wait_until(lambda service=service: healthy(stack, service), f"{service} is healthy again", READY_SECONDS)


def test_cold_starts_of_both_containers(stack: Any, tmp_path: Path) -> None:
    write_samples(MODEL, tmp_path / "samples")
    inputs = read_inputs(tmp_path / "samples", "fp32")
    arms = {"a": ComposeDeployment("native", stack.project), "b": ComposeDeployment("triton", stack.project)}
    for deployment in arms.values():
        deployment.start()
        deployment.wait_ready(MODEL, READY_SECONDS)
    signature = Endpoint(arms["a"].url).signature(MODEL)
    bodies = {size: prepare_body(inputs, signature, list(range(size))) for size in (1, 8)}
    for deployment in arms.values():
        assert deployment.model_name(MODEL) == MODEL
        assert deployment.title
        assert deployment.via
        assert deployment.grpc_address
        checked: Deployment = deployment  # mypy: it offers what a runner wants
        assert checked.pids() == deployment.pids()
        assert deployment.cpu_ns()
        deployment.stop()
    try:
        for label, deployment in arms.items():
            record = measure_container_cold_start(
                deployment, MODEL, bodies, label=label, repetition=0, timeout_s=READY_SECONDS,
                caches="uncached" if label == "a" else "cached",
            )  # fmt: skip
            deployment.stop()
            sys.stdout.write(f"\n{record}\n")
            assert record.error is None
            assert record.started_ns is not None
            assert record.live_ns is not None
            assert record.ready_ns is not None
            assert record.first_answer_ns is not None
            assert 0 < record.started_ns < record.live_ns <= record.ready_ns < record.first_answer_ns
            steps = record.milestones_ns
            expected = {"a": ["process", "imported", "weights_loaded", "engine_ready"],
                        "b": ["process", "load_begins", "engine_ready"]}[label]  # fmt: skip
            assert sorted(expected, key=lambda name: steps[name]) == expected
            assert record.started_ns < steps["process"]
            assert steps["engine_ready"] < record.ready_ns + 10**9
            assert set(record.batch_answers_ns) == {1, 8}
    finally:
        for deployment in arms.values():
            deployment.restore()
    for service in ("native-cpu", "triton-cpu"):
        wait_until(lambda service=service: healthy(stack, service), f"{service} is healthy again", READY_SECONDS)


def test_a_stack_that_is_not_up_is_said() -> None:
    with pytest.raises(DeploymentError, match="docker compose up"):
        ComposeDeployment("native", "no-such-project")


def test_every_dashboard_query_has_data(stack: Any) -> None:
    """Real servers, real load, real runs; the GPU alone is scripted, and no run has evidence of one here."""
    store_evidence(stack.results / "by-url")
    wait_until(lambda: stack.query('abserve_run_gpu_evidence{run="by-url"}', seconds=30), "the evidence's metrics", 60)
    counts = {}
    for name, expression in dashboard_queries():
        found = stack.query(expression, seconds=1800)
        points = [float(value) for series in found for _, value in series["values"]]
        counts[name] = sum(value == value for value in points)  # NaN is no data
    for name, count in counts.items():
        sys.stdout.write(f"{count:6d} points  {name}\n")
    assert len(counts) > 40
    assert [name for name, count in counts.items() if not count] == []


def store_evidence(run: Path) -> None:
    records = [{"label": "a", "workload": None, "finding": "INCONCLUSIVE", "code": "no_nvml"}]
    (run / "evidence.json").write_text(json.dumps({"records": records}))


@pytest.mark.parametrize("service", LONG_RUNNING)
def test_a_killed_service_comes_back_and_loses_nothing(stack: Any, service: str) -> None:
    """SIGKILL to all processes in the container, as an out-of-memory killer would; not `docker kill`, which counts as
    a wish of its user's."""
    before = by_service(stack)[service]
    stored = sorted(path.name for path in (stack.results / "by-url").rglob("*"))
    since = time.time()
    docker("exec", before["Name"].lstrip("/"), "sh", "-c", "kill -9 -1")

    def back() -> bool:
        now = by_service(stack)[service]
        return now["RestartCount"] > before["RestartCount"] and healthy(stack, service)

    wait_until(back, f"{service} is back", RESTART_SECONDS)
    assert sorted(path.name for path in (stack.results / "by-url").rglob("*")) == stored
    assert stack.query("up", seconds=time.time() - since + 120)
    if service in {"native-cpu", "triton-cpu"}:
        assert Endpoint(stack.url("NATIVE_PORT" if service == "native-cpu" else "TRITON_PORT")).ready(MODEL)


def test_triton_without_its_stub_is_started_again(stack: Any) -> None:
    restarts = by_service(stack)["triton-cpu"]["RestartCount"]
    script = (
        'for p in /proc/[0-9]*; do read -r n < $p/comm; case "$n" in triton_python_b*) kill -9 ${p#/proc/};; esac; done'
    )
    assert docker("exec", by_service(stack)["triton-cpu"]["Name"].lstrip("/"), "bash", "-c", script).returncode == 0
    again = lambda: by_service(stack)["triton-cpu"]["RestartCount"] > restarts  # noqa: E731
    wait_until(lambda: again() and healthy(stack, "triton-cpu"), "triton-cpu is back", RESTART_SECONDS)


def test_data_from_before_the_kills_is_still_there(stack: Any) -> None:
    assert stack.query("abserve_native_items_total > 0", seconds=1800)
    assert stack.query('abserve_run_valid{run="by-url"}', seconds=60)


def test_every_service_stays_far_below_its_limits(stack: Any) -> None:
    """Over all that the tests above did. A limit that is reached is a kill, so half of it is the most."""
    limits = {service: one["HostConfig"] for service, one in by_service(stack).items()}
    for service, peak in sorted(stack.peaks.items()):
        host = limits[service]
        sys.stdout.write(
            f"{service}: {peak.memory_bytes / 2**20:.0f} of {host['Memory'] / 2**20:.0f} MiB, "
            f"{peak.processes} of {host['PidsLimit']} processes and threads\n"
        )
        assert peak.memory_bytes < host["Memory"] / 2, service
        assert 0 < peak.processes < host["PidsLimit"] / 2, service
    assert set(LONG_RUNNING) <= set(stack.peaks)
    assert not any(one["State"]["OOMKilled"] for one in stack.containers())


def test_a_container_over_its_memory_is_killed_and_started_again(stack: Any) -> None:
    """The limit holds, and what it does to a service is what the docs say."""
    name = by_service(stack)["results"]["Name"].lstrip("/")
    limit = by_service(stack)["results"]["HostConfig"]["Memory"]
    program = f"import sys; held = bytearray({limit * 2}); sys.exit('all of it was given')"
    killed = docker("exec", name, "python3", "-c", program)
    assert killed.returncode == 137, killed.stderr
    wait_until(lambda: healthy(stack, "results"), "the service goes on", RESTART_SECONDS)
