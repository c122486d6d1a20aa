"""What a front end and the engine's process send each other, over one stream socket: msgpack in frames with a length.

Tensors stay where they are, in slots of the arena: a message says where. Small answers, and elements of BYTES, are in
the message itself. The supervisor and its children say little, over sockets of their own: `CLOSED` and `STOP_BY`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, get_args

import msgspec
import numpy as np

from servers.engines.interface import HostMemory
from servers.engines.padding import Padding, batch_key
from servers.native.shared.errors import INTERNAL_ERROR, REFUSALS, FailureLog, RefusedError
from servers.native.shared.interface import DevicePlace, EngineOperation, FrontEndOperation, QueuedRequest
from servers.native.shared.memory import ALIGNMENT, Arena, RequestMemory
from servers.protocol import errors as protocol_errors
from servers.protocol.errors import ContractError, InternalError, UnavailableError
from servers.protocol.tensors import Array, like

MAX_FORMS = 1024
MAX_GROUP_ROWS = 8
"""Rows of requests that are submitted as one: few, because the batcher does not split them."""
INLINE_BYTES = 64 * 1024
"""Answers with more bytes than this are written to the arena, where their sizes are known before."""

HTTP, GRPC, ENGINE = b"hge"
"""The supervisor sends one with each connection that it has accepted, or with the socket to a new engine."""
CLOSED, SWITCHED = b"c", b"s"
"""A front end sends the supervisor one for each connection that it has closed, and one when the engines that it had
before owe it no answer any more."""
LOADED = b"r"
"""An engine's process that is to replace another one sends it to the supervisor once it could serve."""
STOP_BY = struct.Struct("d")
"""Tells the engine's process to stop, and when it must have finished, in `time.monotonic` seconds."""

_LENGTH = struct.Struct("<Q")
Failure = tuple[str, str]
"""An error's class, or the reason of a `RefusedError`, and its message."""

FORM_UNKNOWN: Failure = (UnavailableError.__name__, "the engine did not get the form of the request, send it again")
FAILED: Failure = (InternalError.__name__, INTERNAL_ERROR)

log = FailureLog("abserve.messages")


class Tensor(msgspec.Struct, array_like=True, gc=False):
    """One array: `data` is its offset in the arena, its bytes, or None for one in device memory. `elements` are those
    of BYTES, whose dtype is `O`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: int | bytes | None = None
    elements: list[bytes] | None = None


class Form(msgspec.Struct, array_like=True, tag=5):
    """The inputs of requests of one kind: name, dtype and shape of each. Later requests name it by its number."""

    number: int
    model: int
    tensors: list[tuple[str, str, tuple[int, ...]]]


SubmittedInput = int | list[bytes] | None
"""Where a request's input is: its offset in the arena, the elements of BYTES, or None for one in device memory."""


class Submit(msgspec.Struct, array_like=True, tag=0, gc=False):
    """Execute requests of one form and of `rows` rows each, that came at one time. `data` has the inputs of each.
    Several requests have offsets only, and nothing of what follows `data`. Large answers go to `room`, an offset and a
    size in the arena."""

    numbers: list[int]
    form: int
    rows: int
    data: list[list[SubmittedInput]]
    deadline_ns: int | None = None
    room: tuple[int, int] | None = None
    device_inputs: dict[str, DevicePlace] | None = None
    device_outputs: dict[str, DevicePlace] | None = None
    trace: bytes | None = None


class Cancel(msgspec.Struct, array_like=True, tag=1, gc=False):
    """Take a request back if it still waits; either way it will be `Done`."""

    number: int


class Done(msgspec.Struct, array_like=True, tag=2, gc=False):
    """These requests, or an operation, are done or have failed: the engine does not read the memory of the requests any
    more. Those that were executed as one have their outputs one after the other in each tensor."""

    numbers: list[int]
    outputs: list[Tensor] = []
    failure: Failure | None = None


class Control(msgspec.Struct, array_like=True, tag=3):
    """Execute a control operation; answered by `Done` with the same number."""

    number: int
    operation: EngineOperation | FrontEndOperation


