"""The files of the compose stack, linted without an engine: `make lint` runs this, too."""

from __future__ import annotations

import ast
import itertools
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from servers.export.tensorrt import TENSORRT_IMAGE
from tests.compose.queries import dashboard_queries, dashboards
from tests.compose.stand_ins import pinned_images

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DASHBOARDS = dashboards()
RULES = yaml.safe_load((ROOT / "docker/prometheus/rules.yml").read_text())
EXAMPLE = (ROOT / ".env.example").read_text()
SETTINGS = dict(re.findall(r"^#([A-Z_]+)=(.*)$", EXAMPLE, re.MULTILINE))
IMAGES = pinned_images()
ONE_SHOT = {name for name, service in SERVICES.items() if service["restart"] == "no"}

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
needs_compose = pytest.mark.skipif(
    shutil.which("docker") is None
    or subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode != 0,
    reason="docker compose is not installed",
)


@pytest.mark.parametrize("name", SERVICES)
def test_services_are_hardened(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not re.match(r"(0|root)(:|$)", service["user"])
    assert not {"privileged", "cap_add", "network_mode", "ipc", "devices"} & set(service)
    assert "docker.sock" not in str(service.get("volumes"))
    assert all(str(port).startswith("127.0.0.1:") for port in service.get("ports", ()))


@pytest.mark.parametrize("name", SERVICES)
def test_services_have_limits(name: str) -> None:
    service = SERVICES[name]
    assert re.fullmatch(r"\$\{[A-Z]+_MEMORY:-\d+[mg]\}", service["mem_limit"])
    assert service["memswap_limit"] == service["mem_limit"]
    assert service["pids_limit"] == "${PIDS_LIMIT:-4096}"


@pytest.mark.parametrize("name", SERVICES)
def test_images_are_pinned(name: str) -> None:
    """Ours by a version, all others by a digest."""
    image = SERVICES[name]["image"]
    if "build" in SERVICES[name]:
        assert re.fullmatch(r"abserve/[a-z]+:\d+\.\d+\.\d+", image)
        image = SERVICES[name]["build"]["args"]["PYTHON_IMAGE"]
    setting, default = re.fullmatch(r"\$\{([A-Z]+_IMAGE):-(.+)\}", image).groups()  # type: ignore[union-attr]  # or it fails
    assert IMAGES[setting] == default


@pytest.mark.parametrize("setting", sorted(IMAGES))
def test_digests_are_whole_and_stand_once(setting: str) -> None:
    assert re.fullmatch(r"\S+:[^:@]*\d+\.\d+[^:@]*@sha256:[0-9a-f]{64}", IMAGES[setting])
    assert (ROOT / "docker-compose.yml").read_text().count(IMAGES[setting].rpartition("@")[2]) == 1
    assert SETTINGS[setting] == ""


@pytest.mark.parametrize("name", sorted(set(SERVICES) - ONE_SHOT - {"locust-worker"}))
def test_services_tell_their_health(name: str) -> None:
    assert SERVICES[name]["healthcheck"]["test"][0] == "CMD"
    assert SERVICES[name]["restart"] == "unless-stopped"


def test_one_shots_are_waited_for() -> None:
    waited_for = {
        target
        for service in SERVICES.values()
        for target, condition in service.get("depends_on", {}).items()
        if condition["condition"] == "service_completed_successfully"
    }
    assert waited_for == ONE_SHOT


def test_both_profiles_offer_the_same_names() -> None:
    def names(profile: str) -> set[str]:
        found: set[str] = set()
        for name, service in SERVICES.items():
            if profile in service.get("profiles", [profile]):
                aliases = (service.get("networks") or {}).get("default", {}).get("aliases", [])
                found |= {name.removesuffix("-cpu"), *aliases}
        return found - {"plan", "triton-tensorrt", "gpu-or-profile"}  # nothing without a GPU needs them

    assert names("cpu") == names("gpu")
    assert {"native", "triton", "gpu-exporter"} <= names("cpu")


def test_only_gpu_services_reserve_a_gpu() -> None:
    reserving = {name for name, service in SERVICES.items() if "deploy" in service}
    assert reserving == {"models", "native", "triton", "plan", "gpu-exporter"}
    for name in reserving:
        (device,) = SERVICES[name]["deploy"]["resources"]["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"]
        assert "count" not in device  # excludes device_ids


def test_every_setting_has_a_default_and_is_documented_with_it() -> None:
    used = dict(re.findall(r"(?<!\$)\$\{([A-Z_]+)(?::([-?][^}]*))?\}", (ROOT / "docker-compose.yml").read_text()))
    assert set(SETTINGS) == {*used, "COMPOSE_PROFILES"}
    for name, default in used.items():
        assert default.startswith("-"), name
        assert SETTINGS[name] == ("" if name in IMAGES else default[1:]), f"{name}: the documented default is another"
    assert [line for line in EXAMPLE.splitlines() if line and not line.startswith("#")] == []


def started_grafana(tmp_path: Path, password: str) -> dict[str, str]:
    """The environment in which the compose file's command starts Grafana, read by a script in its place."""
    (tmp_path / "run.sh").write_text("env\n")
    (script,) = SERVICES["grafana"]["command"]
    script = script.replace("$$", "$").replace("exec /run.sh", f"exec sh {tmp_path}/run.sh")
    settings = {name: str(value) for name, value in SERVICES["grafana"]["environment"].items()}
    assert settings["GF_SECURITY_ADMIN_PASSWORD"] == "${GRAFANA_ADMIN_PASSWORD:-}"
    command = [*SERVICES["grafana"]["entrypoint"], script]
    environment = {"PATH": os.environ["PATH"], **settings, "GF_SECURITY_ADMIN_PASSWORD": password}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return dict(line.split("=", 1) for line in done.stdout.splitlines())


def test_without_a_password_grafana_shows_everything_and_nobody_can_sign_in(tmp_path: Path) -> None:
    environment = started_grafana(tmp_path, "")
    assert environment["GF_AUTH_ANONYMOUS_ENABLED"] == "true"
    assert environment["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert environment["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"  # or there were admin with admin
    assert environment["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert environment["GF_AUTH_BASIC_ENABLED"] == "false"


def test_with_a_password_the_admin_of_grafana_can_sign_in(tmp_path: Path) -> None:
    environment = started_grafana(tmp_path, "chosen")
    assert environment["GF_SECURITY_ADMIN_PASSWORD"] == "chosen"
    locking = {"GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION", "GF_AUTH_DISABLE_LOGIN_FORM", "GF_AUTH_BASIC_ENABLED"}
    assert not locking & set(environment)


def test_triton_gets_no_option_that_gives_clients_more_control() -> None:
    arguments = " ".join(SERVICES["triton"]["command"])
    assert "--model-control-mode=none" in arguments
    for word in ("allow-client-shm", "trace", "explicit", "poll", "load-model"):
        assert word not in arguments


def test_plan_and_triton_are_of_the_same_month() -> None:
    tags = {IMAGES[name].partition("@")[0].rpartition(":")[2] for name in ("TRITON_IMAGE", "TENSORRT_IMAGE")}
    assert len(tags) == 1
    assert SERVICES["triton"]["image"] == SERVICES["triton-tensorrt"]["image"]
    assert IMAGES["TENSORRT_IMAGE"] == TENSORRT_IMAGE


def test_the_dockerfile_keeps_its_rules() -> None:
    text = (ROOT / "docker/Dockerfile").read_text()
    assert re.search(r"^ARG PYTHON_IMAGE$", text, re.MULTILINE)
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"${PYTHON_IMAGE}", "build", "runtime"}
    for line in re.findall(r"pip (?:install|wheel) .*", text):
        assert re.search(r"--require-hashes|--no-index|--no-build-isolation|TORCH_INDEX_URL", line), line
    stages = re.split(r"^FROM ", text, flags=re.MULTILINE)[1:]
    final = {stage.split()[2]: stage for stage in stages if stage.split()[2] in {"load", "servers"}}
    assert set(final) == {"load", "servers"}
    for stage in final.values():
        assert stage.rstrip().endswith("USER 10001:10001")
    assert not re.search(r"^ADD |https?://\S+@|PASSWORD|TOKEN|:latest|pip\.conf|ca-certificates", text, re.MULTILINE)
    for line in re.findall(r"apt-get install.*", text):
        assert "--no-install-recommends" in line
        assert "rm -rf /var/lib/apt/lists" in line


LOCKS = ROOT / "docker/locks"
LOCKED: dict[str, dict[str, tuple[str, list[str]]]] = {
    path.stem: {
        canonicalize_name(name): (version, hashes.split())
        for name, version, hashes in re.findall(
            r"^([A-Za-z0-9._-]+)==(\S+) \\\n((?: +--hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)",
            path.read_text(),
            re.MULTILINE,
        )
    }
    for path in LOCKS.glob("*.txt")
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONSTRAINTS: dict[str, str] = {
    canonicalize_name(name): version
    for name, version in re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "docker/constraints.txt").read_text(), re.MULTILINE)
}


@pytest.mark.parametrize(
    ("locks", "extras"), [(("load",), ()), (("torch", "servers"), ("servers",))], ids=["load", "servers"]
)
def test_the_locks_hold_what_the_project_asks_for(locks: tuple[str, ...], extras: tuple[str, ...]) -> None:
    found = {name: version for lock in locks for name, (version, _) in LOCKED[lock].items()}
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]
    image: dict[str, Any] = {**default_environment(), "python_version": "3.11", "platform_machine": "x86_64"}
    wanted = [one for one in map(Requirement, lines) if one.marker is None or one.marker.evaluate(image)]
    wrong = [str(one) for one in wanted if not one.specifier.contains(found.get(canonicalize_name(one.name), "0"))]
    assert not wrong, "make lock"


