"""Writes docker/grafana/dashboards/*.json: python docker/grafana/build_dashboards.py [OUT]

Do not edit those files by hand: tests compare them with this script and run every query.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCE = {"type": "prometheus", "uid": "prometheus"}
COLUMNS = 24
HEIGHT = 8


@dataclass(frozen=True, slots=True)
class Panel:
    """`queries`: (legend, PromQL). `kind`: timeseries, stat, table or alertlist. `width` in columns of 24."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    description: str = ""
    kind: str = "timeseries"
    width: int = 8
    maximum: float | None = None


def quantiles(metric: str, labels: str = "", by: str = "") -> tuple[tuple[str, str], ...]:
    """p50, p90 and p99 of a histogram over a minute."""
    group, legend = (f"le, {by}", f" {{{{{by}}}}}") if by else ("le", "")
    return tuple(
        (
            f"p{round(q * 100)}{legend}",
            f"histogram_quantile({q}, sum by ({group}) (rate({metric}_bucket{labels}[1m])))",
        )
        for q in (0.5, 0.9, 0.99)
    )


def servers(metric: str) -> tuple[tuple[str, str], ...]:
    """A recorded series of both servers."""
    return (("{{server}} {{model}}", f"{metric}{SERVER}"),)


SERVER = '{server=~"$server",model=~"$model"}'
MODEL = '{model=~"$model"}'
GPU = '{uuid=~"$gpu"}'
MEANS = "Means, because Triton exports no distributions."
AB_OVERVIEW = (
    Panel(
        "Verdict of the newest runs", "none",
        (("", "abserve_run_valid"), ("", "abserve_run_start_timestamp_seconds * 1000")),
        "From ./results: 1 is valid, 0 is not. The report of a run says more.", "table", 16,
    ),
    Panel("Alerts", "none", (), "Prometheus alerts that are firing or pending.", "alertlist", 8),
    Panel(
        "Arms against their baseline, newest runs", "none",
        (("{{run}} {{scenario}} {{metric}} {{arm}}/{{baseline}}: {{verdict}}", "abserve_comparison_ratio"),),
        "Ratio and verdict of each comparison.", "table", 8,
    ),
    Panel(
        "95 % intervals of the ratios", "none",
        (("low {{run}} {{scenario}} {{metric}} {{arm}}/{{baseline}}", "abserve_comparison_ratio_low"),
         ("high {{run}} {{scenario}} {{metric}} {{arm}}/{{baseline}}", "abserve_comparison_ratio_high")),
        "If both ends are on one side of 1, the arms differ.", "table", 8,
    ),
    Panel(
        "GPU verification of the newest runs", "none",
        (("{{run}} {{arm}} {{scenario}}: {{finding}} {{code}}", "abserve_run_gpu_evidence or abserve_run_arm_info"),),
        "GPU_VERIFIED, CPU_FALLBACK or INCONCLUSIVE for each arm. Runs without evidence show only the arms.",
        "table", 8,
    ),
    Panel("Items answered", "ops", servers("abserve:items:rate1m"),
          "Items (such as images) per second, as each server counts them."),
    Panel("Requests answered", "reqps", servers("abserve:requests:rate1m")),
    Panel("GPU busy", "percentunit", (("{{uuid}}", f"abserve:gpu_busy:ratio1m{GPU}"),),
          "An idle GPU under load means that a server runs on the CPU.", maximum=1),
    Panel("Latency at the clients", "s", quantiles("abserve_load_latency_seconds"),
          "From the load generator, for the server that it sends to."),
    Panel("Latency in the native server", "s", quantiles("abserve_native_request_duration_seconds", MODEL)),
    Panel("Mean time in the server", "s", servers("abserve:request_seconds:mean1m"), MEANS),
    Panel("Mean time in the queue", "s", servers("abserve:queue_seconds:mean1m"), MEANS),
    Panel("Executed batch size", "none", servers("abserve:executed_batch_size:mean1m"), "Mean of the last minute."),
    Panel("Waiting requests", "none", servers("abserve:pending_requests")),
    Panel("Rejected requests", "reqps", servers("abserve:rejections:rate1m"), "Queue full, or waited too long."),
    Panel("Latency breakdown, native", "s",
          (("{{stage}} {{model}}", f"sum by (model, stage) (rate(abserve_native_stage_seconds_total{MODEL}[1m])) "
            "/ on (model) group_left () "
            f"(sum by (model) (rate(abserve_native_requests_success_total{MODEL}[1m])) > 0)"),), "Mean per request."),
    Panel("Latency breakdown, Triton", "s",
          tuple((f"{stage} {{{{model}}}}",
                 f"sum by (model) (rate(nv_inference_{stage}_duration_us{MODEL}[1m])) / 1e6 / "
                 f"(sum by (model) (rate(nv_inference_request_success{MODEL}[1m])) > 0)")
                for stage in ("queue", "compute_input", "compute_infer", "compute_output")), "Mean per request."),
)  # fmt: skip

