"""The decoupled model of Triton's python backend that generates tokens: one engine, one loop for all requests.

Runs inside the backend's stub process. `execute` only reads the requests and queues them; the loop's thread alone calls
the engine and sends what each step has produced. A response is a round trip between two processes, and so is the
question whether a client has left: another thread asks it ten times per second, not for each token. Triton itself
notices that a client has left when it next writes to the connection.

A response that holds one token is made once per token and sent again: making it costs as much as sending it. Sending
removes the outputs that the client did not ask for from the response itself, so a request that does not ask for the
tokens gets responses of its own.
"""

from __future__ import annotations

import json
import queue
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from servers.language.engine import Emission, GeneratingEngine, GenerationRequest, GenerationSettings, make_engine
from servers.language.specification import language_model
from servers.language.torch_engine import generation_kernels
from servers.models.files import for_python
from servers.protocol.errors import ContractError
from servers.triton.config import contradicting_parameters
from servers.triton.python_backend import FAILED, array_of, read_launch, repair_bytes, tensor_of

CANCEL_SECONDS = 0.1
MOST_KEPT = 32_768
"""Responses that are kept, in up to 32 MiB of the shared memory."""
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


@dataclass(slots=True)
class _Answer:
    """An answer that has not ended."""

    sender: Any
    prompt_tokens: int | None
    """For the first response; None after it."""
    with_tokens: bool
    """Whether the client asks for the tokens."""


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
        settings = self._engine.settings() | generation_kernels(self._engine)
        report = {
            "in_effect": {"kind": settings["engine"], "device": settings["device"], "details": settings},
            "load_ns": loaded_ns - started_ns,
            "warm_up_ns": warm_ns - loaded_ns,
        }
        pb_utils.Logger.log_info(f"engine ready: {json.dumps(report, default=str)}")
        self._number = 0
        self._answers: dict[int, _Answer] = {}
        """By number, of all that wait or are generated."""
        self._asking = threading.Lock()
        """Held while it is asked whether a client has left, and to take an answer away: to ask that of an answer whose
        last response is sent ends all of Triton (SIGSEGV)."""
        self._arrivals: queue.SimpleQueue[GenerationRequest | int | None] = queue.SimpleQueue()
        """Requests, the numbers of those whose client has left, and at the end None."""
        self._responses: dict[tuple[int, ...], Any] = {}
        """By their tokens, of responses without anything else."""
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=run) for run in (self._generate, self._watch_clients)]
        for thread in self._threads:
            thread.start()

    def execute(self, requests: list[Any]) -> None:
        """Queue the requests; the loop's thread sends their responses."""
        for request in requests:
            sender = request.get_response_sender()
            if self._queue_size and len(self._answers) >= self._engine.slots + self._queue_size:
                message = f"{self._queue_size} requests are waiting; retry later"
                _send(sender, _error(message, pb_utils.TritonError.UNAVAILABLE), final=True)
                continue
            prompt = _values(request, "input_ids") or []
            (max_tokens,) = _values(request, "max_tokens") or [0]
            (ignore_eos,) = _values(request, "ignore_eos") or [True]
            self._number += 1
            with_tokens = "token_ids" in request.requested_output_names()
            self._answers[self._number] = _Answer(sender, len(prompt), with_tokens)
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
                for emission in self._engine.step():
                    self._respond(emission)
        except Exception:  # noqa: BLE001 - every request gets the error, and the log the cause
            pb_utils.Logger.log_error(f"the engine failed: {traceback.format_exc()}")
            for number in list(self._answers):
                self._end(number, FAILED, pb_utils.TritonError.INTERNAL)
            while (arrival := self._arrivals.get()) is not None:
                number = arrival if isinstance(arrival, int) else arrival.number
                self._end(number, FAILED, pb_utils.TritonError.INTERNAL)

    def _take_arrivals(self) -> bool:
        """Tell the engine what has come since the last step; wait while it is idle. False at the end."""
        while not self._arrivals.empty() or not (self._engine.active or self._engine.waiting):
            arrival = self._arrivals.get()
            if arrival is None:
                return False
            if isinstance(arrival, int):
                self._engine.cancel(arrival)
                self._end(arrival)
                continue
            try:
                self._engine.add(arrival)
            except ContractError as error:
                self._end(arrival.number, str(error))
        return True

    def _respond(self, emission: Emission) -> None:
        number, tokens, finish = emission.number, emission.tokens, emission.finish
        if finish == "error":
            self._end(number, emission.message)
            return
        answer = self._answers.get(number)
        if answer is None:  # its client has left, and the engine was a step ahead
            return
        prompt_tokens, answer.prompt_tokens = answer.prompt_tokens, None
        shared = prompt_tokens is None and finish is None and answer.with_tokens
        response = self._responses.get(tokens) if shared else None
        if response is None:
            tensors = [tensor_of("token_ids", np.array(tokens, np.int32))]
            if prompt_tokens is not None:
                tensors.append(tensor_of("prompt_tokens", np.array([prompt_tokens], np.int32)))
            if finish is not None:
                tensors.append(tensor_of("finish_reason", np.array([finish.encode()], object)))
            response = pb_utils.InferenceResponse(tensors)
            if shared and len(tokens) == 1 and len(self._responses) < MOST_KEPT:
                self._responses[tokens] = response
        if finish is not None:
            self._take_away(number)
        _send(answer.sender, response, final=finish is not None)

    def _end(self, number: int, message: str = "", code: int | None = None) -> None:
        """The last response of a request without a good end; without a message its client has left. Without a `code` it
        is the request's fault."""
        if (answer := self._take_away(number)) is not None:
            code = pb_utils.TritonError.INVALID_ARG if code is None else code
            _send(answer.sender, _error(message, code) if message else None, final=True)

    def _take_away(self, number: int) -> _Answer | None:
        """An answer that gets its last response; None where it has had that."""
        with self._asking:
            return self._answers.pop(number, None)

    def _watch_clients(self) -> None:
        while not self._stopping.wait(CANCEL_SECONDS):
            for number in list(self._answers):
                with self._asking:
                    answer = self._answers.get(number)
                    has_left = answer is not None and answer.sender.is_cancelled()
                if has_left:
                    self._arrivals.put(number)


def _values(request: Any, name: str) -> list[int] | None:
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else array_of(tensor).reshape(-1).tolist()


def _error(message: str, code: int) -> Any:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code))


def _send(sender: Any, response: Any, *, final: bool) -> None:
    """A response that cannot be sent is logged: other requests go on."""
    try:
        sender.send(response, FINAL if final else 0)
    except Exception:  # noqa: BLE001 - Triton's own type, made anew in each process
        pb_utils.Logger.log_error(f"a response was not sent: {traceback.format_exc()}")
