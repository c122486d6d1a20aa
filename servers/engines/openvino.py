"""OpenVINO executing an exported file, or the user's own, on the CPU: FP32, BF16 where the processor has it, and INT8.

OpenVINO computes an FP32 file in BF16 where the processor has AMX, unasked. The engine therefore always gives the
precision, reads back the one in effect, and counts the products by the precision that their kernels have: a model
that executes none of them as requested is refused.

The answers are compared at load with those of ONNX Runtime to the same file, which the artefact's manifest proves to be
the model's, each item alone.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from servers.engines.agreement import Disagreement, disagreement, proof_at_load
from servers.engines.batches import check_sizes
from servers.engines.interface import Engine, EngineDescription, EngineError, export_command
from servers.engines.onnxruntime import OnnxRuntimeEngine
from servers.engines.processors import thread_count
from servers.engines.settings import EngineKind
from servers.models.specification import reason_of
from servers.protocol.tensors import Array

KIND = EngineKind(
    "servers.engines.openvino:OpenVINOEngine",
    {"cpu": ("latency",)},
    {"cpu": ("fp32", "bf16", "int8")},
    ("openvino",),
    executes="standard",
    install="pip install 'abserve[openvino]'",
)
HINTS = {"fp32": "f32", "bf16": "bf16", "int8": "f32"}
"""OpenVINO's hint by precision; in INT8 it is that of the layers that are not quantised."""
KERNELS = {"fp32": ("f32",), "bf16": ("bf16",), "int8": ("u8", "i8")}
"""OpenVINO's names for the precision of a product's inputs."""
PRODUCTS = frozenset({"Convolution", "Deconvolution", "FullyConnected", "MatMul", "RNNSeq", "RNNCell"})
FAILURES = (RuntimeError, ValueError, TypeError)
"""The exceptions of OpenVINO's bindings."""