def test_the_locks_agree_with_the_constraints_and_with_each_other() -> None:
    for lock, packages in LOCKED.items():
        wrong = [n for n, (version, _) in packages.items() if CONSTRAINTS.get(n, version) != version]
        assert not wrong, f"{lock}: make lock"
    versions = {(name, version) for packages in LOCKED.values() for name, (version, _) in packages.items()}
    names = [name for name, _ in versions]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []


@pytest.mark.parametrize("lock", sorted(LOCKED))
def test_a_lock_is_nothing_but_pinned_and_hashed_packages(lock: str) -> None:
    """No index, no address, no package without a hash: every line that is no comment belongs to what was read above."""
    lines = [line for line in (LOCKS / f"{lock}.txt").read_text().splitlines() if not line.lstrip().startswith("#")]
    assert len(lines) == sum(1 + sum(word != "\\" for word in hashes) for _, hashes in LOCKED[lock].values())
    assert {"build": {"pip", "hatchling"}}.get(lock, set()) <= LOCKED[lock].keys()


@pytest.mark.parametrize("script", sorted((ROOT / "docker/bin").iterdir()), ids=lambda path: path.name)
def test_scripts_can_run(script: Path) -> None:
    assert os.access(script, os.X_OK)
    first = script.read_text().splitlines()[0]
    if "python" in first:
        ast.parse(script.read_text())
    else:
        assert subprocess.run(["bash", "-n", str(script)], capture_output=True, check=False).returncode == 0


