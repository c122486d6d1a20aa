"""A model behind the Open Inference Protocol V2 with LitServe; the protocol itself is in `fastapi_server.py`.

LitServe executes the model in a worker process, a child of this one, and counts the requests of a batch, not their
rows. So the worker executes at most the model's largest batch at once.
"""
# No `from __future__ import annotations`: LitServe reads the annotations of decode_request and encode_response.

import multiprocessing
import os
import signal
from collections.abc import MutableMapping
from typing import Annotated, Any

import litserve
from fastapi import Depends, Request, Response

from servers.gpu.info import Runtime
from servers.plain.fastapi_server import LENGTH, PlainModel, add_routes, decode, encode
from servers.plain.report import read_runtime
from servers.plain.settings import PlainSettings, of_process
from servers.protocol.tensors import Array

SETTINGS = of_process()
SPEC = SETTINGS.specification()
Decoded = tuple[list[Array], dict[str, Any]]


async def read_request(request: Request) -> Decoded:
    """The raw body, decoded before it is queued: LitServe would fail a whole batch for one malformed request."""
    return decode(SPEC, await request.body(), request.headers.get(LENGTH))


class ProtocolAPI(litserve.LitAPI):  # type: ignore[misc,unused-ignore]  # LitServe is optional
    """One model; `report` gets from the worker what it knows about the loaded model."""

    def __init__(self, settings: PlainSettings, report: MutableMapping[str, Runtime]) -> None:
        delay_s = settings.max_queue_delay_us / 1e6
        path = f"/v2/models/{SPEC.name}/infer"
        super().__init__(max_batch_size=SPEC.max_batch_size, batch_timeout=delay_s, api_path=path)
        self.settings, self.report = settings, report

    def setup(self, device: str) -> None:  # noqa: ARG002 - it is that of the settings
        """Load and warm up, in the worker."""
        self.model = PlainModel(self.settings)
        self.report["runtime"] = read_runtime(self.settings, self.model.module, self.model.infer)

    def decode_request(self, request: Annotated[Decoded, Depends(read_request)]) -> Decoded:
        return request

    def batch(self, inputs: list[Decoded]) -> list[Decoded]:
        """Requests of different shapes cannot be merged, so `predict` merges them."""
        return inputs

    def predict(self, requests: Any) -> Any:
        """Execute requests of equal shapes together, as many as the largest batch holds."""
        if isinstance(requests, tuple):  # a largest batch of 1: LitServe does not batch
            return self.model.infer([requests[0]])[0], requests[1]
        groups: list[list[int]] = []
        for index, (arrays, _) in enumerate(requests):
            group = next((g for g in groups if self._fits(requests, g, arrays)), None)
            if group is None:
                groups.append([index])
            else:
                group.append(index)
        answers: dict[int, list[Array]] = {}
        for group in groups:
            answers |= zip(group, self.model.infer([requests[index][0] for index in group]), strict=True)
        return [(answers[index], header) for index, (_, header) in enumerate(requests)]

    def encode_response(self, output: Any) -> Response:
        return encode(SPEC, *output)

    def _fits(self, requests: list[Decoded], group: list[int], arrays: list[Array]) -> bool:
        """Whether a request has the shapes of a group and its largest batch has room."""
        first = requests[group[0]][0]
        rows = sum(len(requests[index][0][0]) for index in group) + len(arrays[0])
        return rows <= SPEC.max_batch_size and [a.shape[1:] for a in arrays] == [a.shape[1:] for a in first]


MAIN = os.getpid()


def end(*_: object) -> None:
    """Stop as after Ctrl-C, the only signal after which LitServe ends its processes; forked ones just end."""
    if os.getpid() == MAIN:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt
    raise SystemExit(0)


def main() -> None:
    with multiprocessing.Manager() as manager:
        report = manager.dict()
        accelerator = "cpu" if SETTINGS.device == "cpu" else "cuda"
        # The worker puts the model on the device of the settings; LitServe only counts the devices.
        server = litserve.LitServer(ProtocolAPI(SETTINGS, report), accelerator=accelerator, devices=1)
        add_routes(server.app, "litserve", SETTINGS, lambda: report["runtime"])
        signal.signal(signal.SIGTERM, end)
        server.run(
            host=SETTINGS.host,
            port=SETTINGS.http_port,
            log_level="warning",
            generate_client_file=False,
            num_api_servers=1,
            ssl_certfile=SETTINGS.tls_certificate,
        )


if __name__ == "__main__":
    main()