class OpenVINOEngine(Engine):
    """Executes the ONNX file at `path`; `weights` only label it. In mode `latency` all threads execute one batch."""

    _compiled: Any = None
    _request: Any = None
    _ports: Mapping[str, Any]
    _products: Mapping[str, int]
    _checked: Disagreement | None = None
    _compile_seconds = 0.0

    def load(self) -> None:
        """Compile the file, check that threads and precision took effect, and compare the answers."""
        import openvino

        specification, settings, path = self._specification, self._settings, self._path
        assert path is not None  # see build_engine
        mode = settings.mode_on("cpu" if settings.device in ("auto", "cpu") else "cuda")
        assert mode == "latency"
        if any(tensor.datatype == "BYTES" for tensor in (*specification.inputs, *specification.outputs)):
            raise EngineError("the openvino engine takes no strings; use the engine onnxruntime")
        if not path.is_file():
            command = export_command(specification, settings.kind)
            raise EngineError(f"no ONNX file for {specification.name} at {path.name}; run: {command}")
        core = openvino.Core()
        if settings.precision == "bf16" and "BF16" not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            raise EngineError("this processor has no BF16 instructions (AVX512_BF16 or AMX); use --precision fp32")
        threads = thread_count(settings.threads)
        options = {
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": "1",
            "INFERENCE_PRECISION_HINT": HINTS[settings.precision],
            "INFERENCE_NUM_THREADS": threads,
            "ENABLE_HYPER_THREADING": True,  # else it leaves out logical cores that were asked for
        }
        started_ns = time.perf_counter_ns()
        try:
            self._compiled = core.compile_model(core.read_model(path), "CPU", options)
        except FAILURES as exc:
            raise EngineError(f"OpenVINO cannot load {path.name}: {_reason(exc)}") from exc
        self._compile_seconds = (time.perf_counter_ns() - started_ns) / 1e9
        used = int(self._compiled.get_property("INFERENCE_NUM_THREADS"))
        if settings.threads and used != threads:
            raise EngineError(f"OpenVINO uses {used} threads here instead of {threads}; use --threads {used}")
        proof = proof_at_load(specification, settings.max_batch_size)
        with self.checking():
            expected = self._expected(proof)
        self._ports = {name: port for port in self._compiled.outputs for name in port.get_names()}
        self._request = self._compiled.create_infer_request()
        self._products = _products(self._compiled)
        self._check_precision()
        with self.checking():
            answers = proof.without_padding(self.infer(proof.inputs))
            self._checked = disagreement(specification, expected, answers, settings.precision)
        if self._checked.fault is not None:
            raise EngineError(
                f"OpenVINO does not compute {path.name} as ONNX Runtime does: {self._checked.fault}; use the engine "
                "onnxruntime" + ("" if settings.precision == "fp32" else ", or precision fp32")
            )

    def infer(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Execute one batch. OpenVINO reads the caller's arrays in place; the answers are copies of its memory."""
        if self._request is None:
            raise EngineError("the openvino engine is not loaded")
        check_sizes(self._specification, inputs)  # OpenVINO would execute a longer batch than the model takes
        try:
            answers = self._request.infer(dict(inputs), share_inputs=True, share_outputs=False)
        except FAILURES as exc:
            raise EngineError(f"OpenVINO failed to execute the batch: {_reason(exc)}") from exc
        return {tensor.name: answers[self._ports[tensor.name]] for tensor in self._specification.outputs}

    def describe(self) -> EngineDescription:
        """Read back from the compiled model's properties and the precision of its kernels."""
        import openvino

        if (compiled := self._compiled) is None:
            raise EngineError("the openvino engine is not loaded")
        details: dict[str, object] = {
            "execution_devices": list(compiled.get_property("EXECUTION_DEVICES")),
            "processor": openvino.Core().get_property("CPU", "FULL_DEVICE_NAME"),
            "performance_hint": str(compiled.get_property("PERFORMANCE_HINT")).rpartition(".")[2],
            "streams": int(compiled.get_property("NUM_STREAMS")),
            "thread_pinning": bool(compiled.get_property("ENABLE_CPU_PINNING")),
            "inference_precision": compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name(),
            "executed_products": dict(self._products),
            "compile_seconds": round(self._compile_seconds, 3),
        }
        if self._checked is not None:
            details |= self._checked.details("onnxruntime")
        return self._description(
            version=openvino.__version__.partition("-")[0],
            precision=self._precision_in_effect(),
            mode="latency",
            device="cpu",
            threads=int(compiled.get_property("INFERENCE_NUM_THREADS")),
            details=details,
        )

    def close(self) -> None:
        self._request = self._compiled = None

    def _expected(self, proof: Any) -> dict[str, Array]:
        """ONNX Runtime's answers to the same file, which also checks its signature and precision."""
        settings = self._settings
        stored = "int8" if settings.precision == "int8" else "fp32"
        settings = replace(settings, kind="onnxruntime", precision=stored, mode="auto", device="cpu")
        engine = OnnxRuntimeEngine(self._specification, settings, self._weights, self._path)
        try:
            engine.load()
            answers: dict[str, Array] = proof.expected(engine.infer)
            return answers
        finally:
            engine.close()

    def _precision_in_effect(self) -> str:
        """The precision of the products; that of the hint if the model has no products."""
        for precision in ("int8", "bf16", "fp32"):
            if any(name in self._products for name in KERNELS[precision]):
                return precision
        hint = self._compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
        return next(precision for precision, name in HINTS.items() if name == hint)

    def _check_precision(self) -> None:
        """Raise `EngineError` if the products are not executed as requested."""
        requested = self._settings.precision
        in_effect = self._precision_in_effect()
        if in_effect != requested:
            listed = ", ".join(f"{count} in {name}" for name, count in self._products.items()) or "none"
            remedy = "use --precision fp32" if requested != "fp32" else f"use --precision {in_effect}"
            raise EngineError(
                f"OpenVINO executes no product of {self._specification.name} in {requested} ({listed}); {remedy}"
            )


def _products(compiled: Any) -> dict[str, int]:
    """How many convolutions and matrix products are executed in each precision."""
    products: Counter[str] = Counter()
    for node in compiled.get_runtime_model().get_ops():
        information = node.get_rt_info()
        if information["layerType"].astype(str) in PRODUCTS:
            products[information["runtimePrecision"].astype(str)] += 1
    return dict(sorted(products.items()))


def _reason(exc: BaseException) -> str:
    """The cause; OpenVINO puts the place in its source code before it."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return next((line for line in reversed(lines) if not line.startswith("Exception from")), reason_of(exc))
