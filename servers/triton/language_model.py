"""The decoupled model of Triton's python backend that generates tokens: one engine, one loop for all requests.

Runs inside the backend's stub process. `execute` only reads the requests and queues them. The loop's thread alone calls
the engine. Each response is a round trip between two processes (50 µs), during which another thread lets the engine go
on. Whether a client has left is such a round trip, too, so it is asked ten times per second and not per token; Triton
itself learns of it when it next writes to the connection.
"""

from __future__ import annotations

import json
import queue
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from servers.language.engine import Emission, GeneratingEngine, GenerationRequest, GenerationSettings, make_engine
from servers.language.specification import language_model
from servers.models.files import for_python
from servers.protocol.errors import ContractError
from servers.triton.config import contradicting_parameters
from servers.triton.python_backend import FAILED, array_of, read_launch, repair_bytes, tensor_of

CANCEL_SECONDS = 0.1
STEPS_AHEAD = 2
"""How many steps the engine may be ahead of the responses: more would only make them later."""
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class GeneratingModel:
    """Triton creates one and calls its methods from one thread."""

    _engine: GeneratingEngine

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load, verify and warm up the engine; a failure fails the load, with its message in Triton's log."""
        started_ns = time.perf_counter_ns()
        repair_bytes()
        _, parameters, folder = read_launch(args)
        private = json.loads((folder / "engine.json").read_bytes())
        self._queue_size = int(private["queue_size"])
        model = language_model(for_python(private["model"]), for_python(private["weights"]))
        self._engine = make_engine(model, GenerationSettings(**private["settings"]))
        self._engine.load()
        if differences := contradicting_parameters(parameters, self._engine.settings()):
            raise RuntimeError(f"the engine differs from the model's config: {'; '.join(differences)}")
        loaded_ns = time.perf_counter_ns()
        self._engine.warm_up()
        warm_ns = time.perf_counter_ns()
        report = {
            "in_effect": self._engine.settings(),
            "load_ns": loaded_ns - started_ns,
            "warm_up_ns": warm_ns - loaded_ns,
        }
        pb_utils.Logger.log_info(f"engine ready: {json.dumps(report, default=str)}")
        self._number = 0
        self._senders: dict[int, Any] = {}
        self._prompt_tokens: dict[int, int] = {}
        """Of requests without a response yet."""
        self._arrivals: queue.SimpleQueue[GenerationRequest | int | None] = queue.SimpleQueue()
        """Requests, the numbers of those whose client has left, and at the end None."""
        self._emitted: queue.Queue[Sequence[Emission] | None] = queue.Queue(STEPS_AHEAD)
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=run) for run in (self._generate, self._send, self._watch_clients)]
        for thread in self._threads:
            thread.start()

    def execute(self, requests: list[Any]) -> None:
        """Queue the requests; their responses follow from the other threads."""
        for request in requests:
            sender = request.get_response_sender()
            if self._queue_size and self._engine.waiting + self._arrivals.qsize() >= self._queue_size:
                _refuse(
                    sender, f"{self._queue_size} requests are waiting; retry later", pb_utils.TritonError.UNAVAILABLE
                )
                continue
            prompt = _values(request, "input_ids") or []
            (max_tokens,) = _values(request, "max_tokens") or [0]
            (ignore_eos,) = _values(request, "ignore_eos") or [True]
            self._number += 1
            self._senders[self._number] = sender
            self._prompt_tokens[self._number] = len(prompt)
            self._arrivals.put(GenerationRequest(self._number, prompt, max_tokens, bool(ignore_eos)))

    def finalize(self) -> None:
        """Stop the threads and free the engine."""
        self._stopping.set()
        self._arrivals.put(None)
        for thread in self._threads:
            thread.join()
        self._engine.close()

    def _generate(self) -> None:
        """The engine's loop."""
        try:
            while self._take_arrivals():
                self._emitted.put(self._engine.step())
        except Exception:  # noqa: BLE001 - every request gets the error, and the log the cause
            pb_utils.Logger.log_error(f"the engine failed: {traceback.format_exc()}")
            self._emitted.put([Emission(number, (), "error", FAILED) for number in list(self._senders)])
            while (arrival := self._arrivals.get()) is not None:
                number = arrival if isinstance(arrival, int) else arrival.number
                self._emitted.put([Emission(number, (), "error", FAILED)])
        self._emitted.put(None)

    def _take_arrivals(self) -> bool:
        """Tell the engine what has come since the last step; wait while it is idle. False at the end."""
        idle = not (self._engine.active or self._engine.waiting)
        while idle or not self._arrivals.empty():
            arrival = self._arrivals.get()
            if arrival is None:
                return False
            if isinstance(arrival, int):
                self._engine.cancel(arrival)
                self._emitted.put([Emission(arrival, (), "error")])
            else:
                idle = not self._add(arrival) and idle
        return True

    def _add(self, request: GenerationRequest) -> bool:
        try:
            self._engine.add(request)
        except ContractError as error:
            self._emitted.put([Emission(request.number, (), "error", str(error))])
            return False
        return True

    def _send(self) -> None:
        while (emissions := self._emitted.get()) is not None:
            for emission in emissions:
                try:
                    self._respond(emission)
                except Exception:  # noqa: BLE001 - Triton's own type; the other requests go on
                    pb_utils.Logger.log_error(f"a response was not sent: {traceback.format_exc()}")
                    self._arrivals.put(emission.number)

    def _respond(self, emission: Emission) -> None:
        number, finish = emission.number, emission.finish
        sender = self._senders.get(number)
        if sender is None:  # its client left, and the engine was a step ahead
            return
        if finish is not None:
            del self._senders[number]
        prompt_tokens = self._prompt_tokens.pop(number, None)
        if finish == "error":
            if emission.message:
                _refuse(sender, emission.message, pb_utils.TritonError.INVALID_ARG)
            else:
                sender.send(flags=FINAL)
            return
        tensors = [tensor_of("token_ids", np.array(emission.tokens, np.int32))]
        if prompt_tokens is not None:
            tensors.append(tensor_of("prompt_tokens", np.array([prompt_tokens], np.int32)))
        if finish is not None:
            tensors.append(tensor_of("finish_reason", np.array([finish.encode()], object)))
        sender.send(pb_utils.InferenceResponse(tensors), FINAL if finish is not None else 0)

    def _watch_clients(self) -> None:
        while not self._stopping.wait(CANCEL_SECONDS):
            for number, sender in list(self._senders.items()):
                if sender.is_cancelled():
                    self._arrivals.put(number)


def _values(request: Any, name: str) -> list[int] | None:
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else array_of(tensor).reshape(-1).tolist()


def _refuse(sender: Any, message: str, code: int) -> None:
    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code)), FINAL)
