"""The same rows through both front ends and in every form give bit by bit the same answer."""

from __future__ import annotations

import asyncio
import os
import queue

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
import tritonclient.utils.shared_memory as shm
from tritonclient.grpc import service_pb2, service_pb2_grpc

ROWS = 2


@pytest.fixture(scope="module")
def model(specification, artefact, tmp_path_factory, native_starter):
    """The real model, executed by ONNX Runtime, one batch a request so that no merging changes the arithmetic."""
    server = native_starter(
        tmp_path_factory.mktemp("agree"),
        "--engine", "onnxruntime", "--artefact", str(artefact.path), "--max-batch-size", str(ROWS),
        "--max-queue-delay-us", "0", "--allow-shared-memory", "true", "--threads", "1",
    )  # fmt: skip
    return specification, server


@pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")  # tritonclient's aio does that
def test_every_door_gives_the_same_bits(model):
    specification, server = model
    given, wanted = specification.inputs[0].name, specification.outputs[0].name
    data = np.random.default_rng(3).standard_normal((ROWS, 3, 224, 224), dtype=np.float32)
    answers: dict[str, np.ndarray] = {}

    for kind, module, address in (
        ("http", tritonclient.http, server.address),
        ("grpc", tritonclient.grpc, server.grpc_address),
    ):
        client = module.InferenceServerClient(address)
        item = module.InferInput(given, list(data.shape), "FP32")
        item.set_data_from_numpy(data)
        answers[kind] = client.infer(specification.name, [item]).as_numpy(wanted)
        if kind == "http":
            item.set_data_from_numpy(data, binary_data=False)
            output = module.InferRequestedOutput(wanted, binary_data=False)
            answers["http json"] = client.infer(specification.name, [item], outputs=[output]).as_numpy(wanted)
        answers[f"{kind} shared memory"] = through_shared_memory(module, client, specification, data)
        client.close()

    raw = server.request(
        "POST", f"/v2/models/{specification.name}/infer", data[:1].tobytes(), {"Inference-Header-Content-Length": "0"}
    )
    answers["http raw"] = np.frombuffer(raw.body[int(raw.headers["inference-header-content-length"]) :], np.float32)
    with grpc.insecure_channel(server.grpc_address) as channel:
        request = service_pb2.ModelInferRequest(model_name=specification.name)
        request.inputs.add(name=given, datatype="FP32", shape=data.shape).contents.fp32_contents.extend(data.ravel())
        response = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=60)
        answers["grpc typed"] = np.frombuffer(response.raw_output_contents[0], np.float32)
    answers["grpc stream"] = through_a_stream(server, specification, data)
    answers["http aio"], answers["grpc aio"] = asyncio.run(through_aio(server, specification, data))

    golden = answers["http"].tobytes()
    assert len(golden) == ROWS * 512 * 4
    assert np.ptp(answers["http"]) > 0
    first = answers.pop("http raw")  # of the first row alone: other sizes are other arithmetic, so not bit by bit
    np.testing.assert_allclose(first, answers["http"][0], rtol=0, atol=1e-5)
    assert {name for name, answer in answers.items() if answer.tobytes() != golden} == set()


def through_shared_memory(module, client, specification, data) -> np.ndarray:
    key = f"abserve_agree_{os.getpid()}"
    region = shm.create_shared_memory_region("all", key, data.nbytes + ROWS * 2048)
    try:
        shm.set_shared_memory_region(region, [data])
        client.register_system_shared_memory("all", key, data.nbytes + ROWS * 2048)
        item = module.InferInput(specification.inputs[0].name, list(data.shape), "FP32")
        item.set_shared_memory("all", data.nbytes)
        output = module.InferRequestedOutput(specification.outputs[0].name)
        output.set_shared_memory("all", ROWS * 2048, offset=data.nbytes)
        client.infer(specification.name, [item], outputs=[output])
        return shm.get_contents_as_numpy(region, np.float32, [ROWS, 512], offset=data.nbytes).copy()
    finally:
        client.unregister_system_shared_memory("all")
        shm.destroy_shared_memory_region(region)


def through_a_stream(server, specification, data) -> np.ndarray:
    answers: queue.Queue = queue.Queue()
    with tritonclient.grpc.InferenceServerClient(server.grpc_address) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        item = tritonclient.grpc.InferInput(specification.inputs[0].name, list(data.shape), "FP32")
        item.set_data_from_numpy(data)
        client.async_stream_infer(specification.name, [item])
        result, error = answers.get(timeout=60)
        client.stop_stream()
    assert error is None
    return result.as_numpy(specification.outputs[0].name)


async def through_aio(server, specification, data) -> list[np.ndarray]:
    outputs = []
    for module, aio, address in (
        (tritonclient.http, tritonclient.http.aio, server.address),
        (tritonclient.grpc, tritonclient.grpc.aio, server.grpc_address),
    ):
        async with aio.InferenceServerClient(address) as client:
            item = module.InferInput(specification.inputs[0].name, list(data.shape), "FP32")
            item.set_data_from_numpy(data)
            result = await client.infer(specification.name, [item])
            outputs.append(result.as_numpy(specification.outputs[0].name))
    return outputs
