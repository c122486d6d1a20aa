"""The winner of a tuning where others reach it: behind TLS and keys, with limits, probes, and the cores and GPUs that
it was measured with.

    compose.yml      docker compose up --wait
    kubernetes.yml   kubectl apply -f kubernetes.yml
    nginx.conf       the proxy of a server that has neither keys nor TLS for all that it answers: Triton

The native server has both. The proxy and Triton share one network namespace, and Triton listens on loopback alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

IMAGE, PROXY_IMAGE = "abserve/servers:0.1.0", "nginx:1.28-alpine"
PORT, GRPC_PORT, SECRETS, TMP = 8443, 8444, "/run/secrets/abserve", "/tmp"
TRITON_PORTS = (8000, 8001)
"""HTTP and gRPC, behind the proxy, which takes both at `PORT`."""
KEYS = {"native": "keys", "triton": "keys.conf"}
"""The file of clients' keys, in the format of what reads it."""
MEMORY_GIB = 16
USER, MOST_THREADS = 10001, 4096
READY_S = 900
"""Until a server must be ready: it may have to download weights and to export a model."""
_NEW_KEY = {
    "native": """echo "$(openssl rand -hex 32) requests=512  # team-a" >> keys""",
    "triton": """printf '"Bearer %s" team-a;\\n' "$(openssl rand -hex 32)" >> keys.conf""",
}
_AFTER_A_CHANGE = {"native": "docker compose kill -s HUP server", "triton": "docker compose exec proxy nginx -s reload"}


def secret_files(target: str) -> tuple[str, ...]:
    """What the user has to make, beside the files that are written."""
    return KEYS[target], "tls.crt", "tls.key"


def _how(target: str, then: str) -> str:
    return f"""\
# In this folder, first a key per client and a certificate (here one for a test), for user {USER} to read:
#   {_NEW_KEY[target]}
#   openssl req -x509 -newkey rsa:2048 -nodes -days 30 -subj /CN=localhost -addext subjectAltName=DNS:localhost \\
#     -keyout tls.key -out tls.crt
{then}"""


def nginx_conf() -> str:
    """The proxy's configuration: TLS, a key for every request but health checks, and limits."""
    http, grpc = TRITON_PORTS
    folders = " ".join(f"{name}_temp_path {TMP}/{name};" for name in ("proxy", "fastcgi", "uwsgi", "scgi"))
    return f"""worker_processes auto;
pid {TMP}/nginx.pid;
error_log stderr warn;
events {{ worker_connections 4096; }}
http {{
  access_log off;
  server_tokens off;
  client_body_temp_path {TMP}/body; {folders}
  map_hash_bucket_size 256;
  map_hash_max_size 65536;
  # A line per key: "Bearer KEY" CLIENT;
  map $http_authorization $client {{ default ""; include {SECRETS}/keys.conf; }}
  limit_conn_zone $client zone=clients:1m;
  upstream http_server {{ server 127.0.0.1:{http}; keepalive 256; }}
  upstream grpc_server {{ server 127.0.0.1:{grpc}; keepalive 256; }}
  server {{
    listen {PORT} ssl http2;
    ssl_certificate {SECRETS}/tls.crt;
    ssl_certificate_key {SECRETS}/tls.key;
    ssl_protocols TLSv1.2 TLSv1.3;
    ssl_session_cache shared:tls:10m;
    client_max_body_size 64m;
    client_header_timeout 30s;
    client_body_timeout 30s;
    send_timeout 30s;
    keepalive_timeout 75s;
    large_client_header_buffers 4 16k;
    limit_conn clients 512;  # requests of one client at the same time
    limit_conn_status 429;
    proxy_http_version 1.1;
    proxy_set_header Connection "";
    proxy_set_header Host $host;
    proxy_set_header Authorization "";
    proxy_buffering off;
    proxy_request_buffering off;
    proxy_read_timeout 300s;
    location = /v2/health/live {{ proxy_pass http://http_server; }}
    location = /v2/health/ready {{ proxy_pass http://http_server; }}
    location /inference.GRPCInferenceService/ {{
      if ($client = "") {{ return 401; }}
      grpc_set_header Authorization "";
      grpc_read_timeout 300s;
      grpc_pass grpc://grpc_server;
    }}
    location / {{
      if ($client = "") {{ return 401; }}
      proxy_pass http://http_server;
    }}
  }}
}}
"""


