"""Steps of a cold start from log lines of both servers, as their containers wrote them."""

from __future__ import annotations

from loadgen.launch.compose import _log_lines
from loadgen.measure.probes.cold_start_measurement import milestones

NATIVE = b"""\
2026-11-20T10:00:01.000000001Z 10:00:00.9 [info     ] listening    model=['openclip_vit_b32'] url=http://0.0.0.0:8100
2026-11-20T10:00:03.5Z 10:00:03.5 [info     ] engine imported      model=openclip_vit_b32
2026-11-20T10:00:04.25Z 10:00:04.2 [info     ] weights loaded      model=openclip_vit_b32
a line without a time
2026-11-20T10:00:06Z 10:00:06.0 [info     ] ready    device=cpu load_s=2.1 model=openclip_vit_b32 warm_up_s=1.75
"""
TRITON = b"""\
2026-11-20T10:00:01Z I1120 10:00:01.1 1 cache_manager.cc:480] "Create CacheManager with cache_dir"
2026-11-20T10:00:02Z I1120 10:00:02.1 1 model_lifecycle.cc:472] "loading: openclip_vit_b32:1"
2026-11-20T10:00:07Z I1120 10:00:07.1 1 python.cc] engine ready: {"kind": "onnxruntime"}
2026-11-20T10:00:08Z I1120 10:00:08.1 1 model_lifecycle.cc:839] "successfully loaded 'openclip_vit_b32'"
2026-11-20T10:00:09Z I1120 10:00:09.1 1 http_server.cc:4692] "Started HTTPService at 0.0.0.0:8000"
"""
START_NS = 1_795_168_800_000_000_000  # 2026-11-20T10:00:00Z


def steps(log: bytes) -> dict[str, int]:
    return milestones(list(_log_lines(log)), -START_NS)


def test_steps_of_the_native_server_to_the_nanosecond() -> None:
    assert steps(NATIVE) == {
        "process": 1_000_000_001,
        "door_open": 1_000_000_001,
        "imported": 3_500_000_000,
        "weights_loaded": 4_250_000_000,
        "engine_ready": 6_000_000_000,
    }


def test_steps_of_triton() -> None:
    assert steps(TRITON) == {
        "process": 10**9,
        "load_begins": 2 * 10**9,
        "engine_ready": 7 * 10**9,
        "door_open": 9 * 10**9,
    }


def test_what_is_not_logged_is_missing() -> None:
    assert steps(b"") == {}