GPU_AND_HOST = (
    Panel("Driver answers", "none", (("", "nvml_up"),), "1: yes, for every GPU.", "stat", 4),
    Panel("Age of the last reading", "s", (("", "time() - nvml_last_success_timestamp_seconds"),), "", "stat", 4),
    Panel("Duration of a reading", "s", (("", "nvml_collect_duration_seconds"),), "", "stat", 4),
    Panel("Failed calls", "none", (("{{call}} {{code}}", "sum by (call, code) (nvml_errors_total)"),),
          "A call that this GPU does not support counts once.", "stat", 4),
    Panel("GPU", "none", (("{{name}} {{driver_version}}", f"nvml_device_info{GPU}"),), "", "stat", 8),
    Panel("Busy", "percentunit", (("integral {{uuid}}", f"abserve:gpu_busy:ratio1m{GPU}"),
                                  ("now {{uuid}}", f"nvml_device_utilization_ratio{GPU}")),
          "Share of time with any kernel running; not the share of the GPU that it used.", maximum=1),
    Panel("SM activity", "percentunit", (("SM {{uuid}}", f"nvml_gpm_sm_active_ratio{GPU}"),
                                         ("tensor {{uuid}}", f"nvml_gpm_tensor_active_ratio{GPU}"),
                                         ("DRAM {{uuid}}", f"nvml_gpm_dram_active_ratio{GPU}")),
          "Hopper and later.", maximum=1),
    Panel("Power", "watt", (("{{uuid}}", f"nvml_device_power_watts{GPU}"),
                            ("limit {{uuid}}", f"nvml_device_power_limit_watts{GPU}"))),
    Panel("Energy per item", "joule",
          (("{{uuid}}", f"abserve:gpu_energy:joules_per_item1m{GPU}"),),
          "Of each GPU that is busy for over 2 % of the time; items of all servers and models."),
    Panel("Memory", "bytes", (("used {{uuid}}", f"nvml_device_memory_used_bytes{GPU}"),
                              ("of {{uuid}}", f"nvml_device_memory_total_bytes{GPU}"))),
    Panel("Clocks", "hertz", (("{{clock}} {{uuid}}", f"nvml_device_clock_hertz{GPU}"),)),
    Panel("Reasons for lower clocks now", "none", (("{{reason}} {{uuid}}", f"nvml_device_clock_event_active{GPU}"),),
          "1: active."),
    Panel("Time with lower clocks", "percentunit",
          (("{{reason}} {{uuid}}", f"rate(nvml_device_clock_event_seconds_total{GPU}[1m])"),),
          "Share of time by reason.", maximum=1),
    Panel("Temperature", "celsius", (("{{uuid}}", f"nvml_device_temperature_celsius{GPU}"),)),
    Panel("PCIe traffic", "Bps", (("{{direction}} {{uuid}}", f"rate(nvml_device_pcie_bytes_total{GPU}[1m])"),),
          "Transmit is from the GPU, receive is to it."),
    Panel("Host CPU", "percentunit",
          (("busy", 'sum(abserve:host_cpu:ratio1m{mode!~"idle|iowait"})'),
           ("waiting for disks", 'abserve:host_cpu:ratio1m{mode="iowait"}'),
           ("steal", 'abserve:host_cpu:ratio1m{mode="steal"}')),
          "Of all cores. Steal is time that the hypervisor gave to other machines.", maximum=1),
    Panel("Host memory", "bytes", (("used", "host_memory_total_bytes - host_memory_available_bytes"),
                                   ("of", "host_memory_total_bytes"))),
)  # fmt: skip

