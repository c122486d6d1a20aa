"""Options of servers, most of them of language models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic_settings import BaseSettings

from servers.language.engine import GenerationSettings
from servers.language.specification import LanguageModel
from servers.options import defaults, search
from servers.options.command_line import flag_of, is_chosen
from servers.options.defaults import OptionError

TOKENS_ONLY = ("slots", "max_length", "prefill_chunk", "graphs", "max_client_requests")
"""Options that only a language model has."""


def of_other_kind(name: str) -> str:
    """The refusal of an option that the served model does not have."""
    if name in TOKENS_ONLY:
        return f"{flag_of(name)} is for language models, such as --model language:demo"
    return f"{flag_of(name)} is for models of tensors; a language model has no such setting"


class ServingOptions(BaseSettings):
    """What every server is told: where it listens, and how many answers of a language model it makes."""

    slots: Annotated[int, search.SLOTS] = Field(
        0, ge=0, le=4096, title="Language models", description="Requests generated at once; 0: the engine's default."
    )
    max_length: int = Field(
        0,
        ge=0,
        le=2**24,
        title="Language models",
        description="Most tokens of a prompt and its answer together; 0: the engine's default, at most the model's.",
    )
    host: str = Field(defaults.HOST, title="Target", description="Address to listen on.")
    anyone: bool = Field(False, title="Access and process", description=defaults.ANYONE)
    tls_certificate: Path | None = Field(
        None, title="Access and process", description="Speak TLS with the certificate in this PEM file, and its key."
    )

    def check_length(self, model: LanguageModel) -> None:
        """Raise `OptionError` for a maximum length beyond the model's."""
        if self.max_length > model.max_length:
            raise OptionError(f"--max-length {self.max_length}: {model.title} takes at most {model.max_length} tokens")

    def check_for_tensors(self) -> None:
        """Raise `OptionError` for an option that only a language model has."""
        for name in TOKENS_ONLY:
            if name in type(self).model_fields and is_chosen(self, name):
                raise OptionError(of_other_kind(name))


class GeneratingOptions(ServingOptions):
    """How one of abserve's engines generates tokens."""

    prefill_chunk: Annotated[int, search.PREFILL_CHUNK] = Field(
        0,
        ge=0,
        le=2**24,
        title="Language models",
        description="Most prompt tokens per step, beside the running answers; 0: the engine's default.",
    )
    graphs: Annotated[bool, search.GRAPHS] = Field(
        True, title="Language models", description="Replay CUDA graphs on a GPU."
    )

    def generation_settings(self, engine: str, device: str, precision: str, threads: int) -> GenerationSettings:
        """The options as a generating engine takes them. Raises `EngineError` for a value that is wrong everywhere."""
        settings = GenerationSettings(
            engine, device, precision, self.slots, self.max_length, self.prefill_chunk, self.graphs, threads
        )
        settings.check()
        return settings