def compose_file(target: str, arguments: Sequence[str], cores: int, gpus: int) -> str:
    """The server, with its proxy if it needs one, for `docker compose`."""
    secrets = {"secrets": [{"source": name, "target": f"{SECRETS}/{name}"} for name in secret_files(target)]}
    hardened: dict[str, Any] = {
        "restart": "unless-stopped",
        "init": True,
        "user": f"{USER}:{USER}",
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "tmpfs": [f"{TMP}:rw,nosuid,nodev,exec,size=1g"],
        "logging": {"driver": "json-file", "options": {"max-size": "10m", "max-file": "3"}},
    }
    limits = {"limits": {"cpus": str(cores), "memory": f"{MEMORY_GIB}G", "pids": MOST_THREADS}}
    devices = {"reservations": {"devices": [{"driver": "nvidia", "count": gpus, "capabilities": ["gpu"]}]}}
    server: dict[str, Any] = {
        **hardened,
        "image": IMAGE,
        "command": _command(target, arguments),
        "environment": _environment(),
        **(
            {"ports": [f"{port}:{port}" for port in (PORT, GRPC_PORT)], **secrets}
            if target == "native"
            else {"network_mode": "service:proxy"}
        ),
        "shm_size": "1g",
        "volumes": ["models:/models"],
        "stop_grace_period": "40s",
        "healthcheck": {
            "test": ["CMD", *_health(target)],
            "interval": "5s",
            "timeout": "6s",
            "retries": 3,
            "start_period": f"{READY_S}s",
        },
        "deploy": {"resources": limits | (devices if gpus else {})},
    }
    proxy = {
        **hardened,
        "image": PROXY_IMAGE,
        "ports": [f"{PORT}:{PORT}"],
        "volumes": ["./nginx.conf:/etc/nginx/nginx.conf:ro"],
        **secrets,
        "deploy": {"resources": {"limits": {"cpus": "2", "memory": "1G", "pids": MOST_THREADS}}},
    }
    document = {
        "name": "abserve-exposed",
        "services": {**({} if target == "native" else {"proxy": proxy}), "server": server},
        "secrets": {name: {"file": f"./{name}"} for name in secret_files(target)},
        "volumes": {"models": {}},
    }
    steps = f"""#   sudo chown {USER} {" ".join(secret_files(target))}
#   docker compose up --wait
#   curl --cacert tls.crt -H "Authorization: Bearer KEY" https://localhost:{PORT}/v2/models/stats
# After a change in these files: {_AFTER_A_CHANGE[target]}
"""
    return _how(target, steps) + _yaml([document])


