"""`abserve calibrate` measures a real generator against a real sink, and a run finds what it stored."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from loadgen.client.grpc import GrpcConnection, grpc_request
from loadgen.entry import build
from loadgen.measure.calibrate import SinkProcesses, calibrate
from loadgen.measure.machine import cache_path, own_calibration, read_calibration, store_record
from loadgen.records.machine import Calibration, ceiling_images_per_s, ceiling_tokens_per_s
from tests.again import again


def test_quick_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert own_calibration() is None
    options = ["--quick", "--transports", "http", "--payloads", "jpeg", "--json", str(tmp_path / "copy.json")]
    done = CliRunner().invoke(build(), ["calibrate", *options])
    assert done.exit_code == 0, done.output
    assert "http jpeg ×1" in done.output
    calibration = own_calibration()
    assert calibration is not None
    assert read_calibration(tmp_path / "copy.json") == calibration
    assert read_calibration(cache_path("calibration", calibration.fingerprint)) == calibration
    (workload,) = calibration.workloads
    assert (workload.transport, workload.payload, workload.batch_size, workload.payload_bytes) == (
        "http",
        "jpeg",
        1,
        30_004,
    )
    assert workload.requests_per_s > 0.0
    assert workload.cpu_us_per_request > 0.0
    idle, loaded = workload.timing
    assert idle.p50_us is not None
    assert idle.p50_us > 0.0, "an answer cannot arrive before the server gave it"
    assert (idle.concurrency, loaded.concurrency) == (1, 16)
    assert ceiling_images_per_s(calibration, "http", "jpeg", 1) == pytest.approx(workload.images_per_s)
    assert ceiling_images_per_s(calibration, "grpc", "jpeg", 1) is None
    assert [ceiling.transport for ceiling in calibration.tokens] == ["completions", "generate_stream"]
    for ceiling in calibration.tokens:
        assert ceiling.tokens_per_s > 0.0
        assert ceiling_tokens_per_s(calibration, ceiling.transport, 2) == pytest.approx(2 * ceiling.tokens_per_s)
    assert ceiling_tokens_per_s(calibration, "http") is None


@pytest.mark.slow
@again
def test_every_transport_and_payload() -> None:
    calibration = calibrate(lambda _: None, seconds=0.2)
    assert not calibration.problems
    assert len(calibration.workloads) == 3 * 3 * 2
    heavy = {(c.transport, c.batch_size): c.cpu_us_per_request for c in calibration.workloads if c.payload == "fp32"}
    assert all(heavy[transport, 32] > 3.0 * heavy[transport, 1] for transport in ("http", "grpc", "shm"))


def test_the_sink_keeps_requests_as_long_as_it_is_told(tmp_path: Path) -> None:
    sink = SinkProcesses(2, tmp_path)
    try:
        sink.delay(3.0)
        assert sink.held_ns() == []
        connection = GrpcConnection(sink.grpc_address)
        for size in (1, 602_112, 20_000_000):
            exchange = connection.send(grpc_request(bytes(size), size))
            assert exchange.failure is None
            assert len(exchange.body) > 2048
            assert exchange.end_ns - exchange.send_ns > 2_900_000
        connection.close()
        held_ns = sink.held_ns()
        assert len(held_ns) == 3
        assert min(held_ns) > 2_900_000
        assert sink.cpu_ns() is not None
    finally:
        sink.stop()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--transports", "carrier-pigeon"], "--transports: unknown value carrier-pigeon; choose from http, grpc, shm"),
        (["--payloads", "png"], "--payloads: unknown value png; choose from fp32, uint8, jpeg"),
        (["--batch-sizes", "0"], "--batch-sizes 0: give whole numbers from 1"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: list[str], sentence: str) -> None:
    done = CliRunner().invoke(build(), ["calibrate", *options])
    assert done.exit_code == 2
    assert sentence in done.output.replace("\n", " ")


def test_other_batch_sizes_are_interpolated(tmp_path: Path) -> None:
    """Times of a request add up: 1 ms for one image and 32 ms for 32 leave 16.5 ms or so for 16."""
    document = {
        "fingerprint": "0" * 12, "made_at": "", "command": "", "host": {}, "packages": {}, "sink_processes": 1,
        "seconds": 1.0,
        "workloads": [
            {
                "transport": "http", "payload": "fp32", "batch_size": size, "payload_bytes": 602_112 * size,
                "concurrency": 4, "requests_per_s": 1000.0 / size, "images_per_s": 1000.0, "generator_cpu_share": 1.0,
                "sink_cpu_cores": 0.5, "cpu_us_per_request": 1000.0 * size, "limited_by": "generator",
            }
            for size in (1, 32)
        ],
    }  # fmt: skip
    calibration = msgspec.convert(document, Calibration)
    for size in (1, 2, 16, 32, 64):
        assert ceiling_images_per_s(calibration, "http", "fp32", size) == pytest.approx(1000.0)
    assert ceiling_images_per_s(calibration, "http", "fp32", 8, processes=3) == pytest.approx(3000.0)
    store_record(tmp_path / "deep" / "c.json", calibration, "")
    assert read_calibration(tmp_path / "deep" / "c.json") == calibration


WITHOUT_ROOM = """
import resource, sys
from loadgen.entry import main
sys.argv = ["abserve", "calibrate", "--quick", "--transports", "http", "--payloads", "fp32"]
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
main()
"""


def test_a_full_temporary_folder_is_one_sentence() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_ROOM], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "error: no temporary files: " in done.stderr
    assert "set TMPDIR to a folder with" in done.stderr