class Generate(msgspec.Struct, array_like=True, tag=6, gc=False):
    """Generate an answer to a checked prompt of token ids; ends with a `finished` of `Generated`, unless cancelled."""

    number: int
    prompt: list[int]
    max_tokens: int
    ignore_eos: bool
    received_ns: int
    """When it came, by `perf_counter_ns`."""
    client: str = ""
    """The client's address, where the number of its requests is limited."""


class Finished(msgspec.Struct, array_like=True, gc=False):
    """The last tokens of an answer. `finish`: "length", "stop", or "error" with a failure."""

    number: int
    tokens: list[int]
    finish: str
    failure: Failure | None = None


class Generated(msgspec.Struct, array_like=True, tag=7, gc=False):
    """What one step of a generating engine has for a front end: for each number one token, and answers that are done.
    `several` are answers that go on and got another number of tokens than one."""

    numbers: list[int]
    tokens: list[int]
    several: list[tuple[int, list[int]]] = []
    finished: list[Finished] = []


Message = Form | Submit | Cancel | Done | Control | Generate | Generated
REQUESTS = (Submit, Control)
"""Messages that the other side replies to."""


class UnusableMessage(NamedTuple):
    """A message of this kind about these requests that cannot be encoded, or has a field of another type."""

    kind: type[Message] | None
    numbers: list[int]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(list[Message])
_RAW_DECODER = msgspec.msgpack.Decoder(list[msgspec.Raw])
_ONE_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_KINDS: Mapping[object, type[Message]] = {kind.__struct_config__.tag: kind for kind in get_args(Message)}


def encode(messages: Sequence[Message]) -> bytes:
    """One frame. Raises whatever msgspec raises for a value that no message can hold."""
    content = _ENCODER.encode(messages)
    return _LENGTH.pack(len(content)) + content


def encode_all(messages: Sequence[Message]) -> tuple[bytes, list[UnusableMessage]]:
    """One frame of the messages that can be encoded, and the others."""
    try:
        return encode(messages), []
    except Exception:
        log.exception("a message to another process cannot be encoded")
    encoded: list[Message] = []
    unusable: list[UnusableMessage] = []
    for message in messages:
        try:
            _ENCODER.encode(message)
        except Exception:  # noqa: BLE001  logged above
            unusable.append(unusable_of(message))
        else:
            encoded.append(message)
    return encode(encoded), unusable


def unusable_of(message: Message | UnusableMessage) -> UnusableMessage:
    """A message that only fails what it is about."""
    if isinstance(message, UnusableMessage):
        return message
    if isinstance(message, Submit | Done | Generated):
        return _unusable(type(message), message.numbers)
    return _unusable(type(message), message.number)


def _unusable(kind: type[Message] | None, about: object) -> UnusableMessage:
    """`about`: the field with the number or numbers, whatever it holds."""
    numbers = about if isinstance(about, list) else [about]
    return UnusableMessage(kind, [number for number in numbers if type(number) is int and -(2**63) <= number < 2**64])


def failed(unusable: UnusableMessage) -> list[Done]:
    """The replies that end what an unusable message asks for; or what takes its place, if it is a reply itself."""
    return [Done([number], [], FAILED) for number in unusable.numbers] if unusable.kind in (*REQUESTS, Done) else []


def settle(operations: dict[int, Any], number: int, failure: Failure | None) -> None:
    """End the future of an operation that the other side has executed; without effect on other numbers."""
    done = operations.pop(number, None)
    if done is None or done.done():
        return
    if failure is None:
        done.set_result(None)
    else:
        done.set_exception(error_of(failure))


def read_frames(unread: bytearray, data: bytes | memoryview) -> list[Message | UnusableMessage]:
    """The messages of a stream that are complete with `data`; `unread` keeps the rest for the next call."""
    unread += data
    messages: list[Message | UnusableMessage] = []
    start = 0
    while len(unread) - start >= _LENGTH.size:
        end = start + _LENGTH.size + _LENGTH.unpack_from(unread, start)[0]
        if end > len(unread):
            break
        messages += _decoded(memoryview(unread)[start + _LENGTH.size : end])
        start = end
    del unread[:start]
    return messages


