"""Writes docker/grafana/dashboards/*.json, which nobody edits by hand: python docker/grafana/build_dashboards.py [OUT]

A panel is a line of data here; a test makes the files again and compares, and runs every query.
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


def quantiles(metric: str, prefix: str = "", by: str = "") -> tuple[tuple[str, str], ...]:
    """p50, p90 and p99 of a histogram over a minute."""
    labels = f"le, {by}" if by else "le"
    legend = f" {{{{{by}}}}}" if by else ""
    return tuple(
        (
            f"{prefix}p{round(q * 100)}{legend}",
            f"histogram_quantile({q}, sum by ({labels}) (rate({metric}_bucket[1m])))",
        )
        for q in (0.5, 0.9, 0.99)
    )


def servers(metric: str) -> tuple[tuple[str, str], ...]:
    """A recorded series of both servers."""
    return (("{{server}}", metric),)


MEANS = "Means, since Triton exports no distributions."
AB_OVERVIEW = (
    Panel(
        "Verdict of the newest runs", "none",
        (("", "abserve_run_valid"), ("", "abserve_run_start_timestamp_seconds * 1000")),
        "From ./results: 1 is valid, 0 is not. The report of a run says more.", "table", 16,
    ),
    Panel("Alerts", "none", (), "Prometheus' alerts that fire or are about to.", "alertlist", 8),
    Panel(
        "Arms over their baseline, newest runs", "none",
        (("{{run}} {{scenario}} {{metric}} {{arm}}/{{baseline}}: {{verdict}}", "abserve_comparison_ratio"),),
        "Ratio and verdict of each comparison.", "table", 8,
    ),
    Panel(
        "… with 95 % intervals", "none",
        (("low {{run}} {{scenario}} {{metric}} {{arm}}/{{baseline}}", "abserve_comparison_ratio_low"),
         ("high {{run}} {{scenario}} {{metric}} {{arm}}/{{baseline}}", "abserve_comparison_ratio_high")),
        "Where both ends are on one side of 1, the arms differ.", "table", 8,
    ),
    Panel(
        "GPU evidence of the newest runs", "none",
        (("{{run}} {{arm}} {{scenario}}: {{finding}} {{code}}", "abserve_run_gpu_evidence or abserve_run_arm_info"),),
        "GPU_VERIFIED, CPU_FALLBACK or INCONCLUSIVE for each arm; runs without evidence show the arms alone.",
        "table", 8,
    ),
    Panel("Images answered", "ops", servers("abserve:images:rate1m"), "Images a second, by the servers' own counts."),
    Panel("Requests answered", "reqps", servers("abserve:requests:rate1m")),
    Panel("GPU busy", "percentunit", (("{{uuid}}", "abserve:gpu_busy:ratio1m"),),
          "Beside the load: an idle GPU under load means a server on the CPU.", maximum=1),
    Panel("Latency as clients see it", "s", quantiles("abserve_load_latency_seconds"),
          "From the load generator, whichever server it is pointed at."),
    Panel("Latency in the native server", "s", quantiles("abserve_native_request_duration_seconds")),
    Panel("Mean time in the server", "s", servers("abserve:request_seconds:mean1m"), MEANS),
    Panel("Mean time in the queue", "s", servers("abserve:queue_seconds:mean1m"), MEANS),
    Panel("Executed batch size", "none", servers("abserve:executed_batch_size:mean1m"), "Mean of the last minute."),
    Panel("Waiting requests", "none", servers("abserve:pending_requests")),
    Panel("Turned away", "reqps", servers("abserve:rejections:rate1m"), "Queue full, or waited too long."),
    Panel("Time of a request by stage, native", "s",
          (("{{stage}}", "sum by (stage) (rate(abserve_native_stage_seconds_total[1m])) / on() group_left() "
            "(sum(rate(abserve_native_requests_success_total[1m])) > 0)"),), "Mean a request."),
    Panel("Time of a request by stage, Triton", "s",
          tuple((stage, f"sum(rate(nv_inference_{stage}_duration_us[1m])) / 1e6 / "
                 "(sum(rate(nv_inference_request_success[1m])) > 0)")
                for stage in ("queue", "compute_input", "compute_infer", "compute_output")), "Mean a request."),
)  # fmt: skip

GPU = (
    Panel("Driver answers", "none", (("", "nvml_up"),), "1: yes, for every GPU.", "stat", 4),
    Panel("Age of the last reading", "s", (("", "time() - nvml_last_success_timestamp_seconds"),), "", "stat", 4),
    Panel("One reading takes", "s", (("", "nvml_collect_duration_seconds"),), "", "stat", 4),
    Panel("Failed calls", "none", (("{{call}} {{code}}", "sum by (call, code) (nvml_errors_total)"),),
          "A call that this GPU does not support counts once.", "stat", 4),
    Panel("GPU", "none", (("{{name}} {{driver_version}}", "nvml_device_info"),), "", "stat", 8),
    Panel("Busy", "percentunit", (("integral {{uuid}}", "abserve:gpu_busy:ratio1m"),
                                  ("now {{uuid}}", "nvml_device_utilization_ratio")),
          "Share of time with any kernel running; not how much of the GPU it used.", maximum=1),
    Panel("SM activity", "percentunit", (("SM {{uuid}}", "nvml_gpm_sm_active_ratio"),
                                         ("tensor {{uuid}}", "nvml_gpm_tensor_active_ratio"),
                                         ("DRAM {{uuid}}", "nvml_gpm_dram_active_ratio")),
          "Hopper and later.", maximum=1),
    Panel("Power", "watt", (("{{uuid}}", "nvml_device_power_watts"),
                            ("limit {{uuid}}", "nvml_device_power_limit_watts"))),
    Panel("Energy per image", "joule",
          (("", "sum(rate(nvml_device_energy_joules_total[1m])) / (sum(abserve:images:rate1m) > 0)"),),
          "All that the GPUs took, idling included, over all images answered."),
    Panel("Memory", "bytes", (("used {{uuid}}", "nvml_device_memory_used_bytes"),
                              ("of {{uuid}}", "nvml_device_memory_total_bytes"))),
    Panel("Clocks", "hertz", (("{{clock}} {{uuid}}", "nvml_device_clock_hertz"),)),
    Panel("Clocks held down now", "none", (("{{reason}}", "nvml_device_clock_event_active"),), "1: by this."),
    Panel("Clocks held down, share of time", "percentunit",
          (("{{reason}}", "rate(nvml_device_clock_event_seconds_total[1m])"),), maximum=1),
    Panel("Temperature", "celsius", (("{{uuid}}", "nvml_device_temperature_celsius"),)),
)  # fmt: skip

LOAD = (
    Panel("Users", "none", (("", "abserve_load_users"),), "", "stat", 4),
    Panel("Workers", "none", (("{{state}}", "abserve_load_workers"),), "", "stat", 8),
    Panel("Test", "none", (("{{scenario}} against {{host}}", "abserve_load_running"),), "1: it runs.", "stat", 12),
    Panel("Requests", "reqps", (("{{name}}", "sum by (name) (rate(abserve_load_requests_total[1m]))"),)),
    Panel("Failures", "reqps", (("{{name}}", "sum by (name) (rate(abserve_load_failures_total[1m]))"),)),
    Panel("Bytes received", "Bps", (("{{name}}", "sum by (name) (rate(abserve_load_response_bytes_total[1m]))"),)),
    Panel("Latency", "s", quantiles("abserve_load_latency_seconds", by="name")),
    Panel("Send lag", "s", quantiles("abserve_load_send_lag_seconds"),
          "How much later than due a timer of the generator fires: so late would a request leave."),
    Panel("CPU of the generator", "percentunit", (("{{process}}", "abserve_load_cpu_ratio"),),
          "Of one core. Beyond 90 % it is the generator that is measured.", maximum=1),
    Panel("Users over time", "none", (("", "abserve_load_users"),)),
)  # fmt: skip

DASHBOARDS = {
    "ab-overview": ("A/B overview", AB_OVERVIEW),
    "gpu": ("GPU", GPU),
    "load-generator": ("Load generator", LOAD),
}
ANNOTATIONS = (
    ("Runs of abserve compare", "abserve_run_running == 1", "{{run}}: {{phase}}", "blue"),
    ("Tests of Locust", "abserve_load_running == 1", "{{scenario}} against {{host}}", "purple"),
)


def dashboard(uid: str, title: str, panels: Sequence[Panel]) -> dict[str, Any]:
    """One file: panels flow left to right."""
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
        "panels": placed,
    }  # fmt: skip


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
