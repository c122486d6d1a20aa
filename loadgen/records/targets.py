"""The transports, and the servers that abserve starts itself: what is known of each.

A new transport is its name and its entry here, and how it sends and reads in `loadgen.client.transports`, or for
prompts in `loadgen.client.generation`. A new server is its name and its entry here, and its command in
`servers.commands.serve`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Literal, NamedTuple, TypeGuard, get_args


class Kind(Enum):
    """What the arms serve, and what a user of it waits for."""

    TENSORS = "request"
    TOKENS = "answer"
    """Of language models: prompts go to the arms, and streamed tokens come back."""


TensorTransport = Literal["http", "grpc", "shm"]
TRANSPORTS: tuple[TensorTransport, ...] = get_args(TensorTransport)
"""How tensors travel."""
TokenTransport = Literal["completions", "generate_stream", "text", "chat"]
TOKEN_TRANSPORTS: tuple[TokenTransport, ...] = get_args(TokenTransport)
"""How prompts and streamed tokens travel, all over HTTP: OpenAI's completions, Triton's generate extension; with
prompts as text instead of ids OpenAI's completions again, and its chat."""
Transport = Literal[TensorTransport, TokenTransport]


class Route(NamedTuple):
    """How requests travel over one transport."""

    title: str
    """Its name in a sentence."""
    kind: Kind = Kind.TENSORS
    """What travels over it."""
    is_text: bool = False
    """Whether prompts travel as text, and answers may have other tokens than the model's."""
    is_grpc: bool = False
    """Whether it is gRPC, for which a server has an address of its own (an arm's setting `grpc`)."""
    shares_memory: bool = False
    """Whether tensors lie in memory that client and server share, so that they need to be on one machine."""


ROUTES: Mapping[Transport, Route] = {
    "http": Route("HTTP"),
    "grpc": Route("gRPC", is_grpc=True),
    "shm": Route("shared memory", shares_memory=True),
    "completions": Route("OpenAI's completions", Kind.TOKENS),
    "generate_stream": Route("Triton's generate_stream", Kind.TOKENS),
    "text": Route("OpenAI's completions of text", Kind.TOKENS, is_text=True),
    "chat": Route("OpenAI's chat", Kind.TOKENS, is_text=True),
}


def is_token_transport(transport: Transport) -> TypeGuard[TokenTransport]:
    """Whether prompts travel over it."""
    return transport in TOKEN_TRANSPORTS


TargetName = Literal["native", "triton", "fastapi", "litserve", "vllm"]


class Target(NamedTuple):
    """A server that abserve starts itself."""

    title: str
    """Its name in a sentence."""
    transports: tuple[TensorTransport, ...]
    """Of models that take tensors; empty: it serves language models only."""
    protocols: tuple[TokenTransport, ...]
    """Of its language models, the preferred one first; a server at a URL is asked (`loadgen.launch.discovery`)."""
    is_plain: bool = False
    """Whether it can neither pad batches nor leave the model out."""
    ports: tuple[str, ...] = ("http-port",)
    """The options with its ports, of which abserve chooses free ones: HTTP, gRPC, metrics."""
    has_folder: bool = False
    """Whether it works in a folder, which its option work-dir names."""
    describes_models: bool = True
    """Whether it has the Open Inference Protocol's documents about its models."""
    plain_http: bool = False
    """Whether its HTTP cannot be encrypted, but its gRPC."""
    for_transports: Mapping[Transport, Mapping[str, str]] = {}
    """The options without which it does not offer a transport."""


TARGETS: Mapping[str, Target] = {
    "native": Target(
        "native", TRANSPORTS, ("completions", "generate_stream", "text"), ports=("http-port", "grpc-port"),
        for_transports={"shm": {"allow-shared-memory": "true"}},
    ),
    "triton": Target(
        "Triton", TRANSPORTS, ("generate_stream",), ports=("http-port", "grpc-port", "metrics-port"), has_folder=True,
        plain_http=True,
    ),
    "fastapi": Target("FastAPI", ("http",), ("completions", "generate_stream", "text"), is_plain=True),
    "litserve": Target("LitServe", ("http",), (), is_plain=True),
    "vllm": Target("vLLM", (), ("completions", "text"), is_plain=True, describes_models=False),
}  # fmt: skip
"""By the name of an arm's target; every other target is the URL of a running server."""
TARGET_NAMES = ", ".join(TARGETS)