def _decoded(content: memoryview) -> Sequence[Message | UnusableMessage]:
    try:
        return _DECODER.decode(content)
    except msgspec.ValidationError:
        log.exception("a message of another process cannot be decoded")
    return [_one_decoded(bytes(raw)) for raw in _RAW_DECODER.decode(content)]


def _one_decoded(content: bytes) -> Message | UnusableMessage:
    try:
        return _ONE_DECODER.decode(content)
    except msgspec.ValidationError:
        tag, *fields = msgspec.msgpack.decode(content)
    return _unusable(_KINDS.get(tag), fields[0] if fields else None)


def failure_of(error: Exception) -> Failure:
    """An error to be raised again in the other process; only a `ContractError` is for clients."""
    if isinstance(error, RefusedError):
        return error.reason, str(error)
    if isinstance(error, ContractError):
        return type(error).__name__, str(error)
    return FAILED


def error_of(failure: Failure) -> ContractError:
    """The error that the other process had."""
    name, message = failure
    if name in REFUSALS:
        return RefusedError(name, message)
    kind = getattr(protocol_errors, name, None)
    if isinstance(kind, type) and issubclass(kind, ContractError):
        return kind(message)
    return InternalError(INTERNAL_ERROR)


class SentForms:
    """The forms that a front end has sent. It keeps the latest; shapes that differ each time must not accumulate."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._next = 0

    def number(self, model: int, inputs: Mapping[str, Array]) -> tuple[int, Form | None]:
        """The form's number, and the form if it must be sent before."""
        kind = (model, *[(name, array.dtype, array.shape) for name, array in inputs.items()])
        number = self._numbers.get(kind)
        if number is not None:
            return number, None
        if len(self._numbers) >= MAX_FORMS:
            self._numbers.clear()
        number = self._numbers[kind] = self._next
        self._next = (number + 1) % MAX_FORMS
        return number, Form(number, model, [(name, array.dtype.str, array.shape) for name, array in inputs.items()])

    def forget(self) -> None:
        """Send every form again: the engine's side does not have one of them."""
        self._numbers.clear()


class ReceivedForm:
    """A form as the engine's side uses it."""

    def __init__(self, form: Form, padding: Padding | None) -> None:
        """Raises `TypeError` for a dtype that does not exist."""
        self.model = form.model
        rows = {shape[:1] for _, _, shape in form.tensors}
        self.rows = max(rows)[0] if len(rows) == 1 and () not in rows else 0
        """Of each of its tensors; 0 if they differ, which no request may have."""
        self.key = batch_key(((name, shape) for name, _, shape in form.tensors), padding)
        self._tensors = [
            (name, np.dtype(dtype), shape, prod(shape) * np.dtype(dtype).itemsize)
            for name, dtype, shape in form.tensors
        ]

    def arrays(self, data: Sequence[SubmittedInput], arena: Arena) -> dict[str, Array]:
        """The inputs of a request, as views over the arena."""
        return {
            name: _array(place, shape, dtype, arena)
            for (name, dtype, shape, _), place in zip(self._tensors, data, strict=True)
        }

    def addresses(self, data: Sequence[Sequence[Any]], arena: Arena) -> dict[str, HostMemory]:
        """The same for several requests, whose inputs are all in the arena; each has an entry in `data`. Raises
        `ValueError` for addresses outside of it."""
        base, end, count = arena.address, arena.end, len(data)
        inputs = {}
        for place, (name, dtype, shape, size) in enumerate(self._tensors):
            addresses = [base + places[place] for places in data]
            if min(addresses) < base or max(addresses) + size > end:
                raise ValueError(f"{name} is not in the memory of requests")
            inputs[name] = HostMemory(addresses, (count * shape[0], *shape[1:]), dtype, size)
        return inputs


