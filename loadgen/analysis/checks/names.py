"""The names of all checks, in the order in which they are shown, and what a definition of one holds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

Severity = Literal["invalidates", "warns", "informs"]


class CheckName(StrEnum):
    """All checks, in the order in which they are shown."""

    GPU_PRESENT = "gpu_present"
    GPU_EVIDENCE = "gpu_evidence"
    NEGATIVE_CONTROL = "negative_control"
    RUN_FINISHED = "run_finished"
    PARITY = "parity"
    SAME_PAYLOAD = "same_payload"
    REQUEST_ERRORS = "request_errors"
    WHOLE_ANSWERS = "whole_answers"
    REPEATED_REQUESTS = "repeated_requests"
    BLOCKS_COMPLETE = "blocks_complete"
    SEARCHES_ENDED = "searches_ended"
    SAMPLES_COMPLETE = "samples_complete"
    COLD_STARTS_SUCCEEDED = "cold_starts_succeeded"
    ENOUGH_PAIRS = "enough_pairs"
    GENERATOR_CPU = "generator_cpu"
    GENERATOR_CEILING = "generator_ceiling"
    SEND_LAG = "send_lag"
    CONNECTIONS_FREE = "connections_free"
    RATE_SUSTAINED = "rate_sustained"
    WARM_UP = "warm_up"
    SAME_PAYLOAD_BYTES = "same_payload_bytes"
    SAME_MODEL = "same_model"
    SAME_WEIGHTS = "same_weights"
    SAME_PRECISION = "same_precision"
    SAME_DEVICE = "same_device"
    SAME_THREADS = "same_threads"
    SAME_MAX_BATCH_SIZE = "same_max_batch_size"
    SETTINGS_IN_EFFECT = "settings_in_effect"
    SAME_QUEUE_DELAY = "same_queue_delay"
    SAME_INSTANCES = "same_instances"
    BATCH_LIMIT = "batch_limit"
    SERIAL_QUEUE_DELAY = "serial_queue_delay"
    TF32 = "tf32"
    MODEL_WARM_UP = "model_warm_up"
    METRICS = "metrics"
    RESPONSE_CACHE = "response_cache"
    CUDA_GRAPHS = "cuda_graphs"
    GRAPH_SIZES = "graph_sizes"
    PREFERRED_SIZES = "preferred_sizes"
    CORES = "cores"
    CLIENT_DISTANCE = "client_distance"
    MACHINE_IDLE = "machine_idle"
    CPU_GOVERNOR = "cpu_governor"
    GPU_EXCLUSIVE = "gpu_exclusive"
    GPU_IDLE = "gpu_idle"
    GPU_CLOCKS = "gpu_clocks"
    MACHINE_STEADY = "machine_steady"
    WALL_CLOCK = "wall_clock"
    SERVER_CPU = "server_cpu"
    BATCHING_FORMED = "batching_formed"
    ENGINE_CEILING = "engine_ceiling"
    QUEUE_DELAY = "queue_delay"
    STAGE_ACCOUNT = "stage_account"
    SENSITIVITY = "sensitivity"
    RESTARTS = "restarts"
    NOISE_FLOOR = "noise_floor"
    TRAINED_WEIGHTS = "trained_weights"
    NATIVE_BACKEND = "native_backend"


@dataclass(frozen=True, slots=True)
class CheckDefinition:
    """What a check means whatever its outcome; `unknown` is its severity when its data is missing."""

    title: str
    severity: Severity
    unknown: Severity
    remedy: str
