"""The settings of a native server process: each field is an option and the variable `ABSERVE_NATIVE_<FIELD>`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from servers.engines.options import PadTo
from servers.engines.padding import parse_pad_to
from servers.engines.processors import check_devices, thread_count
from servers.engines.settings import EngineError, EngineSettings, engine_kind, parse_spinning, resolved_device
from servers.language.engine import DEFAULT_ENGINE, GENERATING_ENGINES, GenerationSettings, generation_precision
from servers.language.options import GeneratingOptions, of_other_kind
from servers.language.specification import LanguageModel, is_language_model
from servers.models.files import onnx_parts
from servers.models.images import MAX_PIXELS
from servers.models.registry import DEFAULT_MODEL, model_files
from servers.models.specification import ModelSpecification, choose_from
from servers.models.weights import CheckpointWeights, WeightsSource
from servers.options import defaults, search
from servers.options.command_line import OptionTraits, Tuning, flag_of, is_chosen, settings_of
from servers.options.defaults import ALL, OptionError, usable_cores

TENSORS_ONLY = (
    *("payloads", "mode", "max_queue_delay_us", "pad_to", "queue_timeout_us"),
    *("max_json_bytes", "decode_threads", "max_image_pixels", "allow_shared_memory", "allow_model_control"),
    *("busy_poll_us", "added_delay_ms", "reload"),
)
"""Options that only a model of tensors has."""
NO_BATCHES = "--max-batch-size is for models of tensors; a language model has --slots"
DEFAULT_SLOTS = 256
"""Statistics count the steps of up to so many rows, where the engine chooses how many slots it has."""
MAX_TIMEOUT_US = 3_600_000_000
"""Longest timeout in the queue that the server or a request may set."""
SEARCHED_FRONTS = search.Searched(
    lambda here: [count for count in (0, 1, 2, 4, 8) if count < (2 if here.device == "cpu" else here.cores)],
    ordered=True,
    by_load=True,
)
"""On a CPU they take cores from the engine, which is slower than one of them."""


NO_TRACES = "--traces needs OpenTelemetry; run: pip install 'abserve[traces]'"


def traces_installed() -> bool:
    """Whether this environment has the extra; imports nothing of it."""
    with suppress(PackageNotFoundError):
        return bool(version("opentelemetry-exporter-otlp-proto-http"))
    return False


class NativeSettings(GeneratingOptions):
    """Built once, in the entry point, and passed on. Unknown names are refused."""

    model_config = settings_of("ABSERVE_NATIVE_")

    model: str = Field(DEFAULT_MODEL, title="Model", description="SOURCE:NAME, a path, or a registered name.")
    payloads: str = Field(
        "", title="Model", description="Variants to serve: fp32, uint8, jpeg, comma-separated; empty: only --model."
    )
    weights: str | None = Field(
        None, title="Model", description="random:SEED, a pretrained tag or a checkpoint file; default: the model's."
    )
    http_port: int = Field(8100, ge=1, le=65535, title="Target", description="Port of HTTP.")
    grpc_port: int = Field(8101, ge=0, le=65535, title="Target", description="Port of gRPC; 0: no gRPC.")
    engine: Annotated[str, search.ENGINE] = Field(
        "auto",
        title="Engine",
        description=f"{defaults.ENGINES}; of a language model: {', '.join(GENERATING_ENGINES)}. auto: torch; on a "
        "CPU the fastest of those that have an exported file, for a catalogue model; onnxruntime for an ONNX file; "
        f"{DEFAULT_ENGINE} for a language model.",
    )
    precision: Annotated[str, search.PRECISION] = Field(
        defaults.PRECISION, title="Engine", description=defaults.PRECISIONS
    )
    mode: Annotated[str, search.MODE] = Field(
        defaults.MODE,
        title="Engine",
        description="How the engine executes: auto, or a mode it offers (tuned, eager, traced, graph).",
    )
    device: str = Field(
        defaults.DEVICE,
        title="Engine",
        description="auto, cpu or cuda:N. A list such as cuda:0,cuda:1 starts one engine process for each entry: "
        "different GPUs, or cpu several times.",
    )
    threads: Annotated[int, search.THREADS] = Field(
        0,
        ge=0,
        title="Engine",
        description="Intra-op threads on the CPU, for each engine process; 0: all cores that the server may use, "
        "divided between them.",
    )
    spinning: Annotated[Literal["auto", "on", "off"], search.SPINNING] = Field(
        "auto", title="Engine", description=f"{defaults.SPINNING} Of a language model, auto is off."
    )
    choices: Literal["stored", "fresh", "off"] = Field(
        "stored",
        title="Engine",
        description="What a start measures and chooses: on a CPU the engine and its products, on a GPU plans. stored: "
        "once per model and machine, later starts read it; fresh: again; off: nothing, the model's own form executes.",
    )
    artefact: Annotated[Path | None, OptionTraits(offered=False)] = Field(
        None, title="Engine", description="The file of the model's own inputs, for engines that execute one."
    )
    artefact_uint8: Annotated[Path | None, OptionTraits(offered=False)] = Field(
        None, title="Engine", description="The file of UINT8 pixels, for engines that execute one."
    )
    max_batch_size: Annotated[int, OptionTraits(of_model=True), search.MAX_BATCH_SIZE] = Field(
        defaults.MAX_BATCH_SIZE,
        ge=1,
        le=4096,
        title="Batching",
        description="Largest batch that is executed or accepted; default: the model's.",
    )
    max_queue_delay_us: Annotated[int, OptionTraits(tunes=True), search.MAX_QUEUE_DELAY_US] = Field(
        defaults.MAX_QUEUE_DELAY_US,
        ge=0,
        le=10_000_000,
        title="Batching",
        description="Maximum time a batch waits for more requests (µs).",
    )
    pad_to: PadTo = ""
    queue_size: int = Field(
        defaults.QUEUE_SIZE,
        ge=1,
        title="Batching",
        description="Requests that may wait; the next one is answered 503 at once.",
    )
    queue_timeout_us: int = Field(
        0,
        ge=0,
        le=MAX_TIMEOUT_US,
        title="Batching",
        description="Queue timeout (µs) of requests without their own, then 503; 0: no limit.",
    )
    max_body_bytes: int = Field(
        64 * 2**20,
        ge=1,
        title="Limits",
        description="Largest request body, also after decompression; a larger one gets 413.",
    )
    max_json_bytes: int = Field(
        32 * 2**20,
        ge=1024,
        title="Limits",
        description="Longest JSON of one request, then 413; parsing it delays other requests by 1 ms per MiB.",
    )
    max_header_bytes: int = Field(
        16 * 1024,
        ge=1024,
        le=64 * 1024,
        title="Limits",
        description="Longest HTTP head: the request line and all headers.",
    )
    max_headers: int = Field(100, ge=10, le=10_000, title="Limits", description="Most HTTP headers of one request.")
    max_chunks: int = Field(
        65_536, ge=1, title="Limits", description="Most chunks of one body with Transfer-Encoding: chunked."
    )
    max_held_bytes: int = Field(
        2 * 2**30,
        ge=1,
        title="Limits",
        description="Bodies that arrive, wait or are executed, and unread answers, in bytes; more get 503.",
    )
    max_client_requests: int = Field(
        0,
        ge=0,
        title="Limits",
        description="Of a language model: requests of one client address that wait or are generated; the next one gets "
        "503. 0: no limit.",
    )
    read_timeout_s: float = Field(
        30,
        gt=0,
        le=3600,
        title="Limits",
        description="Time for a head (s), and how far a body may fall behind its minimum rate.",
    )
    min_body_bytes_per_s: int = Field(
        2**20, ge=1, title="Limits", description="Minimum rate of a body that arrives, and of a response that is read."
    )
    keep_alive_timeout_s: float = Field(
        75, gt=0, title="Limits", description="How long an idle connection stays open, HTTP or gRPC."
    )
    decode_threads: Annotated[int, OptionTraits(tunes=True), search.DECODE_THREADS] = Field(
        0, ge=0, le=256, title="Limits", description="Threads that decode JPEG files; 0: one per core, up to four."
    )
    max_image_pixels: int = Field(
        MAX_PIXELS, ge=1, title="Limits", description="Largest JPEG that is decoded, in pixels; read from its header."
    )
    api_key_file: Path | None = Field(
        None,
        title="Access and process",
        description="File of keys, one per line, read again at SIGHUP; all but health checks then need one: "
        "Authorization: Bearer KEY.",
    )
    tls_key: Path | None = Field(
        None, title="Access and process", description="Key of that certificate, if it is in another PEM file."
    )
    tls_client_ca: Path | None = Field(
        None,
        title="Access and process",
        description="Take only clients whose certificate one in this PEM file signed.",
    )
    open_metrics: bool = Field(False, title="Access and process", description="/metrics and /gpu-info need no key.")
    allow_shared_memory: bool = Field(
        False, title="Access and process", description="Let clients register shared memory of this machine."
    )
    allow_model_control: bool = Field(
        False, title="Access and process", description="Let clients unload and load models."
    )
    reload: Literal["off", "poll", "signal"] = Field(
        "off",
        title="Access and process",
        description="When the model's files are loaded again, beside the served version, which answers until the new "
        "one has proved itself. signal: at SIGHUP; poll: also once they have changed. Needs --fronts 1 or more.",
    )
    traces: str = Field("", title="Access and process", description=f"{defaults.TRACES} Needs abserve[traces].")
    trace_share: Annotated[float, OptionTraits(tunes=True)] = Field(
        defaults.TRACE_SHARE, ge=0, le=1, title="Access and process", description=defaults.TRACE_SHARES
    )
    record: Path | None = Field(
        None,
        title="Recording",
        description="A new folder, in which inference requests are recorded as by abserve record, for abserve compare "
        "--traffic.",
    )
    record_minutes: float | None = Field(None, ge=0.001, title="Recording", description="Record so long.")
    record_requests: int | None = Field(None, ge=1, title="Recording", description="Record so many.")
    record_max_bytes: int | None = Field(
        None,
        ge=1,
        title="Recording",
        description="The largest size of the folder; stretches of 10 s are left out at random, the same chance for "
        "each.",
    )
    record_share: float = Field(1.0, ge=1e-6, le=1, title="Recording", description="Record this share of all requests.")
    record_contents: bool = Field(True, title="Recording", description="Store what the requests contain.")
    record_answers: bool = Field(False, title="Recording", description="Store what the server answers.")
    shutdown_timeout_s: float = Field(
        30, gt=0, le=3600, title="Access and process", description="Time to finish accepted work after SIGTERM (s)."
    )
    fronts: Annotated[int | None, OptionTraits(tunes=True), SEARCHED_FRONTS] = Field(
        None,
        ge=0,
        le=64,
        title="Access and process",
        description="Processes that receive and answer beside the engine's; 0: one process for all. "
        "Default: 0 on a CPU; on GPUs the number of cores less one per GPU and one more, at most eight per GPU. With "
        "several devices at least 1.",
    )
    busy_poll_us: Annotated[int, OptionTraits(tunes=True)] = Field(
        0,
        ge=0,
        le=1_000_000,
        title="Access and process",
        description="How long front ends ask for the next event without sleeping (µs): saves the time of waking up and "
        "takes a core for each. Needs --fronts 1 or more.",
    )
    log_level: Annotated[Literal["debug", "info", "warning", "error"], OptionTraits(tunes=True)] = Field(
        "info", title="Access and process", description="Lowest level that is logged."
    )
    tuning: Tuning = ALL
    added_delay_ms: Annotated[float, OptionTraits(hidden=True, tunes=True)] = Field(
        0,
        ge=0,
        le=60_000,
        title="Access and process",
        description="Test option: added to every answer without blocking anything.",
    )

    @property
    def pad_sizes(self) -> tuple[int, ...]:
        """The sizes of `pad_to`, ascending."""
        return parse_pad_to(self.pad_to)

    def resolved(self, specification: ModelSpecification) -> NativeSettings:
        """The settings with the model's own engine and largest batch, and the device's precision, where none were
        chosen."""
        engine = "torch" if specification.file is None else "onnxruntime"
        chosen = "max_batch_size" in self.model_fields_set
        resolved = self.model_copy(
            update={
                "engine": engine if self.engine == "auto" else self.engine,
                "max_batch_size": self.max_batch_size if chosen else specification.max_batch_size,
            }
        )
        least = 0 if self.reload == "off" else 1
        fronts = max(least, resolved._fronts_here()) if resolved.fronts is None else resolved.fronts
        if fronts < least:
            raise OptionError("--reload needs front ends in processes of their own: add --fronts 1")
        for option in ("allow_shared_memory", "allow_model_control"):
            if least and getattr(self, option):
                raise OptionError(f"--reload and {flag_of(option)} exclude each other: leave one of them out")
        self._check_traces()
        if self.busy_poll_us and not fronts:
            raise OptionError("--busy-poll-us is for front ends in processes of their own: add --fronts 1")
        return resolved.model_copy(update={"precision": resolved.engine_settings().precision, "fronts": fronts})

    def resolved_for(self, model: LanguageModel) -> NativeSettings:
        """The settings for a language model. Raises `OptionError` and `EngineError`."""
        for name in TENSORS_ONLY:
            if is_chosen(self, name):
                raise OptionError(of_other_kind(name))
        if "," in self.device:
            raise OptionError(f"--device {self.device}: a language model runs on one device; choose one of them")
        self.check_length(model)
        device = resolved_device(self.device)
        engine = DEFAULT_ENGINE if self.engine == "auto" else self.engine
        cores = usable_cores()
        fronts = 1 if device == "cpu" else max(1, min(2, cores - 2))
        settings = self.model_copy(
            update={
                "engine": engine,
                "device": device,
                "precision": generation_precision(self.precision, device),
                "fronts": fronts if self.fronts is None else self.fronts,
                # A step is hundreds of operators of some microseconds: on a core that another program has, threads that
                # spin for each of them cost 18 times the step (measured).
                "spinning": "off" if self.spinning == "auto" else self.spinning,
                "max_batch_size": self.slots or DEFAULT_SLOTS,
            }
        )
        settings.language_engine().check()
        self._check_traces()
        return settings

    def _check_traces(self) -> None:
        defaults.check_traces(self.traces)
        if self.traces and not traces_installed():
            raise OptionError(NO_TRACES)

    def longest_s(self, byte_count: int) -> float:
        """How long a client may take to send or to read so many bytes."""
        return self.read_timeout_s + byte_count / self.min_body_bytes_per_s

    def language_engine(self) -> GenerationSettings:
        """The options as a generating engine takes them; of resolved settings only."""
        return self.generation_settings(self.engine, self.device, self.precision, self.threads)

    def _fronts_here(self) -> int:
        engines = len(self.devices)
        most = usable_cores() - 1 - engines if self.engine_settings().device_here() != "cpu" else 0
        return max(min(engines - 1, 1), min(8 * engines, most))

    @property
    def devices(self) -> list[str]:
        """The device of each engine process."""
        return self.device.split(",")

    def of_engines(self) -> list[NativeSettings]:
        """The settings of each engine process: its device, and its share of the queue and of the cores."""
        count = len(self.devices)
        if count == 1:
            return [self]
        threads = self.threads or max(1, thread_count(0) // count)
        shares = {"queue_size": -(-self.queue_size // count), "threads": threads}
        return [self.model_copy(update={"device": device, **shares}) for device in self.devices]

    def engine_settings(self) -> EngineSettings:
        """The options as the engine on the first device takes them; of resolved settings only."""
        return EngineSettings(
            self.engine,
            self.precision,
            self.mode,
            self.devices[0],
            self.threads,
            self.max_batch_size,
            self.pad_sizes,
            spinning=parse_spinning(self.spinning),
        )

    @field_validator("engine")
    @classmethod
    def _known_engine(cls, engine: str, info: ValidationInfo) -> str:
        if is_language_model(info.data.get("model", "")):
            if engine not in ("auto", *GENERATING_ENGINES):
                offered = choose_from(engine, ("auto", *GENERATING_ENGINES))
                raise ValueError(f"no engine of this name generates tokens; {offered}")
        elif engine != "auto":
            try:
                engine_kind(engine)
            except EngineError as exc:
                raise ValueError(str(exc)) from exc
        return engine

    @field_validator("device")
    @classmethod
    def _one_engine_on_each(cls, device: str) -> str:
        check_devices(device)
        return device

    @field_validator("fronts")
    @classmethod
    def _front_ends_of_several_engines(cls, fronts: int | None, info: ValidationInfo) -> int | None:
        if fronts == 0 and "," in info.data.get("device", ""):
            raise ValueError("one process has one engine; with several devices use --fronts 1 or more")
        return fronts

    @field_validator("grpc_port")
    @classmethod
    def _own_port(cls, port: int, info: ValidationInfo) -> int:
        """Refuse one port for both: a check of free ports would not find this, since neither is bound yet."""
        if port == info.data.get("http_port"):
            raise ValueError("HTTP and gRPC need different ports, and this is --http-port")
        return port


def artefact_field(executed: ModelSpecification) -> str:
    """The field with the exported file of a variant that an engine executes."""
    return "artefact_uint8" if executed.payload == "uint8" else "artefact"


def watched_files(
    settings: NativeSettings, specifications: Sequence[ModelSpecification], weights: WeightsSource
) -> list[Path]:
    """The files of this machine from which the models are made. Raises `OptionError` if they are to be loaded again and
    none was found."""
    if settings.reload == "off":
        return []
    files: list[Path | None] = [settings.artefact, settings.artefact_uint8, specifications[0].file]
    if isinstance(weights, CheckpointWeights):
        files.append(weights.path)
    files += model_files(specifications[0].reference)
    found = [part for file in dict.fromkeys(files) if file is not None for part in _parts(file)]
    if not found:
        raise OptionError(
            f"--reload {settings.reload}: neither {settings.model} nor its weights are a file; give --weights FILE"
        )
    return found


def _parts(file: Path) -> Sequence[Path]:
    return onnx_parts(file) if file.suffix == ".onnx" else (file,)