def submit_message(
    number: int, form: int, queued: QueuedRequest, memory: RequestMemory, answer_bytes: int
) -> tuple[Submit, list[Array]]:
    """The message for a request, and the memory that must be kept until it is `Done`. Inputs outside of the
    arena are copied into it. `answer_bytes` is the size of the answers, 0 if it is not known. Raises `UnavailableError`
    when there is no room."""
    arena = memory.arena
    in_use: list[Array] = []
    data: list[SubmittedInput] = []
    for name, array in queued.inputs.items():
        if name in queued.device_inputs:
            data.append(None)
        elif array.dtype.hasobject:
            data.append(array.reshape(-1).tolist())
        else:
            offset = arena.offset_of(array) if array.flags.c_contiguous else None
            if offset is None:
                array = memory.placed(array)
                offset = arena.offset_of(array)
            in_use.append(array)
            data.append(offset)
    message = Submit([number], form, queued.rows, [data], queued.deadline_ns)
    message.trace = queued.trace
    if queued.device_inputs or queued.device_outputs:
        message.device_inputs, message.device_outputs = dict(queued.device_inputs), dict(queued.device_outputs)
    if answer_bytes > INLINE_BYTES:
        room = memory.allocate(answer_bytes + ALIGNMENT * 16)
        in_use.append(room)
        start = arena.offset_of(room)
        assert start is not None
        message.room = start, room.nbytes
    return message, in_use


def done_message(numbers: list[int], queued: QueuedRequest, arena: Arena, room: tuple[int, int] | None = None) -> Done:
    """The message for a complete request, or for several that were executed as one. Large outputs are copied to the
    room; several requests have none."""
    if queued.error is not None:
        return Done(numbers, [], failure_of(queued.error))
    tensors = []
    start, left = (0, 0) if room is None else room
    for name, array in (queued.outputs or {}).items():
        if name in queued.device_outputs:
            tensors.append(Tensor(name, array.dtype.str, array.shape))
        elif room is not None and array.nbytes <= left and not array.dtype.hasobject:
            arena.view(start, array.shape, array.dtype)[...] = array
            tensors.append(Tensor(name, array.dtype.str, array.shape, start))
            taken = -(-array.nbytes // ALIGNMENT) * ALIGNMENT
            start, left = start + taken, left - taken
        else:
            tensors.append(_inline(name, array))
    return Done(numbers, tensors)


def divided(message: Done) -> Iterator[tuple[int, dict[str, Array]]]:
    """The numbers and the outputs of requests that were executed as one."""
    count = len(message.numbers)
    whole: dict[str, Array] = {}
    for tensor in message.outputs:
        assert isinstance(tensor.data, bytes)
        rows, *item = tensor.shape
        whole[tensor.name] = np.frombuffer(tensor.data, np.dtype(tensor.dtype)).reshape(count, rows // count, *item)
    for place, number in enumerate(message.numbers):
        yield number, {name: array[place] for name, array in whole.items()}


def _inline(name: str, array: Array) -> Tensor:
    if array.dtype.hasobject:
        return Tensor(name, "O", array.shape, None, array.reshape(-1).tolist())
    return Tensor(name, array.dtype.str, array.shape, array.tobytes())


def outputs_of(message: Done, arena: Arena, room: Array | None) -> dict[str, Array]:
    """The outputs of an executed request; those in its room keep it."""
    outputs = {}
    for tensor in message.outputs:
        dtype = np.dtype(tensor.dtype)
        if isinstance(tensor.data, int) and room is not None:
            begin = tensor.data - (arena.offset_of(room) or 0)
            outputs[tensor.name] = np.ndarray(tensor.shape, dtype, room.data, begin)
        elif isinstance(tensor.data, bytes):
            outputs[tensor.name] = np.frombuffer(tensor.data, dtype).reshape(tensor.shape)
        else:
            outputs[tensor.name] = _array(tensor.elements, tensor.shape, dtype, arena)
    return outputs


def _array(data: SubmittedInput, shape: tuple[int, ...], dtype: np.dtype[np.generic], arena: Arena) -> Array:
    if data is None:
        return like(dtype, shape)
    if isinstance(data, int):
        if dtype.hasobject:  # its bytes would be taken for the addresses of objects
            raise ValueError("the elements of BYTES are not in the memory of requests")
        return arena.view(data, shape, dtype)
    elements = np.empty(len(data), object)
    elements[:] = data
    return elements.reshape(shape)
