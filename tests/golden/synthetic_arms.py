"""The machine and the two arms of a synthetic run: what its servers are said to be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loadgen.records.run import ArmRecord, Environment


def environment(gpu_status: str) -> Environment:
    """Of the run; `gpu_status` is what was found of NVML."""
    return Environment(
        started_at="2026-03-02T10:00:00Z",
        command="abserve compare --preset quick --out compare",
        git_commit="0123456789abcdef0123456789abcdef01234567",
        host={
            "cpu_model": "Simulated CPU 2.0 GHz",
            "cpu_count": 2,
            "memory_bytes": 25_769_803_776,
            "kernel": "6.1.0",
            "glibc": "2.36",
            "os": "Debian GNU/Linux 12",
            "virtualisation": None,
        },
        packages={"abserve": "0.1.0", "torch": "2.15.0", "onnxruntime-gpu": "1.31.1", "nvidia-pytriton": "0.7.0"},
        gpu={"schema": "abserve.gpu-info/1", "status": gpu_status, "devices": []},
    )


def arms(
    b_settings: Mapping[str, str], b_in_effect: Mapping[str, object], others: Sequence[str] = ()
) -> list[ArmRecord]:
    """A native torch and an embedded Triton; B also with these settings, as asked for and as in effect. `others` are
    labels of further native arms."""
    shared = {
        "precision": "fp32",
        "device": "cpu",
        "threads": "2",
        "max_batch_size": 32,
        "max_queue_delay_us": 0,
        "weights": "random weights (seed 0)",
    }
    native = [
        ArmRecord(
            label=label, title="native torch 2.15.0 fp32", target="native",
            url=f"http://127.0.0.1:{8100 + 10 * number}",
            server_name="abserve-native", server_version="0.1.0", launched=True,
            argv=("abserve", "serve", "native", "--threads", "2"), settings={"threads": "2"},
            in_effect={"engine": "torch", "mode": "eager", **shared},
            model_config={"name": "openclip_vit_b32", "max_batch_size": 32}, gpu_info=None, artefact=None,
        )
        for number, label in enumerate(("a", *others))
    ]  # fmt: skip
    return [
        native[0],
        ArmRecord(
            label="b", title="Triton 2.51, python backend, onnxruntime 1.31.1 fp32", target="triton",
            url="http://127.0.0.1:8000", server_name="triton", server_version="2.51.0", launched=True,
            argv=("abserve", "serve", "triton", "--threads", "2"), settings={"threads": "2", **b_settings},
            in_effect={"engine": "onnxruntime", "mode": "session", **shared, **b_in_effect},
            model_config={"name": "openclip_vit_b32", "backend": "python", "max_batch_size": 32}, gpu_info=None,
            artefact={"sha256": "9f86d081884c7d659a2feaa0c55ad015", "bytes": 352_000_000},
        ),
        *native[1:],
    ]  # fmt: skip