LOAD = (
    Panel("Users", "none", (("", "abserve_load_users"),), "", "stat", 4),
    Panel("Workers", "none", (("{{state}}", "abserve_load_workers"),), "", "stat", 8),
    Panel("Test", "none", (("{{scenario}} against {{host}}", "abserve_load_running"),), "1: running.", "stat", 12),
    Panel("Requests", "reqps", (("{{name}}", "sum by (name) (rate(abserve_load_requests_total[1m]))"),)),
    Panel("Failures", "reqps", (("{{name}}", "sum by (name) (rate(abserve_load_failures_total[1m]))"),)),
    Panel("Bytes received", "Bps", (("{{name}}", "sum by (name) (rate(abserve_load_response_bytes_total[1m]))"),)),
    Panel("Latency", "s", quantiles("abserve_load_latency_seconds", by="name")),
    Panel("Send lag", "s", quantiles("abserve_load_send_lag_seconds"),
          "How late a timer of the generator fires; a request would leave just as late."),
    Panel("CPU of the generator", "percentunit", (("{{process}}", "abserve_load_cpu_ratio"),),
          "Share of one core. Above 90 % the generator itself limits the load.", maximum=1),
    Panel("Users over time", "none", (("", "abserve_load_users"),)),
)  # fmt: skip

DASHBOARDS = {
    "ab-overview": ("A/B overview", AB_OVERVIEW),
    "gpu": ("GPU and host", GPU_AND_HOST),
    "load-generator": ("Load generator", LOAD),
}
VARIABLES = {
    "server": ("Server", "abserve:items:rate1m", "server"),
    "model": ("Model", "abserve:items:rate1m", "model"),
    "gpu": ("GPU", "nvml_device_info", "uuid"),
}
"""Variables by name: title, and series and label of the values on offer. A dashboard has those its queries use."""
ANNOTATIONS = (
    ("Runs of abserve compare", "abserve_run_running == 1", "{{run}}: {{phase}}", "blue"),
    ("Tests of Locust", "abserve_load_running == 1", "{{scenario}} against {{host}}", "purple"),
)


def dashboard(uid: str, title: str, panels: Sequence[Panel]) -> dict[str, Any]:
    """The content of one file; panels flow from left to right."""
    queries = " ".join(query for panel in panels for _, query in panel.queries)
    placed, x, y = [], 0, 0
    for number, panel in enumerate(panels, start=1):
        if x + panel.width > COLUMNS:
            x, y = 0, y + HEIGHT
        placed.append(_panel(number, panel, {"h": HEIGHT, "w": panel.width, "x": x, "y": y}))
        x += panel.width
    return {
        "uid": f"abserve-{uid}",
        "title": title,
        "tags": ["abserve"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "links": [{"type": "dashboards", "title": "abserve", "tags": ["abserve"], "asDropdown": False}],
        "annotations": {
            "list": [
                {"datasource": SOURCE, "enable": True, "name": name, "expr": query, "titleFormat": text,
                 "iconColor": colour, "step": "5s", "type": "dashboard"}
                for name, query, text, colour in ANNOTATIONS
            ]
        },
        "templating": {"list": [_variable(name, *one) for name, one in VARIABLES.items() if f"${name}" in queries]},
        "panels": placed,
    }  # fmt: skip


def _variable(name: str, title: str, series: str, label: str) -> dict[str, Any]:
    query = f"label_values({series}, {label})"
    return {
        "name": name,
        "label": title,
        "type": "query",
        "datasource": SOURCE,
        "definition": query,
        "query": {"query": query, "refId": f"Variable-{name}"},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    table = panel.kind == "table"
    document: dict[str, Any] = {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "gridPos": place,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": SOURCE,
                "expr": query,
                "legendFormat": legend,
                **({"format": "table", "instant": True} if table else {}),
            }
            for index, (legend, query) in enumerate(panel.queries)
        ],
    }
    if panel.kind == "timeseries":
        document["options"] = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    elif panel.kind == "stat":
        document["options"] = {"reduceOptions": {"calcs": ["lastNotNull"]}, "textMode": "value_and_name"}
    elif panel.kind == "alertlist":
        document["options"] = {"stateFilter": {"firing": True, "pending": True}, "viewMode": "list"}
    else:
        hidden = dict.fromkeys(("Time", "__name__", "instance", "job"), True)
        document["transformations"] = [
            {"id": "merge", "options": {}},
            {"id": "organize", "options": {"excludeByName": hidden}},
        ]
    return document


def main() -> None:
    """Write every dashboard."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "dashboards"
    folder.mkdir(parents=True, exist_ok=True)
    for uid, (title, panels) in DASHBOARDS.items():
        text = json.dumps(dashboard(uid, title, panels), indent=1, ensure_ascii=False)
        (folder / f"{uid}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