def kubernetes_manifest(target: str, arguments: Sequence[str], cores: int, gpus: int) -> str:
    """A Deployment of one pod, with a proxy and its configuration if the server needs one, a Service, and who may reach
    it."""
    labels = {"app.kubernetes.io/name": "abserve-exposed"}
    restricted = {"readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    gpu = {"nvidia.com/gpu": str(gpus)} if gpus else {}
    probe: dict[str, Any] = {"periodSeconds": 10, "timeoutSeconds": 6}
    is_native = target == "native"

    def asked(what: str) -> dict[str, Any]:
        if is_native:
            return {"httpGet": {"path": f"/v2/health/{what}", "port": "https", "scheme": "HTTPS"}, **probe}
        return {"exec": {"command": _health(target, what)}, **probe}

    secrets = {"name": "secrets", "mountPath": SECRETS, "readOnly": True}
    ports = {"https": PORT, **({"grpc": GRPC_PORT} if is_native else {})}
    listening = [{"name": name, "containerPort": port} for name, port in ports.items()]
    server: dict[str, Any] = {
        "name": "server",
        "image": IMAGE,
        "command": _command(target, arguments),
        "env": [{"name": name, "value": value} for name, value in _environment().items()],
        "startupProbe": {**asked("ready"), "failureThreshold": READY_S // 10},
        "livenessProbe": {**asked("live"), "failureThreshold": 6},
        **({"readinessProbe": asked("ready"), "ports": listening} if is_native else {}),
        "resources": _resources({"cpu": str(cores), "memory": f"{MEMORY_GIB}Gi", **gpu}),
        "securityContext": restricted,
        "volumeMounts": [
            {"name": "models", "mountPath": "/models"},
            {"name": "tmp", "mountPath": TMP},
            {"name": "shm", "mountPath": "/dev/shm"},
            *([secrets] if is_native else []),
        ],
    }
    proxy = {
        "name": "proxy",
        "image": PROXY_IMAGE,
        "ports": listening,
        "readinessProbe": {"httpGet": {"path": "/v2/health/ready", "port": "https", "scheme": "HTTPS"}, **probe},
        "resources": _resources({"cpu": "1", "memory": "1Gi"}),
        "securityContext": restricted,
        "volumeMounts": [
            {"name": "configuration", "mountPath": "/etc/nginx/nginx.conf", "subPath": "nginx.conf", "readOnly": True},
            secrets,
            {"name": "tmp-proxy", "mountPath": TMP},
        ],
    }
    pod = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 40,
        "securityContext": {
            "runAsNonRoot": True,
            **dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), USER),
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [server, *([] if is_native else [proxy])],
        "volumes": [
            *([] if is_native else [{"name": "configuration", "configMap": {"name": "abserve-exposed"}}]),
            {"name": "secrets", "secret": {"secretName": "abserve"}},
            {"name": "models", "emptyDir": {"sizeLimit": "20Gi"}},
            *(
                {"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}
                for name in ("tmp", "shm", *([] if is_native else ["tmp-proxy"]))
            ),
        ],
    }

    def named(version: str, kind: str, **content: Any) -> dict[str, Any]:
        return {
            "apiVersion": version,
            "kind": kind,
            "metadata": {"name": "abserve-exposed", "labels": labels},
            **content,
        }

    documents = [
        *([] if is_native else [named("v1", "ConfigMap", data={"nginx.conf": nginx_conf()})]),
        named(
            "apps/v1",
            "Deployment",
            spec={
                "replicas": 1,
                "strategy": {"type": "Recreate"},
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        ),
        named(
            "v1",
            "Service",
            spec={
                "selector": labels,
                "ports": [{"name": n, "port": 443 if n == "https" else p, "targetPort": n} for n, p in ports.items()],
            },
        ),
        named(
            "networking.k8s.io/v1",
            "NetworkPolicy",
            spec={
                "podSelector": {"matchLabels": labels},
                "policyTypes": ["Ingress"],
                "ingress": [{"ports": [{"port": port, "protocol": "TCP"} for port in ports.values()]}],
            },
        ),
    ]
    files = " ".join(f"--from-file={name}" for name in secret_files(target))
    steps = f"#   kubectl create secret generic abserve {files}\n#   kubectl apply -f kubernetes.yml\n"
    return _how(target, steps) + _yaml(documents)


def _command(target: str, arguments: Sequence[str]) -> list[str]:
    if target == "native":
        keys, certificate, key = (f"{SECRETS}/{name}" for name in secret_files(target))
        secured = ["--api-key-file", keys, "--tls-certificate", certificate, "--tls-key", key]
        host, (http, grpc) = "0.0.0.0", (PORT, GRPC_PORT)
    else:
        secured, host, (http, grpc) = [], "127.0.0.1", TRITON_PORTS
    fixed = ["--host", host, "--http-port", str(http), "--grpc-port", str(grpc), *secured]
    return ["abserve", "serve", target, *arguments, *fixed, "--artefacts", "/models/artefacts"]


def _environment() -> Mapping[str, str]:
    """Where libraries write: the root is read-only."""
    caches = {"HF_HOME": "huggingface", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "kernels"}
    return {name: f"/models/{folder}" for name, folder in (caches | {"XDG_CACHE_HOME": "cache"}).items()}


def _health(target: str, what: str = "ready") -> list[str]:
    port, tls = (PORT, ["tls"]) if target == "native" else (TRITON_PORTS[0], [])
    return ["http-health", str(port), f"/v2/health/{what}", *tls]


def _resources(limits: Mapping[str, str]) -> dict[str, Any]:
    """Requests equal to limits, so that the pod is the last to be evicted."""
    return {"requests": dict(limits), "limits": dict(limits)}


def _yaml(documents: Sequence[Mapping[str, Any]]) -> str:
    class Plain(yaml.SafeDumper):  # type: ignore[misc]  # yaml has no types
        """Writes what stands in several places each time, and long texts as they are."""

        def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002  as the base class has it
            return True

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Plain.add_representer(str, text)
    written: str = yaml.dump_all(documents, Dumper=Plain, sort_keys=False, default_flow_style=False, width=120)
    return written