def test_the_dashboards_are_those_that_the_generator_makes(tmp_path: Path) -> None:
    generator = ROOT / "docker/grafana/build_dashboards.py"
    subprocess.run([sys.executable, str(generator), str(tmp_path)], check=True)
    made = {path.name: path.read_text() for path in tmp_path.glob("*.json")}
    assert made == {name: (ROOT / "docker/grafana/dashboards" / name).read_text() for name in DASHBOARDS}
    assert len(made) == 3


@pytest.mark.parametrize("name", DASHBOARDS)
def test_dashboards_are_well_formed(name: str) -> None:
    dashboard = DASHBOARDS[name]
    source = yaml.safe_load((ROOT / "docker/grafana/provisioning/datasources/prometheus.yml").read_text())
    uid = source["datasources"][0]["uid"]
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        mine = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + 8)}
        assert not mine & cells, f"{panel['title']} lies over another panel"
        cells |= mine
        assert panel["targets"] or panel["type"] == "alertlist"
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        assert {panel["datasource"]["uid"], *(target["datasource"]["uid"] for target in panel["targets"])} == {uid}


@needs_promtool
def test_every_query_parses(tmp_path: Path) -> None:
    rules = [{"record": f"q:{number}", "expr": query} for number, (_, query) in enumerate(dashboard_queries())]
    assert len(rules) > 40
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@needs_promtool
def test_prometheus_takes_its_configuration() -> None:
    file = ROOT / "docker/prometheus/prometheus.yml"
    done = subprocess.run(["promtool", "check", "config", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@needs_promtool
def test_the_alerts_fire_when_they_should_and_only_then() -> None:
    file = ROOT / "docker/prometheus/tests/rules_test.yml"
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_explained_and_tested() -> None:
    alerts = [rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule]
    tested = yaml.safe_load((ROOT / "docker/prometheus/tests/rules_test.yml").read_text())["tests"]
    fired = {case["alertname"] for test in tested for case in test.get("alert_rule_test", ()) if case["exp_alerts"]}
    assert fired == {alert["alert"] for alert in alerts}
    for alert in alerts:
        assert {"summary", "description"} == set(alert["annotations"])
        assert alert["for"]


def services(*arguments: str) -> set[str]:
    """What `docker compose ARGUMENTS up` would start, without a .env and without variables of this machine."""
    environment = {name: value for name, value in os.environ.items() if name not in {*SETTINGS, "COMPOSE_PROFILES"}}
    command = ["docker", "compose", *arguments, "config", "--services"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@needs_compose
def test_the_stack_with_a_gpu_is_the_default_and_needs_no_setting() -> None:
    nothing = ("--env-file", os.devnull)
    default = services(*nothing)
    assert {"gpu-or-profile-cpu", "native", "triton", "plan", "grafana"} <= default
    assert default == services(*nothing, "--profile", "gpu") == services("--env-file", ".env.example")
    assert not {name for name in default if name.startswith("locust")}
    assert services(*nothing, "--profile", "gpu", "--profile", "load") - default == {"locust-master", "locust-worker"}
    assert not {name for name in default if name.endswith("-cpu") and name != "gpu-or-profile-cpu"}


@needs_compose
def test_the_profile_cpu_has_nothing_that_needs_a_gpu(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("COMPOSE_PROFILES=cpu\n")
    chosen = services("--env-file", os.devnull, "--profile", "cpu")
    assert {"native-cpu", "triton-cpu", "grafana"} <= chosen
    assert "gpu-or-profile-cpu" not in chosen
    assert not {name for name in chosen if "deploy" in SERVICES[name]}
    assert chosen == services("--env-file", str(tmp_path / ".env"))


def test_where_there_is_no_gpu_one_sentence_says_so_before_docker_is_asked_for_one() -> None:
    reserving = {name for name, service in SERVICES.items() if "deploy" in service}

    def waits_for(name: str) -> set[str]:
        direct = set(SERVICES[name].get("depends_on", {}))
        return direct.union(*(waits_for(other) for other in direct))

    assert [name for name in reserving if "gpu-or-profile-cpu" not in waits_for(name)] == []
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("this machine has a GPU")
    done = subprocess.run([ROOT / "docker/bin/gpu-check"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "docker compose --profile cpu up" in done.stderr


def test_the_recorder_stands_before_the_native_server() -> None:
    recorder = SERVICES["recorder"]
    words = recorder["command"][-1].replace("$$(date +%s)", "NEW").split()
    options = dict(itertools.pairwise(words))
    assert (words[1:3], options["--to"], options["--grpc-to"]) == (
        ["abserve", "record"], "http://native:8100", "native:8101",
    )  # fmt: skip
    assert {port.rpartition(":")[2] for port in recorder["ports"]} == {
        options[name].rpartition(":")[2] for name in ("--listen", "--grpc-listen")
    }
    assert [recorder["volumes"], options["--out"]] == [["traffic:/traffic"], "/traffic/NEW"]
    assert "traffic" in COMPOSE["volumes"]
    assert "/traffic" in (ROOT / "docker/Dockerfile").read_text()
