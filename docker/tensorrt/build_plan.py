"""build_plan.py FOLDER: builds the TensorRT plan of FOLDER/request.json, unless it is up to date.

Runs in NVIDIA's TensorRT image with Python's standard library and `tensorrt` only (API of versions 10 and 11). A plan
loads only with the TensorRT build and GPU architecture that built it, so this refuses to build with another TensorRT
than Triton's, which FOLDER/triton-tensorrt.json names.
"""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SCHEMA = "abserve.plan/1"
WORKSPACE_BYTES = 4 * 2**30


class PlanError(Exception):
    """The plan cannot be built; the message is one sentence with the remedy."""


def main(folder: Path) -> int:
    """Exit status 1 with one sentence if the requested plan cannot be built."""
    try:
        sys.stdout.write(ensure_plan(folder) + "\n")
    except PlanError as exc:
        sys.stderr.write(f"error: {exc}\n")
        return 1
    return 0


def ensure_plan(folder: Path) -> str:
    """Build the plan if necessary; returns a sentence about it. Raises `PlanError`."""
    request_path = folder / "request.json"
    if not request_path.exists():
        return "no plan is needed (TRITON_BACKENDS has no tensorrt)"
    request = json.loads(request_path.read_text(encoding="utf-8"))
    import tensorrt

    serving = json.loads((folder / "triton-tensorrt.json").read_text(encoding="utf-8"))["tensorrt"]
    if serving != tensorrt.__version__:
        raise PlanError(
            f"Triton uses TensorRT {serving} and this image has {tensorrt.__version__}: a plan of one does not load in "
            "the other; set TRITON_IMAGE and TENSORRT_IMAGE in .env to the same month"
        )
    manifest = {
        "schema": SCHEMA,
        "tensorrt": serving,
        "gpu": gpu(),
        "onnx_sha256": request["onnx_sha256"],
        "precision": request["precision"],
        "profile": request["profile"],
    }
    plan = Path(request["plan"])
    if up_to_date(folder, plan, manifest):
        return f"{plan} is up to date"
    content = build(tensorrt, folder / request["onnx"], request, folder / "timing.cache")
    plan.parent.mkdir(parents=True, exist_ok=True)
    part = plan.with_name(plan.name + ".part")
    part.write_bytes(content)
    part.replace(plan)
    document = {**manifest, "plan_sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    (folder / "plan.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return f"built {plan}: {len(content) / 1e6:.0f} MB with TensorRT {serving} for {manifest['gpu']}"


def up_to_date(folder: Path, plan: Path, wanted: dict[str, Any]) -> bool:
    """Whether the plan is complete and was built from the same file for the same GPU."""
    try:
        known = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
        content = plan.read_bytes()
    except (OSError, ValueError):
        return False
    return all(known.get(key) == value for key, value in wanted.items()) and (
        known.get("plan_sha256") == hashlib.sha256(content).hexdigest()
    )


def gpu() -> str:
    """Name and compute capability of this GPU. Raises `PlanError`."""
    query = ["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as exc:
        raise PlanError(f"nvidia-smi does not answer in this container ({exc}): check the container toolkit") from exc
    return done.stdout.strip().splitlines()[0]


def build(trt: Any, onnx: Path, request: dict[str, Any], timing_cache: Path) -> bytes:
    """The serialised engine: one profile, of which the request has the shapes of each input. Raises `PlanError`."""
    logger = trt.Logger(trt.Logger.INFO)
    builder = trt.Builder(logger)
    # TensorRT 11 is always strongly typed; 10 needs the flag, so that FP16 means the FP16 of the file.
    flags = 0
    if hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED"):
        flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(flags)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(onnx)):
        errors = "; ".join(str(parser.get_error(index)) for index in range(parser.num_errors))
        raise PlanError(f"TensorRT cannot parse {onnx.name}: {errors}")
    config = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, WORKSPACE_BYTES)
    if request["precision"] != "tf32":  # a flag that is set by default
        config.clear_flag(trt.BuilderFlag.TF32)
    cache = config.create_timing_cache(timing_cache.read_bytes() if timing_cache.exists() else b"")
    config.set_timing_cache(cache, ignore_mismatch=False)
    profile = builder.create_optimization_profile()
    for name, shapes in request["profile"].items():
        profile.set_shape(name, *map(tuple, shapes))
    config.add_optimization_profile(profile)
    serialised = builder.build_serialized_network(network, config)
    if serialised is None:
        raise PlanError("TensorRT built no engine; its reasons are above")
    timing_cache.write_bytes(bytes(config.get_timing_cache().serialize()))
    return bytes(serialised)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
